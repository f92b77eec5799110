"""Buffer's low-latency calls, in the twin: what DeepEP's script for them checks, against a reference of our
own."""
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import gc

import numpy as np
import pytest

import crossdock
from crossdock.compat import deep_ep
from crossdock.compat.deep_ep import low_latency
from kits import KITS, NumPyKit
from low_latency_rounds import (Case, check_combine, check_received, dispatch, late_for_weights, made_by,
                                shrink_and_grow, silent, two_at_a_time, whole_round)

each_kit = pytest.mark.parametrize("kit", KITS, ids=lambda kit: kit.name)


def run(world, function, *arguments):
    threads = deep_ep.Threads(world, backend="twin", timeout=120)
    return threads.run(lambda group: function(group, *arguments))


@each_kit
@pytest.mark.parametrize("change", [
    {}, {"fp8": False}, {"fp8": False, "round_scale": True}, {"round_scale": True},
    {"round_scale": True, "ue8m0": True, "hidden": 512},
    {"hidden": 512, "most": 12, "counts": (12, 5)}])
def test_a_whole_round(kit, change):
    run(2, whole_round, kit, Case(**change))


@pytest.mark.parametrize("world", [1, 4])
def test_other_worlds(world):
    run(world, whole_round, NumPyKit(), Case(world=world))


@each_kit
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("most", [4, 24])
def test_packed_powers_of_two_are_cast_as_they_are_sent(kit, most, hooked, monkeypatch):
    """In packets and in rows, with the bits of a cast before the dispatch."""
    monkeypatch.setattr(low_latency, "cast_rounded", None)
    case = Case(round_scale=True, ue8m0=True, hidden=1024, most=most, counts=(most, 3))

    def one(group):
        sent = case.sent()
        for of in sent:  # groups of every kind: zeros, subnormals, the largest and the smallest powers
            of.rows[0, :128] = 0
            of.rows[0, 128:256] = np.arange(128)
            of.rows[1, :128] = np.arange(0x7F00, 0x7F80)
            of.rows[1, 128:256] = 0x3F80
            of.rows[2, :256] = np.arange(0x3800, 0x3900)
            of.rows[2, 256:384] = 0x43E0  # 448
            of.rows[2, 384:512] = 0x43E1
        buffer = deep_ep.Buffer(group, low_latency_mode=True)
        recv_x, count, handle, event, hook = dispatch(buffer, kit, case, sent[group.rank()],
                                                      return_recv_hook=hooked)
        hook()
        event.current_stream_wait()
        check_received(kit, case, group.rank(), sent, recv_x, count, handle)
        check_combine(buffer, kit, case, handle, sent, 1)
        buffer.destroy()

    run(2, one)


@each_kit
def test_one_rank_has_tokens_the_others_none(kit):
    run(2, whole_round, kit, Case(counts=(4, 0)))


def refused(call, *texts):
    with pytest.raises(crossdock.InvalidArgument) as caught:
        call()
    for text in texts:
        assert text in caught.value.message, caught.value.message


@each_kit
def test_two_results_are_kept_and_a_third_ends_the_first(kit):
    case = Case()

    def one(group):
        buffer, first, mine = two_at_a_time(group, kit, case)
        x = kit.bf16(made_by(case, group.rank(), 0))
        refused(lambda: buffer.low_latency_combine(x, kit.array(mine.ids), kit.array(mine.weights), first),
                "at most two results")
        buffer.destroy()

    run(2, one)


