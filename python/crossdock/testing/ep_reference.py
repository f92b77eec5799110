"""What dispatch, combine and the lists by expert have to give, in plain NumPy and slowly.

Written from the rules of ``crossdock/ep/group.hpp`` and from nothing of the kernels, so that the two can
be compared. bf16 and e4m3 are codes here: ``uint16`` and ``uint8``.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from typing import Any, Optional, Sequence

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

SCALE_GROUP = 128
E4M3_MOST = np.float32(448)


# ---- number formats ----------------------------------------------------------------------------


def bf16_encode(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """fp32 to bf16, to nearest even; a NaN becomes 0x7fff."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, 0x7FFF, rounded & 0xFFFF).astype(np.uint16)


def bf16_decode(codes: Codes) -> Floats:
    return (codes.astype(np.uint32) << 16).view(np.float32)


def _e4m3_values() -> npt.NDArray[np.float64]:
    """The finite magnitudes, by code."""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    return np.where(exponent == 0, mantissa * 2.0**-9, normal)


def e4m3_encode(values: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """fp32 to e4m3, to nearest even, too large ones to the largest; a NaN becomes 0x7f."""
    table = _e4m3_values()
    x = np.asarray(values, dtype=np.float32)
    magnitude = np.minimum(np.abs(x.astype(np.float64)), table[-1])
    above = np.clip(np.searchsorted(table, np.nan_to_num(magnitude)), 1, len(table) - 1)
    down, up = magnitude - table[above - 1], table[above] - magnitude
    nearest = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    code = np.where(np.signbit(x), nearest | 0x80, nearest)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


def e4m3_decode(codes: Codes) -> Floats:
    table = np.append(_e4m3_values(), np.nan)
    magnitude = table[codes & 0x7F]
    signed: Floats = np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)
    return signed


