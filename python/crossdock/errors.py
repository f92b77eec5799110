"""What went wrong, as exceptions: one class for each kind of failure, all with the same fields.

    try:
        handle = group.dispatch(rows, ids)
    except crossdock.Busy:           # every slot is held: drop a handle
        ...
    except crossdock.Error as e:     # e.code, e.scope, e.retry, e.native, e.message, e.where
        ...
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import enum
from typing import ClassVar, NamedTuple, Optional


class Code(enum.IntEnum):
    """The kind of failure."""

    OK = 0
    INVALID_ARGUMENT = 1
    NOT_FOUND = 2
    BUSY = 3
    WOULD_BLOCK = 4
    DEADLINE = 5
    CANCELLED = 6
    PEER_LOST = 7
    UNREACHABLE = 8
    NO_MEMORY = 9
    UNSUPPORTED = 10
    INCOMPATIBLE = 11
    CLOSED = 12
    INTERNAL = 13
    CORRUPT = 14
    DENIED = 15


class Scope(enum.IntEnum):
    """The largest thing that is damaged and has to be made anew."""

    CALL = 0
    TRANSFER = 1
    PEER = 2
    DEVICE = 3
    ENGINE = 4


class Retry(enum.IntEnum):
    """Whether doing the same again can succeed."""

    NO = 0
    LATER = 1
    AFTER_RECONNECT = 2


class Native(NamedTuple):
    """The code of the system underneath: of ``errno``, ``cuda``, ``nvrtc`` or ``verbs``."""

    domain: str
    value: int


class Where(NamedTuple):
    """The place in the library that made the error."""

    file: str
    line: int


class Error(Exception):
    """The root of all errors of Crossdock. ``str()`` of it is everything that is known."""

    code: Code = Code.INTERNAL
    scope: Scope = Scope.CALL
    retry: Retry = Retry.NO
    native: Optional[Native] = None
    message: str = ""
    where: Optional[Where] = None

    of_code: ClassVar[Code] = Code.INTERNAL

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = self.of_code


class InvalidArgument(Error, ValueError):
    """The caller's mistake: the message names rule, value and fix."""

    of_code = Code.INVALID_ARGUMENT


class NotFound(Error):
    """No such peer, region, key or file."""

    of_code = Code.NOT_FOUND


class Busy(Error):
    """In use; try again when it is free."""

    of_code = Code.BUSY


class WouldBlock(Error):
    """A bounded queue is full; nothing was accepted."""

    of_code = Code.WOULD_BLOCK


class DeadlineExceeded(Error, TimeoutError):
    """The deadline passed first."""

    of_code = Code.DEADLINE


class Cancelled(Error):
    """Cancelled on request."""

    of_code = Code.CANCELLED


class PeerLost(Error):
    """The peer died, restarted, or stopped answering."""

    of_code = Code.PEER_LOST


class Unreachable(Error):
    """No path to the peer."""

    of_code = Code.UNREACHABLE


class NoMemory(Error, MemoryError):
    """Memory, descriptors, disk or device memory ran out."""

    of_code = Code.NO_MEMORY


class Unsupported(Error):
    """This machine, build or transport cannot do it."""

    of_code = Code.UNSUPPORTED


class Incompatible(Error):
    """The peer speaks another protocol version, or disagrees on a size."""

    of_code = Code.INCOMPATIBLE


class Closed(Error):
    """The object was closed before."""

    of_code = Code.CLOSED


class Internal(Error):
    """A bug of this library."""

    of_code = Code.INTERNAL


class Corrupt(Error):
    """A checksum did not match."""

    of_code = Code.CORRUPT


class Denied(Error):
    """Authentication or permission refused."""

    of_code = Code.DENIED


_CLASSES: dict[Code, type[Error]] = {kind.of_code: kind for kind in Error.__subclasses__()}


def _make(code: int, scope: int, retry: int, domain: str, value: int, message: str, file: str,
          line: int, text: str) -> Error:
    """Called by the native part: the exception of an Error. ``text`` is what str() gives."""
    error = _CLASSES.get(Code(code), Internal)(text)
    error.code = Code(code)
    error.scope = Scope(scope)
    error.retry = Retry(retry)
    error.native = Native(domain, value) if domain else None
    error.message = message
    error.where = Where(file.rpartition("/")[2], line)
    return error
