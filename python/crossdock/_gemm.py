"""Grouped products; public as :class:`crossdock.moe.Gemm`."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import math
from typing import Any, Optional, Tuple, Union

from . import _arrays, _native
from ._ranks import current_device
from .ep import Array, Stream
from .errors import InvalidArgument

@dataclasses.dataclass(frozen=True)
class Swiglu:
    """silu(gate) * up of a product whose weights have gate and up by turns in groups of 8 rows, as
    :attr:`crossdock.moe.Weights.gate_up` has them. Of rows in e4m3 the result is e4m3 again, with a scale
    for 128 values."""

    clamp: float = math.inf  #: gate <= clamp, -clamp <= up <= clamp
    fast: bool = False  #: approximate exponential and reciprocal


@dataclasses.dataclass(frozen=True)
class _Call:
    """What the native part reads; see Gemm.run."""

    rows: Any
    weights: Any
    scales: Any
    weight_scales: Any
    offsets: Any
    counts: Any
    places: Any
    swiglu: Optional[Swiglu]
    row_weights: Any
    bias: Any
    out: Any
    out_scales: Any
    format: str
    tile: str
    expected_rows: int


def _below(array: Any, name: str) -> Any:
    """[experts, rows, columns] as [experts * rows, columns]."""
    if array is None:
        return None
    if len(array.shape) != 3:
        raise InvalidArgument(f"moe gemm: {name} has the shape {tuple(array.shape)}: it must be "
                              "[experts, rows, columns]")
    _arrays.require_contiguous(array, f"moe gemm: {name}")
    return array.reshape(array.shape[0] * array.shape[1], array.shape[2])


class Gemm:
    """The rows of each expert times the weights of that expert, all experts in one launch, on one GPU (or,
    with ``backend="twin"``, on the CPU). How many rows an expert has is read by the GPU, so no call waits
    for it and all of them may be captured::

        gemm = moe.Gemm()
        gemm.prepare(format="bf16")
        y = gemm.run(x, weights, offsets=offsets)

    Three layouts: ``offsets`` (expert segments), ``counts`` and ``expert_rows`` (masked, [experts,
    expert_rows]), and with ``places`` a list that names the row of each place (gathered). The same input
    gives the same bits every time."""

    def __init__(self, *, device: Optional[int] = None, backend: str = "gpu", sms: int = 0,
                 timeout: float = 60.0) -> None:
        if backend not in ("gpu", "twin"):
            raise InvalidArgument(f"backend = {backend!r} must be 'gpu' or 'twin'")
        cpu = backend == "twin"
        if device is None:
            device = -1 if cpu else current_device()
        self._native = _native.Gemm(device, cpu, sms, timeout)

    def prepare(self, *, format: str = "e4m3", scales: str = "f32", swiglu: bool = False,
                tile: str = "auto", expected_rows: int = 0, timeout: float = 600.0) -> None:
        """Compiles or loads the kernel of such calls. ``format``: of the weights, "bf16", "e4m3" or
        "e2m1"; ``scales``: "f32" or "ue8m0". ``run`` never compiles: it raises
        :class:`crossdock.InvalidArgument` where this was not called. Not in a capture."""
        self._native.prepare(format, scales, swiglu, tile, expected_rows, timeout)

    def run(self, rows: Array, weights: Array, *, scales: Optional[Array] = None,
            weight_scales: Optional[Array] = None, offsets: Optional[Array] = None,
            counts: Optional[Array] = None, expert_rows: int = 0, places: Optional[Array] = None,
            swiglu: Optional[Swiglu] = None, row_weights: Optional[Array] = None,
            bias: Optional[Array] = None, out: Optional[Array] = None,
            out_scales: Optional[Array] = None, format: str = "auto", tile: str = "auto",
            expected_rows: int = 0, stream: Optional[Stream] = None) -> Union[Array, Tuple[Array, Array]]:
        """One product of all experts, put on ``stream``.

        ``rows``: [count, k] bf16, or e4m3 with ``scales``, float32 [k / 128, columns], a column for each
        row, columns a multiple of 4. ``weights``: [experts, n, k] of the same type, with
        ``weight_scales``, float32 [experts, n / 128, k / 128]; for rows of e4m3 with ``format="e2m1"``
        as :class:`crossdock.moe.Weights` has them, uint8 [experts, n / 128, k / 128 * 8704]. Scales may be
        ue8m0, all of a call: ``weight_scales`` then bytes, uint8 or float8_e8m0fnu, and ``scales`` int32
        [k / 512 rounded up, columns], four of a row in each. n and k are multiples of 128 (with swiglu
        n of 256). ``offsets``: int32 [experts + 1], first place of each expert; ``counts``: int32
        [experts]; ``places``: int32, a row for each place, -1: none, sums of 0. Unless gathered, rows of e4m3 of an
        expert begin at a multiple of 4. ``row_weights``: float32 [places], with swiglu. ``bias``: float32
        or bf16 [experts, n], added to the sums before they are rounded, in the order of the weights' rows.

        Returns ``out``, [places, n] bf16 (with swiglu [places, n / 2]); with swiglu of e4m3 ``out`` in e4m3
        and its scales, float32 [n / 2 / 128, places rounded up to 4], of ue8m0 int32 with a fourth of the
        rows, like ``scales``. Only rows of experts are written.
        Counts that do not fit are a fault, see :meth:`check`."""
        experts = int(weights.shape[0])
        all_weights = _below(weights, "weights")
        if out is None:
            words = weight_scales is not None and getattr(weight_scales.dtype, "itemsize", 4) == 1
            n = int(weights.shape[1]) * (128 if format == "e2m1" else 1)
            out, out_scales = self._outputs(rows, n, places, swiglu, words, stream)
        call = _Call(rows, all_weights, scales, _below(weight_scales, "weight_scales"),
                     offsets, counts, places, swiglu, row_weights, bias, out, out_scales, format, tile,
                     expected_rows)
        self._native.run(call, experts, expert_rows, stream)
        return out if out_scales is None else (out, out_scales)

    def _outputs(self, rows: Array, n: int, places: Optional[Array], swiglu: Optional[Swiglu],
                 words: bool, stream: Optional[Stream]) -> Tuple[Any, Any]:
        framework, count, _, device = _native.framework_of(rows, "moe gemm", "rows")
        if places is not None:
            count = int(places.shape[0])
        columns = n // (2 if swiglu else 1)
        place, like = _arrays.Place(0, device, framework), getattr(rows, "dtype", None)
        if swiglu is None or getattr(like, "itemsize", 2) != 1:
            return _arrays.empty(self._native, place, count, columns, "bfloat16",
                                 _arrays.bf16_of(framework, like), stream), None
        made = _arrays.empty(self._native, place, count, columns, "uint8",
                             _arrays.e4m3_of(framework, like), stream)
        groups, kind = (-(-columns // 512), "int32") if words else (columns // 128, "float32")
        return made, _arrays.empty(self._native, place, groups, -(-count // 4) * 4, kind, stream=stream)

    def synchronize(self, timeout: float = 30.0, *, stream: Optional[Stream] = None) -> None:
        """Waits for what was called (in the twin: runs it), then raises the first fault."""
        self._native.synchronize(timeout, stream)

    def check(self) -> None:
        """Raises the first fault, naming the expert. Never waits."""
        self._native.check()

    def reset(self, timeout: float = 30.0) -> None:
        """After a fault, when nothing runs on any stream."""
        self._native.reset(timeout)