def test_mistakes_are_named():
    case, kit = Case(world=1), NumPyKit()

    def one(group):
        buffer, sent = deep_ep.Buffer(group, low_latency_mode=True), case.sent()
        mine = sent[0]
        refused(lambda: dispatch(buffer, kit, Case(world=1, most=4), mine), "8 tokens", "= 4")
        refused(lambda: dispatch(buffer, kit, Case(world=1, round_scale=False, ue8m0=True), mine),
                "use_ue8m0 needs")
        refused(lambda: dispatch(buffer, kit, Case(world=1, round_scale=True, ue8m0=True), mine),
                "hidden = 128 must be a multiple of 512")
        refused(lambda: dispatch(buffer, kit, case, mine, async_finish=True, return_recv_hook=True),
                "exclude each other")
        handle = dispatch(buffer, kit, case, mine)[2]
        x = made_by(case, 0, 0)
        refused(lambda: buffer.low_latency_combine(x[:, :3], mine.ids, mine.weights, handle), "(8, 8, 128)")
        refused(lambda: buffer.low_latency_combine(x, mine.ids, mine.weights, handle, zero_copy=True),
                "get_next_low_latency_combine_buffer")
        refused(lambda: buffer.low_latency_combine(x, mine.ids, mine.weights, handle, use_logfmt=True),
                "use_logfmt needs rows that may travel compressed", "hidden = 128 must be a multiple of 512")
        # And the buffer is good for what comes after.
        check_combine(buffer, kit, case, handle, sent, 1)
        buffer.destroy()

    run(1, one)


def test_experts_have_to_divide():
    def one(group):
        case = Case(experts=9)
        refused(lambda: dispatch(deep_ep.Buffer(group), NumPyKit(), case, case.sent()[group.rank()]),
                "num_experts = 9", "multiple of the 2 ranks")

    run(2, one)


@each_kit
@pytest.mark.parametrize("hooked", [False, True])
def test_ranks_are_left_out_and_come_back(kit, hooked):
    run(3, shrink_and_grow, kit, Case(world=3, experts=9, counts=(4, 5, 3)), hooked)


def test_a_rank_that_does_not_come_is_left_out():
    run(3, silent, NumPyKit(), Case(world=3, experts=9, counts=(4, 5, 3)))


@pytest.mark.parametrize("arrived", [False, True])
def test_a_rank_that_is_late_for_the_weights_alone_is_left_out(arrived):
    run(3, late_for_weights, NumPyKit(), Case(world=3, experts=9, counts=(4, 5, 3)), arrived)


@pytest.mark.parametrize("clean", [False, True])
def test_letting_in_that_is_refused_leaves_all_as_it_was(clean):
    """Of two formats, which have groups of their own, one has a dispatch that is not combined."""
    kit, case = NumPyKit(), Case()
    wide = dataclasses.replace(case, fp8=False)

    def masks(buffer):
        told = np.full(2, 7, np.int32)
        buffer.low_latency_query_mask_buffer(told)
        return told.tolist()

    def one(group):
        rank, sent = group.rank(), case.sent()
        buffer = deep_ep.Buffer(group, enable_shrink=True)

        def let_in():
            if clean:
                buffer.low_latency_clean_mask_buffer()
            else:
                buffer.low_latency_update_mask_buffer(1 - rank, False)

        _, _, handle, _, hook = dispatch(buffer, kit, case, sent[rank])
        check_combine(buffer, kit, case, handle, sent, 0)
        _, _, handle, _, hook = dispatch(buffer, kit, wide, sent[rank], return_recv_hook=True)
        buffer.low_latency_update_mask_buffer(1 - rank, True)
        out = [rank, 1 - rank]
        for _ in range(2):
            refused(let_in, "before a rank is let in again")
            assert masks(buffer) == out and buffer._low_latency._masked == {1 - rank}
            hook()
        *_, combine_hook = buffer.low_latency_combine(
            kit.bf16(made_by(wide, rank, 0)), kit.array(sent[rank].ids), kit.array(sent[rank].weights), handle,
            return_recv_hook=True)
        refused(let_in, "before a rank is let in again")
        combine_hook()
        let_in()
        assert masks(buffer) == [0, 0] and not buffer._low_latency._masked
        for of in (case, wide):
            handle = dispatch(buffer, kit, of, sent[rank])[2]
            check_combine(buffer, kit, of, handle, sent, 0)
        buffer.destroy()

    run(2, one)


