"""crossdock.coll in the twin: a sum over the ranks, what ends a session, and what is refused. What
ElasticBuffer makes of the rest is tested in compat/."""
# SPDX-License-Identifier: Apache-2.0
import gc
import weakref

import numpy as np
import pytest

import crossdock
from crossdock import coll

TIMEOUT = 60.0


def test_the_ranks_parts_are_added_up():
    options = coll.Options(session_bytes=4096, reduce=True)
    assert coll.sizes(options, 2).window_bytes >= 4096
    with coll.Group(options, world=2, backend="twin") as group:
        given = [np.arange(16, dtype=np.float32).reshape(2, 8) + rank for rank in range(2)]
        outs = [group.empty(32, rank=rank).view("float32") for rank in range(2)]
        sessions = [group.session(rank=rank) for rank in range(2)]
        for session, x, out in zip(sessions, given, outs):
            session.reduce_scatter(x, out)
            session.end()
            session.end()
        group.synchronize(TIMEOUT)
        for rank, out in enumerate(outs):
            np.testing.assert_array_equal(out, given[0][rank] + given[1][rank])
        with pytest.raises(crossdock.Closed, match="the session has ended"):
            sessions[0].all_gather(given[0], np.zeros((2, 16), np.float32))
    with pytest.raises(crossdock.Closed, match="the group is closed"):
        group.barrier(rank=0)


def test_mistakes_are_named():
    with coll.Group(coll.Options(session_bytes=4096, shard_rows=4, row_bytes=32), world=1,
                    backend="twin") as group:
        x = np.zeros((4, 8), np.float32)
        with group.session() as session:
            for call, text in [
                    (lambda: session.all_gather(x, np.zeros((3, 8), np.float32)), "for each of the 1 ranks"),
                    (lambda: session.all_gather(x[:, :4], x[:, :4]), "make it contiguous first"),
                    (lambda: session.reduce_scatter(x, x.astype(np.int32)), "float32 or bfloat16"),
                    (lambda: group.write_rows(x, first=1), "rows 1 to 5 of the 4"),
                    (lambda: group.fetch_rows(np.zeros(4, np.int64), x), "must be int32"),
                    (lambda: group.write_rows(x[:, :4].copy()), "row_bytes = 32"),
                    (lambda: group.fetch_rows(np.zeros(4, np.int32), np.zeros((4, 4), np.float32)),
                     "out is float32 [4, 4], rows of 16 bytes"),
                    (lambda: group.fetch_rows(np.zeros(4, np.int32), np.zeros((4, 16), np.float32)),
                     "rows of 64 bytes"),
                    (lambda: group.session(rank=3), "rank 3 is not one of the 1 ranks")]:
                with pytest.raises(crossdock.InvalidArgument) as caught:
                    call()
                assert text in caught.value.message, caught.value.message
        group.synchronize(TIMEOUT)
    with pytest.raises(crossdock.InvalidArgument, match="world is missing"):
        coll.Group(coll.Options())


@pytest.mark.parametrize("field, value, text", [
    ("session_bytes", -1, "session_bytes = -1 must be a whole number from 0 to 18446744073709551615"),
    ("tensor_bytes", 1.5, "tensor_bytes = 1.5 must be a whole number"),
    ("gathers", True, "gathers = True must be a whole number from 0 to 4294967295"),
    ("row_bytes", 1 << 32, "row_bytes = 4294967296 must be a whole number"),
    ("reduce", "yes", "reduce = 'yes' must be True or False"),
    ("wait", "long", "wait = 'long' must be a number of seconds"),
    ("wait", -1.0, "wait")])
def test_options_that_are_none_are_named(field, value, text):
    with pytest.raises(crossdock.InvalidArgument) as caught:
        coll.sizes(coll.Options(**{field: value}), 2)
    assert text in caught.value.message, caught.value.message


