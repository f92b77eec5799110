"""Weights of expert layers from Python: what is prepared, bit by bit, and what is refused."""
# SPDX-License-Identifier: Apache-2.0
import ml_dtypes
import numpy as np
import pytest

from cases import raises
from crossdock import Incompatible, InvalidArgument, moe
from crossdock.testing import ep_reference as ep_ref
from crossdock.testing import moe_reference as ref
from moe_cases import Case, matrices

GATE_UP = matrices(1, (3, 256, 384))
DOWN = matrices(2, (3, 384, 128))


def same(got: moe.Weights, want: ref.Prepared) -> None:
    np.testing.assert_array_equal(got.gate_up, want.gate_up)
    np.testing.assert_array_equal(got.down, want.down)
    for scales, expected in ((got.gate_up_scales, want.gate_up_scales),
                             (got.down_scales, want.down_scales)):
        if expected is None:
            assert scales is None
        else:
            np.testing.assert_array_equal(scales, expected)


@pytest.mark.parametrize("format", ["bf16", "e4m3"])
def test_prepared_as_the_reference_does_it(format):
    got = moe.Weights.prepare(GATE_UP, DOWN, format=format)
    assert got.layout == (1, format, 3, 384, 128, "f32")
    assert got.report == (0, 0)
    same(got, ref.prepare(GATE_UP, DOWN, format))


def test_scales_of_one_byte():
    got = moe.Weights.prepare(GATE_UP, DOWN, scales="ue8m0")
    assert got.layout == (1, "e4m3", 3, 384, 128, "ue8m0")
    assert got.down_scales.dtype == np.uint8
    same(got, ref.prepare(GATE_UP, DOWN, "e4m3", "ue8m0"))
    (q, s), (d, ds) = (ref.quantise_blocks(m, "ue8m0") for m in (GATE_UP, DOWN))
    same(moe.Weights.prepare(q, d, gate_up_scales=s, down_scales=ds, scales="ue8m0"),
         ref.prepare(GATE_UP, DOWN, "e4m3", "ue8m0"))
    with raises(InvalidArgument, "scale 3", "of down at expert 1, row 128, column 0",
                "must be a power of two to be ue8m0"):
        ds[1, 1, 0] = 3
        moe.Weights.prepare(q, d, gate_up_scales=s, down_scales=ds, scales="ue8m0")
    with raises(InvalidArgument, "bf16 has no scales: leave their type f32"):
        moe.Weights.prepare(GATE_UP, DOWN, format="bf16", scales="ue8m0")


def unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values of [experts, rows / 128, columns / 128 * 8704] in the order of the prepared rows, from the
    words of layout/fp4_weights.cuh."""
    experts, row_blocks, _ = blocks.shape
    tiles = blocks.reshape(experts, row_blocks, -1, 8704)
    codes = tiles[..., :8192].copy().view("<u4").reshape(*tiles.shape[:3], 4, 2, 2, 8, 4, 2, 2)
    shifts = tiles[..., 8192:].reshape(*tiles.shape[:3], 4, 2, 8, 2, 4).astype(np.int64) // 8 - 8
    out = np.empty((experts, row_blocks, tiles.shape[2], 128, 128))
    for warp, piece, half, lane, quad, odd, second in np.ndindex(4, 2, 2, 8, 4, 2, 2):
        word = codes[..., warp, piece, half, lane, quad, odd, second]
        row, step = piece * 64 + warp * 16 + second * 8 + lane, half * 2 + odd
        power = 2.0 ** shifts[..., warp, piece, lane, second, step]
        for i in range(8):
            sign = word >> (i % 4 * 8 + (7 if i < 4 else 3)) & 1
            value = ref.e2m1_decode((word >> (4 * i) & 7 | sign << 3).astype(np.uint8))
            out[..., row, step * 32 + quad * 4 + i % 4 + i // 4 * 16] = value * power
    out *= scales[..., None, None]
    return out.swapaxes(2, 3).reshape(experts, row_blocks * 128, -1)


@pytest.mark.parametrize("scales", ["f32", "ue8m0"])
def test_e2m1_as_the_reference_makes_it(scales):
    spread = DOWN * np.repeat(2.0 ** -np.arange(0, 20, 5, np.float32), 32)  # down to 2^-15
    got = moe.Weights.prepare(GATE_UP, spread, format="e2m1", scales=scales)
    assert got.layout == (1, "e2m1", 3, 384, 128, scales)
    assert got.gate_up.shape == (3, 2, 3 * 8704) and got.down.shape == (3, 3, 8704)
    powers = [s if scales == "f32" else 2.0 ** (s.astype(np.int64) - 127)
              for s in (got.gate_up_scales, got.down_scales)]
    want = [ref.see_groups(*ref.quantise_groups(m)) for m in (GATE_UP, spread.astype(np.float32))]
    gate_up = unpacked(got.gate_up, np.repeat(powers[0][:, ::2], 2, axis=1))
    # Gates and ups of 128 rows have each their scale: every second 8 rows are ups.
    ups = unpacked(got.gate_up, np.repeat(powers[0][:, 1::2], 2, axis=1))
    of_up = np.arange(256) // 8 % 2 == 1
    gate_up[:, of_up] = ups[:, of_up]
    np.testing.assert_array_equal(gate_up, ref.interleave(want[0]))
    np.testing.assert_array_equal(unpacked(got.down, powers[1]), want[1])
    assert got.report.groups == 3 * 3 * 384 * 128 // 32
    assert 0 < got.report.inexact_groups <= 3 * 384


def test_e2m1_of_a_checkpoint_keeps_its_bits():
    codes, powers = zip(*(ref.quantise_groups(m) for m in (GATE_UP, DOWN)))
    packed = [ref.pack_pairs(c) for c in codes]
    bytes_of = [ref.ue8m0_encode(p) for p in powers]
    given = {"gate_up_scales": bytes_of[0], "down_scales": bytes_of[1], "number": "e2m1"}
    want = moe.Weights.prepare(GATE_UP, DOWN, format="e2m1")
    got = moe.Weights.prepare(*packed, format="e2m1", **given)
    for name in ("gate_up", "down", "gate_up_scales", "down_scales"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    assert got.report == want.report
    typed = moe.Weights.prepare(*packed, format="e2m1", number="e2m1",
                                gate_up_scales=bytes_of[0].view(ml_dtypes.float8_e8m0fnu),
                                down_scales=bytes_of[1].view(ml_dtypes.float8_e8m0fnu))
    np.testing.assert_array_equal(typed.gate_up, want.gate_up)
    back = moe.Weights.prepared(want.gate_up, want.down, gate_up_scales=want.gate_up_scales,
                                down_scales=want.down_scales, format="e2m1")
    assert back.layout == want.layout
    with raises(InvalidArgument, "gate_up_scales of all experts is uint8", "[768, 12]"):
        moe.Weights.prepare(*packed, **{**given, "gate_up_scales": bytes_of[0][:, :, :6].copy()})
    with raises(InvalidArgument, "down_scales is float32", "ue8m0 as uint8"):
        moe.Weights.prepare(*packed, **{**given, "down_scales": powers[1]})
    with raises(InvalidArgument, "plain weights of e2m1 need scales, one ue8m0 byte for 32 values"):
        moe.Weights.prepare(*packed, number="e2m1")
    with raises(InvalidArgument, "gate_up is float32", "two values in a byte"):
        moe.Weights.prepare(GATE_UP, DOWN, number="e2m1")
    with raises(InvalidArgument, "number = fp4 must be one of"):
        moe.Weights.prepare(*packed, **{**given, "number": "fp4"})
    bytes_of[0][2, 130, 3] = 255
    with raises(InvalidArgument, "scale nan of gate_up at expert 2, row 130, column 96"):
        moe.Weights.prepare(*packed, **given)
    with raises(InvalidArgument, "in e2m1 its rows are blocks of 8704 bytes"):
        moe.Weights.prepared(want.gate_up[:, :, :-4].copy(), want.down, format="e2m1")
    with raises(InvalidArgument, "gate_up is float32", "which is not e2m1"):
        moe.Weights.prepared(GATE_UP, DOWN, format="e2m1")


def test_types_of_a_checkpoint():
    want = ref.prepare(GATE_UP, DOWN, "e4m3")
    for kind in (ml_dtypes.bfloat16, "codes"):
        plain = [ep_ref.bf16_encode(m) if kind == "codes" else m.astype(kind) for m in (GATE_UP, DOWN)]
        same(moe.Weights.prepare(*plain), want)
    (gate_up, scales), (down, down_scales) = (ref.quantise_blocks(m) for m in (GATE_UP, DOWN))
    same(moe.Weights.prepare(gate_up, down, gate_up_scales=scales, down_scales=down_scales), want)
    as_e4m3 = [m.view(ml_dtypes.float8_e4m3fn) for m in (gate_up, down)]
    same(moe.Weights.prepare(*as_e4m3, gate_up_scales=scales, down_scales=down_scales), want)


def test_up_first_and_matrices_of_each_expert():
    want = ref.prepare(GATE_UP, DOWN, "e4m3")
    gates, ups = GATE_UP[:, :128], GATE_UP[:, 128:]
    other = np.concatenate([ups, gates], axis=1)
    same(moe.Weights.prepare(other, DOWN, up_first=True), want)
    same(moe.Weights.from_experts(list(gates), list(ups), list(DOWN)), want)
    quantised = [ref.quantise_blocks(m) for m in (gates, ups, DOWN)]
    same(moe.Weights.from_experts(*(list(q[0]) for q in quantised),
                                  gate_scales=list(quantised[0][1]), up_scales=list(quantised[1][1]),
                                  down_scales=list(quantised[2][1])), want)


def test_stored_and_read_back():
    made = moe.Weights.prepare(GATE_UP, DOWN)
    copies = [np.array(a) for a in (made.gate_up, made.down, made.gate_up_scales, made.down_scales)]
    del made
    back = moe.Weights.prepared(copies[0], copies[1], gate_up_scales=copies[2], down_scales=copies[3])
    same(back, ref.prepare(GATE_UP, DOWN, "e4m3"))
    assert back.layout == moe.WeightLayout(1, "e4m3", 3, 384, 128)
    assert back.report is None


def test_what_is_wrong_is_named():
    with raises(InvalidArgument, "gate_up has the shape (256, 384)", "[experts, rows, columns]"):
        moe.Weights.prepare(GATE_UP[0], DOWN)
    with raises(InvalidArgument, "gate_up of all experts is float32 [768, 384]", "[1536, 384]"):
        moe.Weights.prepare(GATE_UP, matrices(2, (3, 384, 256)))
    with raises(InvalidArgument, "hidden = 320 must be a positive multiple of 128", "pad with zeros to 384"):
        moe.Weights.prepare(matrices(1, (3, 256, 320)), matrices(1, (3, 320, 128)))
    with raises(InvalidArgument, "inter = 64 must be a positive multiple of 128"):
        moe.Weights.prepare(matrices(1, (3, 128, 384)), matrices(1, (3, 384, 64)))
    with raises(InvalidArgument, "down_scales of all experts is float32 [9, 2]", "[9, 1]"):
        q, s = ref.quantise_blocks(GATE_UP)
        d, _ = ref.quantise_blocks(DOWN)
        moe.Weights.prepare(q, d, gate_up_scales=s, down_scales=np.ones((3, 3, 2), np.float32))
    with raises(InvalidArgument, "plain weights of e4m3 need scales"):
        moe.Weights.prepare(q, d)
    with raises(InvalidArgument, "gate_up is float32", "down is uint16", "one type"):
        moe.Weights.prepare(GATE_UP, ep_ref.bf16_encode(DOWN))
    with raises(InvalidArgument, "int64", "must be float32, bfloat16, float8_e4m3fn"):
        moe.Weights.prepare(GATE_UP.astype(np.int64), DOWN.astype(np.int64))
    with raises(InvalidArgument, 'format = fp4 must be one of "bf16", "e4m3"'):
        moe.Weights.prepare(GATE_UP, DOWN, format="fp4")
    with raises(InvalidArgument, "2 gates, 3 ups and 3 downs"):
        moe.Weights.from_experts(list(GATE_UP[:2, :128]), list(GATE_UP[:, 128:]), list(DOWN))
    with raises(InvalidArgument, "matrices of different shapes"):
        moe.Weights.from_experts([GATE_UP[0], GATE_UP[1, :1]], [GATE_UP[0]] * 2, list(DOWN[:2]))
    with raises(InvalidArgument, "a layout of version 9", "prepare the weights again"):
        moe.Weights.prepared(ep_ref.bf16_encode(GATE_UP), ep_ref.bf16_encode(DOWN), version=9)
    with raises(InvalidArgument, "gate_up is not contiguous"):
        moe.Weights.prepared(ep_ref.bf16_encode(GATE_UP)[:, ::2], ep_ref.bf16_encode(DOWN))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_and_scales_that_are_not_finite_are_named(value):
    wrong = GATE_UP.copy()
    wrong[2, 130, 77] = value
    with raises(InvalidArgument, "of gate_up at expert 2, row 130, column 77", "must be finite"):
        moe.Weights.prepare(wrong, DOWN)
    (q, s), (d, ds) = (ref.quantise_blocks(m) for m in (GATE_UP, DOWN))
    ds[1, 2, 0] = value
    with raises(InvalidArgument, "scale", "of down at expert 1, row 256, column 0"):
        moe.Weights.prepare(q, d, gate_up_scales=s, down_scales=ds)


def test_weights_of_another_layout_are_incompatible():
    with Case(world=1, experts=3, hidden=384, max_tokens=2).layer() as layer:
        assert layer.weight_layout() == (1, "e4m3", 3, 384, 128, "f32")
        for other in (moe.Weights.prepare(GATE_UP, DOWN, format="bf16"),
                      moe.Weights.prepare(GATE_UP[:2], DOWN[:2])):
            with raises(Incompatible, "rank 0 takes version 1, e4m3, 3 experts, hidden 384, inter 128"):
                layer.load(other)
        with raises(InvalidArgument, "in the twin, which reads its own memory only", "load()"):
            layer.use(moe.Weights.prepare(GATE_UP, DOWN))
        with raises(InvalidArgument, "rank 4 is not one of the 1 ranks"):
            layer.load(moe.Weights.prepare(GATE_UP, DOWN), rank=4)
