"""What every rank does and checks in the tests of ElasticBuffer."""
# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np

import deep_ep_reference as want
from crossdock.compat.deep_ep import ElasticBuffer
from crossdock.testing import ep_reference as ref


@dataclasses.dataclass
class Case:
    world: int = 2
    experts: int = 8
    top_k: int = 3
    hidden: int = 256
    most: int = 24
    counts: tuple = (24, 7, 0, 13)
    fp8: bool = False
    packed: bool = False  # scales: powers of two, four exponents to an int32
    transposed: bool = False  # scales: one column after the other
    alignment: int = 8
    expand: bool = False
    sync: bool = True
    by_column: bool = False
    seed: int = 1
    rounds: int = 1

    def sent(self, seed=0):
        return [want.tokens(self.world, r, self.counts, self.experts, self.top_k, self.hidden,
                            self.seed + seed) for r in range(self.world)]

    def buffer(self, group):
        return ElasticBuffer(group, num_max_tokens_per_rank=self.most, hidden=self.hidden,
                             num_topk=self.top_k, use_fp8_dispatch=self.fp8)


def payload(kit, case, of):
    if not case.fp8:
        return kit.bf16(of.rows)
    codes, scales = want.quantised(of.rows, case.packed)
    return kit.e4m3(codes), (kit.transposed if case.transposed else kit.array)(scales)


def planes_of(case, sent):
    if not case.fp8:
        return [of.rows for of in sent], None
    casts = [want.quantised(of.rows, case.packed) for of in sent]
    return [c[0] for c in casts], [c[1] for c in casts]


