"""What every rank does and checks in the tests of Buffer's calls for many tokens."""
# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np

import deep_ep_reference as want
from crossdock.compat.deep_ep import Buffer, EventOverlap
from crossdock.testing import ep_reference as ref


@dataclasses.dataclass
class Case:
    world: int = 2
    experts: int = 8
    top_k: int = 3
    hidden: int = 256
    counts: tuple = (20, 7, 0, 13)  # tokens of each rank
    fp8: bool = False
    packed: bool = False  # scales: powers of two, four exponents to an int32
    transposed: bool = False  # scales: one column after the other
    with_topk: bool = True
    alignment: int = 1
    internode: bool = False  # by the calls of that name
    seed: int = 1

    def sent(self, seed=0):
        return [want.tokens(self.world, r, self.counts, self.experts, self.top_k, self.hidden,
                            self.seed + seed) for r in range(self.world)]

    def received(self, sent):
        return [want.received(r, self.experts, sent) for r in range(self.world)]


def payload(kit, case, of):
    if not case.fp8:
        return kit.bf16(of.rows)
    codes, scales = want.quantised(of.rows, case.packed)
    return kit.e4m3(codes), (kit.transposed if case.transposed else kit.array)(scales)


def check_rows(kit, case, recv_x, sent, pairs):
    """bf16 rows, or e4m3 rows and scales."""
    if not case.fp8:
        assert kit.is_bf16(recv_x)
        np.testing.assert_array_equal(kit.codes(recv_x), want.rows_of([of.rows for of in sent], pairs))
        return
    casts = [want.quantised(of.rows, case.packed) for of in sent]
    assert isinstance(recv_x, tuple) and kit.is_e4m3(recv_x[0])
    np.testing.assert_array_equal(kit.codes(recv_x[0]), want.rows_of([c[0] for c in casts], pairs))
    np.testing.assert_array_equal(kit.codes(recv_x[1]), want.rows_of([c[1] for c in casts], pairs))


def dispatch_of(buffer, case):
    return buffer.internode_dispatch if case.internode else buffer.dispatch


def made_by(case, rank, got, seed):
    """What the experts of a rank make: any rank can say."""
    random = np.random.default_rng([case.seed, seed, rank])
    n = len(got.pairs)
    rows = ref.bf16_encode(random.normal(0, 1, (n, case.hidden)).astype(np.float32))
    return rows, random.random((n, case.top_k), dtype=np.float32)


def check_layout(buffer, kit, case, mine):
    per_rank, per_rdma, per_expert, in_rank, event = buffer.get_dispatch_layout(
        kit.array(mine.ids), case.experts)
    expected = want.layout(mine.ids, case.experts, case.world)
    assert per_rdma is None and isinstance(event, EventOverlap)
    for array, reference, dtype in zip((per_rank, per_expert, in_rank), expected,
                                       ("int32", "int32", "bool")):
        assert str(array.dtype).endswith(dtype)
        np.testing.assert_array_equal(kit.codes(array), reference)
    return {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert}


def check_choices(kit, ids, weights, got, rows=None):
    n = len(got.pairs)
    rows = n if rows is None else rows
    ids, weights = kit.codes(ids), kit.codes(weights)
    assert ids.shape[0] == weights.shape[0] == rows and ids.dtype == np.int64
    np.testing.assert_array_equal(ids[:n], got.ids)
    np.testing.assert_array_equal(weights[:n], got.weights)
    assert (ids[n:] == -1).all()


def check_combine(buffer, kit, case, handle, received, seed, biases=0, weights=False, rows=None, how=dict):
    """Of what the experts made, with and without weights and biases."""
    rank = buffer.rank
    made = [made_by(case, r, received[r], seed) for r in range(case.world)]
    count = case.counts[rank % len(case.counts)]
    random = np.random.default_rng([seed, rank, 9])
    bias = [ref.bf16_encode(random.normal(0, 1, (count, case.hidden)).astype(np.float32))
            for _ in range(biases)]
    given = None if not biases else kit.bf16(bias[0]) if biases == 1 else tuple(map(kit.bf16, bias))
    own, own_weights = made[rank]
    if rows is not None:  # outputs of a worst case: what lies behind is not looked at
        own = np.concatenate([own, np.full((rows - len(own), case.hidden), 0x7FC0, np.uint16)])
    combine = buffer.internode_combine if case.internode else buffer.combine
    out, sums, event = combine(kit.bf16(own), handle, bias=given,
                               topk_weights=kit.array(own_weights) if weights else None, **how())
    event.current_stream_wait()
    assert kit.is_bf16(out)
    np.testing.assert_array_equal(
        kit.codes(out), want.combined(rank, received, [m[0] for m in made], count, bias))
    if not weights:
        assert sums is None
        return
    np.testing.assert_array_equal(
        kit.codes(sums), want.combined_weights(rank, received, [m[1] for m in made], count))


