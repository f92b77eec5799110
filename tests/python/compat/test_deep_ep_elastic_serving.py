"""The calls of serving stacks' dispatchers over ElasticBuffer, in their order and with their arguments, in the
twin: one whose layers each keep a handle for every batch, and one that has one handle at a time."""
# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

import deep_ep_reference as want
from crossdock.compat.deep_ep import ElasticBuffer, Threads
from crossdock.testing import ep_reference as ref
from kits import KITS

WORLD, EXPERTS, TOP_K = 2, 8, 3
LOCAL = EXPERTS // WORLD
MOST, HIDDEN = 24, 512

each_kit = pytest.mark.parametrize("kit", KITS, ids=lambda kit: kit.name)


def tokens_of(counts, seed):
    return [want.tokens(WORLD, r, counts, EXPERTS, TOP_K, HIDDEN, seed) for r in range(WORLD)]


def expert(number, values):
    """A stand-in for a network."""
    return values * np.float32(1 + number % 3)


def payload(kit, of, fp8):
    if not fp8:
        return kit.bf16(of.rows)
    codes, scales = ref.cast(of.rows)
    return kit.e4m3(codes), kit.array(scales)


def scaled(codes, scales):
    values = ref.e4m3_decode(codes).reshape(len(codes), HIDDEN // 128, 128)
    return (values * scales[:, :, None]).reshape(codes.shape)


def values_of(kit, recv_x, fp8):
    """fp32, of what has arrived."""
    return scaled(*(kit.codes(part) for part in recv_x)) if fp8 else ref.bf16_decode(kit.codes(recv_x))


def sent_values(sent, fp8):
    return [scaled(*ref.cast(of.rows)) if fp8 else ref.bf16_decode(of.rows) for of in sent]


def of_rows(rank, values, ids, weights):
    """bf16: of each row the sum of its choices here, by their weights."""
    total = np.zeros_like(values)
    for row, chosen in enumerate(ids):
        for k, local in enumerate(chosen):
            if local >= 0:
                total[row] += expert(rank * LOCAL + local, values[row]) * weights[row, k]
    return ref.bf16_encode(total)


def of_choices(rank, values, begins, ends, weights):
    """bf16: a row for each choice, times its weight; what lies between experts is NaN."""
    out = np.full(values.shape, np.nan, np.float32)
    for local, (begin, end) in enumerate(zip(begins, ends)):
        out[begin:end] = expert(rank * LOCAL + local, values[begin:end]) * weights[begin:end, None]
    return ref.bf16_encode(out)


def expected(rank, sent, fp8, expanded):
    """What combine has to give this rank. Expanded: choices are rounded to bf16 one by one."""
    received = [want.received(r, EXPERTS, sent) for r in range(WORLD)]
    made = []
    for r, got in enumerate(received):
        values = want.rows_of(sent_values(sent, fp8), got.pairs)
        if not expanded:
            made.append(of_rows(r, values, got.ids, got.weights))
            continue
        total = np.zeros_like(values)
        for row, chosen in enumerate(got.ids):
            for k, local in enumerate(chosen):
                if local >= 0:
                    one = expert(r * LOCAL + local, values[row]) * got.weights[row, k]
                    total[row] += ref.bf16_decode(ref.bf16_encode(one))
        made.append(ref.bf16_encode(total))
    return want.combined(rank, received, made, len(sent[rank].ids))


# ---- layers that keep their handles ----------------------------------------------------------------


class Keeping:
    """One layer. ``graphs``: calls can be captured, so rows are as many as there can be."""

    def __init__(self, buffer, kit, graphs, fp8):
        self.buffer, self.kit, self.graphs, self.fp8 = buffer, kit, graphs, fp8
        self.handles = [None, None]

    def prepare(self, of, batch, largest):
        buffer, kit = self.buffer, self.kit
        most = min(1 << max(largest - 1, 0).bit_length(), MOST) if self.graphs else None
        recv_x, ids, weights, handle, event = buffer.dispatch(
            x=payload(kit, of, self.fp8), topk_idx=kit.array(of.ids), topk_weights=kit.array(of.weights),
            num_experts=EXPERTS, num_max_tokens_per_rank=most, do_expand=not self.graphs,
            do_cpu_sync=not self.graphs, async_with_compute_stream=False)
        self.handles[batch] = handle
        assert not self.graphs or len(ids) == WORLD * most

        def receive():
            if event.event is not None:
                event.current_stream_wait()
            counts = handle.num_recv_tokens_per_expert_list
            assert isinstance(counts, list) and bool(counts) == (not self.graphs)
            return recv_x, ids, weights, counts, handle.psum_num_recv_tokens_per_scaleup_rank
        return receive

    def experts(self, rank, recv_x, ids, weights, counts, ends):
        kit = self.kit
        values = values_of(kit, recv_x, self.fp8)
        if ids is None:
            assert sum(counts) == len(values)
            last = np.cumsum(counts)
            return of_choices(rank, values, last - counts, last, kit.codes(weights))
        # Ids of all experts, where they arrived; rows that did not have none, whatever lies there.
        used = kit.array((np.arange(len(ids)) < kit.codes(ends)[-1])[:, None] & (kit.codes(ids) >= 0))
        ids += rank * LOCAL
        ids[~used] = -1
        everywhere = kit.codes(ids)
        return of_rows(rank, np.nan_to_num(values), np.where(everywhere < 0, -1, everywhere - rank * LOCAL),
                       kit.codes(weights))

    def finalize(self, made, batch, shared):
        """``shared``: the experts that all tokens go to work beside it, else another batch does."""
        out, sums, event = self.buffer.combine(
            x=self.kit.bf16(made), handle=self.handles[batch], topk_weights=None,
            async_with_compute_stream=shared, allocate_on_comm_stream=shared)
        assert sums is None

        def receive():
            if event.event is not None:
                event.current_stream_wait()
            return self.kit.codes(out)
        return receive


@each_kit
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_layers_that_keep_their_handles(kit, fp8, graphs, batches):
    def one(group):
        rank = group.rank()
        buffer = ElasticBuffer(
            group=group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOP_K, use_fp8_dispatch=fp8,
            allow_hybrid_mode=True, prefer_overlap_with_compute=True, allow_multiple_reduction=True,
            num_cpu_timeout_secs=1800, num_gpu_timeout_secs=1800, explicitly_destroy=True)
        assert buffer.get_theoretical_num_sms(num_experts=EXPERTS, num_topk=TOP_K) >= 4
        layers = [Keeping(buffer, kit, graphs, fp8) for _ in range(3)]
        for step, counts in enumerate([(MOST, 5), (3, 0)]):
            for number, layer in enumerate(layers):
                sent = [tokens_of(counts, 100 * step + 10 * number + b) for b in range(batches)]
                waiting = [layer.prepare(of[rank], b, max(counts)) for b, of in enumerate(sent)]
                results = [layer.finalize(layer.experts(rank, *receive()), b, batches == 1)
                           for b, receive in enumerate(waiting)]
                for of, receive in zip(sent, results):
                    np.testing.assert_array_equal(receive(), expected(rank, of, fp8, not graphs))
        buffer.destroy()

    Threads(WORLD, backend="twin", timeout=120).run(one)


# ---- one handle at a time --------------------------------------------------------------------------


class OneAtATime:
    """Decode steps are expanded and can be captured; prefills are compact, of exact size."""

    def __init__(self, group, kit, fp8, by_column):
        self.group, self.kit, self.fp8, self.by_column = group, kit, fp8, by_column
        self.alignment = 128 if fp8 else 8
        self.buffer = ElasticBuffer(group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=TOP_K,
                                    use_fp8_dispatch=fp8, allow_hybrid_mode=False, sl_idx=0,
                                    prefer_overlap_with_compute=False)
        assert self.buffer.num_bytes == ElasticBuffer.get_buffer_size_hint(
            group, MOST, HIDDEN, TOP_K, use_fp8_dispatch=fp8, allow_hybrid_mode=False)

    def resources(self):
        sms = self.buffer.get_theoretical_num_sms(EXPERTS, TOP_K)
        return {"num_sms": sms, "num_qps": self.buffer.get_theoretical_num_qps(sms)}

    def dispatch(self, of, expand):
        kit = self.kit
        recv_x, ids, weights, handle, event = self.buffer.dispatch(
            payload(kit, of, self.fp8), topk_idx=kit.array(of.ids), topk_weights=kit.array(of.weights),
            num_experts=EXPERTS, num_max_tokens_per_rank=MOST, expert_alignment=self.alignment,
            use_tma_aligned_col_major_sf=self.by_column, do_cpu_sync=not expand, do_expand=expand,
            **self.resources())
        if event.event is not None:
            event.current_stream_wait()
        return recv_x, ids, weights, handle

    def combine(self, made, handle, weights):
        out, _, event = self.buffer.combine(self.kit.bf16(made), handle=handle, topk_weights=weights,
                                            **self.resources())
        if event.event is not None:
            event.current_stream_wait()
        return self.kit.codes(out)

    def decode(self, sent):
        rank, kit = self.group.rank(), self.kit
        recv_x, ids, weights, handle = self.dispatch(sent[rank], True)
        ends = kit.codes(handle.psum_num_recv_tokens_per_expert).astype(int)
        begins = np.concatenate([[0], -(-ends[:-1] // self.alignment) * self.alignment])
        assert ids is None and weights.ndim == 1
        assert (ends - begins).tolist() == want.masked(rank, EXPERTS, sent).counts()
        made = of_choices(rank, values_of(kit, recv_x, self.fp8), begins, ends, kit.codes(weights))
        np.testing.assert_array_equal(self.combine(made, handle, weights),
                                      expected(rank, sent, self.fp8, True))

    def prefill(self, sent):
        """A rank without tokens sends one that counts for nothing."""
        rank, kit = self.group.rank(), self.kit
        padded = [of if len(of.ids) else want.Tokens(
            np.zeros((1, HIDDEN), np.uint16), np.arange(TOP_K)[None], np.zeros((1, TOP_K), np.float32))
            for of in sent]
        recv_x, ids, weights, handle = self.dispatch(padded[rank], False)
        n = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1].item())
        values = values_of(kit, recv_x, self.fp8)[:n]
        counts = [-(-c // self.alignment) * self.alignment for c in want.received(rank, EXPERTS, padded).counts]
        assert list(handle.num_recv_tokens_per_expert_list) == counts
        made = of_rows(rank, values, kit.codes(ids[:n]), kit.codes(weights[:n]))
        out = self.combine(made, handle, weights[:n])
        np.testing.assert_array_equal(out[:len(sent[rank].ids)], expected(rank, sent, self.fp8, False))


@each_kit
@pytest.mark.parametrize("fp8, by_column", [(False, False), (True, False), (True, True)])
def test_a_dispatcher_of_one_handle_at_a_time(kit, fp8, by_column):
    def one(group):
        dispatcher = OneAtATime(group, kit, fp8, by_column)
        for step in range(2):
            dispatcher.decode(tokens_of((0, 4), 10 * step))
            dispatcher.prefill(tokens_of((MOST, 0), 10 * step + 1))
            dispatcher.decode(tokens_of((8, 8), 10 * step + 2))

    Threads(WORLD, backend="twin", timeout=120).run(one)
