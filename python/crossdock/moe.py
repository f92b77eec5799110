"""Expert layers within one NVLink domain: dispatch, two grouped products with SwiGLU between them, and
combine, as one call::

    options = moe.Options(experts=256, top_k=8, max_tokens=4096, hidden=7168, inter=2048)
    with moe.Layer(options, world=4) as layer:                    # a rank for each GPU of this process
        layer.load(moe.Weights.prepare(gate_up, down), rank=0)     # matrices of the rank's experts
        y = layer.forward(x, ids, weights, rank=0)                 # [tokens, hidden] bf16

A forward puts work on the current stream of the tokens' framework and returns; nothing waits for the
GPU, and all of it may be captured into a CUDA graph. Every rank makes the same forwards in the same
order. The same input gives the same bits every time. What is rounded where is in docs/design/moe.md, and
in plain NumPy in :mod:`crossdock.testing.moe_reference`.

Below it is :class:`Gemm`, the grouped product by itself.

With ``backend="twin"`` the same kernels run on the CPU, inside :meth:`Layer.synchronize`, on NumPy
arrays (or CPU tensors); outputs are there when it has returned.

Types: bf16 rows are ``torch.bfloat16``; NumPy has no such type, so there they are ``ml_dtypes.bfloat16``
or, without that package, codes as ``uint16``; e4m3 likewise, as ``uint8``. Threads: a layer may be used by
several; its calls take turns.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import math
from types import TracebackType
from typing import Any, Iterable, NamedTuple, Optional, Sequence, Tuple

from . import _arrays, _native
from ._gemm import Gemm, Swiglu
from .ep import Array, Sizes, Statistics, Stream, _current_device
from .errors import InvalidArgument

__all__ = ["BegunForward", "Gemm", "Layer", "LayerSizes", "Options", "Swiglu", "WeightLayout",
           "WeightSizes", "Weights", "layer_sizes"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a layer is made for; the same on every rank."""

    experts: int  #: of all ranks, dealt to them in contiguous ranges; at least one a rank
    top_k: int  #: choices of a token, 1 to 32
    max_tokens: int  #: of one rank in one forward
    hidden: int  #: values of a token, a multiple of 128
    inter: int  #: values between the products, a multiple of 128
    format: str = "e4m3"  #: of the weights, and of the rows that travel and are multiplied: or "bf16"
    wide_ids: bool = False  #: expert ids are int64, as ``torch.topk`` makes them; else int32
    clamp: float = math.inf  #: gate <= clamp, -clamp <= up <= clamp
    fast: bool = False  #: approximate exponential and reciprocal in SwiGLU
    #: Choices that one rank computes in one forward; more are a fault that names the expert. 0: all that
    #: can arrive, world * max_tokens * top_k, which is the most memory.
    max_places: int = 0
    tile: str = "auto"  #: rows of an expert that a block takes: "128", "64", "32", "16", "8"
    dispatch_sms: int = 0  #: SMs; 0: the library's choice, as the next two
    combine_sms: int = 0
    gemm_sms: int = 0
    wait: float = 2.0  #: seconds a kernel waits for a peer before the forward fails, naming it
    compile_timeout: float = 600.0  #: seconds for compiling the kernels, which a machine does once
    statistics: bool = True  #: count selections of each expert and waits for each source


@dataclasses.dataclass(frozen=True)
class WeightSizes:
    """Of the weights of one rank."""

    gate_up_bytes: int
    gate_up_scales: int  #: numbers
    down_bytes: int
    down_scales: int  #: numbers


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """Memory of one rank, in bytes. Siblings share all but the weights."""

    group: Sizes
    places: int
    activation_bytes: int  #: between the products, with scales
    output_bytes: int  #: of the second product
    weights: WeightSizes  #: of the rank with the most experts


def _sizes(of: dict[str, Any]) -> LayerSizes:
    return LayerSizes(**{**of, "group": Sizes(**of["group"]), "weights": WeightSizes(**of["weights"])})


def layer_sizes(options: Options, world: int) -> LayerSizes:
    """The memory that a layer over ``world`` ranks would take, and whether its options are right."""
    return _sizes(_native.moe_sizes(options, world))


class WeightLayout(NamedTuple):
    """What prepared weights are. Keep it beside the bytes where they are stored: weights of another
    layout are :class:`crossdock.Incompatible` and not a wrong result."""

    version: int  #: goes up when the same bytes would mean something else
    format: str  #: "bf16" or "e4m3"
    experts: int
    hidden: int
    inter: int


