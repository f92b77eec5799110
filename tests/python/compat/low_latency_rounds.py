"""What every rank does and checks in the tests of Buffer's low-latency calls."""
# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np

import deep_ep_reference as want
from crossdock.compat.deep_ep import Buffer
from crossdock.testing import ep_reference as ref


@dataclasses.dataclass
class Case:
    world: int = 2
    experts: int = 8
    top_k: int = 3
    hidden: int = 128
    most: int = 8
    counts: tuple = (8, 5, 0, 3)
    fp8: bool = True
    round_scale: bool = False
    ue8m0: bool = False
    seed: int = 1

    def sent(self, seed=0):
        return [want.tokens(self.world, r, self.counts, self.experts, self.top_k, self.hidden,
                            self.seed + seed) for r in range(self.world)]


def dispatch(buffer, kit, case, mine, **more):
    return buffer.low_latency_dispatch(
        kit.bf16(mine.rows), kit.array(mine.ids), case.most, case.experts, use_fp8=case.fp8,
        round_scale=case.round_scale, use_ue8m0=case.ue8m0, **more)


def expected_planes(case, sent):
    """Rows of each source as delivered, and their scales."""
    if not case.fp8:
        return [of.rows for of in sent], None
    casts = [(want.cast_rounded if case.round_scale else ref.cast)(of.rows) for of in sent]
    scales = [want.packed(c[1]) if case.ue8m0 else c[1] for c in casts]
    return [c[0] for c in casts], scales


