"""ElasticBuffer, in the twin: what DeepEP's script for it checks on one host, against a reference of our
own."""
# SPDX-License-Identifier: Apache-2.0
import itertools

import numpy as np
import pytest

import crossdock
import deep_ep_reference as want
from crossdock.compat import deep_ep
from elastic_rounds import Case, begins, held_handles, payload, whole_round
from kits import KITS, NumPyKit

each_kit = pytest.mark.parametrize("kit", KITS, ids=lambda kit: kit.name)


def run(world, function, *arguments, **more):
    threads = deep_ep.Threads(world, backend="twin", timeout=120)
    return threads.run(lambda group: function(group, *arguments, **more))


@each_kit
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("change", [
    {}, {"fp8": True, "by_column": True}, {"expand": True}, {"expand": True, "fp8": True},
    {"expand": True, "fp8": True, "by_column": True, "alignment": 1}])
def test_a_whole_round(kit, change, sync):
    run(2, whole_round, kit, Case(sync=sync, **change))


@each_kit
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("change", [
    {"transposed": True}, {"packed": True, "hidden": 512},
    {"packed": True, "transposed": True, "by_column": True, "hidden": 512}])
def test_scales_of_every_form(kit, change, expand):
    """As DeepEP's own scripts pass them: column by column, and exponents in int32."""
    run(2, whole_round, kit, Case(fp8=True, expand=expand, **change))


@each_kit
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint8])
@pytest.mark.parametrize("expand", [False, True])
def test_rows_of_other_types(kit, dtype, expand):
    """Of any width of a multiple of 16 bytes."""
    case = Case(expand=expand)

    def one(group):
        buffer, rank, sent = case.buffer(group), group.rank(), case.sent()
        mine, rows = sent[rank], [of.rows.astype(dtype) for of in sent]
        recv_x = buffer.dispatch(kit.array(rows[rank]), kit.array(mine.ids), kit.array(mine.weights),
                                 num_experts=case.experts, expert_alignment=case.alignment,
                                 do_expand=expand)[0]
        assert str(recv_x.dtype).endswith(np.dtype(dtype).name)
        lists = want.masked(rank, case.experts, sent)
        starts = begins(case, lists)
        parts = [(starts[e], [pair[:2] for pair in chosen]) for e, chosen in enumerate(lists.rows)] if (
            expand) else [(0, want.received(rank, case.experts, sent).pairs)]
        for begin, pairs in parts:
            np.testing.assert_array_equal(kit.codes(recv_x)[begin:begin + len(pairs)],
                                          want.rows_of(rows, pairs))
        buffer.destroy()

    run(2, one)


# Copies by expert beside a dispatch, where the size of the output is known before: all is as without.
@each_kit
@pytest.mark.parametrize("change", [{}, {"fp8": True, "by_column": True}, {"sync": True}])
def test_a_whole_round_with_copies_beside(monkeypatch, kit, change):
    monkeypatch.setenv("CROSSDOCK_DEEP_EP_EXPAND_SMS", "2")
    dispatched = []
    dispatch = crossdock.ep.Group.dispatch

    def noted(group, *arguments, **more):
        dispatched.append((more.get("expanded") is not None, group.options.expand_sms))
        return dispatch(group, *arguments, **more)

    monkeypatch.setattr(crossdock.ep.Group, "dispatch", noted)
    run(2, whole_round, kit, Case(**{"expand": True, "sync": False, **change}))
    # Those with a handle always, the first one where no exact size is asked for.
    assert dispatched.count((True, 2)) == 2 * (2 if change.get("sync") else 3)


@each_kit
@pytest.mark.parametrize("results", [False, True])
@pytest.mark.parametrize("change, beside", [
    ({"sync": False}, "0"), ({"expand": True}, "0"), ({"expand": True}, "2"),
    ({"expand": True, "fp8": True, "by_column": True, "sync": False}, "2")])
def test_handles_are_held_through_later_dispatches(monkeypatch, kit, change, beside, results):
    monkeypatch.setenv("CROSSDOCK_DEEP_EP_EXPAND_SMS", beside)
    monkeypatch.setenv("CROSSDOCK_DEEP_EP_REGIONS", "2")
    run(2, held_handles, kit, Case(**change), 3, results)


@pytest.mark.parametrize("world, expand", [(1, False), (4, True)])
def test_other_worlds(world, expand):
    run(world, whole_round, NumPyKit(), Case(world=world, expand=expand, rounds=2))


@each_kit
@pytest.mark.parametrize("previous, asynchronous, allocate", list(itertools.product([False, True], repeat=3)))
def test_orders_of_calls(kit, previous, asynchronous, allocate):
    """allocate_on_comm_stream goes with any order, and says nothing about it."""
    def order():
        events = {"previous_event": deep_ep.ElasticBuffer.capture(),
                  "previous_event_before_epilogue": deep_ep.ElasticBuffer.capture()}
        return {**(events if previous else {}), "async_with_compute_stream": asynchronous,
                "allocate_on_comm_stream": allocate}

    run(2, whole_round, kit, Case(expand=True), order)


def test_attributes():
    def one(group):
        buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=64, hidden=512, deterministic=True,
                                       allow_hybrid_mode=False, allow_multiple_reduction=False,
                                       prefer_overlap_with_compute=False)
        hint = deep_ep.ElasticBuffer.get_buffer_size_hint
        assert buffer.num_bytes == hint(group, 64, 512) > hint(group, 32, 512)
        assert deep_ep.ElasticBuffer(group, 1 << 22).num_bytes == 1 << 22
        assert buffer.deterministic
        assert not (buffer.allow_hybrid_mode or buffer.allow_multiple_reduction or
                    buffer.prefer_overlap_with_compute)
        assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == buffer.get_physical_domain_size()
        assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == buffer.get_logical_domain_size()
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, group.rank())

    run(2, one)