@pytest.mark.parametrize("shrink", [False, True])
def test_a_combine_imports_no_memory(monkeypatch, shrink):
    """Where groups say who is left out is looked up once."""
    kit, case, asked = NumPyKit(), Case(), []
    mask_memory = crossdock.ep.Group.mask_memory

    def noted(group, *arguments):
        asked.append(group)
        return mask_memory(group, *arguments)

    monkeypatch.setattr(crossdock.ep.Group, "mask_memory", noted)

    def one(group):
        rank, sent = group.rank(), case.sent()
        buffer = deep_ep.Buffer(group, enable_shrink=shrink)
        for seed in range(3):
            handle = dispatch(buffer, kit, case, sent[rank])[2]
            check_combine(buffer, kit, case, handle, sent, seed)
        buffer.destroy()

    run(2, one)
    assert len(asked) == (4 if shrink else 0)


def test_masks_before_the_first_call_and_mistakes():
    def one(group):
        buffer = deep_ep.Buffer(group, low_latency_mode=True, enable_shrink=True)
        masks = np.full(2, 7, np.int32)
        buffer.low_latency_update_mask_buffer(1 - group.rank(), True)
        buffer.low_latency_query_mask_buffer(masks)
        assert masks.tolist() == [group.rank(), 1 - group.rank()]
        buffer.low_latency_clean_mask_buffer()
        buffer.low_latency_query_mask_buffer(masks)
        assert masks.tolist() == [0, 0]
        for wrong in (group.rank(), 2, -1):
            refused(lambda: buffer.low_latency_update_mask_buffer(wrong, True),
                    f"rank_to_mask = {wrong} must be another of the 2 ranks")
        refused(lambda: buffer.low_latency_query_mask_buffer(masks[:1]), "int32 [2]")
        refused(lambda: deep_ep.Buffer(group).low_latency_clean_mask_buffer(), "enable_shrink = True")

    run(2, one)


@each_kit
def test_a_combine_whose_hook_was_not_called_ends_with_the_next(kit):
    case = Case()

    def one(group):
        buffer, rank, sent = deep_ep.Buffer(group, low_latency_mode=True), group.rank(), case.sent()
        handle = dispatch(buffer, kit, case, sent[rank])[2]
        x = kit.bf16(made_by(case, rank, 0))
        buffer.low_latency_combine(x, kit.array(sent[rank].ids), kit.array(sent[rank].weights), handle,
                                   return_recv_hook=True)
        check_combine(buffer, kit, case, handle, sent, 1, hooked=True)
        for seed in (1, 2):
            check_combine(buffer, kit, case, dispatch(buffer, kit, case, sent[rank])[2], sent, seed)
        buffer.destroy()

    run(2, one)


def test_a_combine_whose_handle_and_hook_are_dropped_does_not_keep_its_slot():
    case, kit = Case(), NumPyKit()

    def one(group):
        buffer, rank, sent = deep_ep.Buffer(group, low_latency_mode=True), group.rank(), case.sent()
        for dropped in (True, False, True, False, False, False):
            handle = dispatch(buffer, kit, case, sent[rank])[2]
            if dropped:
                buffer.low_latency_combine(kit.bf16(made_by(case, rank, 0)), kit.array(sent[rank].ids),
                                           kit.array(sent[rank].weights), handle, return_recv_hook=True)
            else:
                check_combine(buffer, kit, case, handle, sent, 1)
            del handle
            gc.collect()
        buffer.destroy()

    run(2, one)


def test_too_many_tokens_for_these_calls_are_named():
    def one(group):
        case = Case(world=1, most=1025)
        refused(lambda: dispatch(deep_ep.Buffer(group), NumPyKit(), case, case.sent()[0]),
                "num_max_dispatch_tokens_per_rank = 1025", "at most 1024")

    run(1, one)


def test_sizes():
    small, large = (deep_ep.Buffer.get_low_latency_rdma_size_hint(most, 7168, 4, 256) for most in (1, 128))
    assert 0 < small < large < 128 << 20