def check_received(kit, case, rank, sent, recv_x, count, handle):
    experts, rows = case.experts // case.world, case.world * case.most
    lists = want.masked(rank, case.experts, sent)
    planes, scales = expected_planes(case, sent)
    data, got_scales = recv_x if case.fp8 else (recv_x, None)
    assert (kit.is_e4m3 if case.fp8 else kit.is_bf16)(data)
    assert tuple(data.shape) == (experts, rows, case.hidden)
    np.testing.assert_array_equal(kit.codes(count), lists.counts())
    assert str(count.dtype).endswith("int32")
    src_info, layout_range, most, hidden, num_experts = handle
    assert (most, hidden, num_experts) == (case.most, case.hidden, case.experts)
    src_info, layout_range = kit.codes(src_info), kit.codes(layout_range)
    data = kit.codes(data)
    for expert, chosen in enumerate(lists.rows):
        n, pairs = len(chosen), [pair[:2] for pair in chosen]
        np.testing.assert_array_equal(data[expert, :n], want.rows_of(planes, pairs))
        np.testing.assert_array_equal(src_info[expert, :n], [token for _, token in pairs])
        begin = 0
        for source in range(case.world):
            here = sum(s == source for s, _ in pairs)
            assert (layout_range[expert, source] >> 32, layout_range[expert, source] & 0xFFFFFFFF) == (
                begin, here)
            begin += here
        if case.fp8:
            np.testing.assert_array_equal(kit.codes(got_scales)[expert, :n],
                                          want.rows_of(scales, pairs))
    if case.fp8:
        n = case.hidden // (512 if case.ue8m0 else 128)
        assert tuple(got_scales.shape) == (experts, rows, n)
        strides = got_scales.stride() if hasattr(got_scales, "stride") else tuple(
            s // got_scales.itemsize for s in got_scales.strides)
        assert tuple(strides) == (rows * n, 1, rows)


def made_by(case, rank, seed):
    """What the experts of a rank make, in all rows that there are."""
    random = np.random.default_rng([case.seed, seed, rank, 5])
    shape = (case.experts // case.world, case.world * case.most, case.hidden)
    return ref.bf16_encode(random.normal(0, 1, shape).astype(np.float32))


def close_enough(got, wanted, compressed=False, where=""):
    """As similar as one more rounding of each rank's part allows, to bf16 or to LogFMT-10."""
    got = ref.bf16_decode(got).astype(np.float64)
    if not got.size:
        return
    error = 1 - 2 * (got * wanted).sum() / max((got * got + wanted * wanted).sum(), 1e-30)
    assert abs(error) < (1e-4 if compressed else 1e-5), (error, where)
    assert np.abs(got - wanted).max() <= 0.02 * max(np.abs(wanted).max(), 1.0), where


def check_combine(buffer, kit, case, handle, sent, seed, zero_copy=False, hooked=False, without=(), **more):
    """``without``: ranks that are left out of the combine."""
    rank = buffer.rank
    mine, made = sent[rank], [made_by(case, r, seed) for r in range(case.world)]
    x = kit.bf16(made[rank])
    if zero_copy:
        kit.assign(buffer.get_next_low_latency_combine_buffer(handle), made[rank])
        x = kit.bf16(np.zeros_like(made[rank]))
    out, event, hook = buffer.low_latency_combine(
        x, kit.array(mine.ids), kit.array(mine.weights), handle, zero_copy=zero_copy,
        return_recv_hook=hooked, **more)
    if hooked:
        hook()
        hook()
    event.current_stream_wait()
    assert kit.is_bf16(out)
    made = [rows * (r not in without) for r, rows in enumerate(made)]
    close_enough(kit.codes(out), want.weighted(rank, sent, made, case.experts),
                 more.get("use_logfmt", False), f"rank {rank}, seed {seed}, without {without}")
    return out


def whole_round(group, kit, case):
    """Everything, with and without hooks and events; several combines of one dispatch."""
    buffer = Buffer(group, 0, Buffer.get_low_latency_rdma_size_hint(
        case.most, case.hidden, case.world, case.experts), low_latency_mode=True)
    buffer.clean_low_latency_buffer(case.most, case.hidden, case.experts)
    rank = group.rank()
    stats = kit.array(np.zeros(case.experts // case.world, np.int32))
    waits = kit.array(np.zeros(case.world, np.int64))
    combines = kit.array(np.zeros(case.world, np.int64))
    total = np.zeros(case.experts // case.world, np.int32)
    for seed in range(3):
        sent = case.sent(seed)
        hooked = seed % 2 == 1
        waited = kit.codes(waits).copy()
        recv_x, count, handle, event, hook = dispatch(
            buffer, kit, case, sent[rank], return_recv_hook=hooked, async_finish=seed == 2,
            cumulative_local_expert_recv_stats=stats, dispatch_wait_recv_cost_stats=waits)
        if hooked:
            hook()
            hook()
        event.current_stream_wait()
        assert grown(case, rank, kit.codes(waits), waited)
        check_received(kit, case, rank, sent, recv_x, count, handle)
        total += want.masked(rank, case.experts, sent).counts()
        np.testing.assert_array_equal(kit.codes(stats), total)
        before = kit.codes(combines).copy()
        check_combine(buffer, kit, case, handle, sent, seed, hooked=hooked, async_finish=seed == 2,
                      combine_wait_recv_cost_stats=combines)
        assert grown(case, rank, kit.codes(combines), before)
        if seed == 0:
            check_combine(buffer, kit, case, handle, sent, seed + 10, zero_copy=True)
        if seed == 1:
            out = kit.bf16(np.zeros((len(sent[rank].ids), case.hidden), np.uint16))
            # So few tokens travel in packets, which are never compressed, unless they are cast to packed
            # powers of two.
            compressed = case.hidden % 512 == 0 and (case.most > 8 or case.ue8m0)
            assert check_combine(buffer, kit, case, handle, sent, seed + 20, out=out,
                                 use_logfmt=case.hidden % 512 == 0) is out
            plain = check_combine(buffer, kit, case, handle, sent, seed + 20)
            if len(sent[rank].ids):
                assert (kit.codes(plain) != kit.codes(out)).any() == compressed
    buffer.destroy()


def grown(case, rank, now, before):
    """Time that was waited for each of the other ranks."""
    return ((now > before) | (np.arange(case.world) == rank)).all()


def two_at_a_time(group, kit, case):
    """Dispatch, dispatch, combine, combine; a third one takes the place of the first."""
    buffer = Buffer(group, low_latency_mode=True)
    rank = group.rank()
    sent = [case.sent(seed) for seed in range(3)]
    first = dispatch(buffer, kit, case, sent[0][rank])
    second = dispatch(buffer, kit, case, sent[1][rank])
    for seed, result in enumerate((first, second)):
        check_received(kit, case, rank, sent[seed], *result[:3])
        check_combine(buffer, kit, case, result[2], sent[seed], seed)
    third = dispatch(buffer, kit, case, sent[2][rank])
    check_received(kit, case, rank, sent[2], *third[:3])
    check_combine(buffer, kit, case, third[2], sent[2], 2)
    check_combine(buffer, kit, case, second[2], sent[1], 3)
    return buffer, first[2], sent[0][rank]


def seen_by(case, sent, mine, apart):
    """What there is for a rank in a round in which pairs of ranks are apart, `apart(rank, peer)`: other
    ranks' tokens, and its own without choices of experts that it does not reach."""
    owners = case.experts // case.world
    out = []
    for rank, of in enumerate(sent):
        if apart(mine, rank):
            out.append(dataclasses.replace(of, rows=of.rows[:0], ids=of.ids[:0], weights=of.weights[:0]))
            continue
        ids = of.ids.copy()
        for peer in range(case.world):
            if apart(rank, peer):
                ids[(ids >= peer * owners) & (ids < (peer + 1) * owners)] = -1
        out.append(dataclasses.replace(of, ids=ids))
    return out


def masks_of(buffer, kit, case):
    told = kit.array(np.full(case.world, 7, np.int32))
    buffer.low_latency_query_mask_buffer(told)
    return kit.codes(told).tolist()


def shrink_and_grow(group, kit, case, hooked):
    """The last rank and the others go on without each other, and together again, more than once. Ranks that are
    well are masked when all have finished their combines: after that nobody waits until they have read its rows."""
    buffer = Buffer(group, low_latency_mode=True, enable_shrink=True)
    rank, last = group.rank(), case.world - 1
    for seed in range(5):
        apart = seed in (1, 2, 4)
        def is_apart(a, b):
            return apart and a != b and last in (a, b)
        if seed == 1 or seed == 4:
            group.gather(b"", 60.0)
            for peer in range(case.world):
                if is_apart(rank, peer):
                    buffer.low_latency_update_mask_buffer(peer, True)
        if seed == 3:
            buffer.low_latency_clean_mask_buffer()
        assert masks_of(buffer, kit, case) == [int(is_apart(rank, peer)) for peer in range(case.world)]
        all_sent = case.sent(seed)
        sent = seen_by(case, all_sent, rank, is_apart)
        recv_x, count, handle, event, hook = dispatch(buffer, kit, case, all_sent[rank],
                                                      return_recv_hook=hooked)
        hook()
        event.current_stream_wait()
        check_received(kit, case, rank, sent, recv_x, count, handle)
        check_combine(buffer, kit, case, handle, sent, seed, hooked=hooked)
        assert masks_of(buffer, kit, case) == [int(is_apart(rank, peer)) for peer in range(case.world)]
    buffer.destroy()


def silent(group, kit, case):
    """The last rank sends the others nothing; they mask it by themselves, and go on."""
    buffer = Buffer(group, low_latency_mode=True, enable_shrink=True)
    rank, last = group.rank(), case.world - 1

    def is_apart(a, b):
        return a != b and last in (a, b)
    for peer in range(last if rank == last else 0):
        buffer.low_latency_update_mask_buffer(peer, True)
    for seed in range(2):
        all_sent = case.sent(seed)
        recv_x, count, handle, _, hook = dispatch(buffer, kit, case, all_sent[rank])
        hook()
        sent = seen_by(case, all_sent, rank, is_apart)
        check_received(kit, case, rank, sent, recv_x, count, handle)
        check_combine(buffer, kit, case, handle, sent, seed)
        assert masks_of(buffer, kit, case) == [int(is_apart(rank, peer)) for peer in range(case.world)]
    buffer.destroy()


def late_for_weights(group, kit, case, arrived):
    """The others give the last rank up in a dispatch of weights, when its own have ``arrived`` or before, and in
    nothing else: it is left out from that combine on."""
    buffer = Buffer(group, low_latency_mode=True, enable_shrink=True)
    rank, last = group.rank(), case.world - 1

    def is_apart(a, b):
        return a != b and last in (a, b)
    for seed in range(4):
        all_sent = case.sent(seed)
        apart = seen_by(case, all_sent, rank, is_apart)
        recv_x, count, handle, _, hook = dispatch(buffer, kit, case, all_sent[rank])
        hook()
        check_received(kit, case, rank, apart if seed > 1 else all_sent, recv_x, count, handle)
        if seed == 1 and rank != last:
            give_up(handle.world, last, arrived)
        gone = [peer for peer in range(case.world) if seed > 0 and is_apart(rank, peer)]
        check_combine(buffer, kit, case, handle, apart if seed > 1 else all_sent, seed, without=gone)
        assert masks_of(buffer, kit, case) == [int(peer in gone) for peer in range(case.world)]
    buffer.destroy()


def give_up(world, peer, arrived):
    """As a kernel of the group of the weights does when ``peer`` is late for it, in the next dispatch there."""
    rank, weights = world.rank, world._weights
    if not arrived:
        weights.mask(peer, rank=rank.rank())
        return
    meet = rank.meet

    def met(group, timeout):
        meet(group, timeout)
        if group is weights:
            weights.mask_memory(rank.rank())[0] |= 1 << peer
            rank.meet = meet

    rank.meet = met