@each_kit
@pytest.mark.parametrize("expand", [False, True])
def test_rows_narrower_than_those_of_the_buffer(kit, expand):
    """Models of different width, one buffer."""
    class Narrow(Case):
        def buffer(self, group):
            return deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=self.most, hidden=512)

    run(2, whole_round, kit, Narrow(expand=expand))


@each_kit
@pytest.mark.parametrize("expand", [False, True])
def test_other_rows_go_the_ways_of_a_handle(kit, expand):
    """Wider ones than those that made it, and with more scales."""
    case = Case(expand=expand)

    def one(group):
        buffer, rank, sent = case.buffer(group), group.rank(), case.sent()
        mine = sent[rank]
        handle = buffer.dispatch(kit.bf16(mine.rows), kit.array(mine.ids), num_experts=case.experts,
                                 expert_alignment=case.alignment, do_expand=expand)[3]
        wide = [of.rows.astype(np.float32) for of in sent]
        many = [np.arange(len(of.rows) * 64, dtype=np.float32).reshape(-1, 64) for of in sent]
        got = buffer.dispatch(kit.array(wide[rank]), handle=handle)[0]
        rows, scales = buffer.dispatch((kit.bf16(mine.rows), kit.array(many[rank])), handle=handle)[0]
        lists = want.masked(rank, case.experts, sent)
        parts = [(begins(case, lists)[e], [pair[:2] for pair in chosen]) for e, chosen in enumerate(
            lists.rows)] if expand else [(0, want.received(rank, case.experts, sent).pairs)]
        for begin, pairs in parts:
            here = slice(begin, begin + len(pairs))
            for arrived, planes in ((got, wide), (rows, [of.rows for of in sent]), (scales, many)):
                np.testing.assert_array_equal(kit.codes(arrived)[here], want.rows_of(planes, pairs))
        buffer.destroy()

    run(2, one)


@each_kit
def test_ids_that_arrived_are_the_callers(kit):
    """Also those of 32 bits, which a dispatcher counts from the first of all experts in place."""
    case = Case()

    def one(group):
        buffer, mine = case.buffer(group), case.sent()[group.rank()]
        _, ids, _, handle, _ = buffer.dispatch(kit.bf16(mine.rows), kit.array(mine.ids.astype(np.int32)),
                                               num_experts=case.experts)
        before = kit.codes(handle.recv_src_metadata).copy()
        ids += 100
        np.testing.assert_array_equal(kit.codes(handle.recv_src_metadata), before)
        buffer.destroy()

    run(2, one)


@each_kit
def test_ranks_agree_on_the_most_tokens_where_nobody_says_it(kit):
    """Ranks have different numbers of tokens, and the numbers of all tokens are different still."""
    counts = (1, 10)

    def one(group):
        buffer, rank = deep_ep.ElasticBuffer(group, 1 << 20), group.rank()
        ids = np.tile(np.array([[0, 4]]), (counts[rank], 1))  # one expert of each rank
        handle = buffer.dispatch(kit.bf16(np.zeros((counts[rank], 256), np.uint16)), kit.array(ids),
                                 num_experts=8)[3]
        buffer.destroy()
        return handle.num_max_tokens_per_rank, kit.codes(handle.recv_src_metadata)[:, 0].tolist()

    (most, numbers), other = run(2, one)
    assert most >= 10 and (most, numbers) == other
    assert numbers == [source * most + token for source in range(2) for token in range(counts[source])]


def test_no_tokens_at_all():
    run(2, whole_round, NumPyKit(), Case(counts=(0,), expand=True))


def refused(call, *texts):
    with pytest.raises(crossdock.InvalidArgument) as caught:
        call()
    for text in texts:
        assert text in caught.value.message, caught.value.message


def test_mistakes_are_named():
    case, kit = Case(world=1), NumPyKit()

    def one(group):
        refused(lambda: deep_ep.ElasticBuffer(group), "num_bytes is missing")
        buffer, mine = case.buffer(group), case.sent()[0]
        rows, ids = payload(kit, case, mine), mine.ids
        refused(lambda: buffer.dispatch(rows, ids), "num_experts are missing")
        refused(lambda: buffer.dispatch(np.tile(rows, (2, 1)), np.tile(ids, (2, 1)), num_experts=8),
                "48 tokens", "num_max_tokens_per_rank = 24")
        result = buffer.dispatch(rows, ids, num_experts=8)
        refused(lambda: buffer.dispatch(rows, ids, handle=result[3]), "leave topk_idx out")
        refused(lambda: buffer.combine(rows[:1], result[3]), "1 rows")
        refused(lambda: buffer.combine(rows, "handle"), "handle is a str")
        by_bytes = deep_ep.ElasticBuffer(group, 1 << 22)
        refused(lambda: by_bytes.dispatch(rows, ids, num_experts=8, do_cpu_sync=False),
                "num_max_tokens_per_rank is missing")
        assert len(by_bytes.dispatch(rows, ids, num_experts=8)[0]) == len(result[0])
        assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (1, 1)
        assert buffer.get_theoretical_num_sms(8, 3) % 2 == 0 and buffer.get_theoretical_num_qps(8) == 0
        by_bytes.destroy()
        buffer.destroy()

    run(1, one)


def test_sizes():
    threads = deep_ep.Threads(4, backend="twin")
    small, large = (deep_ep.ElasticBuffer.get_buffer_size_hint(threads.rank(0), most, 7168, 8)
                    for most in (128, 4096))
    assert 0 < small < large < 2 << 30
