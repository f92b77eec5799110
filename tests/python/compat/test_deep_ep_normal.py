"""Buffer's calls for many tokens, in the twin: what DeepEP's script for one host checks, against a
reference of our own."""
# SPDX-License-Identifier: Apache-2.0
import inspect

import numpy as np
import pytest

import crossdock
import deep_ep_reference as want
from crossdock.compat import deep_ep
from kits import KITS, NumPyKit
from normal_rounds import Case, check_layout, held_results, payload, whole_round, worst_case_round

each_kit = pytest.mark.parametrize("kit", KITS, ids=lambda kit: kit.name)


def run(world, function, *arguments, **more):
    threads = deep_ep.Threads(world, backend="twin", timeout=120)
    return threads.run(lambda group: function(group, *arguments, **more))


@each_kit
@pytest.mark.parametrize("change", [
    {}, {"fp8": True}, {"with_topk": False}, {"fp8": True, "with_topk": False, "alignment": 8},
    {"alignment": 128}])
def test_a_whole_round(kit, change):
    run(2, whole_round, kit, Case(**change))


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("fp8", [False, True])
def test_other_worlds(world, fp8):
    run(world, whole_round, NumPyKit(), Case(world=world, fp8=fp8))


@each_kit
@pytest.mark.parametrize("change", [
    {"transposed": True}, {"packed": True, "hidden": 512}, {"packed": True, "transposed": True, "hidden": 512}])
def test_scales_of_every_form(kit, change):
    """As DeepEP's own scripts pass them: column by column, and exponents in int32."""
    run(2, whole_round, kit, Case(fp8=True, **change))


@each_kit
def test_asynchronous_calls(kit):
    """In the twin an event has nothing to wait for; arguments and results are those of a GPU."""
    run(2, whole_round, kit, Case(), lambda: {
        "previous_event": deep_ep.Buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True})


@each_kit
def test_calls_with_a_config_and_those_between_hosts(kit):
    """Any config does, and there is one way to go."""
    for config in (deep_ep.Buffer.get_dispatch_config(2), deep_ep.Config(4, 8, 128, 16, 64)):
        run(2, whole_round, kit, Case(internode=True, fp8=True), lambda: {"config": config})


@each_kit
@pytest.mark.parametrize("dtype", [np.float16, np.int16, np.uint8])
def test_rows_of_other_types(kit, dtype):
    """What is no wider than bf16 travels as it is."""
    case = Case()

    def one(group):
        buffer, sent = deep_ep.Buffer(group, 1 << 20), case.sent()
        mine, got = sent[group.rank()], case.received(sent)[group.rank()]
        rows = [of.rows.astype(dtype) for of in sent]
        recv_x = buffer.dispatch(kit.array(rows[group.rank()]), **check_layout(buffer, kit, case, mine),
                                 topk_idx=kit.array(mine.ids), topk_weights=kit.array(mine.weights))[0]
        assert str(recv_x.dtype).endswith(np.dtype(dtype).name)
        np.testing.assert_array_equal(kit.codes(recv_x), want.rows_of(rows, got.pairs))
        buffer.destroy()

    run(2, one)


@each_kit
@pytest.mark.parametrize("fp8", [False, True])
def test_worst_case_outputs(kit, fp8):
    run(2, worst_case_round, kit, Case(fp8=fp8), 40)


@pytest.mark.parametrize("fp8", [False, True])
def test_results_are_kept_while_they_are_held(fp8):
    run(2, held_results, NumPyKit(), Case(fp8=fp8), 5)


def test_ids_may_be_narrow_and_layouts_of_ones_own():
    """is_token_in_rank of the caller, without topk_idx."""
    case, kit = Case(), NumPyKit()

    def one(group):
        buffer = deep_ep.Buffer(group, 1 << 20)
        sent = case.sent()
        got = case.received(sent)[group.rank()]
        mine = sent[group.rank()]
        layout = check_layout(buffer, kit, case, mine)
        layout["is_token_in_rank"] = layout["is_token_in_rank"].copy()
        recv_x, _, _, counts, _, _ = buffer.dispatch(payload(kit, case, mine), **layout)
        np.testing.assert_array_equal(recv_x, np.stack([sent[s].rows[t] for s, t in got.pairs]))
        assert counts == got.counts
        ids = mine.ids.astype(np.int32)
        got_ids = buffer.dispatch(payload(kit, case, mine), **layout, topk_idx=ids,
                                  topk_weights=mine.weights)[1]
        assert got_ids.dtype == np.int32
        np.testing.assert_array_equal(got_ids, got.ids)
        buffer.destroy()

    run(2, one)


