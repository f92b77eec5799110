"""Every call of crossdock.ep in the twin against the NumPy reference."""
# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np
import pytest

import crossdock
from cases import TIMEOUT, Case, bf16_rows, check_received, dispatch, round_of, tokens_of
from crossdock import ep
from crossdock.testing import ep_reference as ref


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("payload", ["bf16", "e4m3", "cast"])
def test_dispatch_and_combine(world, payload):
    case = Case(world=world, payload=payload, hidden=256 if payload == "bf16" else 128)
    with case.group() as group:
        for seed in (1, 2, 3):  # more rounds than slots
            round_of(case, group, seed, biases=seed - 1)


@pytest.mark.parametrize("change", [
    {"wide_ids": True}, {"weights": False}, {"experts": 7}, {"top_k": 1}, {"max_tokens": 1},
    {"payload": "e4m3", "scales_by_column": True, "hidden": 512},
    {"payload": "cast", "scales_by_column": True, "hidden": 640},
    {"payload": "ue8m0", "hidden": 640}, {"payload": "ue8m0", "scales_by_column": True, "hidden": 640}])
def test_forms_of_a_dispatch(change):
    case = Case(**change)
    with case.group() as group:
        for seed in (1, 2):
            round_of(case, group, seed)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("row_bytes, scale_bytes", [(256, 32), (512, 16)], ids=["nvfp4", "mxfp8"])
def test_formats_of_blocks_travel_as_bytes(row_bytes, scale_bytes, few):
    """512 values: pairs of e2m1 and a byte for 16 of them; e4m3 and a byte for 32."""
    case = Case(hidden=512, max_tokens=12)
    random = np.random.default_rng(row_bytes)
    sent = [dataclasses.replace(
        of, rows=random.integers(0, 256, (len(of.ids), row_bytes), np.uint8),
        scales=random.integers(0, 256, (len(of.ids), scale_bytes), np.uint8))
        for of in (tokens_of(case, r, 3) for r in range(2))]
    options = dataclasses.replace(case.options(), small_tokens=case.max_tokens if few else 0,
                                  scale_bytes=scale_bytes)
    with ep.Group(options, world=2, backend="twin", timeout=TIMEOUT) as group:
        handles = dispatch(case, group, sent)
        group.synchronize(TIMEOUT)
        for r, handle in enumerate(handles):
            want, got = ref.dispatch(r, case.experts, sent), handle.received
            assert got.rows.dtype == got.scales.dtype == np.uint8
            assert handle.rows(timeout=TIMEOUT) == len(want.tokens)
            # With few tokens those of a source begin at a place of its own.
            at = np.concatenate([s * case.max_tokens + np.arange(np.sum(want.sources == s))
                                 for s in range(2)]) if few else np.arange(len(want.tokens))
            np.testing.assert_array_equal(got.tokens[at], want.tokens)
            np.testing.assert_array_equal(got.rows[at], want.rows)
            np.testing.assert_array_equal(got.scales[at], want.scales)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_by_expert(world, weighted):
    case = Case(world=world, alignment=8, payload="cast")
    sent = [tokens_of(case, r, 9) for r in range(world)]
    want = [ref.dispatch(r, case.experts, sent, True) for r in range(world)]
    with case.group() as group:
        handles = dispatch(case, group, sent)
        grouped = [group.group_rows(handle) for handle in handles]
        group.synchronize(TIMEOUT)
        lists = [ref.group_rows(delivery, case.alignment) for delivery in want]
        made = []
        for r, got in enumerate(grouped):
            check_received(case, handles[r], want[r])
            np.testing.assert_array_equal(got.offsets, lists[r].offsets)
            places = lists[r].offsets[-1]
            np.testing.assert_array_equal(got.rows[:places], lists[r].rows)
            here = want[r].ids >= 0
            np.testing.assert_array_equal(got.positions[:len(here)][here], lists[r].positions[here])
            made.append(bf16_rows(r, (max(places, 1), case.hidden)))
            group.reduce_rows(handles[r], made[r], weighted=weighted)
        outputs = [group.combine(handle) for handle in handles]
        group.synchronize(TIMEOUT)
        sums = [ref.reduce_rows(want[r], lists[r], made[r], weighted) for r in range(world)]
        for r, handle in enumerate(handles):
            np.testing.assert_array_equal(handle.expert_input.rows[:len(sums[r])], sums[r])
            np.testing.assert_array_equal(outputs[r], ref.combine(r, want, sums, len(sent[r].ids)))


