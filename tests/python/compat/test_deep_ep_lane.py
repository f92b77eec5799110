"""Which stream of torch a call of deep_ep follows, with streams and events of our own that only write down
what is done to them."""
# SPDX-License-Identifier: Apache-2.0
import contextlib
import sys
import types

import pytest

from crossdock.compat.deep_ep.events import EventHandle
from crossdock.compat.deep_ep.lane import Lane


class Stream:
    def __init__(self, name):
        self.name, self.waits = name, []

    def wait_stream(self, other):
        self.waits.append(other.name)

    def wait_event(self, event):
        self.waits.append(f"event of {event.stream.name}")


class Event:
    def record(self, stream):
        self.stream = stream


class Cuda:
    """As much of torch.cuda as lanes use."""

    Event = Event

    def __init__(self):
        self.current = Stream("caller")

    def current_stream(self, device=None):
        return self.current

    def Stream(self, device, priority):
        return Stream("comm")

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def is_current_stream_capturing(self):
        return False


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda()
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=made))
    return made


def test_calls_come_one_after_the_other_whatever_stream_they_are_on(cuda):
    lane = Lane(0)
    with lane.call(None, True) as call:
        assert cuda.current.name == "comm"
    assert call.event.event.event.stream.name == "comm"
    assert lane.stream.waits == ["caller"]
    with lane.call():
        assert cuda.current.waits == ["comm"]


def test_what_a_call_that_raised_left_on_a_stream_is_followed(cuda):
    lane = Lane(0)
    with pytest.raises(ValueError):
        with lane.call(None, True) as call:
            raise ValueError
    assert call.event.event.event.stream.name == "comm"
    with lane.call():
        assert cuda.current.waits == ["comm"]
    other = cuda.current = Stream("another")
    with pytest.raises(ValueError):
        with lane.call(EventHandle(other)):
            raise ValueError
    assert other.waits == ["event of comm"], "an ordinary call's work is over for the caller's stream"
    with lane.call():
        assert other.waits == ["event of comm", "comm"]