# ---- mistakes ------------------------------------------------------------------------------------


def alone(function):
    run(1, function)


def refused(call, *texts):
    with pytest.raises(crossdock.InvalidArgument) as caught:
        call()
    for text in texts:
        assert text in caught.value.message, caught.value.message


def test_mistakes_are_named():
    case, kit = Case(world=1), NumPyKit()

    def one(group):
        buffer = deep_ep.Buffer(group)
        mine = case.sent()[0]
        refused(lambda: buffer.get_local_buffer_tensor(np.dtype("uint8")), "before its first dispatch")
        layout = check_layout(buffer, kit, case, mine)
        rows, ids, weights = mine.rows, mine.ids, mine.weights
        result = buffer.dispatch(rows, **layout, topk_idx=ids, topk_weights=weights)
        handle = result[4]
        refused(lambda: buffer.dispatch(rows), "get_dispatch_layout() are missing")
        refused(lambda: buffer.dispatch(rows, handle=handle, topk_idx=ids), "leave topk_idx")
        refused(lambda: buffer.dispatch(rows, handle=(1, 2)), "handle is a tuple")
        refused(lambda: buffer.dispatch(rows, **layout, topk_weights=weights), "give both or neither")
        refused(lambda: buffer.dispatch((rows,), **layout), "(rows, scales)")
        refused(lambda: buffer.dispatch(rows, **layout, topk_idx=ids, allocate_on_comm_stream=True),
                "needs previous_event")
        refused(lambda: buffer.dispatch([1, 2, 3], **layout), "tuple of 3")
        refused(lambda: buffer.dispatch("rows", **layout), "x is a str")
        refused(lambda: buffer.dispatch(rows, **layout, topk_idx=ids, num_worst_tokens=1000),
                "num_worst_tokens = 1000", "32 rows")
        refused(lambda: buffer.combine(rows[:3], handle), "3 rows", f"delivered {len(result[0])}")
        many = np.tile(rows, (3, 1))
        more = check_layout(buffer, kit, case, type(mine)(many, np.tile(ids, (3, 1)), None))
        refused(lambda: buffer.dispatch(many, **more, topk_idx=np.tile(ids, (3, 1))), "60 tokens",
                "the 32 that", "CROSSDOCK_DEEP_EP_MAX_TOKENS")
        refused(lambda: buffer.get_dispatch_layout(ids, 8, allocate_on_comm_stream=True),
                "needs previous_event")
        buffer.destroy()

    alone(one)
    refused(lambda: deep_ep.Buffer(None), "group is missing")
    refused(lambda: deep_ep.Buffer.set_num_sms(3), "num_sms = 3 must be even")
    refused(lambda: deep_ep.Config(num_sms=0), "num_sms = 0")
    refused(lambda: deep_ep.Buffer.get_dispatch_config(64), "num_ranks = 64")
    assert deep_ep.Buffer.get_combine_config(3) == deep_ep.Config(20, 6, 256, 6, 256)


def test_ranks_that_call_differently_are_named():
    def one(group):
        case = Case(hidden=256 if group.rank() == 0 else 128)
        buffer, mine = deep_ep.Buffer(group), case.sent()[group.rank()]
        layout = check_layout(buffer, NumPyKit(), case, mine)
        refused(lambda: buffer.dispatch(mine.rows, **layout, topk_idx=mine.ids), "hidden=",
                "all ranks make the same calls")

    run(2, one)


def test_a_rank_that_does_not_call_is_waited_for_no_longer_than_said():
    threads = deep_ep.Threads(2, backend="twin", timeout=0.5)
    case = Case()

    def one(group):
        if group.rank() == 1:
            return
        buffer, mine = deep_ep.Buffer(group), case.sent()[0]
        layout = check_layout(buffer, NumPyKit(), case, mine)
        with pytest.raises(crossdock.DeadlineExceeded, match="not all 2 ranks"):
            buffer.dispatch(mine.rows, **layout, topk_idx=mine.ids)

    threads.run(one)