# ---- weights -----------------------------------------------------------------------------------


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
    dense = array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags["C_CONTIGUOUS"]
    if not dense:
        raise InvalidArgument(f"moe weights: {name} is not contiguous: make it contiguous first")
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
    [experts, hidden, inter]; e4m3 with float32 scales for 128 x 128 values.
    """

    __slots__ = ("_native", "_given")

    def __init__(self, native: _native.MoeWeights, given: Optional[Tuple[Any, Any, Any, Any]]) -> None:
        self._native = native
        self._given = given

    @staticmethod
    def prepare(gate_up: Array, down: Array, *, format: str = "e4m3",
                gate_up_scales: Optional[Array] = None, down_scales: Optional[Array] = None,
                up_first: bool = False) -> Weights:
        """From plain matrices, on the CPU. ``gate_up``: [experts, 2 * inter, hidden], all gates, then all
        ups (``up_first``: the other way); ``down``: [experts, hidden, inter]; float32, bfloat16, or
        float8_e4m3fn with float32 scales for 128 x 128 values, [experts, rows / 128, columns / 128].
        Arrays of a GPU are copied to the host. Values that are not finite, and scales that are not
        finite or negative, are :class:`crossdock.InvalidArgument` with their place."""
        flat = _all_flat(*(_to_host(a) for a in (gate_up, down, gate_up_scales, down_scales)))
        return Weights(_native.moe_prepare(*flat, int(gate_up.shape[0]), up_first, format), None)

    @staticmethod
    def from_experts(gates: Sequence[Array], ups: Sequence[Array], downs: Sequence[Array], *,
                     format: str = "e4m3", gate_scales: Optional[Sequence[Array]] = None,
                     up_scales: Optional[Sequence[Array]] = None,
                     down_scales: Optional[Sequence[Array]] = None) -> Weights:
        """From the matrices of each expert, as most checkpoints have them: gate and up [inter, hidden],
        down [hidden, inter], and for float8_e4m3fn the scales of each, [rows / 128, columns / 128]."""
        counts = {len(gates), len(ups), len(downs)}
        if len(counts) != 1:
            raise InvalidArgument(f"moe weights: {len(gates)} gates, {len(ups)} ups and {len(downs)} downs: "
                                  "every expert has one of each")
        if (gate_scales is None) != (up_scales is None):
            raise InvalidArgument("moe weights: scales of gate and up come together: give both or none")
        scales = None
        if gate_scales is not None and up_scales is not None:
            scales = _one_above_the_other(_stack(gate_scales), _stack(up_scales))
        return Weights.prepare(_one_above_the_other(_stack(gates), _stack(ups)), _stack(downs),
                               format=format, gate_up_scales=scales,
                               down_scales=None if down_scales is None else _stack(down_scales))

    @staticmethod
    def prepared(gate_up: Array, down: Array, *, gate_up_scales: Optional[Array] = None,
                 down_scales: Optional[Array] = None,
                 version: int = _native.moe_weight_layout_version) -> Weights:
        """What :meth:`prepare` has made, read back from where it was stored (``version``: of its layout),
        or moved to a GPU, for :meth:`Layer.use`. Nothing is copied."""
        given = (gate_up, down, gate_up_scales, down_scales)
        return Weights(_native.moe_take(*_all_flat(*given), int(gate_up.shape[0]), version), given)

    @property
    def layout(self) -> WeightLayout:
        n = self._native
        return WeightLayout(n.version, n.format, n.experts, n.hidden, n.inter)

    def _part(self, index: int, name: str) -> Any:
        if self._given is not None:
            return self._given[index]
        array = self._native.part(name)
        if array is None:
            return None
        import numpy
        flat = numpy.asarray(array)
        return flat.reshape(self._native.experts, flat.shape[0] // self._native.experts, flat.shape[1])

    @property
    def gate_up(self) -> Array:
        """[experts, 2 * inter, hidden]. Of weights prepared here NumPy arrays, bf16 as uint16 and e4m3 as
        uint8, which are views; so are the others."""
        return self._part(0, "gate_up")

    @property
    def down(self) -> Array:
        """[experts, hidden, inter]."""
        return self._part(1, "down")

    @property
    def gate_up_scales(self) -> Optional[Array]:
        """[experts, 2 * inter / 128, hidden / 128] float32: gates 0-127, ups 0-127, and so on; None: bf16."""
        return self._part(2, "gate_up_scales")

    @property
    def down_scales(self) -> Optional[Array]:
        """[experts, hidden / 128, inter / 128] float32; None: bf16."""
        return self._part(3, "down_scales")

    def __repr__(self) -> str:
        return f"<crossdock.moe.Weights: {self.layout}>"


# ---- layers ------------------------------------------------------------------------------------


class BegunForward:
    """A forward that has begun: its tokens are on their way. It keeps what it was given until it ends."""

    __slots__ = ("_native", "_dtype")

    def __init__(self, native: _native.MoeForward, dtype: Any) -> None:
        self._native = native
        self._dtype = dtype

    @property
    def rank(self) -> int:
        return self._native.rank

    @property
    def tokens(self) -> int:
        return self._native.tokens

    @property
    def ended(self) -> bool:
        return self._native.ended

    def __repr__(self) -> str:
        state = "ended" if self.ended else f"{self.tokens} tokens"
        return f"<crossdock.moe.BegunForward of rank {self.rank}: {state}>"


class Layer:
    """An expert layer over ranks, one or several of them in this process.

    * All ranks in this process: ``Layer(options, world=4)``, rank ``r`` on GPU ``r``; or, on the CPU,
      ``Layer(options, world=4, backend="twin")``.
    * A process a rank, as under torchrun: ``Layer(options, exchange=crossdock.torch_exchange())``; the
      rank is the exchange's member, on torch's current device.
    * Anything else: ``ranks=[(rank, device), ...]`` are those of this process.
    * The other layers of a model: :meth:`sibling`.

    Making one is collective among its processes and compiles the kernels or loads them from the cache.
    """

    def __init__(self, options: Options, *, world: Optional[int] = None,
                 ranks: Optional[Iterable[Tuple[int, int]]] = None, backend: str = "gpu",
                 exchange: Optional[_native.Exchange] = None, timeout: float = 60.0) -> None:
        if backend not in ("gpu", "twin"):
            raise InvalidArgument(f"backend = {backend!r} must be 'gpu' or 'twin'")
        if world is None:
            if exchange is None:
                raise InvalidArgument("world is missing: how many ranks are there in all?")
            world = exchange.members
        local = list(ranks) if ranks is not None else []
        if ranks is None and exchange is not None:
            if exchange.members != world:
                raise InvalidArgument(f"world = {world} ranks in {exchange.members} processes: say "
                                      "which are in this one, ranks = [(rank, device), ...]")
            local = [(exchange.member, _current_device() if backend == "gpu" else -1)]
        self._set(options, _native.MoeLayer(options, world, local, backend == "twin", exchange, timeout))

    def _set(self, options: Options, native: _native.MoeLayer) -> None:
        self.options = options
        self._native = native
        only = native.ranks
        self._only_rank = only[0][0] if len(only) == 1 else None

    def sibling(self) -> Layer:
        """Another layer of the same shape, which shares the group and all buffers but has no weights yet."""
        made = Layer.__new__(Layer)
        made._set(self.options, self._native.sibling())
        return made

    @property
    def world(self) -> int:
        return self._native.world

    @property
    def local_ranks(self) -> list[int]:
        """The ranks of this process."""
        return [rank for rank, _ in self._native.ranks]

    @property
    def memory(self) -> LayerSizes:
        return _sizes(self._native.memory)

    def weight_layout(self, rank: Optional[int] = None) -> WeightLayout:
        """Of the weights that the rank takes."""
        return WeightLayout(*self._native.weight_layout(self._rank(rank)))

    def load(self, weights: Weights, *, rank: Optional[int] = None, timeout: float = 60.0) -> None:
        """Copies weights of the rank's experts from the host to its GPU; they are there when this returns.
        :class:`crossdock.Incompatible`, naming both, where they are of another layout."""
        self._native.load(self._rank(rank), weights._native, timeout)

    def use(self, weights: Weights, *, rank: Optional[int] = None) -> None:
        """The same for weights in memory of the rank's GPU, which stay there (:meth:`Weights.prepared`)."""
        number = self._rank(rank)
        self._native.use(number, weights._native)
        self._in_use = {**getattr(self, "_in_use", {}), number: weights}

    def forward(self, rows: Array, ids: Array, weights: Optional[Array] = None, *,
                scales: Optional[Array] = None, residual: Optional[Array] = None,
                out: Optional[Array] = None, expected_rows: int = 0, rank: Optional[int] = None,
                stream: Optional[Stream] = None) -> Array:
        """The experts' outputs of each token, added up: [tokens, hidden] bf16.

        ``rows``: [tokens, hidden] bf16, which a layer of e4m3 casts as it sends, or e4m3 with ``scales``,
        [tokens, hidden / 128] float32; rows on multiples of 16 bytes. ``ids``: [tokens, top_k], -1 is
        none. ``weights``: [tokens, top_k] float32, the factor of each choice; None: 1. ``residual``: added
        first. ``expected_rows``: that an expert gets on average, to choose tiles by; 0: as if all ranks
        had as many tokens and chose evenly. ``rank`` may be left out where this process has one.
        ``stream``: default the current one of the rows' framework.

        The arrays have to stay as they are until the forward has run. All that is wrong with a call is
        found before anything is launched."""
        number = self._rank(rank)
        out = self._output(rows, number) if out is None else out
        self._native.forward(number, (rows, ids, weights, scales), out, residual, expected_rows, stream)
        return out

    def forward_begin(self, rows: Array, ids: Array, weights: Optional[Array] = None, *,
                      scales: Optional[Array] = None, expected_rows: int = 0,
                      rank: Optional[int] = None, stream: Optional[Stream] = None) -> BegunForward:
        """The first half of a forward: its dispatch, on a stream of the library, after what is on ``stream``
        now and beside what comes on it later::

            first = layer.forward_begin(x0, ids0, weights0)
            second = layer.forward_begin(x1, ids1, weights1)   # travels while the next line computes
            y0 = layer.forward_end(first)
            y1 = layer.forward_end(second)

        Every rank begins and ends in the same order. Two may have begun at a time, of a layer and its
        siblings together: a third raises :class:`crossdock.Busy`. The results are those of
        :meth:`forward`, bit by bit."""
        number = self._rank(rank)
        native = self._native.forward_begin(number, (rows, ids, weights, scales), expected_rows, stream)
        return BegunForward(native, getattr(rows, "dtype", None))

    def forward_end(self, begun: BegunForward, *, residual: Optional[Array] = None,
                    out: Optional[Array] = None, stream: Optional[Stream] = None) -> Array:
        """The second half, on the same stream or one ordered after it; it waits for the rows on the GPU."""
        native = begun._native
        if out is None and not native.ended:
            out = self._new(native.rank, native.tokens, native.framework, native.device, begun._dtype)
        self._native.forward_end(native, out, residual, stream)
        return out

    def _output(self, rows: Array, rank: int) -> Any:
        framework, tokens, _, device = _native.framework_of(rows, "moe forward", "rows")
        return self._new(rank, tokens, framework, device, getattr(rows, "dtype", None))

    def _new(self, rank: int, tokens: int, framework: int, device: int, like: Any) -> Any:
        place = _arrays.Place(rank, device, framework)
        return _arrays.empty(self._native, place, tokens, self.options.hidden, "bfloat16",
                             _arrays.bf16_of(framework, like))

    def synchronize(self, timeout: float = 30.0, *, stream: Optional[Stream] = None) -> None:
        """Waits for what was called, then raises the first fault of a rank of this process. On GPUs it
        waits for ``stream`` (default: the current one of the framework) and the ranks' own; in the twin
        it runs what was called."""
        self._native.synchronize(timeout, stream)

    def check(self) -> None:
        """Raises the first fault of a rank of this process, naming who is to blame. Never waits."""
        self._native.check()

    def reset(self, timeout: float = 30.0) -> None:
        """After a fault: makes the layer and its siblings usable again. Collective among the processes,
        when no work of them is left on any stream. Weights stay; forwards that have begun are lost."""
        self._native.reset(timeout)

    def statistics(self, rank: Optional[int] = None, timeout: float = 10.0) -> Statistics:
        """Of the layer and its siblings, over all forwards: choices of each expert of the rank, and waits
        for the rows of each rank. Kept by the device, copied when asked for."""
        selections, waits = self._native.statistics(self._rank(rank), timeout)
        return Statistics(selections, waits)

    @property
    def closed(self) -> bool:
        return self._native.closed

    def close(self, timeout: float = 10.0) -> None:
        """Waits for what is on the GPU's streams and lets go of the weights; the buffers go with the last
        sibling. Local: peers are not waited for. Twice is no error."""
        if self._native.closed:
            return
        try:
            if not self._native.twin:
                self._native.synchronize(timeout, None)
        finally:
            self._native.close()

    def __enter__(self) -> Layer:
        return self

    def __exit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        try:
            self.close()
        except Exception:
            # What went wrong inside the block says more than what follows from it.
            if error is None:
                raise

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"ranks {self.local_ranks} of {self.world}"
        return f"<crossdock.moe.Layer: {state}>"

    def _rank(self, rank: Optional[int]) -> int:
        if rank is not None:
            return rank
        if self._only_rank is None:
            raise InvalidArgument(f"rank is missing: this process has the ranks {self.local_ranks}")
        return self._only_rank
