"""Which stream of torch a call of deep_ep follows, with streams and events of our own that only write down
what is done to them."""
# SPDX-License-Identifier: Apache-2.0
import contextlib
import sys
import time
import types

import numpy as np
import pytest

from crossdock import Busy, DeadlineExceeded, InvalidArgument, NoMemory
from crossdock.compat.deep_ep import Buffer, ElasticBuffer, Threads
from crossdock.compat.deep_ep.elastic_extras import Extras
from crossdock.compat.deep_ep.events import EventHandle
from crossdock.compat.deep_ep.lane import Call, Lane
from crossdock.compat.deep_ep.low_latency import Format, LowLatency, LowLatencyHandle, _once
from crossdock.compat.deep_ep.normal import How, Normal
from crossdock.compat.deep_ep.ranks import Rank, do_all
from crossdock.compat.deep_ep.settings import Settings
from crossdock.compat.deep_ep.world import Region, World


class Stream:
    def __init__(self, name):
        self.name, self.waits, self.capturing = name, [], False

    def wait_stream(self, other):
        event = Event()
        event.record(other)
        self._join(event)
        self.waits.append(other.name)

    def wait_event(self, event):
        self._join(event)
        self.waits.append(f"event of {event.stream.name}")

    def _join(self, event):
        assert event.captured or not self.capturing, "CUDA: STREAM_CAPTURE_ISOLATION"
        self.capturing = event.captured


class Event:
    def record(self, stream):
        self.stream, self.captured = stream, stream.capturing


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
        return self.current.capturing

    @contextlib.contextmanager
    def graph(self, *streams):
        """A capture that begins on the current stream; all of ``streams`` leave it with that one."""
        self.current.capturing = True
        yield
        for stream in (self.current, *streams):
            stream.capturing = False


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


def test_calls_of_one_capture_come_one_after_the_other(cuda):
    lane, caller = Lane(0), cuda.current
    with lane.call(None, True):  # outside
        pass
    for _ in range(2):
        caller.waits.clear()
        lane.stream.waits.clear()
        with cuda.graph(lane.stream):
            with lane.call():
                assert caller.waits == [], "a capture cannot wait for what was called before it"
            with lane.call(None, True) as call:
                assert cuda.current.capturing
            assert lane.stream.waits == ["caller"] * 2
            with lane.call():
                assert caller.waits == ["comm"]
            with lane.call(None, True) as call:
                pass
            call.event.current_stream_wait()
    other = cuda.current = Stream("another")
    with lane.call():
        assert other.waits == ["comm"], "what was captured has not made the call before it forgotten"


def test_parallel_branches_of_a_capture_are_put_in_order(cuda):
    lane, caller = Lane(0), cuda.current
    branch = Stream("branch")
    with cuda.graph(branch):
        branch.wait_stream(caller)
        with lane.call():
            pass
        cuda.current = branch
        with lane.call():
            assert branch.waits == ["caller", "caller"]
        cuda.current = caller
        caller.wait_stream(branch)


def test_memory_of_a_session_is_written_when_peers_have_read_that_of_the_one_before(cuda):
    extras = Extras(types.SimpleNamespace(rank=lambda: 0, meet=lambda *_: None), Lane(0), Settings())
    extras._gathers = types.SimpleNamespace(check=lambda: None, session=lambda rank, stream: types.SimpleNamespace(
        input=lambda nbytes: np.zeros(nbytes, np.uint8), end=lambda: None))
    caller = cuda.current
    for _ in range(2):
        extras.create_session()
        assert "event of comm" not in caller.waits
        extras.inplace_tensors([(4,)], np.dtype("float32"))
        assert caller.waits == ["event of comm"]
        extras.destroy_session()
        caller.waits.clear()
    extras.create_session()
    with cuda.graph():
        extras.inplace_tensors([(4,)], np.dtype("float32"))
        assert caller.waits == [], "a capture cannot wait for what was called before it"


class Tensor:
    def __init__(self):
        self.streams = []

    def record_stream(self, stream):
        self.streams.append(stream.name)


def test_tensors_of_an_earlier_call_are_kept_whatever_its_stream_was(cuda):
    frame, lane, tensor = types.SimpleNamespace(gpu=True), Lane(0), Tensor()
    with lane.call() as call:
        call.keep(frame, tensor, None)
    assert tensor.streams == [], "where the caller has it, and nowhere else"
    with lane.call(None, True):
        with lane.call() as inner:
            inner.keep_all(frame, tensor, None)
    assert set(tensor.streams) == {"comm"}


def test_a_hook_whose_work_a_later_call_has_done_waits_for_it(cuda):
    done, lane = [], Lane(0)
    for early in (False, True):
        hook = _once(lambda: done.append(cuda.current.name))
        with lane.call(None, True):
            hook(early=early)
        cuda.current.waits.clear()
        hook()
        assert cuda.current.waits == (["event of comm"] if early else [])
    assert done == ["comm"] * 2


@pytest.fixture
def kept(monkeypatch):
    """What calls keep for the streams that use it."""
    all_of_it = []

    def keep(call, frame, *tensors):
        all_of_it.extend(tensors)

    monkeypatch.setattr(Call, "keep", keep)
    monkeypatch.setattr(Call, "keep_all", keep)
    return all_of_it


