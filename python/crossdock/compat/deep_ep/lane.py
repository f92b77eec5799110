"""Which stream a call runs on, and what waits for what.

An ordinary call runs on the caller's current stream: that is what a communication stream which waits for
it, and which it waits for, comes to. An asynchronous call, or one that need only wait for a given event,
runs on a stream of its own. Calls of a buffer are ordered whatever stream each is on.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import sys
from typing import Any, Iterator, Optional, Sequence, Union

from .events import EventHandle, EventOverlap, event_of
from .frame import Frame
from .ranks import Group

__all__ = ["Call", "Lane"]

Event = Union[EventOverlap, EventHandle, None]


class Call:
    """One call on its stream. Tensors that the caller gave or gets are named, so that the allocator of
    torch keeps their memory until both streams are past it."""

    def __init__(self, stream: Any, current: Any, asynchronous: bool) -> None:
        self.stream, self._current, self._asynchronous = stream, current, asynchronous
        self.event = EventOverlap()

    def keep(self, frame: Frame, *tensors: Any) -> None:
        if self.stream is not self._current:
            self.keep_all(frame, *tensors)

    def keep_all(self, frame: Frame, *tensors: Any) -> None:
        """Tensors of an earlier call, which may have been on any stream."""
        if not frame.gpu:
            return
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(self.stream)
                tensor.record_stream(self._current)

    def end(self) -> None:
        if self.stream is self._current:
            return
        done = EventHandle(self.stream)
        if self._asynchronous:
            self.event = EventOverlap(done)
        else:
            done.current_stream_wait()


class Lane:
    """The streams of one buffer's calls. ``device``: -1 in the twin, where there are none."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._stream: Optional[Any] = None
        # Streams of the last call outside captures and of the last in one.
        self._last: dict[bool, Any] = {}

    @property
    def stream(self) -> Optional[Any]:
        """The communication stream: of high priority, made when it is first needed."""
        if self._stream is None and self._device >= 0:
            self._stream = sys.modules["torch"].cuda.Stream(self._device, priority=-1)
        return self._stream

    @contextlib.contextmanager
    def call(self, previous_event: Event = None, asynchronous: bool = False) -> Iterator[Call]:
        if self._device < 0:
            yield Call(None, None, asynchronous)
            return
        cuda = sys.modules["torch"].cuda
        current = cuda.current_stream(self._device)
        before = event_of(previous_event)
        if not asynchronous and before is None:
            # What a call put on its stream before it raised is followed by later calls like all else.
            self._follow(current)
            yield Call(current, current, False)
            return
        stream = self.stream
        assert stream is not None
        if before is None or before.event is None:
            stream.wait_stream(current)
        else:
            stream.wait_event(before.event)
        self._follow(stream)
        call = Call(stream, current, asynchronous)
        try:
            with cuda.stream(stream):
                yield call
        finally:
            call.end()

    def finish(self, groups: Sequence[Group], timeout: float) -> None:
        """Before memory of the groups goes: waits for the streams of calls, at most ``timeout`` seconds for
        each. :class:`crossdock.DeadlineExceeded` where one does not end."""
        # The last call outside captures is behind all others, whatever streams they were on; the user of a
        # buffer may have put work on the communication stream after it.
        streams = [self._last.get(False)]
        if self._stream not in streams:
            streams.append(self._stream)
        for stream in streams:
            if stream is not None and groups:
                groups[0].synchronize(timeout, stream=stream)

    def _follow(self, stream: Any) -> None:
        """Calls of a rank come one after the other, on whatever streams. A call in a capture follows
        those of the same capture: what was called before it is over already, by the rules of captures."""
        cuda = sys.modules["torch"].cuda
        captured = bool(cuda.is_current_stream_capturing())
        last = self._last.get(captured)
        self._last[captured] = stream
        if last is None or last == stream:
            return
        if captured:
            with cuda.stream(last):
                if not cuda.is_current_stream_capturing():  # it was part of an earlier capture
                    return
        stream.wait_stream(last)
