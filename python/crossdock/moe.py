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
from typing import Any, Iterable, Optional, Tuple, Union

from . import _arrays, _native
from ._gemm import Gemm, Swiglu
from ._ranks import RankOwner, local_ranks_of
from ._weights import WeightLayout, WeightReport, Weights, _all_flat, _to_host
from .ep import Array, Sizes, Statistics, Stream

__all__ = ["BegunForward", "Gemm", "Layer", "LayerSizes", "Options", "Swiglu", "WeightLayout",
           "WeightReport", "WeightSizes", "Weights", "layer_sizes"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a layer is made for; the same on every rank."""

    experts: int  #: of all ranks, dealt to them in contiguous ranges; at least one a rank
    top_k: int  #: choices of a token, 1 to 32
    max_tokens: int  #: of one rank in one forward
    hidden: int  #: values of a token, a multiple of 128
    inter: int  #: values between the products, a multiple of 128
    #: Of the weights, and of the rows that travel and are multiplied: "e4m3", "bf16", or "e2m1", whose rows
    #: are e4m3.
    format: str = "e4m3"
    #: Of the weights, of the rows that travel, and of what lies between the products: or "ue8m0", powers of
    #: two in a byte; not with bf16.
    scales: str = "f32"
    wide_ids: bool = False  #: expert ids are int64, as ``torch.topk`` makes them; else int32
    #: Of experts that every token goes through besides those it chose, on its own rank, all of them taken
    #: as one; a multiple of 128. 0: none.
    shared_inter: int = 0
    clamp: float = math.inf  #: gate <= clamp, -clamp <= up <= clamp
    fast: bool = False  #: approximate exponential and reciprocal in SwiGLU
    #: Choices that one rank computes in one forward; more are a fault that names the expert. 0: all that
    #: can arrive, world * max_tokens * top_k, which is the most memory.
    max_places: int = 0
    tile: str = "auto"  #: rows of an expert that a block takes: "128", "64", "32", "16", "8"
    #: How the first product gets the rows of an expert: "gather", from where dispatch has put them, or
    #: "copy", from copies apart; "auto" goes by the rows an expert has on average. The same bits.
    row_order: str = "auto"
    dispatch_sms: int = 0  #: SMs; 0: the library's choice, as the next two
    combine_sms: int = 0
    gemm_sms: int = 0
    #: ``ep.Options.expand_sms``, where experts may have so many rows that they are copied apart: a forward
    #: in one call then copies them while others are on their way. With shared experts it counts as 0.
    expand_sms: Union[int, str] = 0
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
    scale_bytes: int  #: of a number


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """Memory of one rank, in bytes. Siblings share all but the weights."""

    group: Sizes
    places: int
    activation_bytes: int  #: between the products, with scales
    output_bytes: int  #: of the second product
    ones_bytes: int  #: weights of choices for which none are given
    weights: WeightSizes  #: of the rank with the most experts
    shared_bytes: int  #: shared experts: buffers between their stages
    shared_weights: WeightSizes  #: and weights, the same on every rank


def _sizes(of: dict[str, Any]) -> LayerSizes:
    return LayerSizes(**{**of, "group": Sizes(**of["group"]), "weights": WeightSizes(**of["weights"]),
                         "shared_weights": WeightSizes(**of["shared_weights"])})


def layer_sizes(options: Options, world: int) -> LayerSizes:
    """The memory that a layer over ``world`` ranks would take, and whether its options are right."""
    return _sizes(_native.moe_sizes(options, world))


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


class Layer(RankOwner):
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
        world, local = local_ranks_of(world, ranks, backend, exchange)
        self._set(options, _native.MoeLayer(options, world, local, backend == "twin", exchange, timeout))

    def _set(self, options: Options, native: _native.MoeLayer) -> None:
        self.options = options
        self._own(native)
        self._in_use: dict[Tuple[int, bool], Weights] = {}

    def sibling(self) -> Layer:
        """Another layer of the same shape, which shares the group and all buffers but has no weights yet."""
        made = Layer.__new__(Layer)
        made._set(self.options, self._native.sibling())
        return made

    @property
    def memory(self) -> LayerSizes:
        return _sizes(self._native.memory)

    def weight_layout(self, rank: Optional[int] = None) -> WeightLayout:
        """Of the weights that the rank takes."""
        return WeightLayout(*self._native.weight_layout(self._rank(rank)))

    def shared_layout(self) -> WeightLayout:
        """Of the weights of the shared experts: one expert of ``Options.shared_inter`` values."""
        return WeightLayout(*self._native.shared_layout())

    def load(self, weights: Weights, *, rank: Optional[int] = None, timeout: float = 60.0) -> None:
        """Copies weights of the rank's experts from the host to its GPU; they are there when this returns.
        :class:`crossdock.Incompatible`, naming both, where they are of another layout.

        :meth:`load`, :meth:`use` and :meth:`load_bias` free what :meth:`load` and :meth:`load_bias` copied
        before: capture CUDA graphs again that were captured with it. Graphs that shall go on with other
        weights :meth:`use` tensors of yours (:meth:`Weights.prepared`), into which you write them."""
        self._load(weights, rank, False, timeout)

    def prepare(self, gate_up: Array, down: Array, *, gate_up_scales: Optional[Array] = None,
                down_scales: Optional[Array] = None, up_first: bool = False, number: str = "auto",
                rank: Optional[int] = None, timeout: float = 60.0) -> Weights:
        """What :meth:`Weights.prepare` makes, in the layer's format and with the same bits, of matrices in
        memory of the rank's GPU and there, for :meth:`use` and :meth:`use_shared`. Waits for the current
        stream of their framework and for the work. Compiles or loads a kernel; not in a capture."""
        flat = _all_flat(gate_up, down, gate_up_scales, down_scales)
        return Weights(self._native.prepare(self._rank(rank), flat, int(gate_up.shape[0]), up_first, number,
                                            timeout), None)

    def load_bias(self, *, gate_up: Optional[Array] = None, down: Optional[Array] = None,
                  up_first: bool = False, rank: Optional[int] = None, timeout: float = 60.0) -> None:
        """Biases beside the weights that the rank has, on the host: ``gate_up``, [experts, 2 * inter], all
        gates, then all ups (``up_first``: the other way), and ``down``, [experts, hidden]; both float32
        or both bfloat16. None: none. :meth:`load` and :meth:`use` drop them. With ``down`` the weights of
        the choices are applied when the outputs of a row's choices are added up."""
        self._native.load_bias(self._rank(rank), _to_host(gate_up), _to_host(down), up_first, timeout)

    def load_shared(self, weights: Weights, *, rank: Optional[int] = None, timeout: float = 60.0) -> None:
        """The same for the shared experts, of which every rank has all."""
        self._load(weights, rank, True, timeout)

    def use(self, weights: Weights, *, rank: Optional[int] = None) -> None:
        """The same for weights in memory of the rank's GPU, which stay there (:meth:`prepare`,
        :meth:`Weights.prepared`)."""
        self._use(weights, rank, False)

    def use_shared(self, weights: Weights, *, rank: Optional[int] = None) -> None:
        """The same for the shared experts."""
        self._use(weights, rank, True)

    def _load(self, weights: Weights, rank: Optional[int], shared: bool, timeout: float) -> None:
        number = self._rank(rank)
        self._native.load(number, weights._native, shared, timeout)
        self._in_use.pop((number, shared), None)  # what was used before may go

    def _use(self, weights: Weights, rank: Optional[int], shared: bool) -> None:
        number = self._rank(rank)
        self._native.use(number, weights._native, shared)
        self._in_use[(number, shared)] = weights

    def forward(self, rows: Array, ids: Array, weights: Optional[Array] = None, *,
                scales: Optional[Array] = None, residual: Optional[Array] = None,
                shared_weights: Optional[Array] = None, out: Optional[Array] = None,
                expected_rows: int = 0, rank: Optional[int] = None,
                stream: Optional[Stream] = None) -> Array:
        """The experts' outputs of each token, added up: [tokens, hidden] bf16.

        ``rows``: [tokens, hidden] bf16, which a layer of e4m3 or e2m1 casts as it sends, or e4m3 with
        ``scales``, [tokens, hidden / 128] float32 (of a layer with ue8m0 uint8, padded to a multiple of
        four, or int32 with four in each); rows on multiples of 16 bytes. ``ids``: [tokens, top_k], -1 is
        none. ``weights``: [tokens, top_k] float32, the factor of each choice; None: 1, whatever other
        ranks give. ``shared_weights``: [tokens] float32, that of the shared experts. ``residual``: added
        first. ``expected_rows``: that an expert gets on average, to choose tiles by; 0: as if all ranks had as
        many tokens and chose evenly. ``rank`` may be left out where this process has one.
        ``stream``: default the current one of the rows' framework.

        The arrays have to stay as they are until the forward has run. All that is wrong with a call is
        found before anything is launched."""
        number = self._rank(rank)
        out = self._output(rows, number, stream) if out is None else out
        self._native.forward(number, (rows, ids, weights, scales, shared_weights), out, residual,
                             expected_rows, stream)
        return out

    def forward_begin(self, rows: Array, ids: Array, weights: Optional[Array] = None, *,
                      scales: Optional[Array] = None, shared_weights: Optional[Array] = None,
                      expected_rows: int = 0, rank: Optional[int] = None,
                      stream: Optional[Stream] = None) -> BegunForward:
        """The first half of a forward: its dispatch, on a stream of the library, after what is on ``stream``
        now and beside what comes on it later::

            first = layer.forward_begin(x0, ids0, weights0)
            second = layer.forward_begin(x1, ids1, weights1)   # travels while the next line computes
            y0 = layer.forward_end(first)
            y1 = layer.forward_end(second)

        Every rank begins and ends in the same order. Two may have begun at a time, of a layer and its
        siblings together: a third raises :class:`crossdock.Busy`. While one has begun outside a capture no
        graph with calls of these layers is launched. The results are those of
        :meth:`forward`, bit by bit. What is given stays alive until the end; of a forward that is dropped,
        which all ranks must do, until the rank's next call."""
        number = self._rank(rank)
        native = self._native.forward_begin(number, (rows, ids, weights, scales, shared_weights),
                                            expected_rows, stream)
        return BegunForward(native, getattr(rows, "dtype", None))

    def forward_end(self, begun: BegunForward, *, residual: Optional[Array] = None,
                    out: Optional[Array] = None, stream: Optional[Stream] = None) -> Array:
        """The second half, on the same stream or one ordered after it; it waits for the rows on the GPU. If that
        is another, what comes later on the stream of the first half waits for them, too: the arrays that were
        given may be dropped then."""
        native = begun._native
        if out is None and not native.ended:
            place = _arrays.Place(native.rank, native.device, native.framework)
            out = self._new(place, native.tokens, begun._dtype, stream)
        self._native.forward_end(native, out, residual, stream)
        return out

    def _output(self, rows: Array, rank: int, stream: Optional[Stream]) -> Any:
        framework, tokens, _, device = self._native.place_of_rows(rank, rows)
        return self._new(_arrays.Place(rank, device, framework), tokens, getattr(rows, "dtype", None), stream)

    def _new(self, place: _arrays.Place, tokens: int, like: Any, stream: Optional[Stream]) -> Any:
        return _arrays.empty(self._native, place, tokens, self.options.hidden, "bfloat16",
                             _arrays.bf16_of(place.framework, like), stream)

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
        for each rank in dispatch and combine. Kept by the device, copied when asked for."""
        return Statistics(*self._native.statistics(self._rank(rank), timeout))
