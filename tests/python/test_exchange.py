"""Groups of several processes: how they meet. Kernels of the twin need all ranks in one process, so what
is tested here is the meeting; what follows is tested on GPUs."""
# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import threading
import time
import types

import pytest

import crossdock
from cases import Case, in_threads, raises
from crossdock import ep
from crossdock.compat.deep_ep.ranks import rank_of
from crossdock.exchange import mpi_exchange


class Meeting:
    """An all-gather between threads."""

    def __init__(self, members):
        self.barrier = threading.Barrier(members)
        self.parts = [b""] * members

    def exchange(self, member):
        def all_gather(data, seconds):
            self.parts[member] = data
            self.barrier.wait(seconds)
            everything = list(self.parts)
            self.barrier.wait(seconds)
            return everything
        return crossdock.function_exchange(member, len(self.parts), all_gather)


def test_a_store_gathers(tmp_path):
    def body(member):
        exchange = crossdock.store_exchange(f"file://{tmp_path}", "ep0", member, 3, timeout=20)
        assert (exchange.member, exchange.members) == (member, 3)
        assert "name ep0" in repr(exchange)
        return [exchange.all_gather(bytes([member]) * n, 20) for n in (1, 0, 1000)]

    for got in in_threads(3, body):
        assert got == [[bytes([m]) * n for m in range(3)] for n in (1, 0, 1000)], got


def test_a_function_gathers_and_its_mistakes_are_named():
    meeting = Meeting(2)
    got = in_threads(2, lambda m: meeting.exchange(m).all_gather(b"abc"[m:], 20))
    assert got == [[b"abc", b"bc"]] * 2

    def broken(error):
        def all_gather(data, seconds):
            raise error
        return crossdock.function_exchange(0, 2, all_gather)

    with raises(crossdock.DeadlineExceeded, "all_gather() of the exchange raised TimeoutError: late"):
        broken(TimeoutError("late")).all_gather(b"", 1)
    with raises(crossdock.PeerLost, "ConnectionResetError"):
        broken(ConnectionResetError("gone")).all_gather(b"", 1)
    with raises(crossdock.Busy, "no"):
        broken(crossdock.Busy("no")).all_gather(b"", 1)
    with raises(crossdock.InvalidArgument, "ZeroDivisionError"):
        broken(ZeroDivisionError("x")).all_gather(b"", 1)
    for wrong, text in [([b"a"], "1 parts for 2 members"), ([b"b", b"a"], "own bytes"),
                        (["a", "b"], "must return a list of bytes"), (None, "raised TypeError")]:
        with raises(crossdock.InvalidArgument, text):
            crossdock.function_exchange(0, 2, lambda data, seconds, w=wrong: w).all_gather(b"a", 1)
    with raises(crossdock.InvalidArgument, "member 2 of 2"):
        crossdock.function_exchange(2, 2, lambda data, seconds: [])


def test_processes_that_miss_a_member_end_by_the_deadline(tmp_path):
    exchange = crossdock.store_exchange(f"file://{tmp_path}", "ep1", 0, 2, timeout=5)
    with pytest.raises(crossdock.DeadlineExceeded) as caught:
        ep.Group(Case().options(), exchange=exchange, backend="twin", timeout=0.3)
    assert "1" in caught.value.message


def test_members_agree_before_anything_is_made():
    """The twin refuses ranks in several processes, but only after all of them have met."""
    meeting = Meeting(2)

    def body(member):
        return ep.Group(Case().options(), exchange=meeting.exchange(member), backend="twin", timeout=20)

    for got in in_threads(2, body):
        assert isinstance(got, crossdock.Unsupported) and "one process" in got.message, got


def test_members_that_disagree_are_told(tmp_path):
    def body(member):
        exchange = crossdock.store_exchange(f"file://{tmp_path}", "ep2", member, 2, timeout=20)
        options = Case(hidden=128 if member == 0 else 256).options()
        return ep.Group(options, exchange=exchange, backend="twin", timeout=20)

    for got in in_threads(2, body):
        assert isinstance(got, crossdock.Incompatible), got


