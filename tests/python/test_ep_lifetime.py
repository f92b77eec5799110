"""Who keeps what: slots, handles, arrays and groups may go in any order, and nothing is overwritten."""
# SPDX-License-Identifier: Apache-2.0
import gc
import sys
import threading
import time

import numpy as np
import pytest

import crossdock
from cases import TIMEOUT, Case, check_received, dispatch, raises, round_of, tokens_of
from crossdock import ep
from crossdock.testing import ep_reference as ref

CASE = Case(world=2)


def sent(seed):
    return [tokens_of(CASE, r, seed) for r in range(2)]


def test_slots_are_held_by_handles_and_given_back():
    with CASE.group() as group:
        first, second = dispatch(CASE, group, sent(1)), dispatch(CASE, group, sent(2))
        with raises(crossdock.Busy, "all 2 slots of rank 0"):
            dispatch(CASE, group, sent(3))
        first[0].close()
        del first[1]  # dropped is as good as closed
        third = dispatch(CASE, group, sent(3))
        group.synchronize(TIMEOUT)
        for handles, seed in ((second, 2), (third, 3)):
            want = ref.dispatch(0, CASE.experts, sent(seed))
            n = handles[0].rows()
            np.testing.assert_array_equal(handles[0].received.rows[:n], want.rows)


def test_an_array_keeps_its_slot_when_the_handle_is_gone():
    with CASE.group() as group:
        handles = dispatch(CASE, group, sent(1))
        group.synchronize(TIMEOUT)
        n = handles[0].rows()
        part = handles[0].received.rows[1:n][:, 8:]  # a view of a view
        want = part.copy()
        with handles[0], handles[1]:
            pass
        assert handles[0].closed
        held = [dispatch(CASE, group, sent(2))]
        with raises(crossdock.Busy):
            group.dispatch(sent(3)[0].rows, sent(3)[0].ids, rank=0)
        held.append([group.dispatch(sent(3)[1].rows, sent(3)[1].ids, rank=1)])
        np.testing.assert_array_equal(part, want)
        del part
        held[1].append(group.dispatch(sent(3)[0].rows, sent(3)[0].ids, rank=0))
        group.synchronize(TIMEOUT)


def test_closed_handles_and_groups_say_so():
    group = CASE.group()
    handles = dispatch(CASE, group, sent(1))
    group.synchronize(TIMEOUT)
    handles[0].close()
    handles[0].close()
    for call in (lambda: handles[0].rows(), lambda: handles[0].received.rows,
                 lambda: handles[0].expert_input.rows, lambda: group.combine(handles[0])):
        with raises(crossdock.Closed, "rank 0 is closed"):
            call()
    rows = handles[1].received.rows
    before = rows.copy()
    group.close()
    group.close()
    with raises(crossdock.Closed, "the group is closed"):
        group.synchronize(TIMEOUT)
    with raises(crossdock.Closed, "the group is closed"):
        group.combine(handles[1])
    assert handles[1].rows() == ref.dispatch(1, CASE.experts, sent(1)).source_ends[-1]
    np.testing.assert_array_equal(rows, before)  # its memory is still there
    del handles, group
    gc.collect()
    np.testing.assert_array_equal(rows, before)


def test_arrays_outlive_everything_else():
    out = []
    with CASE.group() as group:
        handles = dispatch(CASE, group, sent(1))
        group.synchronize(TIMEOUT)
        for handle in handles:
            handle.expert_input.rows[:] = 0x3F80
        out = [group.combine(handle) for handle in handles]
        group.synchronize(TIMEOUT)
        del handles, handle
    del group
    gc.collect()
    want = [ref.dispatch(r, CASE.experts, sent(1)) for r in range(2)]
    ones = [np.full((len(w.tokens), CASE.hidden), 0x3F80, np.uint16) for w in want]
    for r in range(2):
        np.testing.assert_array_equal(out[r], ref.combine(r, want, ones, len(sent(1)[r].ids)))


def test_arrays_may_be_dropped_on_any_thread():
    with CASE.group() as group:
        for seed in range(4):
            handles = dispatch(CASE, group, sent(seed))
            group.synchronize(TIMEOUT)
            parts = [handle.received.rows for handle in handles]
            for handle in handles:
                handle.close()
            del handle, handles
            dropping = threading.Thread(target=parts.clear)
            dropping.start()
            dropping.join()
        round_of(CASE, group, 9)


