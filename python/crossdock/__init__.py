"""Crossdock: the data plane of LLM serving.

``crossdock.ep`` is expert parallelism: dispatch and combine, on GPUs and, for tests, on the CPU.
``crossdock.moe`` is whole expert layers over them.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import NamedTuple

from . import _native
from .errors import (Busy, Cancelled, Closed, Code, Corrupt, DeadlineExceeded, Denied, Error,
                     Incompatible, Internal, InvalidArgument, Native, NoMemory, NotFound, PeerLost,
                     Retry, Scope, Unreachable, Unsupported, Where, WouldBlock)
from .exchange import (Exchange, MeetingPlace, function_exchange, store_exchange, torch_exchange)
from . import coll, ep, moe

__version__: str = _native.version
wire_version: int = _native.wire_version


class Setting(NamedTuple):
    """A setting of the library: from its default, a file, or a CROSSDOCK_* variable."""

    name: str
    value: str
    source: str
    meaning: str


def settings() -> list[Setting]:
    """All settings as the library would use them now; ``crossdock info --config`` shows the same."""
    return [Setting(*row) for row in _native.settings()]


__all__ = [
    "Busy", "Cancelled", "Closed", "Code", "Corrupt", "DeadlineExceeded", "Denied", "Error",
    "Exchange", "Incompatible", "Internal", "InvalidArgument", "MeetingPlace", "Native", "NoMemory", "NotFound",
    "PeerLost", "Retry", "Scope", "Setting", "Unreachable", "Unsupported", "Where", "WouldBlock",
    "__version__", "coll", "ep", "function_exchange", "moe", "settings", "store_exchange", "torch_exchange",
    "wire_version",
]