def test_ranks_and_processes_have_to_add_up():
    exchange = crossdock.function_exchange(0, 2, lambda data, seconds: [data, data])
    with raises(crossdock.InvalidArgument, "4 ranks in 2 processes"):
        ep.Group(Case().options(), world=4, exchange=exchange, backend="twin")


PROCESS = """
import sys, crossdock
url, member = sys.argv[1], int(sys.argv[2])
exchange = crossdock.store_exchange(url, "ep3", member, 2, timeout=20)
assert exchange.all_gather(b"p%d" % member, 20) == [b"p0", b"p1"]
"""


def test_real_processes_meet_in_a_store(tmp_path):
    children = [subprocess.Popen([sys.executable, "-c", PROCESS, f"file://{tmp_path}", str(m)])
                for m in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]


class Request:
    """Of MPI: ended when it was asked a few times and all are there."""

    def __init__(self, barrier, finish):
        self.barrier, self.finish, self.asked = barrier, finish, 0

    def Test(self):
        self.asked += 1
        if self.asked < 3 or self.barrier is None:
            return False
        self.barrier.wait(20)
        self.finish()
        self.barrier.wait(20)
        return True


class Comm:
    """As much of a communicator of mpi4py as exchanges use. Without a barrier others never come."""

    def __init__(self, rank, sent, barrier):
        self.rank, self.sent, self.barrier = rank, sent, barrier

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return len(self.sent)

    def Iallgather(self, data, parts):
        self.sent[self.rank] = bytes(data)

        def finish():
            parts[:] = b"".join(self.sent)
        return Request(self.barrier, finish)


def test_mpi_gathers():
    barrier, sent = threading.Barrier(3), [b""] * 3
    comms = [Comm(rank, sent, barrier) for rank in range(3)]

    def body(member):
        exchange = mpi_exchange(comms[member])
        assert (exchange.member, exchange.members) == (member, 3)
        return [exchange.all_gather(bytes([member]) * (n * member), 20) for n in (1, 0, 1000)]

    for got in in_threads(3, body):
        assert got == [[bytes([m]) * (n * m) for m in range(3)] for n in (1, 0, 1000)]


def test_mpi_ends_by_the_deadline():
    """deep_ep.Buffer(comm=...) meets when it is first used: a rank that is gone must not hold others."""
    begun = time.monotonic()
    rank = rank_of(None, Comm(0, [b""] * 2, None))
    with raises(crossdock.DeadlineExceeded, "MPI: the all-gather has not ended in time"):
        rank.gather(b"x", 0.2)
    assert time.monotonic() - begun < 10


class FakeTorch(types.ModuleType):
    """torch with NCCL where a peer never comes: waiting for the work is the stream's, and returns."""

    def __init__(self):
        super().__init__("torch")
        self.waited = []
        tensor = types.SimpleNamespace(cpu=lambda: self.fail("a copy to the host has no deadline"))
        work = types.SimpleNamespace(wait=self.waited.append)
        self.distributed = types.ModuleType("torch.distributed")
        self.distributed.__dict__.update(
            is_initialized=lambda: True, get_rank=lambda group: 0, get_world_size=lambda group: 2,
            get_backend=lambda group: "nccl", all_gather=lambda *_, **__: work)
        event = types.SimpleNamespace(record=lambda: None, query=lambda: False)
        self.cuda = types.SimpleNamespace(current_device=lambda: 0, Event=lambda: event)
        self.uint8, self.device = None, lambda *_: None
        self.frombuffer = self.tensor = self.empty_like = lambda *_, **__: tensor

    @staticmethod
    def fail(text):
        raise AssertionError(text)


def test_nccl_ends_by_the_deadline(monkeypatch):
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", torch.distributed)
    with raises(crossdock.DeadlineExceeded, "the all-gather has not ended in time"):
        crossdock.torch_exchange().all_gather(b"x", 0.2)
    assert 0 < torch.waited[0].total_seconds() <= 0.2


def test_torch_exchange_needs_a_process_group():
    pytest.importorskip("torch", reason="torch is not installed")
    with raises(crossdock.InvalidArgument, "init_process_group"):
        crossdock.torch_exchange()
