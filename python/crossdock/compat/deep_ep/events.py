"""Events of a stream, and what is done when one has been waited for."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Callable, Optional, Tuple, Union

__all__ = ["EventHandle", "EventOverlap", "Mark", "capturing", "event_of"]


def capturing() -> bool:
    """Whether the current stream is being captured: events from before must not be waited for then."""
    torch = sys.modules.get("torch")
    return (torch is not None and torch.cuda.is_available() and
            bool(torch.cuda.is_current_stream_capturing()))


class EventHandle:
    """An event on a stream, by default torch's current one; it may keep tensors alive. Without a GPU
    everything before it has been done already, and there is nothing to wait for."""

    def __init__(self, stream: Optional[Any] = None, tensors: Optional[Tuple[Any, ...]] = None) -> None:
        self.tensors = tensors
        self.event: Optional[Any] = None
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream() if stream is None else stream)

    def current_stream_wait(self) -> None:
        """What comes later on the current stream waits for the event."""
        if self.event is not None:
            sys.modules["torch"].cuda.current_stream().wait_event(self.event)


class Mark:
    """A point that other streams come after, on a stream, by default the current one. Between a capture and
    what is outside of it nothing can be waited for, nor need it: what was called before is over."""

    def __init__(self, stream: Optional[Any] = None) -> None:
        self._captured = capturing()
        self._event = EventHandle(stream)

    def current_stream_wait(self) -> None:
        if capturing() == self._captured:
            self._event.current_stream_wait()


class EventOverlap:
    """An event of a communication call, or none where the call was not asynchronous.

    ``with buffer.dispatch(..., async_finish=True)[-1]:`` runs its block beside the communication and
    waits for the event at the end."""

    def __init__(self, event: Optional[EventHandle] = None,
                 extra_tensors: Optional[Tuple[Any, ...]] = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._hooks: list[Callable[[], Any]] = []
        self._release = False

    def register_hook_after_wait(self, hook: Callable[[], Any]) -> None:
        """Called once, after the next wait."""
        self._hooks.append(hook)

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """The current stream waits for the event. ``release_handle``: the event, and the tensors it
        keeps, are let go of then."""
        if self.event is not None:
            self.event.current_stream_wait()
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook()
        if release_handle:
            self.event, self.extra_tensors = None, None

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        if self.event is not None:
            self.current_stream_wait(self._release)
            self._release = False


def event_of(previous: Union[EventOverlap, EventHandle, None]) -> Optional[EventHandle]:
    """The event of a ``previous_event`` argument, which may be of either class."""
    return previous.event if isinstance(previous, EventOverlap) else previous
