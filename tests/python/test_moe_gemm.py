"""Grouped products from Python in the twin: every layout against fp64, SwiGLU, and what is refused."""
# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from cases import TIMEOUT, raises
from crossdock import InvalidArgument, moe
from crossdock.testing import ep_reference as ep_ref
from crossdock.testing import moe_reference as ref
from moe_cases import matrices

COUNTS = (3, 0, 9)
OFFSETS = np.array([0, 4, 4, 13], np.int32)  # the first expert has padding
K, N = 256, 256


class Data:
    """Rows in the order of the places, NaN where no expert has one, and what they are."""

    def __init__(self, format: str, kind: str) -> None:
        random = np.random.default_rng(3)
        self.format, self.kind = format, kind
        self.weights = matrices(5, (3, N, K))
        down = matrices(6, (3, K, 128))
        self.experts = ref.experts_of(self.weights, down, format, kind)
        self.prepared = moe.Weights.prepare(self.weights, down, format=format, scales=kind)
        # As a down matrix they are no gate and up.
        self.in_order = moe.Weights.prepare(matrices(7, (3, 2 * K, N)), self.weights, format=format,
                                            scales=kind)
        values = ref.round_bf16(random.normal(0, 1, (16, K)))
        self.scales, by_row, self.rows = None, None, ep_ref.bf16_encode(values)
        if format != "bf16":
            self.rows, by_row = ref.cast_rows(self.rows, kind)
            words = ref.pack_scales(by_row).view(np.int32) if kind == "ue8m0" else by_row
            self.scales = np.ascontiguousarray(words.T)
        self.seen = ref.see_rows(self.rows, by_row, format)
        self.valid = np.zeros(16, bool)
        for e, count in enumerate(COUNTS):
            self.valid[OFFSETS[e]:OFFSETS[e] + count] = True
        self.rows[~self.valid] = 0x7FC0 if format == "bf16" else 0xFF

    def plain(self) -> dict:
        """Weights that are no gate and up, as given to the product."""
        if self.format == "bf16":
            return {"weights": ep_ref.bf16_encode(self.weights)}
        return {"weights": self.in_order.down, "weight_scales": self.in_order.down_scales,
                "scales": self.scales, "format": self.format}

    def want(self, expert: int, rows: np.ndarray) -> np.ndarray:
        return ep_ref.bf16_encode(ref.round_bf16(self.seen[rows] @ self.experts.gate_up[expert].T))


FORMATS = [("bf16", "f32"), ("e4m3", "f32"), ("e4m3", "ue8m0"), ("e2m1", "f32"), ("e2m1", "ue8m0")]


@pytest.fixture(scope="module", params=FORMATS, ids="-".join)
def data(request):
    return Data(*request.param)