def align(case, n):
    return -(-n // case.alignment) * case.alignment


def begins(case, lists):
    """Where the rows of each expert begin, and where the last ones end."""
    return np.concatenate([[0], np.cumsum([align(case, n) for n in lists.counts()])]).astype(int)


def worst_rows(case):
    n, local = case.world * case.most, case.experts // case.world
    return n if not case.expand else align(case, n * min(case.top_k, local) + (case.alignment - 1) * local)


def check_scales_layout(case, scales, rows):
    strides = scales.stride() if hasattr(scales, "stride") else tuple(
        s // scales.itemsize for s in scales.strides)
    if case.by_column and rows > 1:
        assert strides[0] == 1 and strides[1] == -(-rows // 4) * 4


def check_compact(kit, case, rank, sent, result, weighted=True):
    recv_x, ids, weights, handle, _ = result
    got = want.received(rank, case.experts, sent)
    n, (planes, scales) = len(got.pairs), planes_of(case, sent)
    data, got_scales = recv_x if case.fp8 else (recv_x, None)
    assert len(data) == len(ids) == (n if case.sync else worst_rows(case))
    np.testing.assert_array_equal(kit.codes(data[:n]), want.rows_of(planes, got.pairs))
    np.testing.assert_array_equal(kit.codes(ids)[:n], got.ids)
    assert (kit.codes(ids)[n:] == -1).all() and str(ids.dtype).endswith("int64")
    assert (weights is not None) == weighted
    if weighted:
        assert len(weights) == len(data)
        np.testing.assert_array_equal(kit.codes(weights)[:n], got.weights)
    if case.fp8:
        np.testing.assert_array_equal(kit.codes(got_scales[:n]), want.rows_of(scales, got.pairs))
        check_scales_layout(case, got_scales, len(data))
    sums = np.cumsum([align(case, c) for c in got.counts])
    np.testing.assert_array_equal(kit.codes(handle.psum_num_recv_tokens_per_expert), sums)


def check_expanded(kit, case, rank, sent, result, weighted=True):
    recv_x, ids, weights, handle, _ = result
    lists = want.masked(rank, case.experts, sent)
    planes, scales = planes_of(case, sent)
    data, got_scales = recv_x if case.fp8 else (recv_x, None)
    starts = begins(case, lists)
    assert ids is None and len(data) == (starts[-1] if case.sync else worst_rows(case))
    assert (weights is not None) == weighted and (not weighted or len(weights) == len(data))
    codes, factors = kit.codes(data), kit.codes(weights) if weighted else None
    for expert, chosen in enumerate(lists.rows):
        here = slice(starts[expert], starts[expert] + len(chosen))
        pairs = [pair[:2] for pair in chosen]
        np.testing.assert_array_equal(codes[here], want.rows_of(planes, pairs))
        if weighted:
            np.testing.assert_array_equal(factors[here], np.array(
                [sent[s].weights[t, k] for s, t, k in chosen], np.float32))
        assert not codes[here.stop:starts[expert + 1]].any()  # padding
        if case.fp8:
            np.testing.assert_array_equal(kit.codes(got_scales[here]), want.rows_of(scales, pairs))
    if case.fp8:
        check_scales_layout(case, got_scales, len(data))
    np.testing.assert_array_equal(kit.codes(handle.psum_num_recv_tokens_per_expert),
                                  starts[:-1] + lists.counts())


def check_handle(kit, case, rank, sent, handle):
    got, lists = want.received(rank, case.experts, sent), want.masked(rank, case.experts, sent)
    n = len(got.pairs)
    assert handle.do_expand == case.expand and handle.num_experts == case.experts
    assert handle.expert_alignment == case.alignment and handle.num_max_tokens_per_rank == case.most
    np.testing.assert_array_equal(kit.codes(handle.topk_idx), sent[rank].ids)
    ends = [sum(s <= source for s, _ in got.pairs) for source in range(case.world)]
    np.testing.assert_array_equal(kit.codes(handle.psum_num_recv_tokens_per_scaleup_rank), ends)
    np.testing.assert_array_equal(kit.codes(handle.num_unaligned_recv_tokens_per_expert), got.counts)
    expected = [align(case, c) for c in got.counts] if case.sync else []
    assert handle.num_recv_tokens_per_expert_list == expected
    assert handle.num_recv_tokens == (n if case.sync else case.world * case.most)
    places = {}
    for expert, chosen in enumerate(lists.rows):
        for i, (source, token, k) in enumerate(chosen):
            places[source, token, k] = begins(case, lists)[expert] + i
    metadata = kit.codes(handle.recv_src_metadata)
    for row, (source, token) in enumerate(got.pairs):
        lanes = [k for k in range(case.top_k) if got.ids[row, k] >= 0]
        rows = [places[source, token, k] if case.expand and k in lanes else -1 for k in range(case.top_k)]
        assert metadata[row].tolist() == [source * case.most + token, source * case.top_k + lanes[0], *rows]
    assert (metadata[n:] == -1).all()
    slots = kit.codes(handle.dst_buffer_slot_idx)
    assert slots.shape == sent[rank].ids.shape and slots.dtype == np.int32 and (slots == -1).all()


def expert_rows(case, rank, sent, seed):
    """What the experts of a rank make, as its combine is given it, and what that is for each compact row:
    when expanded the sum of its choices, with weights of each choice."""
    got, lists = want.received(rank, case.experts, sent), want.masked(rank, case.experts, sent)
    random = np.random.default_rng([case.seed, seed, rank, 7])
    n = len(got.pairs)
    if not case.expand:
        rows = ref.bf16_encode(random.normal(0, 1, (n, case.hidden)).astype(np.float32))
        weights = random.random((n, case.top_k), dtype=np.float32)
        return rows, weights, rows, weights
    starts = begins(case, lists)
    rows = ref.bf16_encode(random.normal(0, 1, (starts[-1], case.hidden)).astype(np.float32))
    weights = random.random(starts[-1], dtype=np.float32)
    index = {pair: row for row, pair in enumerate(got.pairs)}
    sums = np.zeros((n, case.hidden), np.float32)
    by_choice = np.zeros((n, case.top_k), np.float32)
    placed = [(index[s, t], k, starts[e] + i) for e, chosen in enumerate(lists.rows)
              for i, (s, t, k) in enumerate(chosen)]
    for row, k, place in sorted(placed):  # in the order of the choices
        sums[row] += ref.bf16_decode(rows[place])
        by_choice[row, k] = weights[place]
    return rows, weights, ref.bf16_encode(sums), by_choice


def check_combine(buffer, kit, case, handle, sent, seed, biases=0, weights=False, how=dict):
    rank = buffer.rank
    received = [want.received(r, case.experts, sent) for r in range(case.world)]
    made = [expert_rows(case, r, sent, seed) for r in range(case.world)]
    x, factors = made[rank][:2]
    rows = handle.num_expanded_tokens if case.expand else handle.num_recv_tokens
    x = np.concatenate([x, np.full((rows - len(x), case.hidden), 0x7FC0, np.uint16)])
    factors = np.concatenate([factors, np.zeros((rows - len(factors), *factors.shape[1:]), np.float32)])
    count = len(sent[rank].ids)
    random = np.random.default_rng([seed, rank, 9])
    bias = [ref.bf16_encode(random.normal(0, 1, (count, case.hidden)).astype(np.float32))
            for _ in range(biases)]
    out, sums, event = buffer.combine(kit.bf16(x), handle, bias=tuple(map(kit.bf16, bias)) or None,
                                      topk_weights=kit.array(factors) if weights else None, **how())
    event.current_stream_wait()
    np.testing.assert_array_equal(kit.codes(out),
                                  want.combined(rank, received, [m[2] for m in made], count, bias))
    if weights:
        np.testing.assert_array_equal(kit.codes(sums),
                                      want.combined_weights(rank, received, [m[3] for m in made], count))
    else:
        assert sums is None


def whole_round(group, kit, case, how=dict):
    """Dispatch, combines, the same with the handle, statistics."""
    buffer, rank = case.buffer(group), group.rank()
    stats = kit.array(np.zeros(case.experts // case.world, np.int32))
    total = np.zeros(case.experts // case.world, np.int32)
    check = check_expanded if case.expand else check_compact
    for seed in range(case.rounds):
        sent = case.sent(seed)
        mine = sent[rank]
        result = buffer.dispatch(
            payload(kit, case, mine), kit.array(mine.ids), kit.array(mine.weights), stats,
            num_experts=case.experts, expert_alignment=case.alignment, do_expand=case.expand,
            do_zero_padding=True, do_cpu_sync=case.sync, use_tma_aligned_col_major_sf=case.by_column, **how())
        result[-1].current_stream_wait()
        check(kit, case, rank, sent, result)
        handle = result[3]
        check_handle(kit, case, rank, sent, handle)
        total += want.received(rank, case.experts, sent).counts
        np.testing.assert_array_equal(kit.codes(stats), total)
        check_combine(buffer, kit, case, handle, sent, seed, weights=True, how=how)
        check_combine(buffer, kit, case, handle, sent, seed + 5, biases=2, how=how)
        again_of_a_handle(buffer, kit, case, rank, sent, handle, check, how)
        n = len(want.received(rank, case.experts, sent).pairs)
        whole = kit.codes(handle.recv_src_metadata)
        handle.recv_src_metadata = handle.recv_src_metadata[:n]
        np.testing.assert_array_equal(kit.codes(handle.recv_src_metadata), whole[:n])
        buffer.barrier(with_cpu_sync=seed == 0)
    buffer.destroy()


def held_handles(group, kit, case, rounds, results):
    """More than there are regions for, with what was received or without, all used afterwards."""
    buffer, rank, held = case.buffer(group), group.rank(), []
    check = check_expanded if case.expand else check_compact
    for seed in range(rounds):
        sent = case.sent(seed)
        result = buffer.dispatch(
            payload(kit, case, sent[rank]), kit.array(sent[rank].ids), kit.array(sent[rank].weights),
            num_experts=case.experts, expert_alignment=case.alignment, do_expand=case.expand,
            do_zero_padding=True, do_cpu_sync=case.sync, use_tma_aligned_col_major_sf=case.by_column)
        held.append((sent, result[3], result if results else None))
    for seed, (sent, handle, result) in enumerate(held):
        check_handle(kit, case, rank, sent, handle)
        check_combine(buffer, kit, case, handle, sent, seed, weights=True)
        if results:
            check(kit, case, rank, sent, result)
    for sent, handle, _ in held:
        again_of_a_handle(buffer, kit, case, rank, sent, handle, check)
    buffer.destroy()


def again_of_a_handle(buffer, kit, case, rank, sent, handle, check, how=dict):
    """Other rows the same ways, with other weights and without any."""
    fresh = case.sent(77)
    mixed = [dataclasses.replace(of, rows=new.rows, weights=new.weights) for of, new in zip(sent, fresh)]
    again = buffer.dispatch(payload(kit, case, mixed[rank]), handle=handle,
                            topk_weights=kit.array(mixed[rank].weights),
                            use_tma_aligned_col_major_sf=case.by_column, **how())
    again[-1].current_stream_wait()
    check(kit, case, rank, mixed, again)
    check_combine(buffer, kit, case, again[3], mixed, 31, how=how)
    plain = [dataclasses.replace(of, rows=new.rows) for of, new in zip(sent, fresh)]
    again = buffer.dispatch(payload(kit, case, plain[rank]), handle=handle,
                            use_tma_aligned_col_major_sf=case.by_column, **how())
    again[-1].current_stream_wait()
    check(kit, case, rank, plain, again, weighted=False)
    check_combine(buffer, kit, case, handle, plain, 32, how=how)