def cast(rows: Codes) -> tuple[npt.NDArray[np.uint8], Floats]:
    """bf16 rows to e4m3 rows and a scale for each 128 values: the largest magnitude / 448."""
    values = bf16_decode(rows).reshape(rows.shape[0], rows.shape[1] // SCALE_GROUP, SCALE_GROUP)
    magnitude = np.abs(values)
    largest = np.max(np.where(np.isnan(magnitude), np.float32(0), magnitude), axis=2, initial=0)
    largest = np.where(largest < np.float32(1e-4), np.float32(1e-4), largest).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = values * (E4M3_MOST / largest)[:, :, None]
    return e4m3_encode(scaled).reshape(rows.shape), (largest / E4M3_MOST).astype(np.float32)


# ---- dispatch ----------------------------------------------------------------------------------


def first_expert(experts: int, world: int, rank: int) -> int:
    """Experts are dealt in contiguous ranges, the first ranks one more where they do not divide."""
    return rank * (experts // world) + min(rank, experts % world)


@dataclasses.dataclass
class Tokens:
    """What one rank sends."""

    rows: Codes
    ids: npt.NDArray[Any]
    weights: Optional[Floats] = None
    scales: Optional[Codes] = None


@dataclasses.dataclass
class Delivery:
    """What one rank gets."""

    rows: Codes
    ids: npt.NDArray[np.int32]
    weights: Optional[Floats]
    scales: Optional[Codes]
    tokens: npt.NDArray[np.int32]
    sources: npt.NDArray[np.int32]  #: the rank of each row
    source_ends: npt.NDArray[np.int32]
    expert_counts: npt.NDArray[np.int32]


def _rows_at(rank: int, experts: int, sent: Sequence[Tokens]) -> list[tuple[int, int]]:
    """(source, token) of the rows of a rank."""
    first, end = (first_expert(experts, len(sent), r) for r in (rank, rank + 1))
    return [(source, token) for source, of in enumerate(sent) for token in range(len(of.ids))
            if np.any((of.ids[token] >= first) & (of.ids[token] < end))]


def dispatch(rank: int, experts: int, sent: Sequence[Tokens], with_cast: bool = False) -> Delivery:
    """What arrives at ``rank`` when every rank of ``sent`` dispatches."""
    world, top_k = len(sent), sent[0].ids.shape[1]
    first, end = (first_expert(experts, world, r) for r in (rank, rank + 1))
    pairs = _rows_at(rank, experts, sent)

    def take(parts: Sequence[Any], columns: int) -> Any:
        rows = [parts[source][token] for source, token in pairs]
        return np.stack(rows) if rows else np.empty((0, columns), dtype=parts[0].dtype)

    payload: list[Codes] = [of.rows for of in sent]
    scales: Optional[list[Codes]] = None
    if with_cast:
        casts = [cast(of.rows) for of in sent]
        payload, scales = [c[0] for c in casts], [c[1] for c in casts]
    elif sent[0].scales is not None:
        scales = [of.scales for of in sent if of.scales is not None]
    ids = take([of.ids for of in sent], top_k).astype(np.int64)
    here = (ids >= first) & (ids < end)
    weights: Optional[Floats] = None
    if sent[0].weights is not None:
        weights = np.where(here, take([of.weights for of in sent], top_k), np.float32(0))
    sources = np.array([source for source, _ in pairs], dtype=np.int32)
    return Delivery(
        rows=take(payload, payload[0].shape[1]),
        ids=np.where(here, ids - first, -1).astype(np.int32),
        weights=weights,
        scales=None if scales is None else take(scales, scales[0].shape[1]),
        tokens=np.array([token for _, token in pairs], dtype=np.int32),
        sources=sources,
        source_ends=np.array([np.sum(sources <= s) for s in range(world)], dtype=np.int32),
        expert_counts=np.array([sum(int(np.sum(of.ids == e)) for of in sent)
                                for e in range(first, end)], dtype=np.int32))


# ---- combine -----------------------------------------------------------------------------------


def combine(rank: int, deliveries: Sequence[Delivery], made: Sequence[Codes], count: int,
            bias: Sequence[Codes] = ()) -> npt.NDArray[np.uint16]:
    """What ``rank`` gets back for its ``count`` tokens when the experts of each rank have made the bf16
    rows ``made`` of its delivery: biases first, then the ranks in order, in fp32."""
    total = np.zeros((count, made[0].shape[1]), dtype=np.float32)
    with np.errstate(invalid="ignore"):
        for one in bias:
            total += bf16_decode(one)
        for delivery, rows in zip(deliveries, made):
            mine = delivery.sources == rank
            total[delivery.tokens[mine]] += bf16_decode(rows[:len(delivery.tokens)][mine])
    return bf16_encode(total)


def combine_weights(rank: int, deliveries: Sequence[Delivery], made: Sequence[Floats], count: int,
                    top_k: int) -> Floats:
    """The same for the weights that the experts give back with the rows."""
    total = np.zeros((count, top_k), dtype=np.float32)
    for delivery, weights in zip(deliveries, made):
        mine = delivery.sources == rank
        total[delivery.tokens[mine]] += weights[:len(delivery.tokens)][mine]
    return total


# ---- rows by expert ----------------------------------------------------------------------------


@dataclasses.dataclass
class Groups:
    """Lists of received rows by expert."""

    offsets: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]  #: as long as offsets[-1]
    positions: npt.NDArray[np.int32]  #: of choices of this rank; -1 elsewhere


def group_rows(delivery: Delivery, alignment: int) -> Groups:
    """The places of all choices, expert by expert, each beginning at a multiple of ``alignment``."""
    offsets, places = [0], list[int]()
    positions = np.full(delivery.ids.shape, -1, dtype=np.int32)
    for expert in range(len(delivery.expert_counts)):
        for row, k in zip(*np.nonzero(delivery.ids == expert)):
            positions[row, k] = len(places)
            places.append(int(row))
        places += [-1] * (-len(places) % alignment)
        offsets.append(len(places))
    return Groups(np.array(offsets, dtype=np.int32), np.array(places, dtype=np.int32), positions)


def reduce_rows(delivery: Delivery, groups: Groups, by_place: Codes,
                weighted: bool) -> npt.NDArray[np.uint16]:
    """The sum of what the experts have made of each received row: in the order of its choices, in
    fp32, each times its weight if ``weighted``, multiplied and added with one rounding."""
    values = bf16_decode(by_place)
    total = np.zeros((len(delivery.tokens), by_place.shape[1]), dtype=np.float32)
    for k in range(delivery.ids.shape[1]):
        rows = np.nonzero(delivery.ids[:, k] >= 0)[0]
        one = values[groups.positions[rows, k]].astype(np.longdouble)
        if weighted:
            assert delivery.weights is not None
            one = one * delivery.weights[rows, k][:, None]
        total[rows] = (total[rows] + one).astype(np.float32)
    return bf16_encode(total)


@dataclasses.dataclass
class Copies:
    """Copies of received rows by expert: in the order of the places, or [experts][rows_per_expert]."""

    rows: Codes
    scales: Optional[Codes]
    weights: Optional[Floats]
    sources: npt.NDArray[np.int32]
    written: npt.NDArray[np.bool_]  #: copies and padding; what is not is left alone


def expand_rows(delivery: Delivery, groups: Groups, rows_per_expert: int = 0) -> Copies:
    """A copy of each received row at every place that it has; padding is zero, its sources -1. With
    ``rows_per_expert`` the i-th choice of an expert is the i-th of its rows."""
    places = len(groups.rows)
    experts = np.repeat(np.arange(len(groups.offsets) - 1), np.diff(groups.offsets))
    target = np.arange(places)
    if rows_per_expert:
        inside = target - groups.offsets[experts]
        kept = inside < rows_per_expert  # padding ends where the expert's rows end
        target = np.where(kept, experts * rows_per_expert + inside, -1)
        places = (len(groups.offsets) - 1) * rows_per_expert
    used = target >= 0
    weights = None
    if delivery.weights is not None:
        row, k = np.nonzero(delivery.ids >= 0)
        by_place = np.zeros(len(groups.rows), dtype=np.float32)
        by_place[groups.positions[row, k]] = delivery.weights[row, k]
        weights = by_place

    def put(of_row: Codes, padding: int = 0) -> Any:
        out = np.zeros((places, *of_row.shape[1:]), dtype=of_row.dtype)
        real = used & (groups.rows >= 0)
        out[target[used]] = padding
        out[target[real]] = of_row[groups.rows[real]]
        return out

    written = np.zeros(places, dtype=np.bool_)
    written[target[used]] = True
    flat = np.zeros(places, dtype=np.float32)
    if weights is not None:
        flat[target[used]] = weights[used]
    sources = np.stack([delivery.sources, delivery.tokens], axis=1).astype(np.int32)
    return Copies(put(delivery.rows), None if delivery.scales is None else put(delivery.scales),
                  None if weights is None else flat, put(sources, -1), written)
