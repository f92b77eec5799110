"""The calls of a serving stack's dispatchers, in their order and with their arguments, in the twin: the one
for many tokens, of a prefill, and the one for few, of decode steps, both with two batches at a time."""
# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np
import pytest

import deep_ep_reference as want
from crossdock.compat.deep_ep import Buffer, Threads
from crossdock.testing import ep_reference as ref
from kits import KITS
from low_latency_rounds import close_enough

WORLD, EXPERTS, TOP_K = 2, 8, 3
LOCAL = EXPERTS // WORLD
MOST = 8  #: tokens of a rank in a decode step
#: Hidden sizes that low-latency calls of DeepEP are compiled for; others are padded to the next.
SUPPORTED = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)

each_kit = pytest.mark.parametrize("kit", KITS, ids=lambda kit: kit.name)


def tokens_of(counts, hidden, padded, seed):
    """Of all ranks; columns from `hidden` on are zero."""
    made = [want.tokens(WORLD, r, counts, EXPERTS, TOP_K, hidden, seed) for r in range(WORLD)]
    return [dataclasses.replace(of, rows=np.pad(of.rows, ((0, 0), (0, padded - hidden)))) for of in made]


def expert(number, values):
    """A stand-in for a network."""
    return values * np.float32(1 + number % 3)


def to_bf16(values):
    return ref.bf16_encode(np.asarray(values, np.float32))


# ---- many tokens ---------------------------------------------------------------------------------


class HighThroughput:
    """prepare() before the experts, finalize() after them, of one layer."""

    def __init__(self, buffer, kit, hidden, fp8, allocate=True):
        self.buffer, self.kit, self.hidden, self.fp8 = buffer, kit, hidden, fp8
        self.allocate = allocate  #: results on the communication stream
        self.dispatch_config = Buffer.get_dispatch_config(WORLD)
        self.combine_config = Buffer.get_combine_config(WORLD)
        self.alignment = 128 if fp8 else 1

    def prepare(self, of):
        """Starts a dispatch; what it returns waits for it."""
        buffer, kit = self.buffer, self.kit
        ids, weights = kit.array(of.ids), kit.array(of.weights)
        per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
            topk_idx=ids, num_experts=EXPERTS, previous_event=Buffer.capture(), async_finish=True,
            allocate_on_comm_stream=self.allocate)
        x = kit.bf16(of.rows)
        if self.fp8:
            codes, scales = ref.cast(of.rows)
            x = kit.e4m3(codes), kit.transposed(scales)
        recv_x, recv_ids, recv_weights, counts, handle, event = buffer.dispatch(
            x=x, handle=None, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=ids,
            topk_weights=weights, expert_alignment=self.alignment, config=self.dispatch_config,
            previous_event=event, async_finish=True, allocate_on_comm_stream=self.allocate)

        def receive():
            event.current_stream_wait()
            return recv_x, kit.codes(recv_ids), kit.codes(recv_weights), counts, handle
        return receive

    def experts(self, rank, recv_x, ids, weights):
        """Rows times weights, summed over the choices of this rank, as they go into combine."""
        codes = self.kit.codes
        if self.fp8:
            rows = ref.e4m3_decode(codes(recv_x[0])).reshape(len(ids), -1, 128)
            rows = (rows * codes(recv_x[1])[:, :, None]).reshape(len(ids), -1)
        else:
            rows = ref.bf16_decode(codes(recv_x))
        return self.made(rank, rows, ids, weights)

    @staticmethod
    def made(rank, rows, ids, weights):
        total = np.zeros_like(rows)
        for row, chosen in enumerate(ids):
            for k, local in enumerate(chosen):
                if local >= 0:
                    total[row] += expert(rank * LOCAL + local, rows[row]) * weights[row, k]
        return to_bf16(total)

    def finalize(self, made, handle):
        out, _, event = self.buffer.combine(
            x=self.kit.bf16(made), handle=handle, topk_weights=None, config=self.combine_config,
            previous_event=Buffer.capture(), async_finish=True, allocate_on_comm_stream=self.allocate)

        def receive():
            event.current_stream_wait()
            return self.kit.codes(out)[:, :self.hidden]
        return receive

    def expected(self, rank, sent):
        """What finalize() of a rank has to give."""
        received = [want.received(r, EXPERTS, sent) for r in range(WORLD)]
        planes = [of.rows for of in sent]
        values = [ref.bf16_decode(rows) for rows in planes]
        if self.fp8:
            casts = [ref.cast(rows) for rows in planes]
            values = [(ref.e4m3_decode(c).reshape(len(c), -1, 128) * s[:, :, None]).reshape(c.shape)
                      for c, s in casts]
        made = [self.made(r, want.rows_of(values, got.pairs), got.ids, got.weights)
                for r, got in enumerate(received)]
        return want.combined(rank, received, made, len(sent[rank].ids))[:, :self.hidden]