@pytest.mark.parametrize("hooked", [False, True])
def test_all_that_a_low_latency_dispatch_writes_is_kept(monkeypatch, kept, hooked):
    """Also what the caller does not get: its memory must not be used again while a hook may still write it."""
    low, x, waited = LowLatency(Rank(0, 1), Lane(-1), None, False), np.zeros((1, 8)), np.zeros(1)
    planes = {name: np.zeros((1, 1, 8)) for name in ("rows", "scales", "weights", "sources")}
    handle = types.SimpleNamespace(received=types.SimpleNamespace(expert_counts=np.zeros(1, np.int32)))
    world = types.SimpleNamespace(rank=types.SimpleNamespace(size=lambda: 1), run=lambda: None,
                                  clock=lambda frame, dispatches: types.SimpleNamespace(add=lambda to: None),
                                  group=types.SimpleNamespace(dispatch_receive=lambda *_, **__: None))
    monkeypatch.setattr(low, "_world", lambda *_: world)
    monkeypatch.setattr(low, "_send", lambda *_: (handle, types.SimpleNamespace(**planes)))
    result = low.dispatch(x, x, 1, 1, Format(True, False, False), None, waited, not hooked, hooked)
    if hooked:
        kept.clear()
        result[-1]()
    for array in (waited, *planes.values()):
        assert any(one is array for one in kept)


def test_all_arrays_of_an_elastic_handle_are_kept(kept):
    def one(group):
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=64)
        ids, weights = np.zeros((4, 2), np.int32), np.ones((4, 2), np.float32)
        for expand in (False, True):
            kept.clear()
            handle = buffer.dispatch(np.zeros((4, 64), np.uint16), ids, weights, num_experts=2,
                                     async_with_compute_stream=True, do_expand=expand)[3]
            arrays = [value for value in vars(handle).values() if isinstance(value, np.ndarray)]
            assert len(arrays) == (7 if expand else 6)
            for array in arrays:
                assert any(one is array for one in kept)
        buffer.destroy()

    Threads(1, backend="twin").run(one)


