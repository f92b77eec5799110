"""crossdock.moe on GPUs with weights in e2m1 and scales of one byte, against the NumPy reference."""
# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cases import raises
from crossdock import Incompatible, moe
from crossdock.testing import ep_reference as ep_ref
from crossdock.testing import moe_reference as ref
from moe_cases import Case, check, data_of, given, matrices
from ranks import WORLD, Layer, device_of

TIMEOUT = 60.0
KINDS = [("e4m3", "ue8m0"), ("e2m1", "f32"), ("e2m1", "ue8m0")]
CASE = Case(world=WORLD, experts=16, top_k=4, max_tokens=90, hidden=640, inter=256)
#: As in test_moe_torch.py: a tensor core turns scales of whole groups; one of a byte by a factor of two.
UNEQUAL, FAR, ERROR = 1.0, 12, 3e-2


def to_gpu(array, rank, kind=None):
    if array is None:
        return None
    carrier = array.view(np.int16) if array.dtype == np.uint16 else array
    tensor = torch.from_numpy(np.ascontiguousarray(carrier)).to(f"cuda:{device_of(rank)}")
    return tensor if kind is None else tensor.view(kind)


def tokens_of(data, rank):
    arrays = given(data, rank)
    kind = torch.float8_e4m3fn if data.case.quantised else torch.bfloat16
    return {name: value if name == "rank" else to_gpu(value, rank, kind if name == "rows" else None)
            for name, value in arrays.items()}


def run(layer, data):
    outs = [layer.forward(**tokens_of(data, r)) for r in range(WORLD)]
    layer.synchronize(TIMEOUT)
    return outs


def compare(outs, data):
    wants = data.want()
    got = [out.view(torch.int16).cpu().numpy().view(np.uint16) for out in outs]
    check(got, wants, UNEQUAL, FAR)
    wrong = sum(np.sum((ep_ref.bf16_decode(g) - w.rows) ** 2) for g, w in zip(got, wants))
    every = sum(np.sum(w.rows.astype(np.float64) ** 2) for w in wants)
    assert np.sqrt(wrong / every) <= ERROR


@pytest.mark.parametrize("change", [{}, {"quantised": True}, {"max_tokens": 500}, {"shared_inter": 256},
                                    {"bias": True}])
@pytest.mark.parametrize("format, scales", KINDS)
def test_forwards(format, scales, change):
    case = dataclasses.replace(CASE, format=format, scales=scales, **change)
    data = data_of(case)
    with Layer(case.options(), world=WORLD, timeout=240) as layer:
        for rank in range(WORLD):
            layer.load(data.weights(rank), rank=rank)
            if case.bias:
                gate_up, down = data.bias(rank)
                layer.load_bias(gate_up=gate_up, down=down, rank=rank)
            if data.shared:
                layer.load_shared(data.shared_expert(), rank=rank)
        outs = run(layer, data)
        compare(outs, data)
        assert all(torch.equal(a, b) for a, b in zip(outs, run(layer, data)))


@pytest.mark.parametrize("format, scales", [*KINDS, ("bf16", "f32")])
def test_weights_prepared_on_the_gpu(format, scales):
    case = dataclasses.replace(CASE, format=format, scales=scales)
    data = data_of(case)
    with Layer(case.options(), world=WORLD, timeout=240) as layer:
        for rank in range(WORLD):
            layer.load(data.weights(rank), rank=rank)
        want = run(layer, data)
        for rank in range(WORLD):
            mine, host = data.experts_of(rank), data.weights(rank)
            made = layer.prepare(to_gpu(data.gate_up[mine], rank), to_gpu(data.down[mine], rank), rank=rank)
            assert made.layout == host.layout and made.report == host.report
            assert made.gate_up.device.index == device_of(rank)
            for name in ("gate_up", "down", "gate_up_scales", "down_scales"):
                mine_bytes, theirs = getattr(made, name), getattr(host, name)
                if theirs is None:
                    assert mine_bytes is None
                    continue
                as_bytes = mine_bytes.contiguous().view(torch.uint8).cpu().numpy()
                np.testing.assert_array_equal(as_bytes.reshape(-1), theirs.view(np.uint8).reshape(-1))
            layer.use(made, rank=rank)
        assert all(torch.equal(a, b) for a, b in zip(run(layer, data), want))


def test_e2m1_of_a_checkpoint_on_the_gpu():
    case = dataclasses.replace(CASE, format="e2m1", scales="ue8m0")
    data = data_of(case)
    with Layer(case.options(), world=WORLD, timeout=240) as layer:
        for rank in range(WORLD):
            mine = data.experts_of(rank)
            codes, powers = zip(*(ref.quantise_groups(m[mine]) for m in (data.gate_up, data.down)))
            packed = [to_gpu(ref.pack_pairs(c), rank) for c in codes]
            bytes_of = [to_gpu(ref.ue8m0_encode(p), rank) for p in powers]
            made = layer.prepare(*packed, gate_up_scales=bytes_of[0], down_scales=bytes_of[1], number="e2m1",
                                 rank=rank)
            layer.use(made, rank=rank)
        compare(run(layer, data), data)
        with raises(Incompatible, "rank 0 takes version 1, e2m1"):
            layer.load(moe.Weights.prepare(data.gate_up[data.experts_of(0)], data.down[data.experts_of(0)]),
                       rank=0)


@pytest.mark.parametrize("scales", ["f32", "ue8m0"])
def test_grouped_products(scales):
    """Of gate and up: weights in e2m1, and the same weights as e4m3, give the same bits."""
    plain = (matrices(5, (3, 512, 256)), matrices(6, (3, 256, 256)))
    fp4 = moe.Weights.prepare(*plain, format="e2m1", scales=scales)
    codes, powers = zip(*(ref.quantise_groups(m) for m in plain))
    wide = moe.Weights.prepare(*(ref.pack_pairs(c) for c in codes), number="e2m1", scales=scales,
                               gate_up_scales=ref.ue8m0_encode(powers[0]),
                               down_scales=ref.ue8m0_encode(powers[1]))
    gemm = moe.Gemm(device=0, timeout=240)
    counts = np.array([20, 0, 7], np.int32)
    offsets = np.array([0, 20, 20, 28], np.int32)
    rows, by_row = ref.cast_rows(ep_ref.bf16_encode(np.random.default_rng(1).normal(0, 1, (28, 256))), scales)
    words = ref.pack_scales(by_row).view(np.int32) if scales == "ue8m0" else by_row
    outs = []
    for made, format in ((fp4, "e2m1"), (wide, "e4m3")):
        gemm.prepare(format=format, scales=scales, tile="16")
        weights = to_gpu(made.gate_up, 0, torch.float8_e4m3fn if format == "e4m3" else None)
        outs.append(gemm.run(to_gpu(rows, 0, torch.float8_e4m3fn), weights, format=format, tile="16",
                             scales=to_gpu(words.T, 0), weight_scales=to_gpu(made.gate_up_scales, 0),
                             offsets=to_gpu(offsets, 0), counts=to_gpu(counts, 0),
                             out=torch.zeros(28, 512, device="cuda:0", dtype=torch.bfloat16)))
    gemm.synchronize(TIMEOUT)
    assert torch.equal(*outs) and bool(outs[0].any())