@pytest.mark.parametrize("shape", [(1, 4, 64), (2, 2, 2, 32)])
def test_arrays_with_gaps_are_refused_whatever_their_dimensions(shape):
    options = coll.Options(session_bytes=4096, tensor_bytes=4096)
    with coll.Group(options, world=1, backend="twin") as group:
        gaps = np.zeros(shape, np.float32)[..., :16]
        dense = np.ascontiguousarray(gaps)
        with group.session() as session:
            for name, call in [("all_gather: input", lambda: session.all_gather(gaps, dense)),
                               ("all_gather: out", lambda: session.all_gather(dense, gaps)),
                               ("reduce_scatter: input", lambda: session.reduce_scatter(gaps, dense)),
                               ("reduce_scatter: out", lambda: session.reduce_scatter(dense, gaps)),
                               ("send: tensor", lambda: group.send(gaps, 0)),
                               ("receive: tensor", lambda: group.receive(gaps, 0))]:
                with pytest.raises(crossdock.InvalidArgument) as caught:
                    call()
                assert f"coll {name} is not contiguous" in caught.value.message, caught.value.message
        group.synchronize(TIMEOUT)


def test_outputs_that_are_read_only_are_refused():
    """In the twin they are written by the CPU, whatever NumPy allows."""
    options = coll.Options(session_bytes=4096, tensor_bytes=4096, shard_rows=4, row_bytes=32)
    with coll.Group(options, world=1, backend="twin") as group:
        x, fixed = np.ones((4, 8), np.float32), np.frombuffer(bytes(128), np.float32).reshape(4, 8)
        with group.session() as session:
            for call in (lambda: session.all_gather(x, fixed), lambda: session.reduce_scatter(x, fixed),
                         lambda: group.receive(fixed, 0),
                         lambda: group.fetch_rows(np.zeros(4, np.int32), fixed)):
                with pytest.raises(crossdock.InvalidArgument, match="is read-only: give an array of its own"):
                    call()
            session.all_gather(fixed, x)
        group.synchronize(TIMEOUT)
        assert not x.any() and not fixed.any()


def test_a_reset_makes_a_group_good_that_lost_a_peer():
    options = coll.Options(session_bytes=4096, tensor_bytes=64, wait=0.2)
    with coll.Group(options, world=2, backend="twin") as group:
        group.receive(np.zeros(64, np.uint8), 1, rank=0)
        with pytest.raises(crossdock.PeerLost, match="rank 1"):
            group.synchronize(TIMEOUT)
        with pytest.raises(crossdock.PeerLost, match="rank 1"):
            group.check()
        group.reset(TIMEOUT)
        group.check()
        out = np.zeros(64, np.uint8)
        group.send(np.arange(64, dtype=np.uint8), 1, rank=0)
        group.receive(out, 0, rank=1)
        group.synchronize(TIMEOUT)
        np.testing.assert_array_equal(out, np.arange(64))


@pytest.mark.parametrize("end", ["arrival", "reset", "close"])
def test_arrays_stay_while_a_call_that_was_not_waited_for_uses_them(end):
    group = coll.Group(coll.Options(tensor_bytes=64, wait=3600.0), world=2, backend="twin")
    out = np.zeros(64, np.uint8)
    alive = weakref.ref(out)
    group.receive(out, 1, rank=0)
    del out
    for _ in range(2):
        with pytest.raises(crossdock.DeadlineExceeded):
            group.synchronize(0.02)
        gc.collect()
        assert alive() is not None, "the call will write into it"
    if end == "close":
        group.close()
    else:
        group.send(np.ones(64, np.uint8), 0, rank=1)
        group.reset(TIMEOUT) if end == "reset" else group.synchronize(TIMEOUT)
    gc.collect()
    assert alive() is None
    group.close()


def test_a_group_may_go_while_it_waits_and_with_what_it_was_given():
    group = coll.Group(coll.Options(tensor_bytes=1 << 20, wait=3600.0), world=2, backend="twin")
    group.send(np.ones(1 << 20, np.uint8), 1, rank=0)
    group.receive(np.ones(1 << 20, np.uint8), 1, rank=0)  # which never comes
    group.close()
    group.close()