def test_memory_can_be_looked_at():
    case, kit = Case(world=1), NumPyKit()

    def one(group):
        buffer, mine = deep_ep.Buffer(group, 1 << 22), case.sent()[0]
        layout = check_layout(buffer, kit, case, mine)
        result = buffer.dispatch(mine.rows, **layout, topk_idx=mine.ids)
        memory = buffer.get_local_buffer_tensor(np.dtype("uint16"), (len(result[0]), case.hidden))
        np.testing.assert_array_equal(memory, result[0])
        refused(lambda: buffer.get_local_buffer_tensor(np.dtype("uint8"), (1 << 40,)), "fewer than")
        # The bytes decide for how many tokens it is.
        many = np.tile(mine.rows, (40, 1))
        ids = np.tile(mine.ids, (40, 1))
        more = check_layout(buffer, kit, case, type(mine)(many, ids, None))
        assert len(buffer.dispatch(many, **more, topk_idx=ids)[0]) == 40 * len(result[0])
        buffer.destroy()

    alone(one)


def test_rows_that_num_worst_tokens_has_no_room_for_are_named():
    """All tokens of both ranks go to rank 0."""
    def one(group):
        buffer, kit = deep_ep.Buffer(group), NumPyKit()
        for enough in (True, False):
            ids = np.zeros((16, 1), np.int64)
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 2)
            recv_x, *_, handle, _ = buffer.dispatch(
                np.ones((16, 128), np.uint16), num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert, topk_idx=ids, topk_weights=np.ones((16, 1), np.float32),
                num_worst_tokens=32 if enough else 16)
            if enough or group.rank() != 0:
                if enough:
                    buffer.combine(recv_x, handle)
                continue
            refused(lambda: buffer.combine(recv_x, handle), "32 rows have arrived", "num_worst_tokens = 16")
        buffer.destroy()

    run(2, one)


@each_kit
def test_a_handle_has_places_as_a_tuple_has(kit):
    case = Case(world=3, experts=9, counts=(6, 0, 5))

    def one(group):
        buffer, sent, rank = deep_ep.Buffer(group), case.sent(), group.rank()
        layout = check_layout(buffer, kit, case, sent[rank])
        handle = buffer.dispatch(payload(kit, case, sent[rank]), topk_idx=kit.array(sent[rank].ids),
                                 topk_weights=kit.array(sent[rank].weights), **layout)[4]
        matrix, got = kit.codes(handle[0]), case.received(sent)[rank]
        ends = np.cumsum([sum(s == source for s, *_ in got.pairs) for source in range(3)])
        assert matrix.dtype == np.int32 and matrix.shape == (3, 3)
        np.testing.assert_array_equal(matrix[:, rank], ends)
        assert (np.delete(matrix, rank, 1) == -1).all()
        assert handle[4] is handle[-2] is layout["is_token_in_rank"] and len(handle) == 6
        for index, text in ((1, "channel_prefix_matrix: rows go straight"), (3, "recv_src_idx: it lies with"),
                            (-1, "send_head")):
            with pytest.raises(crossdock.Unsupported) as caught:
                handle[index]
            assert text in caught.value.message
        with pytest.raises(IndexError):
            handle[6]
        buffer.destroy()

    run(3, one)


def test_arguments_come_in_the_order_that_callers_rely_on():
    names = list(inspect.signature(deep_ep.Buffer).parameters)
    assert names == ["group", "num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "num_qps_per_rank",
                     "allow_nvlink_for_low_latency_mode", "allow_mnnvl", "explicitly_destroy",
                     "enable_shrink", "comm", "use_fabric"]


def test_configs_of_four_ranks():
    sms = deep_ep.Buffer.num_sms
    assert deep_ep.Buffer.get_dispatch_config(4) == deep_ep.Config(sms, 6, 256, 6, 128)
    assert deep_ep.Buffer.get_combine_config(4) == deep_ep.Config(sms, 9, 256, 6, 128)
    assert deep_ep.Buffer.get_combine_config(3) == deep_ep.Config(sms)
