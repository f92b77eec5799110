"""What an expert layer has to give, in plain NumPy and slowly: sums in fp64, rounded exactly where
docs/design/moe.md says.

Written from those rules and from nothing of the kernels, so that the two can be compared. bf16 and e4m3
are codes, ``uint16`` and ``uint8``, as in :mod:`crossdock.testing.ep_reference`. The kernels add up in
fp32, and a tensor core drops the last bits of products of e4m3: now and then that turns a rounding, so
compare with :func:`far_from`.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from typing import Any, Optional, Sequence

import numpy as np
import numpy.typing as npt

from . import ep_reference as ep
from .ep_reference import Codes, Floats, Tokens

Doubles = npt.NDArray[np.float64]

GROUP = 128  #: values with one scale, either way
INTERLEAVE = 8  #: rows of gate, then of up
E4M3_MOST = np.float32(448)
SMALLEST_PEAK = np.float32(1e-10)


# ---- weights -----------------------------------------------------------------------------------


def power_from(values: npt.NDArray[Any]) -> Floats:
    """The smallest powers of two that are not below positive values; infinity for infinity."""
    fractions, exponents = np.frexp(values.astype(np.float64))
    powers: Floats = np.ldexp(np.float32(1), exponents - (fractions == 0.5)).astype(np.float32)
    return np.where(np.isinf(values), np.float32(np.inf), powers)


def ue8m0_encode(powers: Floats) -> npt.NDArray[np.uint8]:
    """Powers of two as codes, 127 for 1, 255 for infinity."""
    return (np.ascontiguousarray(powers, np.float32).view(np.uint32) >> 23).astype(np.uint8)


def scale_of(peaks: Floats, scales: str) -> Floats:
    """Of values with these largest magnitudes, in e4m3: max(largest, 1e-10) / 448, or the next power of
    two."""
    plain: Floats = (np.maximum(peaks, SMALLEST_PEAK) / E4M3_MOST).astype(np.float32)
    return power_from(plain) if scales == "ue8m0" else plain


def quantise_blocks(matrix: Floats, scales: str = "f32") -> tuple[npt.NDArray[np.uint8], Floats]:
    """[..., rows, columns] to e4m3, and a scale for 128 x 128 values, see :func:`scale_of`. Each value is
    multiplied by the reciprocal and rounded to nearest even."""
    *outer, rows, columns = matrix.shape
    blocks = matrix.astype(np.float32).reshape(*outer, rows // GROUP, GROUP, columns // GROUP, GROUP)
    made = scale_of(np.max(np.abs(blocks), axis=(-3, -1)), scales)
    inverse = (np.float32(1) / made)[..., :, None, :, None]
    return ep.e4m3_encode(blocks * inverse).reshape(matrix.shape), made


#: The magnitudes of e2m1 by their codes.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4_GROUP = 32  #: values along K with one power of two


def e2m1_encode(values: Floats) -> npt.NDArray[np.uint8]:
    """To the nearest, of two the one with the even code; more than 6 is 6. The sign is the fourth bit."""
    halves = (E2M1[1:] + E2M1[:-1]) / 2
    magnitude = np.abs(values)
    codes = np.searchsorted(halves, magnitude, side="left")
    tie = (codes < 7) & (magnitude == halves[np.minimum(codes, 6)]) & (codes % 2 == 1)
    made: npt.NDArray[np.uint8] = ((codes + tie) | (np.signbit(values) << 3)).astype(np.uint8)
    return made


def e2m1_decode(codes: npt.NDArray[np.uint8]) -> Floats:
    signs: Floats = np.where(codes & 8, np.float32(-1), np.float32(1))
    values: Floats = signs * E2M1[codes & 7]
    return values


def quantise_groups(matrix: Floats) -> tuple[npt.NDArray[np.uint8], Floats]:
    """[..., rows, columns] to codes of e2m1, a byte each, and a power of two for 32 values along K: the
    smallest that is not below largest / 6."""
    groups = matrix.astype(np.float32).reshape(*matrix.shape[:-1], -1, FP4_GROUP)
    peaks = np.max(np.abs(groups), axis=-1)
    powers = power_from(np.where(peaks == 0, np.float32(1), peaks / np.float32(6)))
    return e2m1_encode(groups / powers[..., None]).reshape(matrix.shape), powers


def pack_pairs(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes of e2m1 as checkpoints have them: two in a byte, the first in its lower half."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def see_groups(codes: npt.NDArray[np.uint8], powers: Floats) -> Doubles:
    """What products make of e2m1: groups whose power is 2^15 or more below the largest of their 128 x 128
    values are rounded to multiples of 2^-9 of the scale, which is that largest power / 2^6."""
    shape = codes.shape
    blocks = (*shape[:-2], shape[-2] // GROUP, GROUP, shape[-1] // GROUP, GROUP // FP4_GROUP)
    values = e2m1_decode(codes).astype(np.float64).reshape(*blocks, FP4_GROUP)
    power = powers.astype(np.float64).reshape(blocks)
    used = np.where(np.any(values != 0, axis=-1), power, 0)
    largest = np.max(used, axis=(-3, -1), keepdims=True)
    least = np.where(largest == 0, 1, largest) * 2.0**-14
    kept = np.maximum(power, least)[..., None]
    # Of values that keep their power nothing is rounded.
    folded = e2m1_encode((values * power[..., None] / kept).astype(np.float32))
    seen: Doubles = (e2m1_decode(folded).astype(np.float64) * kept).reshape(shape)
    return seen


def spread_blocks(scales: Floats) -> Floats:
    """A scale for each value of those for 128 x 128."""
    return np.repeat(np.repeat(scales, GROUP, axis=-2), GROUP, axis=-1)


def interleave(gate_up: Any) -> Any:
    """[..., 2 * n, columns], all gates above all ups, as gate and up by turns in groups of 8 rows."""
    return interleave_by(gate_up, INTERLEAVE)


def interleave_by(gate_up: Any, rows_of_turn: int) -> Any:
    *outer, rows, columns = gate_up.shape
    halves = gate_up.reshape(*outer, 2, rows // 2 // rows_of_turn, rows_of_turn, columns)
    return np.swapaxes(halves, -4, -3).reshape(gate_up.shape)


@dataclasses.dataclass
class Prepared:
    """Weights in the layout of ``WeightLayout`` version 1."""

    gate_up: Codes
    down: Codes
    gate_up_scales: Optional[npt.NDArray[Any]]
    down_scales: Optional[npt.NDArray[Any]]


def prepare(gate_up: Floats, down: Floats, format: str, scales: str = "f32") -> Prepared:
    """What ``moe.Weights.prepare`` has to make of fp32 matrices, [experts, 2 * inter, hidden] and
    [experts, hidden, inter], in bf16 or e4m3."""
    if format == "bf16":
        return Prepared(interleave(ep.bf16_encode(gate_up)), ep.bf16_encode(down), None, None)
    codes, made = quantise_blocks(gate_up, scales)
    down_codes, down_made = quantise_blocks(down, scales)
    both = [ue8m0_encode(s) if scales == "ue8m0" else s for s in (interleave_by(made, 1), down_made)]
    return Prepared(interleave(codes), down_codes, both[0], both[1])


@dataclasses.dataclass
class Experts:
    """The matrices of all experts as the products see them."""

    gate_up: Doubles  #: [experts, 2 * inter, hidden], all gates, then all ups
    down: Doubles  #: [experts, hidden, inter]
    format: str
    scales: str = "f32"
    gate_up_bias: Optional[Floats] = None  #: [experts, 2 * inter], all gates, then all ups
    down_bias: Optional[Floats] = None  #: [experts, hidden]

    @property
    def inter(self) -> int:
        return int(self.down.shape[2])


def experts_of(gate_up: Floats, down: Floats, format: str, scales: str = "f32") -> Experts:
    """fp32 matrices, quantised or rounded as preparation does it."""

    def seen(matrix: Floats) -> Doubles:
        if format == "bf16":
            return ep.bf16_decode(ep.bf16_encode(matrix)).astype(np.float64)
        if format == "e2m1":
            return see_groups(*quantise_groups(matrix))
        codes, made = quantise_blocks(matrix, scales)
        return ep.e4m3_decode(codes).astype(np.float64) * spread_blocks(made)

    return Experts(seen(gate_up), seen(down), format, scales)


# ---- one expert --------------------------------------------------------------------------------


def round_bf16(values: npt.NDArray[Any]) -> Floats:
    with np.errstate(over="ignore"):
        return ep.bf16_decode(ep.bf16_encode(values.astype(np.float32)))


def swiglu(gate: Floats, up: Floats, weights: Floats, clamp: float) -> Floats:
    """In fp32, of gate and up as rounded to bf16; ``weights``: a factor for each row."""
    g: Floats = np.minimum(gate, np.float32(clamp))
    u: Any = np.clip(up, np.float32(-clamp), np.float32(clamp))
    with np.errstate(over="ignore", invalid="ignore"):
        out: Floats = g / (np.float32(1) + np.exp(-g)) * u * weights[:, None]
    return out


def requantise(rows: Floats, format: str, scales: str = "f32") -> Doubles:
    """What lies between the products, as the second sees it: bf16, or e4m3 with a scale for 128 values,
    see :func:`scale_of`."""
    if format == "bf16":
        return round_bf16(rows).astype(np.float64)
    groups = rows.reshape(rows.shape[0], rows.shape[1] // GROUP, GROUP)
    made = scale_of(np.max(np.abs(groups), axis=2, initial=0), scales)
    codes = ep.e4m3_encode(groups * (np.float32(1) / made)[:, :, None])
    seen: Doubles = (ep.e4m3_decode(codes).astype(np.float64) * made[:, :, None]).reshape(rows.shape)
    return seen


def cast_rows(rows: Codes, scales: str) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Rows of bf16 as dispatch casts them, and their scales: with ue8m0 the next power of two of those of
    f32."""
    codes, plain = ep.cast(rows)
    if scales != "ue8m0":
        return codes, plain
    powers = power_from(plain)
    groups = ep.bf16_decode(rows).reshape(rows.shape[0], rows.shape[1] // GROUP, GROUP)
    with np.errstate(invalid="ignore"):  # infinities are no numbers
        return ep.e4m3_encode(groups / powers[:, :, None]).reshape(rows.shape), powers


def pack_scales(powers: Floats) -> npt.NDArray[np.uint8]:
    """Powers of two of each row as a caller gives them: bytes, padded to a multiple of four."""
    codes = ue8m0_encode(powers)
    return np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4)))


