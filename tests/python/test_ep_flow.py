"""Beyond one dispatch and one combine: copies by expert, a routing used again, copies when all slots are
held, and outputs in memory of the caller. In the twin against the NumPy reference."""
# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np
import pytest

import crossdock
from cases import TIMEOUT, Case, bf16_rows, check_received, dispatch, raises, round_of, tokens_of
from crossdock import ep
from crossdock.testing import ep_reference as ref


def flow_group(case, **changes):
    options = dataclasses.replace(case.options(), **changes)
    return ep.Group(options, world=case.world, backend="twin", timeout=TIMEOUT)


def one_round(case, seed):
    sent = [tokens_of(case, r, seed) for r in range(case.world)]
    want = case.deliveries(sent)
    return sent, want


# ---- ways to combine ---------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("options", [{"combine": "push"}, {"combine": "push", "combine_send_sms": 1},
                                     {"combine": "by_size"}, {"overlap_launches": True}])
def test_combine_gives_the_same_however_rows_travel(world, options):
    case = Case(world=world, hidden=256)
    with flow_group(case, combine_sms=4, **options) as group:
        # A single rank has nobody to send to, and these sizes are too small to be worth it.
        assert (group.memory.staging_bytes > 0) == (options.get("combine") == "push" and world > 1)
        for seed in (1, 2, 3):
            round_of(case, group, seed, biases=seed - 1)


def test_wrong_ways_to_combine():
    with raises(crossdock.InvalidArgument, 'combine = both must be "pull", "push" or "by_size"'):
        ep.sizes(dataclasses.replace(Case().options(), combine="both"), 2)


def test_counts_that_were_not_wanted_say_so():
    case = Case(world=1)
    sent, want = one_round(case, 1)
    with flow_group(case, host_counts=False) as group:
        handle = dispatch(case, group, sent)[0]
        group.synchronize(TIMEOUT)
        n = int(handle.received.source_ends[-1])
        assert n == len(want[0].tokens)
        np.testing.assert_array_equal(handle.received.rows[:n], want[0].rows)
        with raises(crossdock.InvalidArgument, "host_counts"):
            handle.rows()


# ---- copies by expert --------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("change", [
    {}, {"payload": "cast", "hidden": 512}, {"payload": "e4m3"}, {"weights": False},
    {"payload": "cast", "hidden": 512, "scales_by_column": True}, {"world": 4},
    {"payload": "cast", "hidden": 640, "scales_by_column": True},
    {"payload": "ue8m0", "hidden": 640}, {"payload": "ue8m0", "hidden": 1024, "scales_by_column": True}])
def test_copies_by_expert_and_back(change, masked):
    case = Case(**{"alignment": 8, **change})
    sent, want = one_round(case, 3)
    per_expert = case.world * case.max_tokens * case.top_k if masked else 0
    with case.group() as group:
        handles = dispatch(case, group, sent)
        grouped = [group.group_rows(handle) for handle in handles]
        copies = [group.expand_rows(handle, of, rows_per_expert=per_expert,
                                    scales_by_column=case.scales_by_column)
                  for handle, of in zip(handles, grouped)]
        group.synchronize(TIMEOUT)
        lists = [ref.group_rows(delivery, case.alignment) for delivery in want]
        sums = []
        for r, got in enumerate(copies):
            expected = ref.expand_rows(want[r], lists[r], per_expert)
            experts = len(want[r].expert_counts)
            assert got.rows.shape[:-1] == ((experts, per_expert) if masked else
                                           grouped[r].rows.shape)
            np.testing.assert_array_equal(grouped[r].aligned_counts, np.diff(lists[r].offsets))
            here = len(expected.written)
            for part in ("rows", "scales", "weights", "sources"):
                wanted, plane = getattr(expected, part), getattr(got, part)
                if wanted is None:
                    assert plane is None, part
                    continue
                plane = plane.reshape((-1,) + plane.shape[2:]) if masked else plane
                np.testing.assert_array_equal(plane[:here][expected.written],
                                              wanted[expected.written], part)
            # Each copy becomes something else, so that a sum over wrong ones is seen.
            made = bf16_rows(r, (max(here, 1), case.hidden))
            group.reduce_rows(handles[r], made.reshape((experts, per_expert, case.hidden)) if masked
                              else made, rows_per_expert=per_expert, weighted=case.weights)
            by_place = made
            if masked:
                starts = np.repeat(lists[r].offsets[:-1], np.diff(lists[r].offsets))
                owners = np.repeat(np.arange(experts), np.diff(lists[r].offsets))
                inside = np.arange(len(starts)) - starts
                by_place = made[owners * per_expert + inside] if len(starts) else made
            sums.append(ref.reduce_rows(want[r], lists[r], by_place, case.weights))
        outputs = [group.combine(handle) for handle in handles]
        group.synchronize(TIMEOUT)
        for r, out in enumerate(outputs):
            np.testing.assert_array_equal(out, ref.combine(r, want, sums, len(sent[r].ids)))