def test_rows_may_be_apart_and_results_go_where_the_caller_says():
    case = Case()
    sent = [tokens_of(case, r, 4) for r in range(2)]
    want = [ref.dispatch(r, case.experts, sent) for r in range(2)]
    with case.group() as group:
        handles = []
        for r, of in enumerate(sent):
            wide = np.zeros((len(of.ids), 3 * case.hidden), dtype=np.uint16)
            wide[:, case.hidden:2 * case.hidden] = of.rows
            handles.append(group.dispatch(wide[:, case.hidden:2 * case.hidden], of.ids, of.weights,
                                          rank=r))
            wide[:] = 0  # the twin has its own copy
        group.synchronize(TIMEOUT)
        outs = [np.zeros((len(of.ids), 2 * case.hidden), dtype=np.uint16) for of in sent]
        made = []
        for r, handle in enumerate(handles):
            check_received(case, handle, want[r])
            n = handle.rows()
            made.append(bf16_rows(r, (n, case.hidden)))
            handle.expert_input.rows[:n] = made[r]
            out = outs[r][:, :case.hidden]
            fixed = np.frombuffer(bytes(out.size * 2), np.uint16).reshape(out.shape)
            with pytest.raises(crossdock.InvalidArgument, match="out is read-only: give an array of its own"):
                group.combine(handle, out=fixed)
            assert group.combine(handle, out=out) is out
        group.synchronize(TIMEOUT)
        for r, of in enumerate(sent):
            np.testing.assert_array_equal(outs[r][:, :case.hidden],
                                          ref.combine(r, want, made, len(of.ids)))
            assert not np.any(outs[r][:, case.hidden:])


def test_types_of_ml_dtypes_come_back_as_such():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    case = Case(payload="cast", world=1)
    of = tokens_of(case, 0, 2)
    want = ref.dispatch(0, case.experts, [of], True)
    with case.group() as group:
        handle = group.dispatch(of.rows.view(ml_dtypes.bfloat16), of.ids, of.weights, cast=True)
        group.synchronize(TIMEOUT)
        n = handle.rows()
        assert handle.received.rows.dtype == ml_dtypes.float8_e4m3fn
        assert handle.expert_input.rows.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(handle.received.rows[:n].view(np.uint8), want.rows)
        handle.expert_input.rows[:n] = np.ones((n, case.hidden), dtype=ml_dtypes.bfloat16)
        out = group.combine(handle)
        group.synchronize(TIMEOUT)
        assert out.dtype == ml_dtypes.bfloat16
        here = np.isin(np.arange(len(of.ids)), want.tokens)
        assert np.all(out[here].astype(np.float32) == 1) and np.all(out[~here].astype(np.float32) == 0)


def test_statistics_and_memory():
    case = Case(world=2, experts=5)
    with case.group() as group:
        sums = np.zeros(3, dtype=np.int64)
        for seed in (1, 2, 3):
            sent = [tokens_of(case, r, seed) for r in range(2)]
            for handle in dispatch(case, group, sent):
                handle.close()
            group.synchronize(TIMEOUT)
            sums += ref.dispatch(0, case.experts, sent).expert_counts
        got = group.statistics(0)
        assert got.expert_selections == list(sums) and len(got.source_wait_ns) == 2
        memory = group.memory
        assert memory.capacity == 2 * case.max_tokens
        assert memory.window_bytes == memory.control_bytes + case.slots * (memory.rows_bytes +
                                                                          memory.input_bytes)


def test_the_reference_rounds_like_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.random.default_rng(1).integers(0, 2**32, 200000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.concatenate([values, np.linspace(-500, 500, 100001, dtype=np.float32)])
    finite = values[np.isfinite(values)]
    np.testing.assert_array_equal(ref.bf16_encode(finite), finite.astype(ml_dtypes.bfloat16).view(
        np.uint16))
    small = finite[np.abs(finite) <= 448]
    np.testing.assert_array_equal(ref.e4m3_encode(small),
                                  small.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    assert list(ref.e4m3_encode([1e9, -np.inf, np.nan])) == [0x7E, 0xFE, 0x7F]
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(ref.e4m3_decode(codes),
                                  codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