@each_kit
@pytest.mark.parametrize("fp8, allocate", [(False, True), (True, True), (True, False)])
def test_the_dispatcher_for_many_tokens(kit, fp8, allocate):
    """Layers one after the other, each with two batches: the second is on its way while the experts work on
    the first."""
    hidden, counts = 300, (20, 7)
    padded = -(-hidden * 2 // 512) * 512 // 2  # rows of whole atoms of 512 bytes

    def one(group):
        rank = group.rank()
        buffer = Buffer(group=group, num_nvl_bytes=1 << 20, num_rdma_bytes=0, low_latency_mode=False,
                        num_qps_per_rank=1)
        buffer.set_num_sms(20)
        layer = HighThroughput(buffer, kit, hidden, fp8, allocate)
        for number in range(3):
            batches = [tokens_of(counts, hidden, padded, 10 * number + b) for b in range(2)]
            waiting = [layer.prepare(sent[rank]) for sent in batches]
            results = []
            for sent, receive in zip(batches, waiting):
                recv_x, ids, weights, per_expert, handle = receive()
                got = want.received(rank, EXPERTS, sent)
                np.testing.assert_array_equal(ids, got.ids)
                assert per_expert == [-(-n // layer.alignment) * layer.alignment for n in got.counts]
                results.append(layer.finalize(layer.experts(rank, recv_x, ids, weights), handle))
            for sent, receive in zip(batches, results):
                np.testing.assert_array_equal(receive(), layer.expected(rank, sent))
        buffer.destroy()

    Threads(WORLD, backend="twin", timeout=120).run(one)


# ---- few tokens ----------------------------------------------------------------------------------


class LowLatency:
    """The same for decode steps: each half has a hook, which its caller runs when it wants the result."""

    def __init__(self, buffer, kit, hidden, padded, powers):
        self.buffer, self.kit, self.hidden, self.padded = buffer, kit, hidden, padded
        self.powers = powers  #: scales are powers of two, packed
        self.cast = want.cast_rounded if powers else ref.cast

    def prepare(self, of):
        kit = self.kit
        recv_x, counts, handle, event, hook = self.buffer.low_latency_dispatch(
            kit.bf16(of.rows), kit.array(of.ids), MOST, EXPERTS, use_fp8=True, round_scale=self.powers,
            use_ue8m0=self.powers, async_finish=False, return_recv_hook=True)

        def receive():
            hook()
            return recv_x, kit.codes(counts), handle
        return receive

    def inputs(self, rank, sent):
        """[local experts, rows, hidden] as they have to arrive; NaN behind them."""
        casts = [self.cast(of.rows) for of in sent]
        values = [(ref.e4m3_decode(c).reshape(len(c), -1, 128) * s[:, :, None]).reshape(c.shape)
                  for c, s in casts]
        out = np.full((LOCAL, WORLD * MOST, self.padded), np.nan, np.float32)
        for local, chosen in enumerate(want.masked(rank, EXPERTS, sent).rows):
            out[local, :len(chosen)] = want.rows_of(values, [pair[:2] for pair in chosen])
        return out

    def received(self, recv_x):
        """The same of what has arrived."""
        codes, scales = (self.kit.codes(part) for part in recv_x)
        if self.powers:  # the exponents of four powers in each int32
            exponents = np.ascontiguousarray(scales).view(np.uint8)
            scales = (exponents.astype(np.uint32) << 23).view(np.float32)
        return (ref.e4m3_decode(codes).reshape(*scales.shape, 128) * scales[..., None]).reshape(codes.shape)

    @staticmethod
    def experts(rank, values):
        return np.stack([to_bf16(expert(rank * LOCAL + local, rows)) for local, rows in enumerate(values)])

    def finalize(self, of, made, handle):
        kit = self.kit
        out = kit.bf16(np.full((len(of.ids), self.padded), 0x7FC0, np.uint16))
        _, event, hook = self.buffer.low_latency_combine(
            kit.bf16(made), kit.array(of.ids), kit.array(of.weights), handle, async_finish=False,
            zero_copy=False, return_recv_hook=True, out=out)

        def receive():
            hook()
            return kit.codes(out)[:, :self.hidden]
        return receive

    def check(self, rank, sent, got):
        made = [self.experts(r, self.inputs(r, sent)) for r in range(WORLD)]
        close_enough(got, want.weighted(rank, sent, made, EXPERTS)[:, :self.hidden])

    def step(self, rank, batches):
        """Two batches by turns: while one is on its way, the experts have the other."""
        waiting = [self.prepare(sent[rank]) for sent in batches]
        results = []
        for sent, receive in zip(batches, waiting):
            recv_x, counts, handle = receive()
            assert counts.tolist() == want.masked(rank, EXPERTS, sent).counts()
            values, expected = self.received(recv_x), self.inputs(rank, sent)
            for local, n in enumerate(counts):
                np.testing.assert_array_equal(values[local, :n], expected[local, :n])
                values[local, n:] = np.nan
            results.append(self.finalize(sent[rank], self.experts(rank, values), handle))
        for sent, receive in zip(batches, results):
            self.check(rank, sent, receive())


@each_kit
@pytest.mark.parametrize("powers", [False, True])
def test_the_dispatcher_for_few_tokens(kit, powers):
    """Decode steps, a prefill with the same buffer in between, and decode steps again after a clean."""
    hidden, counts = 2000, (MOST, 5)
    padded = next(size for size in SUPPORTED if size >= hidden)

    def one(group):
        rank = group.rank()
        size = Buffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank=MOST, hidden=padded, num_ranks=WORLD, num_experts=EXPERTS)
        assert size > 0
        buffer = Buffer(group=group, num_nvl_bytes=1 << 20, num_rdma_bytes=size, low_latency_mode=True,
                        num_qps_per_rank=LOCAL, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False)
        few = LowLatency(buffer, kit, hidden, padded, powers)
        many = HighThroughput(buffer, kit, hidden, True)
        for turn in range(2):
            buffer.clean_low_latency_buffer(MOST, padded, EXPERTS)
            for number in range(2):
                few.step(rank, [tokens_of(counts, hidden, padded, 100 * turn + 10 * number + b)
                                for b in range(2)])
            sent = tokens_of((20, 7), hidden, padded, turn)
            recv_x, ids, weights, _, handle = many.prepare(sent[rank])()
            out = many.finalize(many.experts(rank, recv_x, ids, weights), handle)()
            np.testing.assert_array_equal(out, many.expected(rank, sent))
        buffer.destroy()

    Threads(WORLD, backend="twin", timeout=120).run(one)


@each_kit
def test_the_dispatcher_for_few_tokens_recovers(kit):
    """It looks who is left out after each step, and cleans all buffers and masks before a rank comes back."""
    def one(group):
        rank, padded = group.rank(), 2048
        buffer = Buffer(group=group, num_nvl_bytes=1 << 20, num_rdma_bytes=1 << 20, low_latency_mode=True,
                        num_qps_per_rank=LOCAL, explicitly_destroy=True, enable_shrink=True)
        few = LowLatency(buffer, kit, padded, padded, False)
        mask = kit.array(np.full(WORLD, 7, np.int32))
        for number in range(2):
            few.step(rank, [tokens_of((MOST, 5), padded, padded, 10 * number + b) for b in range(2)])
            buffer.low_latency_query_mask_buffer(mask)
            assert kit.codes(mask).tolist() == [0] * WORLD
            everything = buffer.get_local_buffer_tensor(dtype=kit.array(np.zeros(1, np.int8)).dtype,
                                                        use_rdma_buffer=True)
            everything[...] = 0
            assert kit.codes(everything).dtype == np.int8
            buffer.low_latency_clean_mask_buffer()
        buffer.destroy()

    Threads(WORLD, backend="twin", timeout=120).run(one)