def test_two_dispatches_then_two_combines():
    with CASE.group() as group:
        both = [dispatch(CASE, group, sent(seed)) for seed in (1, 2)]
        group.synchronize(TIMEOUT)
        wants = [[ref.dispatch(r, CASE.experts, sent(seed)) for r in range(2)] for seed in (1, 2)]
        made = []
        for handles in both:
            made.append([])
            for handle in handles:
                n = handle.rows()
                rows = handle.received.rows[:n]  # experts that change nothing
                handle.expert_input.rows[:n] = rows
                made[-1].append(rows.copy())
        outs = [[group.combine(handle) for handle in handles] for handles in both]
        group.synchronize(TIMEOUT)
        for which, seed in enumerate((1, 2)):
            for r in range(2):
                np.testing.assert_array_equal(
                    outs[which][r], ref.combine(r, wants[which], made[which],
                                                len(sent(seed)[r].ids)))


def test_outputs_of_a_call_may_go_into_the_next_before_anything_has_run():
    """In the twin calls run later: memory of the library is passed on, not copied too early."""
    case = Case(world=1, experts=2, top_k=1)
    of = tokens_of(case, 0, 1)
    of.ids[:] = 1
    with case.group() as group:
        first = group.dispatch(of.rows, of.ids)
        group.synchronize(TIMEOUT)
        n = first.rows()
        first.expert_input.rows[:n] = first.received.rows[:n]
        out = group.combine(first)
        second = group.dispatch(out, of.ids)  # the sum has not been made yet
        del out
        first.close()
        group.synchronize(TIMEOUT)
        made = ref.combine(0, [ref.dispatch(0, 2, [of])], [of.rows], n)
        np.testing.assert_array_equal(second.received.rows[:n], made)


def test_waiting_lets_other_threads_run():
    case = Case(world=2)
    of = tokens_of(case, 0, 1)
    with case.group() as group:
        handle = group.dispatch(of.rows, of.ids, rank=0)
        ran, stop = [], threading.Event()

        def run():
            while not stop.wait(0.01):
                ran.append(time.monotonic())

        thread = threading.Thread(target=run)
        thread.start()
        try:
            start = time.monotonic()
            with pytest.raises(crossdock.DeadlineExceeded):
                handle.rows(timeout=1)
            end = time.monotonic()
        finally:
            stop.set()
            thread.join()
        assert [when for when in ran if start + 0.1 < when < end - 0.1]


def test_ranks_may_be_called_by_threads_of_their_own():
    with CASE.group() as group:
        tokens = sent(1)
        want = [ref.dispatch(r, CASE.experts, tokens) for r in range(2)]
        for _ in range(10):
            handles = [None, None]

            def call(rank, handles=handles):
                of = tokens[rank]
                handles[rank] = group.dispatch(of.rows, of.ids, of.weights, rank=rank)

            threads = [threading.Thread(target=call, args=(r,)) for r in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            group.synchronize(TIMEOUT)
            for r, handle in enumerate(handles):
                check_received(CASE, handle, want[r])
                handle.close()


def test_many_rounds_take_no_more_memory():
    import resource
    case = Case(world=1, max_tokens=4)
    of = tokens_of(case, 0, 1)
    with case.group() as group:
        def rounds(count):
            for _ in range(count):
                with group.dispatch(of.rows, of.ids, of.weights) as handle:
                    group.synchronize(TIMEOUT)
                    group.combine(handle, weights=True)
                    group.synchronize(TIMEOUT)
        rounds(100)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rounds(300)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= before + 4096


def test_repr():
    with CASE.group() as group:
        assert repr(group) == "<crossdock.ep.Group: ranks [0, 1] of 2>"
        handle = group.dispatch(sent(1)[0].rows, sent(1)[0].ids, rank=0)
        assert repr(handle) == "<crossdock.ep.Handle of rank 0: 24 tokens>"
        handle.close()
        assert "closed" in repr(handle)
    assert isinstance(group, ep.Group) and "closed" in repr(group)


def test_memory_that_was_dropped_is_freed_without_the_gil():
    """On a GPU that may wait for a kernel, and the kernel for a call of another thread. Here a thread that is given
    the GIL by nobody else gets it from a call that frees."""
    go, ran, before = threading.Semaphore(0), [], sys.getswitchinterval()
    with Case(world=1).group() as group:
        def other():
            go.acquire()
            ran.append(True)
        thread = threading.Thread(target=other)
        thread.start()
        sys.setswitchinterval(1000)
        try:
            until = time.monotonic() + 10
            go.release()
            while not ran and time.monotonic() < until:
                group._native.empty(0, "float32", 1, 1)  # gives back the one before
            assert ran
        finally:
            sys.setswitchinterval(before)
            thread.join()
