"""Elastic groups: members of one process in the place of processes, on the twin. One leaves, another takes
its seat, one that does not fit is refused; what arrives is compared with the reference before and after."""
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import threading
import time

import numpy as np

import crossdock
from cases import TIMEOUT, Case, bf16_rows, in_threads, raises, tokens_of
from crossdock import ep
from crossdock.testing import ep_reference as ref

CASE = Case(world=3, experts=9, weights=False)


def options_of(case):
    return dataclasses.replace(case.options(), masks=True, mask_late=True)


def together(*steps):
    """Each on a thread, as processes would; what they gave or raised."""
    return in_threads(len(steps), lambda i: steps[i]())


class Members:
    def __init__(self, name):
        self.place = crossdock.MeetingPlace("inproc://py-ep-elastic", name, fewest=2, settle=2.0)
        self.groups = dict(enumerate(together(*(self.join(r) for r in range(CASE.world)))))

    def join(self, rank, case=CASE):
        return lambda: ep.Group(options_of(case), world=CASE.world, ranks=[(rank, -1)], backend="twin",
                                place=self.place, timeout=TIMEOUT)

    def leave(self, rank):
        self.groups.pop(rank).close()

    def reform(self, newcomer=None):
        """What the members got; ``newcomer``: makes rank 2, for which they wait."""
        steps = [lambda g=g: g.reform(TIMEOUT) for g in self.groups.values()]
        if newcomer is None:
            return together(*steps)
        got = []
        joining = threading.Thread(target=lambda: got.extend(together(newcomer)))
        joining.start()
        end = time.monotonic() + TIMEOUT
        while self.groups[0].waiting_ranks() != [2]:
            assert time.monotonic() < end, f"nobody came for the seat: {got}"
            time.sleep(0.001)
        done = together(*steps)
        joining.join()
        if isinstance(got[0], ep.Group):
            self.groups[2] = got[0]
        return [*done, got[0]]

    def round(self, seed):
        """Of those that are there, without the share of the others."""
        sent = [tokens_of(CASE, r, seed) for r in range(CASE.world)]
        seen = [dataclasses.replace(of, ids=of.ids.copy()) for of in sent]
        each = CASE.experts // CASE.world
        for gone in set(range(CASE.world)) - set(self.groups):
            seen[gone] = dataclasses.replace(seen[gone], rows=seen[gone].rows[:0], ids=seen[gone].ids[:0])
            for of in seen:
                of.ids[of.ids // each == gone] = -1
        want = [ref.dispatch(r, CASE.experts, seen) for r in range(CASE.world)]
        handles = {r: group.dispatch(sent[r].rows, sent[r].ids) for r, group in self.groups.items()}
        self.run()
        made = [bf16_rows(seed * 100 + r, (len(want[r].tokens), CASE.hidden)) for r in range(CASE.world)]
        outs = {}
        for r, handle in handles.items():
            # With masks the rows of a source begin at places of their own.
            ends = np.concatenate([[0], want[r].source_ends])
            for source in range(CASE.world):
                first, n = source * CASE.max_tokens, ends[source + 1] - ends[source]
                part = slice(ends[source], ends[source + 1])
                np.testing.assert_array_equal(handle.received.rows[first:first + n], want[r].rows[part])
                handle.expert_input.rows[first:first + n] = made[r][part]
            outs[r] = self.groups[r].combine(handle)
        self.run()
        for r, rows in outs.items():
            np.testing.assert_array_equal(rows, ref.combine(r, want, made, len(sent[r].ids)))
        return handles

    def run(self):
        for group in self.groups.values():
            group.synchronize(TIMEOUT)


def test_a_rank_leaves_and_another_takes_its_seat():
    members = Members("seat")
    for seed in (1, 2):
        members.round(seed)
    members.leave(2)
    kept = members.round(3)[0]  # nobody has reformed the group: the kernels go on without it
    assert members.groups[0].masked() == [2]
    assert members.reform() == [None, None]
    with raises(crossdock.InvalidArgument, "from before the group's reform()"):
        members.groups[0].combine(kept)
    for group in members.groups.values():
        assert (group.vacant_ranks, group.waiting_ranks(), group.masked()) == ([2], [], [2])
    with raises(crossdock.InvalidArgument, "no process has rank 2"):
        members.groups[0].mask(2, False)
    for seed in (4, 5):
        members.round(seed)
    assert members.reform(members.join(2))[:2] == [None, None]
    for group in members.groups.values():
        assert (group.vacant_ranks, group.masked()) == ([], [])
    for seed in (6, 7):
        members.round(seed)


def test_a_newcomer_with_other_sizes_is_refused_by_name_and_the_others_go_on():
    members = Members("sizes")
    members.leave(2)
    assert members.reform() == [None, None]
    other = dataclasses.replace(CASE, max_tokens=64)
    bytes_of = [ep.sizes(options_of(case), CASE.world).window_bytes for case in (other, CASE)]
    for error in members.reform(members.join(2, other)):
        assert isinstance(error, crossdock.Incompatible), error
        assert f"rank 2 asks for a window of {bytes_of[0]} bytes, rank 0 for {bytes_of[1]} bytes" in str(error)
    with raises(crossdock.Closed, "reform"):
        members.groups[0].check()
    assert members.reform() == [None, None]
    members.round(1)
    assert members.reform(members.join(2))[:2] == [None, None]
    members.round(2)


def test_what_cannot_be_is_refused():
    place = crossdock.MeetingPlace("inproc://py-ep-elastic", "refused")
    with raises(crossdock.InvalidArgument, "needs world", "ranks = [(rank, device), ...]"):
        ep.Group(CASE.options(), world=3, backend="twin", place=place)
    with raises(crossdock.InvalidArgument, "exchange and place"):
        ep.Group(CASE.options(), world=1, ranks=[(0, -1)], backend="twin", place=place,
                 exchange=crossdock.function_exchange(0, 1, lambda data, seconds: [data]))
    with raises(crossdock.InvalidArgument, "fewest = 4 ranks of a world of 3"):
        ep.Group(CASE.options(), world=3, ranks=[(0, -1)], backend="twin",
                 place=dataclasses.replace(place, fewest=4))
    with raises(crossdock.InvalidArgument, "MeetingPlace: store = None must be a string"):
        dataclasses.replace(place, store=None)
    with raises(crossdock.InvalidArgument, "MeetingPlace: settle = '5' must be seconds"):
        dataclasses.replace(place, settle="5")
    with raises(crossdock.InvalidArgument, "place = ('a', 'b') must be a crossdock.MeetingPlace"):
        ep.Group(CASE.options(), world=3, ranks=[(0, -1)], backend="twin", place=("a", "b"))
    with CASE.group() as group:
        assert (group.vacant_ranks, group.waiting_ranks()) == ([], [])
        with raises(crossdock.InvalidArgument, "not elastic"):
            group.reform(1)