@pytest.mark.parametrize("kind, parts", [(Buffer, ("_normal", "_low_latency")), (ElasticBuffer, ("_calls", "_extras"))])
@pytest.mark.parametrize("ordinary", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_memory_goes_when_the_streams_of_calls_are_done(cuda, kind, parts, late, ordinary):
    done = []

    def synchronize(timeout, stream):
        done.append((stream.name, timeout))
        if late:
            raise DeadlineExceeded("deep_ep: late")

    def part(name, groups):
        return types.SimpleNamespace(groups=groups, close=lambda: done.append(name))

    buffer = object.__new__(kind)
    buffer._closed, buffer._lane, buffer._settings = False, Lane(0), Settings(timeout=7)
    group = types.SimpleNamespace(synchronize=synchronize)
    for name, groups in zip(parts, ([], [group, group])):
        setattr(buffer, name, part(name, groups))
    with buffer._lane.call(None, True):
        pass
    if ordinary:  # on a stream that is not current any more
        with cuda.stream(Stream("another")), buffer._lane.call():
            pass
    with pytest.raises(DeadlineExceeded) if late else contextlib.nullcontext():
        buffer.destroy()
    buffer.destroy()
    waited = [("another", 7), ("comm", 7)] if ordinary else [("comm", 7)]
    assert done == [*(waited[:1] if late else waited), *parts]


class Places:
    """Regions as a world has them, whose users a test names."""

    def __init__(self, count):
        self.world = object.__new__(World)
        self.world.rank, self.world._calls = types.SimpleNamespace(twin=True), 0
        self.world.regions = [Region(number) for number in range(count)]

    def take(self):
        """The region, whether its arrays may be given out, and what gives them back."""
        self.world.notice()
        region, lend = self.world.take()
        region.user = types.SimpleNamespace(closed=False, arrays=int(lend))
        return region, lend, lambda: setattr(region.user, "arrays", 0)


def test_what_a_capture_has_got_is_never_given_to_others(cuda):
    places = Places(3)
    eager, lend, _ = places.take()
    assert lend
    with cuda.graph():
        first, lend, drop = places.take()
        assert lend and first is not eager
        drop()
        assert places.take()[0] is first, "a capture uses its place again"
    first.user.arrays = 0
    with cuda.graph():
        assert places.take()[0] is first, "replays come one after the other"
        first.user.arrays = 0
    for _ in range(4):
        other, lend, drop = places.take()
        assert other not in (first, eager) and not lend, "the last one is for copies"
        drop()


def test_a_place_that_a_capture_copies_from_is_for_copies_ever_after(cuda):
    places = Places(2)
    eager, lend, drop = places.take()
    assert lend
    with cuda.graph():
        last, lend, _ = places.take()
        assert not lend
    places.world.notice()  # it is free for longer than the other one
    drop()
    for _ in range(2):
        region, lend, drop = places.take()
        assert region is eager and lend
        assert places.take()[:2] == (last, False)
        drop()


def test_a_capture_that_needs_all_places_says_so(cuda):
    places = Places(2)
    with cuda.graph():
        places.take()
        last = places.take()[0]
        last.user.arrays = 1
        with pytest.raises(Busy, match="all 2 places .* 1 of them for graphs"):
            places.take()


def test_a_layout_keeps_the_arrays_that_it_returns_and_not_copies(monkeypatch):
    kept = []
    monkeypatch.setattr(Call, "keep", lambda self, frame, *tensors: kept.extend(tensors))
    normal = Normal(types.SimpleNamespace(size=lambda: 2), Lane(-1), 0, None)
    ids = np.array([[0, 3], [1, -1]])
    made, _ = normal.layout(ids, 4, How())
    for array in (ids, made.tokens_per_rank, made.tokens_per_expert, made.is_token_in_rank):
        assert any(array is one for one in kept)


# ---- what is left when something fails -----------------------------------------------------------


def test_a_hook_that_failed_says_so_again():
    def work():
        raise DeadlineExceeded("rank 1 did not come")

    hook = _once(work)
    for early in (True, False, False):
        with pytest.raises(DeadlineExceeded, match="rank 1"):
            hook(early=early)


def test_all_is_done_whatever_one_raises():
    done = []

    def fail():
        raise Busy("first")

    with pytest.raises(Busy):
        do_all([fail, lambda: done.append(1), fail, lambda: done.append(2)])
    assert sorted(done) == [1, 2]


@pytest.mark.parametrize("kind, name", [(Buffer, "_normal"), (Buffer, "_low_latency"), (ElasticBuffer, "_calls")])
def test_destroy_gives_all_groups_back_after_a_failure(kind, name):
    closed = []

    def close(which):
        closed.append(which)
        raise DeadlineExceeded("a rank has failed")

    def one(group):
        buffer = kind(group, 1 << 20) if kind is Buffer else kind(group, num_max_tokens_per_rank=4, hidden=64)
        getattr(buffer, name)._worlds = {
            n: types.SimpleNamespace(group=None, groups=[], close=lambda n=n: close(n)) for n in range(3)}
        with pytest.raises(DeadlineExceeded):
            getattr(buffer, name).close()
        assert not getattr(buffer, name)._worlds

    Threads(1, backend="twin").run(one)
    assert sorted(closed) == [0, 1, 2]


def test_a_group_is_closed_when_all_have_left_whoever_was_there_before():
    closed = []
    group = types.SimpleNamespace(close=lambda: closed.append(1))
    threads = Threads(2, backend="twin")

    def one(rank):
        rank.make(lambda *_, **__: group, None, 1.0)
        if rank.rank() == 0:
            rank.leave(group)  # the other one drops it, and the next group has its address
        rank.make(lambda *_, **__: group, None, 1.0)
        if rank.rank() == 0:
            rank.leave(group)

    threads.run(one)
    assert not closed


def test_ranks_wait_for_an_action_as_long_as_it_may_take():
    threads = Threads(2, backend="twin", timeout=0.05)
    threads.run(lambda rank: threads.together(rank.rank(), None, lambda _: time.sleep(0.4), 1.0))


def test_a_table_that_could_not_be_made_is_made_anew(monkeypatch):
    def one(group):
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=64)
        small, large = np.ones((4, 16), np.float32), np.ones((8, 16), np.float32)
        buffer.engram_write(small)
        make = type(group).make

        def refuse(*_):
            raise NoMemory("too much")

        monkeypatch.setattr(type(group), "make", refuse)
        with pytest.raises(NoMemory):
            buffer.engram_write(large)
        monkeypatch.setattr(type(group), "make", make)
        buffer.engram_write(small)
        buffer.destroy()

    Threads(1, backend="twin").run(one)


def test_a_low_latency_dispatch_that_fails_leaves_the_others_whole():
    """One that is refused ends no earlier result; one that has been launched has had its turn."""
    def one(group):
        buffer = Buffer(group, low_latency_mode=True)
        x, ids = np.zeros((2, 128), np.uint16), np.zeros((2, 1), np.int64)
        weights = np.ones((2, 1), np.float32)

        def dispatch(ids=ids, **more):
            return buffer.low_latency_dispatch(x, ids, 4, 2, use_fp8=False, **more)

        kept = [dispatch()[2], dispatch()[2]]
        for wrong in ({"ids": ids[:1]}, {"ids": ids[0]},
                      {"cumulative_local_expert_recv_stats": np.zeros(5, np.int32)},
                      {"dispatch_wait_recv_cost_stats": np.zeros(7, np.int64)}):
            with pytest.raises(InvalidArgument, match="low_latency_dispatch"):
                dispatch(**wrong)
        for handle in kept:
            buffer.low_latency_combine(np.zeros((2, 4, 128), np.uint16), ids, weights, handle)
        for _ in range(3):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(LowLatencyHandle, "tell", lambda *_: (_ for _ in ()).throw(MemoryError("now")))
                with pytest.raises(MemoryError):
                    dispatch()
        dispatch()
        buffer.destroy()

    Threads(1, backend="twin").run(one)