def see_rows(rows: Codes, scales: Optional[Floats], format: str, kind: str = "f32") -> Doubles:
    """Tokens as the first product sees them: as they are, or cast as dispatch does it, with scales of the
    ``kind`` "f32" or "ue8m0"."""
    if rows.dtype == np.uint16 and format == "bf16":
        return ep.bf16_decode(rows).astype(np.float64)
    if rows.dtype == np.uint16:
        rows, scales = cast_rows(rows, kind)
    assert scales is not None
    groups = ep.e4m3_decode(rows).astype(np.float64).reshape(rows.shape[0], rows.shape[1] // GROUP, GROUP)
    seen: Doubles = (groups * scales[:, :, None]).reshape(rows.shape)
    return seen


@dataclasses.dataclass
class Made:
    """Values, and the sums of the magnitudes of the products that they were made of."""

    rows: Floats
    magnitude: Doubles


def run_expert(experts: Experts, expert: int, rows: Doubles, weights: Floats, clamp: float) -> Made:
    """Rows of one expert, as the products see them: [rows, hidden], rounded to bf16."""
    gate_up, down = experts.gate_up[expert], experts.down[expert]
    sums = rows @ gate_up.T
    if experts.gate_up_bias is not None:
        sums = sums + experts.gate_up_bias[expert]
    both = round_bf16(sums)
    between = requantise(swiglu(both[:, :experts.inter], both[:, experts.inter:], weights, clamp),
                         experts.format, experts.scales)
    out, magnitude = between @ down.T, np.abs(between) @ np.abs(down).T
    if experts.down_bias is not None:
        out, magnitude = out + experts.down_bias[expert], magnitude + np.abs(experts.down_bias[expert])
    return Made(round_bf16(out), magnitude)


# ---- a layer -----------------------------------------------------------------------------------


def forward(sent: Sequence[Tokens], experts: Experts, *, clamp: float = np.inf,
            residual: Optional[Sequence[Codes]] = None, shared: Optional[Experts] = None,
            shared_weights: Optional[Sequence[Floats]] = None) -> list[Made]:
    """The output of each rank of ``sent``, [tokens, hidden], bf16 as fp32. The rows of a token's choices
    on one rank are added in their order and rounded to bf16; then, after the residual and the output of
    the ``shared`` expert, those of the ranks in their order, in fp32. ``shared_weights``: its factors, a
    row for each rank."""
    world, count = len(sent), len(experts.down)
    firsts = [ep.first_expert(count, world, r) for r in range(world + 1)]
    out = []
    for rank, tokens in enumerate(sent):
        seen = see_rows(tokens.rows, tokens.scales, experts.format, experts.scales)
        total = np.zeros(seen.shape, np.float32)
        magnitude = np.zeros(seen.shape)
        if residual is not None:
            total += ep.bf16_decode(residual[rank])
        if shared is not None:
            factors = np.ones(len(seen), np.float32) if shared_weights is None else shared_weights[rank]
            made = run_expert(shared, 0, seen, factors, clamp)
            total += made.rows
            magnitude += made.magnitude
        for first, end in zip(firsts[:-1], firsts[1:]):
            part = Made(np.zeros(seen.shape, np.float32), np.zeros(seen.shape))
            for k in range(tokens.ids.shape[1]):
                _add_choice(part, tokens, k, range(first, end), experts, seen, clamp)
            total += round_bf16(part.rows)
            magnitude += part.magnitude
        out.append(Made(round_bf16(total), magnitude))
    return out


def _add_choice(part: Made, tokens: Tokens, k: int, here: range, experts: Experts, seen: Doubles,
                clamp: float) -> None:
    """Choice ``k`` of all tokens that made it among the experts ``here``."""
    ids = np.asarray(tokens.ids)[:, k]
    for expert in np.unique(ids[(ids >= here.start) & (ids < here.stop)]):
        rows = np.nonzero(ids == expert)[0]
        weights = np.ones(len(rows), np.float32) if tokens.weights is None else tokens.weights[rows, k]
        if experts.down_bias is None:
            made = run_expert(experts, int(expert), seen[rows], weights, clamp)
            part.rows[rows] += made.rows
            part.magnitude[rows] += made.magnitude
            continue
        # The bias is weighted with the rest, so the weight comes late: multiplied and added with one
        # rounding.
        made = run_expert(experts, int(expert), seen[rows], np.ones_like(weights), clamp)
        late = weights[:, None].astype(np.float64)
        part.rows[rows] = (part.rows[rows] + late * made.rows).astype(np.float32)
        part.magnitude[rows] += late * made.magnitude


def far_from(got: Codes, want: Made) -> tuple[float, float]:
    """How bf16 codes differ from a reference: the largest difference in units of what is allowed for a
    value, ``|value| * 2^-7 + magnitude * 2^-8`` (a rounding turned in gate, up, activation or output moves
    it by so much; a tensor core turns so many codes of e4m3 that a few units are normal there), and the
    share of values that are not equal."""
    values = ep.bf16_decode(np.asarray(got).view(np.uint16)).astype(np.float64)
    if values.size == 0:
        return 0.0, 0.0
    away = np.abs(values - want.rows)
    room = np.abs(want.rows) * 2.0**-7 + want.magnitude * 2.0**-8
    far = np.divide(away, room, out=np.where(away > 0, np.inf, 0.0), where=room > 0)
    return float(np.max(far)), float(np.mean(away != 0))