def whole_round(group, kit, case, how=dict):
    """Layout, dispatch, the same with the handle, and combines."""
    buffer = Buffer(group, 1 << 20)
    sent = case.sent()
    received = case.received(sent)
    mine, got = sent[group.rank()], received[group.rank()]
    layout = check_layout(buffer, kit, case, mine)
    chosen = {"topk_idx": kit.array(mine.ids), "topk_weights": kit.array(mine.weights)}
    recv_x, ids, weights, counts, handle, event = dispatch_of(buffer, case)(
        payload(kit, case, mine), **layout, **(chosen if case.with_topk else {}),
        expert_alignment=case.alignment, **how())
    event.current_stream_wait()
    check_rows(kit, case, recv_x, sent, got.pairs)
    assert counts == [-(-n // case.alignment) * case.alignment for n in got.counts]
    if case.with_topk:
        check_choices(kit, ids, weights, got)
    else:
        assert ids is None and weights is None
    others = case.sent(seed=50)
    again = dispatch_of(buffer, case)(payload(kit, case, others[group.rank()]), handle=handle, **how())
    again[-1].current_stream_wait()
    assert again[1:5] == (None, None, None, None)
    check_rows(kit, case, again[0], others, got.pairs)
    check_rows(kit, case, recv_x, sent, got.pairs)  # still as it was
    for seed, biases in ((1, 0), (2, 1), (3, 2)):
        check_combine(buffer, kit, case, handle, received, seed, biases,
                      weights=case.with_topk and seed != 2, how=how)
    buffer.destroy()
    buffer.destroy()


def worst_case_round(group, kit, case, worst, how=dict):
    """Outputs of a fixed size: the host learns nothing."""
    buffer = Buffer(group, 1 << 20)
    for seed in (0, 1):
        sent = case.sent(seed)
        received = case.received(sent)
        mine, got = sent[group.rank()], received[group.rank()]
        layout = check_layout(buffer, kit, case, mine)
        recv_x, ids, weights, counts, handle, event = buffer.dispatch(
            payload(kit, case, mine), **layout, topk_idx=kit.array(mine.ids),
            topk_weights=kit.array(mine.weights), num_worst_tokens=worst, **how())
        event.current_stream_wait()
        assert counts == [] and len(recv_x[0] if case.fp8 else recv_x) == worst
        shown = tuple(part[:len(got.pairs)] for part in recv_x) if case.fp8 else recv_x[:len(got.pairs)]
        check_rows(kit, case, shown, sent, got.pairs)
        check_choices(kit, ids, weights, got, worst)
        check_combine(buffer, kit, case, handle, received, seed, biases=1, rows=worst, how=how)
    buffer.destroy()


def held_results(group, kit, case, rounds):
    """More results at a time than there is room for, all of them as they were; then combined."""
    buffer = Buffer(group, 1 << 20)
    held = []
    for seed in range(rounds):
        sent = case.sent(seed)
        mine = sent[group.rank()]
        layout = check_layout(buffer, kit, case, mine)
        result = buffer.dispatch(payload(kit, case, mine), **layout, topk_idx=kit.array(mine.ids),
                                 topk_weights=kit.array(mine.weights))
        held.append((sent, result))
    for seed, (sent, (recv_x, ids, weights, _, handle, _)) in enumerate(held):
        received = case.received(sent)
        got = received[group.rank()]
        check_rows(kit, case, recv_x, sent, got.pairs)
        check_choices(kit, ids, weights, got)
        check_combine(buffer, kit, case, handle, received, seed)
    buffer.destroy()
