"""Weights of expert layers; public as :class:`crossdock.moe.Weights`."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence, Tuple

from . import _arrays, _native
from .ep import Array
from .errors import InvalidArgument


class WeightLayout(NamedTuple):
    """What prepared weights are. Keep it beside the bytes where they are stored: weights of another
    layout are :class:`crossdock.Incompatible` and not a wrong result."""

    version: int  #: goes up when the same bytes would mean something else
    format: str  #: "bf16", "e4m3" or "e2m1"
    experts: int
    hidden: int
    inter: int
    scales: str = "f32"  #: or "ue8m0"


class WeightReport(NamedTuple):
    """How weights came out in e2m1. Of 128 x 128 values the groups whose power is 2^15 or more below the
    largest do not fit beside it: they are rounded to multiples of 2^-9 of the scale."""

    groups: int  #: of 32 values, where e2m1 is made or comes in
    inexact_groups: int  #: of these: those with a value that changed


def _to_host(array: Any) -> Any:
    """Contiguous and on the host; of torch, NumPy or CuPy."""
    if array is None:
        return None
    if hasattr(array, "detach"):
        return array.detach().cpu().contiguous()
    import numpy
    return numpy.ascontiguousarray(array.get() if hasattr(array, "get") else array)


def _flat(array: Any, name: str) -> Any:
    """[experts, rows, columns] as [experts * rows, columns], without a copy."""
    if array is None:
        return None
    if len(array.shape) != 3:
        raise InvalidArgument(f"moe weights: {name} has the shape {tuple(array.shape)}: it must be "
                              "[experts, rows, columns]")
    _arrays.require_contiguous(array, f"moe weights: {name}")
    experts, rows, columns = array.shape
    return array.reshape(experts * rows, columns)


def _all_flat(gate_up: Any, down: Any, gate_up_scales: Any,
              down_scales: Any) -> Tuple[Any, Any, Any, Any]:
    return (_flat(gate_up, "gate_up"), _flat(down, "down"), _flat(gate_up_scales, "gate_up_scales"),
            _flat(down_scales, "down_scales"))


def _stack(matrices: Sequence[Any]) -> Any:
    """One array of the matrices of all experts, on the host."""
    if not matrices:
        raise InvalidArgument("moe weights: there are no matrices: give those of at least one expert")
    on_host = [_to_host(m) for m in matrices]
    shapes = {tuple(m.shape) for m in on_host}
    if len(shapes) != 1:
        raise InvalidArgument(f"moe weights: matrices of different shapes, {sorted(shapes)}: those of all "
                              "experts must be alike")
    if hasattr(on_host[0], "detach"):
        import torch
        # Types of one byte cannot be stacked in every version; their bytes can.
        as_bytes = [m.view(torch.uint8) if m.element_size() == 1 else m for m in on_host]
        stacked = torch.stack(as_bytes)
        return stacked.view(on_host[0].dtype) if on_host[0].element_size() == 1 else stacked
    import numpy
    return numpy.stack(on_host)


def _one_above_the_other(upper: Any, lower: Any) -> Any:
    """Two arrays [experts, ...] joined in their rows, on the host."""
    if hasattr(upper, "detach"):
        import torch
        if upper.element_size() != 1:
            return torch.cat([upper, lower], dim=1)
        return torch.cat([upper.view(torch.uint8), lower.view(torch.uint8)], dim=1).view(upper.dtype)
    import numpy
    return numpy.concatenate([upper, lower], axis=1)


class Weights:
    """Weights of the experts of one rank, as the products take them. Made by :meth:`prepare`,
    :meth:`from_experts` or, from arrays that were prepared before, :meth:`prepared`.

    ``gate_up``: [experts, 2 * inter, hidden], gate and up by turns in groups of 8 rows; ``down``:
    [experts, hidden, inter]; e4m3 and e2m1 with scales for 128 x 128 values, float32 or ue8m0. e2m1 is
    bytes, blocks of 8704 for 128 x 128 values: [experts, rows / 128, columns / 128 * 8704].
    """

    __slots__ = ("_native", "_given")

    def __init__(self, native: _native.MoeWeights, given: Optional[Tuple[Any, Any, Any, Any]]) -> None:
        self._native = native
        self._given = given

    @staticmethod
    def prepare(gate_up: Array, down: Array, *, format: str = "e4m3", scales: str = "f32",
                gate_up_scales: Optional[Array] = None, down_scales: Optional[Array] = None,
                up_first: bool = False, number: str = "auto") -> Weights:
        """From plain matrices, on the CPU (:meth:`Layer.prepare`: on a GPU). ``gate_up``: [experts,
        2 * inter, hidden], all gates, then all ups (``up_first``: the other way); ``down``: [experts,
        hidden, inter]; float32, bfloat16, or float8_e4m3fn with float32 scales for 128 x 128 values,
        [experts, rows / 128, columns / 128]. With ``number="e2m1"`` two values in a byte, the first in
        its lower half, uint8 or float4_e2m1fn_x2 [experts, rows, columns / 2], and for 32 along a row a
        power of two, uint8 or float8_e8m0fnu [experts, rows, columns / 32].

        To ``format`` "e4m3" or "e2m1", with ``scales`` in "f32" or "ue8m0", or to "bf16". What is e4m3
        keeps its scales, which for ue8m0 must be powers of two. See :attr:`report` for what e2m1 loses.

        Arrays of a GPU are copied to the host. Values that are not finite, and scales that are not
        finite or negative, are :class:`crossdock.InvalidArgument` with their place."""
        flat = _all_flat(*(_to_host(a) for a in (gate_up, down, gate_up_scales, down_scales)))
        return Weights(_native.moe_prepare(flat, int(gate_up.shape[0]), up_first, number, format, scales),
                       None)

    @staticmethod
    def from_experts(gates: Sequence[Array], ups: Sequence[Array], downs: Sequence[Array], *,
                     format: str = "e4m3", scales: str = "f32",
                     gate_scales: Optional[Sequence[Array]] = None,
                     up_scales: Optional[Sequence[Array]] = None,
                     down_scales: Optional[Sequence[Array]] = None, number: str = "auto") -> Weights:
        """From the matrices of each expert, as most checkpoints have them: gate and up [inter, hidden],
        down [hidden, inter], and for float8_e4m3fn the scales of each, [rows / 128, columns / 128]; the
        rest as in :meth:`prepare`."""
        counts = {len(gates), len(ups), len(downs)}
        if len(counts) != 1:
            raise InvalidArgument(f"moe weights: {len(gates)} gates, {len(ups)} ups and {len(downs)} downs: "
                                  "every expert has one of each")
        if (gate_scales is None) != (up_scales is None):
            raise InvalidArgument("moe weights: scales of gate and up come together: give both or none")
        of_both = None
        if gate_scales is not None and up_scales is not None:
            of_both = _one_above_the_other(_stack(gate_scales), _stack(up_scales))
        return Weights.prepare(_one_above_the_other(_stack(gates), _stack(ups)), _stack(downs),
                               format=format, scales=scales, gate_up_scales=of_both, number=number,
                               down_scales=None if down_scales is None else _stack(down_scales))

    @staticmethod
    def prepared(gate_up: Array, down: Array, *, gate_up_scales: Optional[Array] = None,
                 down_scales: Optional[Array] = None, format: str = "auto",
                 version: int = _native.moe_weight_layout_version) -> Weights:
        """What :meth:`prepare` has made, read back from where it was stored (``version`` and ``format``: of
        its layout; "auto" knows all but "e2m1"), or moved to a GPU, for :meth:`Layer.use`. Scales of one
        byte are ue8m0. Nothing is copied."""
        given = (gate_up, down, gate_up_scales, down_scales)
        return Weights(_native.moe_take(_all_flat(*given), int(gate_up.shape[0]), version, format), given)

    @property
    def layout(self) -> WeightLayout:
        n = self._native
        return WeightLayout(n.version, n.format, n.experts, n.hidden, n.inter, n.scales)

    @property
    def report(self) -> Optional[WeightReport]:
        """What e2m1 has lost; None: prepared elsewhere."""
        report = self._native.report
        return None if report is None else WeightReport(*report)

    def _part(self, index: int, name: str) -> Any:
        if self._given is not None:
            return self._given[index]
        array = self._native.part(name)
        if array is None:
            return None
        framework = _arrays.library_for(self._native.device)
        codes = self._native.format == "e4m3" and not name.endswith("scales")
        kind = _arrays.e4m3_of(framework, None) if codes else None
        flat = _arrays.to_framework(array, framework, kind)
        return flat.reshape(self._native.experts, flat.shape[0] // self._native.experts, flat.shape[1])

    @property
    def gate_up(self) -> Array:
        """[experts, 2 * inter, hidden]. Of weights prepared here views: NumPy arrays, bf16 as uint16 and
        e4m3 as uint8, or on a GPU arrays of the framework there; so are the others."""
        return self._part(0, "gate_up")

    @property
    def down(self) -> Array:
        """[experts, hidden, inter]."""
        return self._part(1, "down")

    @property
    def gate_up_scales(self) -> Optional[Array]:
        """[experts, 2 * inter / 128, hidden / 128] float32, or uint8: gates 0-127, ups 0-127, and so on;
        None: bf16."""
        return self._part(2, "gate_up_scales")

    @property
    def down_scales(self) -> Optional[Array]:
        """[experts, hidden / 128, inter / 128] float32, or uint8; None: bf16."""
        return self._part(3, "down_scales")

    def __repr__(self) -> str:
        return f"<crossdock.moe.Weights: {self.layout}>"