@pytest.fixture(scope="module")
def gemm():
    made = moe.Gemm(backend="twin", timeout=TIMEOUT)
    for format, scales in FORMATS:
        for swiglu in (False, True):
            made.prepare(format=format, scales=scales, swiglu=swiglu, expected_rows=8)
    return made


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Equal but for roundings that fp32 sums turn."""
    assert np.sum(got != want) <= 0.01 * got.size
    np.testing.assert_allclose(ep_ref.bf16_decode(got), ep_ref.bf16_decode(want), rtol=2**-7, atol=1e-2)


def test_contiguous(gemm, data):
    out = gemm.run(data.rows, offsets=OFFSETS, counts=np.array(COUNTS, np.int32), expected_rows=8,
                   **data.plain())
    out[:] = 0x1234
    gemm.synchronize(TIMEOUT)
    for e, count in enumerate(COUNTS):
        rows = np.arange(OFFSETS[e], OFFSETS[e] + count)
        close(out[rows], data.want(e, rows))
    assert np.all(out[~data.valid] == 0x1234), "rows of no expert were written"


def test_bias(gemm, data):
    bias = ref.round_bf16(np.random.default_rng(2).normal(0, 1, (3, N)))
    outs = [gemm.run(data.rows, offsets=OFFSETS, counts=np.array(COUNTS, np.int32), expected_rows=8,
                     bias=given, **data.plain()) for given in (bias, ep_ref.bf16_encode(bias))]
    gemm.synchronize(TIMEOUT)
    for e, count in enumerate(COUNTS):
        rows = np.arange(OFFSETS[e], OFFSETS[e] + count)
        sums = data.seen[rows] @ data.experts.gate_up[e].T + bias[e]
        close(outs[0][rows], ep_ref.bf16_encode(sums))
        np.testing.assert_array_equal(outs[0][rows], outs[1][rows])


def test_gathered_and_masked(gemm, data):
    places = np.array([5, -1, 7, 0, 0, 8], np.int32)
    valid = np.nonzero(data.valid)[0]
    list_of = np.where(places < 0, -1, valid[places]).astype(np.int32)
    out = gemm.run(data.rows, places=list_of, counts=np.array([1, 2, 2], np.int32), expert_rows=2,
                   expected_rows=8, **data.plain())
    gemm.synchronize(TIMEOUT)
    for place, expert in ((0, 0), (2, 1), (3, 1), (4, 2), (5, 2)):
        close(out[place][None], data.want(expert, list_of[place:place + 1]))
    masked = gemm.run(data.rows, counts=np.array([3, 0, 2], np.int32), expert_rows=4, expected_rows=8,
                      **data.plain())
    gemm.synchronize(TIMEOUT)
    for expert, rows in ((0, [0, 1, 2]), (2, [8, 9])):
        close(masked[rows], data.want(expert, np.array(rows)))


def test_swiglu(gemm, data):
    by_place = np.random.default_rng(1).random(16, dtype=np.float32)
    scaled = {} if data.format == "bf16" else {"scales": data.scales, "format": data.format,
                                               "weight_scales": data.prepared.gate_up_scales}
    got = gemm.run(data.rows, data.prepared.gate_up, offsets=OFFSETS, counts=np.array(COUNTS, np.int32),
                   swiglu=moe.Swiglu(clamp=2.0), row_weights=by_place, expected_rows=8, **scaled)
    gemm.synchronize(TIMEOUT)
    for e, count in enumerate(COUNTS):
        rows = np.arange(OFFSETS[e], OFFSETS[e] + count)
        both = ref.round_bf16(data.seen[rows] @ data.experts.gate_up[e].T)
        want = ref.requantise(ref.swiglu(both[:, :128], both[:, 128:], by_place[rows], 2.0), data.format,
                              data.kind)
        if data.format == "bf16":
            value = ep_ref.bf16_decode(got[rows])
        else:
            codes, scales = got
            if data.kind == "ue8m0":
                assert scales.dtype == np.int32 and scales.shape == (1, 16)
                scales = 2.0 ** ((scales & 0xFF) - 127)
            value = ep_ref.e4m3_decode(codes[rows]).astype(np.float64) * np.repeat(scales.T[rows], 128, 1)
        # A peak that a sum in fp32 rounds otherwise moves the scale of its whole row.
        assert np.sum(value != want) <= (0.05 if data.format == "bf16" else 0.5) * value.size
        np.testing.assert_allclose(value, want, rtol=2**-3, atol=1e-2)


def test_counts_that_do_not_fit_are_a_fault(gemm, data):
    wrong = np.array([0, 4, 4, 99], np.int32)
    gemm.run(data.rows, offsets=wrong, expected_rows=8, **data.plain())
    with raises(InvalidArgument, "the rows of expert 2 end at 99"):
        gemm.synchronize(TIMEOUT)
    with raises(InvalidArgument, "expert 2"):
        gemm.check()
    gemm.reset(TIMEOUT)
    gemm.check()


def test_what_is_wrong_is_named(gemm, data):
    good = {"offsets": OFFSETS, "expected_rows": 8, **data.plain()}

    def refuse(*texts, rows=data.rows, **change):
        with raises(InvalidArgument, *texts):
            gemm.run(rows, **{**good, **change})

    refuse("has not been prepared", tile="64")
    refuse("rows is", f"[rows, {K}], as the weights", rows=data.rows[:, :128])
    refuse("rows is float32", rows=data.rows.astype(np.float32))
    refuse("weights has the shape", weights=good["weights"][0])
    if data.format != "e2m1" and data.kind == "f32":
        refuse("k = 192 must be a positive multiple of 128: pad to 256", rows=data.rows[:, :192].copy(),
               weights=good["weights"][:, :, :192].copy(), scales=None, weight_scales=None)
        refuse("n = 192 must be a positive multiple of 128: pad to 256",
               weights=good["weights"][:, :192].copy(), weight_scales=None)
        refuse("n = 128 must be a positive multiple of 256", weights=good["weights"][:, :128].copy(),
               weight_scales=None, swiglu=moe.Swiglu())
    refuse("offsets has 3 numbers: it must have 4", offsets=OFFSETS[:3])
    refuse("offsets is int64", offsets=OFFSETS.astype(np.int64))
    refuse("groups need offsets", offsets=None)
    refuse("row_weights belong to swiglu", row_weights=np.ones(16, np.float32))
    refuse("bias is float32 [3, 128]", "[3, 256]", bias=np.ones((3, 128), np.float32))
    refuse("out is uint16 [16, 128]: it must be [16, 256]", out=np.zeros((16, 128), np.uint16))
    refuse("clamp = nan must be 0 or more", swiglu=moe.Swiglu(clamp=np.nan))
    refuse("tile = 4 must be one of", tile="4")
    if data.format == "e2m1":
        refuse("in e2m1 its rows are blocks of 8704 bytes", weights=good["weights"][:, :, :-1].copy())
        refuse("which is not bf16", format="bf16")
    if data.kind == "ue8m0":
        refuse("with at least 16 columns, a multiple of 4", scales=data.scales[:, :12].copy())
        refuse("scales is float32", "int32, four ue8m0 in each", scales=np.ones((2, 16), np.float32))
        refuse("weight_scales is uint8 [6, 1]", weight_scales=good["weight_scales"][:, :, :1].copy())
        return
    if data.format != "bf16":
        refuse("weight_scales is float32 [6, 1]", weight_scales=good["weight_scales"][:, :, :1].copy())
        refuse("scales is float32 [1, 16]: it must be float32 [2, columns]", scales=data.scales[:1])
        refuse("with at least 16 columns, a multiple of 4", scales=data.scales[:, :12].copy())
        refuse(f"{data.format} weights need scales", weight_scales=None)
    else:
        refuse("bf16 rows have no scales", scales=np.ones((2, 16), np.float32))