def check_copies(case, delivery, got, per_expert=0):
    expected = ref.expand_rows(delivery, ref.group_rows(delivery, case.alignment), per_expert)
    for part in ("rows", "scales", "weights", "sources"):
        wanted, plane = getattr(expected, part), getattr(got, part)
        if wanted is None:
            assert plane is None, part
            continue
        plane = plane.reshape((-1,) + plane.shape[2:]) if per_expert else plane
        np.testing.assert_array_equal(plane[:len(expected.written)][expected.written],
                                      wanted[expected.written], part)


# Beside the dispatch and after it, also where the routing is used again.
@pytest.mark.parametrize("expand_sms", [0, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("change", [
    {}, {"payload": "cast", "hidden": 512}, {"payload": "e4m3", "scales_by_column": True},
    {"weights": False}, {"payload": "ue8m0", "hidden": 640}])
def test_copies_beside_a_dispatch(change, masked, expand_sms):
    case = Case(**{"alignment": 8, **change})
    options = dataclasses.replace(case.options(), expand_sms=expand_sms, slots=4)
    sent, want = one_round(case, 3)
    per_expert = case.world * case.max_tokens * case.top_k if masked else 0
    with ep.Group(options, world=case.world, backend="twin", timeout=TIMEOUT) as group:
        planes = [group.expanded_for(of.rows, of.weights, scales=of.scales, cast=case.cast,
                                     rows_per_expert=per_expert, rank=r,
                                     scales_by_column=case.scales_by_column)
                  for r, of in enumerate(sent)]

        def send(tokens, like=None):
            return [group.dispatch(of.rows, *((of.ids, of.weights) if like is None else ()),
                                   routing=None if like is None else like[r], scales=of.scales,
                                   cast=case.cast, expanded=planes[r], rank=r)
                    for r, of in enumerate(tokens)]

        handles = send(sent)
        group.synchronize(TIMEOUT)
        for r, handle in enumerate(handles):
            check_copies(case, want[r], planes[r], per_expert)
            lists = ref.group_rows(want[r], case.alignment)
            np.testing.assert_array_equal(group.grouped(handle).offsets, lists.offsets)
        others, _ = one_round(case, 4)
        again = [dataclasses.replace(of, rows=new.rows, scales=new.scales)
                 for of, new in zip(sent, others)]
        send(again, handles)
        group.synchronize(TIMEOUT)
        for r, delivery in enumerate(case.deliveries(again)):
            check_copies(case, delivery, planes[r], per_expert)


def test_a_masked_rank_has_no_copies():
    case = Case(alignment=4, world=3, experts=9)
    options = dataclasses.replace(case.options(), expand_sms=2, masks=True)
    with ep.Group(options, world=3, backend="twin", timeout=TIMEOUT) as group:
        for seed in range(3):
            sent, _ = one_round(case, seed)
            planes = [group.expanded_for(of.rows, of.weights, rank=r) for r, of in enumerate(sent)]
            if seed == 1:
                group.mask(2, rank=0)
                group.mask(2, rank=1)
            here = range(3 if seed == 0 else 2)
            handles = [group.dispatch(sent[r].rows, sent[r].ids, sent[r].weights, expanded=planes[r],
                                      rank=r) for r in here]
            group.synchronize(TIMEOUT)
            seen = [of if r in here else dataclasses.replace(
                of, rows=of.rows[:0], ids=of.ids[:0], weights=of.weights[:0])
                    for r, of in enumerate(sent)]
            for r in here:
                check_copies(case, ref.dispatch(r, case.experts, seen), planes[r])
                handles[r].close()


def test_a_bit_that_is_set_where_kernels_look_masks_a_rank():
    case = Case(world=3)
    sent = [tokens_of(case, r, 1) for r in range(3)]
    with ep.Group(dataclasses.replace(case.options(), masks=True), world=3, backend="twin",
                  timeout=TIMEOUT) as group:
        for rank in (0, 1):
            mine = group.mask_memory(rank)
            mine |= 1 << 2
            assert group.masked(rank=rank) == [2]
        handles = dispatch(case, group, sent[:2])  # rank 2 is not waited for
        group.synchronize(TIMEOUT)
        ends = [handle.received.source_ends.tolist() for handle in handles]
        stride = handles[0].received.source_stride
        assert all(of[2] == 2 * stride for of in ends)
        assert group.mask_memory(2).tolist() == [0]
    with case.group() as group:
        with raises(crossdock.InvalidArgument, "ep mask_memory", "masks = false"):
            group.mask_memory(0)


def test_wrong_copies_beside_a_dispatch():
    case = Case(alignment=4, world=1)
    sent, _ = one_round(case, 1)
    of = sent[0]
    with raises(crossdock.InvalidArgument, 'expand_sms = many must be a whole number or "auto"'):
        ep.sizes(dataclasses.replace(case.options(), expand_sms="many"), 1)
    with raises(crossdock.InvalidArgument, "expand_sms = kAutoSms needs expert_alignment"):
        ep.sizes(dataclasses.replace(case.options(), expand_sms="auto", expert_alignment=0), 1)
    assert ep.sizes(dataclasses.replace(case.options(), expand_sms="auto"), 1).control_bytes > (
        ep.sizes(case.options(), 1).control_bytes)
    assert 8 <= ep.default_expand_sms(4, 8) < ep.default_expand_sms(1, 8) <= 104
    with ep.Group(dataclasses.replace(case.options(), expand_sms=2), world=1, backend="twin",
                  timeout=TIMEOUT) as group:
        with raises(crossdock.InvalidArgument, "have not been listed"):
            group.grouped(group.dispatch(of.rows, of.ids, of.weights))
        without = group.expanded_for(of.rows, of.weights)
        with raises(crossdock.InvalidArgument, "the dispatch had no weights"):
            group.dispatch(of.rows, of.ids, expanded=without)
        for cast in ("e4m3", 1, None):
            with raises(crossdock.InvalidArgument, "ep expanded_for", f"cast = {cast!r} must be True, False or"):
                group.expanded_for(of.rows, of.weights, cast=cast)
        narrow = group.expanded_for(of.rows[:, :64], of.weights)
        with raises(crossdock.InvalidArgument, "ep dispatch: rows", "rows like those received, 256"):
            group.dispatch(of.rows, of.ids, of.weights, expanded=narrow)
        group.synchronize(TIMEOUT)


def test_copies_are_written_again_and_room_is_checked():
    case = Case(alignment=4, world=1)
    with case.group() as group:
        out = None
        for seed in (1, 2):
            sent, want = one_round(case, seed)
            with dispatch(case, group, sent)[0] as handle:
                grouped = group.group_rows(handle)
                out = group.expand_rows(handle, grouped, out=out)
                group.synchronize(TIMEOUT)
            expected = ref.expand_rows(want[0], ref.group_rows(want[0], 4))
            np.testing.assert_array_equal(out.rows[:len(expected.rows)], expected.rows)
        handle = dispatch(case, group, sent)[0]
        grouped = group.group_rows(handle)
        group.expand_rows(handle, grouped, places=4)
        with pytest.raises(crossdock.Error) as caught:
            group.synchronize(TIMEOUT)
        assert "4" in caught.value.message


def test_copies_need_arrays_of_the_library_in_the_twin():
    case = Case(alignment=4, world=1)
    sent, _ = one_round(case, 1)
    with case.group() as group:
        handle = dispatch(case, group, sent)[0]
        grouped = group.group_rows(handle)
        good = group.expand_rows(handle, grouped)
        outside = dataclasses.replace(good, _planes=(np.zeros((96, 128), np.uint16), *good._planes[1:]))
        with raises(crossdock.InvalidArgument, "rows is not memory of rank 0 of the twin"):
            group.expand_rows(handle, grouped, out=outside)
        narrow = dataclasses.replace(good, _planes=(good.rows[:, :64], *good._planes[1:]))
        with raises(crossdock.InvalidArgument, "rows like those received, 256 bytes"):
            group.expand_rows(handle, grouped, out=narrow)


# ---- the same routing again --------------------------------------------------------------------


def test_other_rows_go_the_same_ways():
    case = Case(world=4)
    sent, want = one_round(case, 5)
    with flow_group(case) as group:
        first = dispatch(case, group, sent)
        group.synchronize(TIMEOUT)
        others = [ref.Tokens(bf16_rows(50 + r, of.rows.shape), of.ids, of.weights)
                  for r, of in enumerate(sent)]
        again = [group.dispatch(of.rows, routing=first[r], rank=r) for r, of in enumerate(others)]
        for handle in first:
            handle.close()
        group.synchronize(TIMEOUT)
        for r, handle in enumerate(again):
            check_received(case, handle, ref.dispatch(r, case.experts, others))
            handle.expert_input.rows[:handle.rows()] = 0x3F80
        outs = [group.combine(handle) for handle in again]
        group.synchronize(TIMEOUT)
        ones = [np.full((len(w.tokens), case.hidden), 0x3F80, np.uint16) for w in want]
        for r, out in enumerate(outs):
            np.testing.assert_array_equal(out, ref.combine(r, want, ones, len(sent[r].ids)))


def test_wrong_routings():
    case = Case(world=2)
    sent, _ = one_round(case, 1)
    rows = sent[0].rows
    with flow_group(case) as group:
        handle = group.dispatch(rows, sent[0].ids, sent[0].weights, rank=0)
        with raises(crossdock.InvalidArgument, "leave ids and weights empty"):
            group.dispatch(rows, sent[0].ids, routing=handle, rank=0)
        with raises(crossdock.InvalidArgument, "ids are missing"):
            group.dispatch(rows, rank=0)
        with raises(crossdock.InvalidArgument, "ids are missing"):
            group.dispatch(rows, None, sent[0].weights, routing=handle, rank=0)
        with raises(crossdock.InvalidArgument, "the routing is of 24 tokens, and these are 23"):
            group.dispatch(rows[:23], routing=handle, rank=0)
        with raises(crossdock.InvalidArgument, "the routing is of rank 0"):
            group.dispatch(sent[1].rows, routing=handle, rank=1)
        handle.close()
        with raises(crossdock.Closed, "rank 0 is closed"):
            group.dispatch(rows, routing=handle, rank=0)


# ---- more outputs than slots -------------------------------------------------------------------


def test_held_outputs_are_copied_when_slots_run_out():
    case = Case(world=2)
    rounds = [one_round(case, seed) for seed in range(5)]
    with flow_group(case, fall_back=True) as group:
        held = [dispatch(case, group, sent) for sent, _ in rounds]
        group.synchronize(TIMEOUT)
        assert [handles[0].copied for handles in held] == [False, False, True, True, True]
        assert group.memory.copy_bytes > 0 and group.memory.transit_bytes > 0
        outs, mades = [], []
        for handles, (_, want) in zip(held, rounds):
            for r, handle in enumerate(handles):
                check_received(case, handle, want[r])
            mades.append([bf16_rows(r, (handle.rows(), case.hidden))
                          for r, handle in enumerate(handles)])
            for handle, made in zip(handles, mades[-1]):
                handle.expert_input.rows[:len(made)] = made
        for handles in reversed(held):
            outs.insert(0, [group.combine(handle) for handle in handles])
            group.synchronize(TIMEOUT)
        for out, made, (sent, want) in zip(outs, mades, rounds):
            for r in range(2):
                np.testing.assert_array_equal(out[r], ref.combine(r, want, made, len(sent[r].ids)))


def test_copies_can_be_made_beforehand():
    with flow_group(Case(world=1), fall_back=True) as group:
        group.reserve_copies(2)
        with pytest.raises(TypeError):
            group.reserve_copies(-1)
    with Case(world=1).group() as group:
        with raises(crossdock.InvalidArgument, "fall_back = false"):
            group.reserve_copies(1)


# ---- memory of the caller ----------------------------------------------------------------------


def test_rows_arrive_where_the_caller_says():
    case = Case(world=2)
    sent, want = one_round(case, 6)
    sizes = ep.sizes(case.options(), case.world)
    room = -(-(sizes.rows_bytes + sizes.input_bytes + 256) // 128) * 128
    with flow_group(case, user_bytes=room) as group:
        assert group.memory.user_bytes == room
        handles = []
        for r, of in enumerate(sent):
            memory = group.user_memory(r)
            assert memory.dtype == np.uint8 and memory.shape == (room,)
            needed = group.output_bytes(of.rows, rank=r)
            begin = -(-needed // 128) * 128
            handles.append(group.dispatch(of.rows, of.ids, of.weights, rank=r, output=memory[:needed],
                                          input=memory[begin:begin + sizes.input_bytes]))
            assert handles[r].received.rows.ctypes.data == memory.ctypes.data
            with raises(crossdock.InvalidArgument, "room for 128 bytes"):
                group.dispatch(of.rows, of.ids, rank=r, output=memory[:128])
            with raises(crossdock.InvalidArgument, "output", "user_memory() of rank"):
                group.dispatch(of.rows, of.ids, rank=r, output=np.zeros(needed, np.uint8))
        held = dispatch(case, group, sent), dispatch(case, group, sent)  # the slots are free
        group.synchronize(TIMEOUT)
        made = []
        for r, handle in enumerate(handles):
            check_received(case, handle, want[r])
            made.append(bf16_rows(r, (handle.rows(), case.hidden)))
            handle.expert_input.rows[:len(made[r])] = made[r]
        outs = [group.combine(handle) for handle in handles]
        group.synchronize(TIMEOUT)
        for r, out in enumerate(outs):
            np.testing.assert_array_equal(out, ref.combine(r, want, made, len(sent[r].ids)))
        del held


def test_an_output_without_an_input_cannot_be_combined():
    case = Case(world=1)
    sent, _ = one_round(case, 1)
    with flow_group(case, user_bytes=1 << 20) as group:
        handle = group.dispatch(sent[0].rows, sent[0].ids, output=group.user_memory())
        assert handle.expert_input.rows is None and handle.expert_input.weights is None
        with raises(crossdock.InvalidArgument, "no input"):
            group.combine(handle)
        with raises(crossdock.InvalidArgument, "an input without an output"):
            group.dispatch(sent[0].rows, sent[0].ids, input=group.user_memory())


def test_statistics_are_there_for_kernels_of_the_caller():
    case = Case(world=2)
    sent, want = one_round(case, 1)
    with case.group() as group:
        selections, waits, combines = group.statistics_memory(1)
        handles = dispatch(case, group, sent)
        group.synchronize(TIMEOUT)
        assert not combines.any()
        for handle in handles:
            group.combine(handle)
            handle.close()
        group.synchronize(TIMEOUT)
        np.testing.assert_array_equal(selections, want[1].expert_counts)
        assert combines.shape == (2,) and combines[0] > 0
        assert group.statistics(1).combine_wait_ns == list(combines)
        assert waits.shape == (2,) and group.statistics(1).expert_selections == list(selections)
    with flow_group(case, statistics=False) as group:
        with raises(crossdock.InvalidArgument, "statistics = "):
            group.statistics_memory(0)


# ---- rows that come back compressed --------------------------------------------------------------


def combine_everywhere(group, handles, **how):
    outs = [group.combine(handle, **how) for handle in handles]
    group.synchronize(TIMEOUT)
    return outs


def test_rows_of_few_tokens_may_come_back_compressed():
    case = Case(world=2, hidden=512, max_tokens=12, alignment=1)
    random = np.random.default_rng(3)
    with flow_group(case, small_tokens=12, compressed=True) as group:
        handles = []
        for r in range(2):
            rows = ref.bf16_encode(random.normal(0, 2, (12, case.hidden)).astype(np.float32))
            ids = random.integers(0, case.experts, (12, case.top_k)).astype(np.int32)
            weights = random.random(ids.shape, dtype=np.float32)
            handles.append(group.dispatch(rows, ids, weights, rank=r))
        group.synchronize(TIMEOUT)

        def give_back():
            for handle in handles:
                handle.expert_input.rows[:] = handle.received.rows

        give_back()
        exact = [ref.bf16_decode(out).astype(np.float64) for out in combine_everywhere(group, handles)]
        for payload, error in (("fp8", 1 / 16), ("logfmt10", 0.016)):
            give_back()
            outs = combine_everywhere(group, handles, payload=payload)
            off = [np.abs(ref.bf16_decode(out) - want) for out, want in zip(outs, exact)]
            for by, want in zip(off, exact):
                assert (by <= np.abs(want) * (error + 1 / 128) + 1e-3).all() and by.max() > 0
            halves = []
            for handle in handles:
                group.combine_send(handle, payload=payload)
            for handle in handles:
                halves.append(group.combine_receive(handle, out=group.empty_combined(handle)))
            group.synchronize(TIMEOUT)
            np.testing.assert_array_equal(halves, outs)
            sums = []
            for how in ({}, {"payload": payload}):
                for handle in handles:
                    places = group.group_rows(handle).rows.shape[0]
                    made = bf16_rows(handle.rank, (places, case.hidden))
                    group.reduce_rows(handle, made, weighted=True, **how)
                sums.append(combine_everywhere(group, handles, payload=payload, packed=bool(how)))
            np.testing.assert_array_equal(*sums)
        with raises(crossdock.InvalidArgument, 'payload = fp4 must be "bf16", "fp8" or "logfmt10"'):
            group.combine(handles[0], payload="fp4")
        with raises(crossdock.InvalidArgument, "no reduce_rows() of this handle"):
            group.combine(handles[0], payload="fp8", packed=True)
    with flow_group(case, small_tokens=12) as group:
        handle = group.dispatch(rows, ids, weights, rank=0)
        with raises(crossdock.InvalidArgument, "compressed = false"):
            group.combine_send(handle, payload="fp8")
# The kernel reads a place for each row an expert may have.
def test_sums_of_too_few_places_are_refused():
    case = Case(alignment=4)
    sent, _ = one_round(case, 5)
    with ep.Group(case.options(), world=case.world, backend="twin", timeout=TIMEOUT) as group:
        handles = [group.dispatch(of.rows, of.ids, of.weights, scales=of.scales, rank=r)
                   for r, of in enumerate(sent)]
        lists = [group.group_rows(handle) for handle in handles]
        local = len(lists[0].aligned_counts)
        short = np.zeros((local * 16 - 1, case.hidden), np.uint16)
        with raises(crossdock.InvalidArgument, f"{local} experts with rows_per_expert = 16 need"):
            group.reduce_rows(handles[0], short, rows_per_expert=16)
        group.synchronize(TIMEOUT)
