"""Expert parallelism within one NVLink domain.

``dispatch`` brings every token once to each rank that owns an expert it chose, straight into its final
row; ``combine`` brings the experts' outputs back as one sum::

    options = ep.Options(experts=256, top_k=8, max_tokens=4096, hidden=7168)
    with ep.Group(options, world=4) as group:                   # a rank for each GPU of this process
        with group.dispatch(x, ids, weights, rank=0) as handle:
            n = handle.rows(timeout=5)                           # rows that arrive here
            handle.expert_input.rows[:n] = experts(handle.received.rows[:n], handle.received.ids[:n])
            y = group.combine(handle)

Calls put work on the current stream of the tokens' framework and return; nothing waits for the GPU, and
all of it may be captured into a CUDA graph. Every rank makes the same calls in the same order. Arrays
that the library gives out are views of its memory: they keep the slot of their dispatch, and when the
handle and all of them are gone, later dispatches may use it.

With ``backend="twin"`` the same kernels run on the CPU, inside :meth:`Group.synchronize`, on NumPy
arrays (or CPU tensors); outputs are there when it has returned. A test of a model needs no GPU then.

Types: bf16 rows are ``torch.bfloat16``; NumPy has no such type, so there they are ``ml_dtypes.bfloat16``
or, without that package, codes as ``uint16``; e4m3 likewise, as ``uint8``. What comes out follows what
went in. Threads: a group may be used by several; its calls take turns.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from typing import Any, Iterable, Optional, Sequence, Tuple, Union

from . import _arrays, _native
from ._ep_handle import Copied, Expanded, ExpertInput, Grouped, Handle, Received
from ._ranks import RankOwner, local_ranks_of
from .errors import InvalidArgument
from .exchange import MeetingPlace

#: A torch tensor, a NumPy array, a CuPy array, or any object with ``__dlpack__``.
Array = Any
#: A torch or CuPy stream, an object with ``__cuda_stream__``, or a CUstream as a number.
Stream = Any
_SCALE_GROUP = 128  # values that share a scale of a cast

__all__ = ["Array", "Expanded", "ExpertInput", "Group", "Grouped", "Handle", "Options", "Received", "Sizes",
           "Statistics", "Stream", "default_combine_sms", "default_dispatch_sms", "default_expand_sms", "sizes"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a group is made for; the same on every rank."""

    experts: int  #: of all ranks, dealt to them in contiguous ranges
    top_k: int  #: choices of a token, 1 to 32
    max_tokens: int  #: of one rank in one dispatch
    hidden: int  #: values of a token, a multiple of 8; rows of at most 32 KiB
    row_bytes: int = 0  #: the largest row delivered; 0: a row of bf16
    scale_bytes: int = 0  #: the largest scales of a row; 0: an fp32 for 128 values
    wide_ids: bool = False  #: expert ids are int64, as ``torch.topk`` makes them; else int32
    #: Dispatches whose output may be held at the same time without being copied. 0: every dispatch is
    #: given its output, in ``user_memory``.
    slots: int = 2
    #: Rows of a dispatch that finds all slots held are copied to ordinary memory. False: it raises
    #: :class:`crossdock.Busy` instead, and the window has no transit for such rows.
    fall_back: bool = True
    user_bytes: int = 0  #: of each rank's window, for outputs that the caller provides (user_memory)
    #: Dispatches of at most so many tokens a rank may take the path for few tokens, with ``small_slots``
    #: of its own, used in turns; 0: there is no such path; at most 1024 and ``max_tokens``. A group with no
    #: other path needs no other slots: ``slots=0, fall_back=False``.
    small_tokens: int = 0
    small_slots: int = 2
    small_sms: int = 0  #: blocks that send in a small dispatch, at most 32; 0: 16
    #: SMs that copy rows of few tokens to the places of their choices in the launch of their dispatch
    #: (``expanded``), or of its second half; 0: copies follow in launches of their own. Needs
    #: ``expert_alignment`` and at most 256 experts a rank. Not with ``mask_late``, nor in packets.
    small_expand_sms: int = 0
    #: At most 8 of the few tokens travel in packets that are valid by themselves, which takes more bytes
    #: and fewer waits. Not with ``mask_late``.
    small_packets: bool = True
    #: Combines of few tokens may have compressed rows (``payload``). Needs ``small_tokens`` and
    #: ``hidden % 512 == 0``, and room: 0.64 of the expert outputs of the small slots.
    compressed: bool = False
    #: Ranks may be masked (:meth:`Group.mask`): one goes on without them. Needs ``combine="pull"``.
    masks: bool = False
    #: A rank that has not come by then is masked by the kernel itself, and the call goes on without it.
    mask_late: bool = False
    #: SMs of a dispatch and of a combine; 0: as many as fill the wire. A sequence: one number a rank.
    dispatch_sms: Union[int, Sequence[int]] = 0
    combine_sms: Union[int, Sequence[int]] = 0
    #: How the rows of a combine travel, the sums being the same bit by bit: "pull", every rank loads them;
    #: "push", some SMs send them, which takes staging; "by_size", the faster as far as measured.
    combine: str = "pull"
    combine_send_sms: int = 0  #: by push: of the SMs of a combine, those that send; 0: in proportion
    wait: float = 2.0  #: seconds a kernel waits for a peer before the call fails, naming it
    cast: bool = True  #: dispatches that cast bf16 to e4m3 will be made: hidden % 128 == 0
    expert_alignment: int = 0  #: rows by expert (group_rows): each begins at a multiple of it
    #: SMs that copy rows to the places of their choices while others are on their way, besides those of
    #: dispatch, where a dispatch is given ``expanded``; 0: such copies follow the dispatch; "auto":
    #: :func:`default_expand_sms`, or what a smaller GPU has room for; 0 with more than 256 experts a rank.
    #: Needs ``expert_alignment``.
    expand_sms: Union[int, str] = 0
    #: A dispatch or combine may start while the kernel before it in its stream still runs: it prepares
    #: itself and waits before it reads anything. Saves part of a launch where calls are short.
    overlap_launches: bool = False
    host_counts: bool = True  #: Handle.rows() and expert_counts() will be asked
    statistics: bool = True  #: count selections of each expert and waits for each source


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Memory of one rank, in bytes."""

    capacity: int  #: rows that can arrive
    rows_bytes: int  #: of one slot: rows that can arrive, with all that goes with them
    input_bytes: int  #: of one slot: expert outputs
    control_bytes: int
    staging_bytes: int  #: by push: rows that come to be added up, of one combine
    transit_bytes: int  #: rows and inputs of dispatches that find all slots held
    user_bytes: int  #: the caller's
    small_bytes: int  #: all slots of the path for few tokens
    window_bytes: int  #: symmetric: control, staging, all slots, the transit and the caller's
    local_bytes: int  #: besides the window
    copy_bytes: int  #: ordinary memory of each dispatch that falls back


def sizes(options: Options, world: int) -> Sizes:
    """The memory that a group of ``world`` ranks would take, and whether its options are right."""
    return Sizes(**_native.ep_sizes(options, world))


def default_dispatch_sms(world: int) -> int:
    """SMs that fill the wire with dispatches of ``world`` ranks."""
    return _native.ep_default_dispatch_sms(world)


def default_combine_sms(world: int) -> int:
    """SMs of a combine of ``world`` ranks."""
    return _native.ep_default_combine_sms(world)


def default_expand_sms(world: int, top_k: int) -> int:
    """SMs that keep pace with a dispatch of tokens with ``top_k`` choices when they copy its rows."""
    return _native.ep_default_expand_sms(world, top_k)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Sums over all dispatches and combines of a rank."""

    expert_selections: list[int]  #: of the experts of the rank
    source_wait_ns: list[int]  #: waiting for the rows of each rank
    combine_wait_ns: list[int]  #: until each rank's rows were ready to be combined


Ranks = Iterable[Tuple[int, int]]


class Group(RankOwner):
    """The ranks of one NVLink domain, one or several of them in this process.

    * All ranks in this process: ``Group(options, world=4)``, rank ``r`` on GPU ``r``; or, on the CPU,
      ``Group(options, world=4, backend="twin")``.
    * A process a rank, as under torchrun: ``Group(options, exchange=crossdock.torch_exchange())``; the
      rank is the exchange's member, on torch's current device.
    * Anything else: ``ranks=[(rank, device), ...]`` are those of this process.
    * Processes that may leave and join while the group exists: ``Group(options, world=4,
      ranks=[(rank, device)], place=crossdock.MeetingPlace(store, name, fewest=3))``, see :meth:`reform`.
      In the twin with a store ``inproc://...``: the members are groups of one process then, used on one
      thread at a time, but for creating, resetting and reforming them.

    Making a group is collective among its processes and compiles the kernels or loads them from the
    cache; at most ``timeout`` seconds in all.
    """

    def __init__(self, options: Options, *, world: Optional[int] = None,
                 ranks: Optional[Ranks] = None, backend: str = "gpu",
                 exchange: Optional[_native.Exchange] = None, timeout: float = 60.0,
                 place: Optional[MeetingPlace] = None) -> None:
        if place is not None and not isinstance(place, MeetingPlace):
            raise InvalidArgument(f"ep: place = {place!r} must be a crossdock.MeetingPlace")
        world, local = local_ranks_of(world, ranks, backend, exchange, place is not None)
        meets = None if place is None else (place.store, place.name, place.fewest, place.settle)
        self.options = options
        self._own(_native.Group(options, world, local, backend == "twin", exchange, timeout, meets))

    @property
    def memory(self) -> Sizes:
        return Sizes(**self._native.memory)

    def dispatch(self, rows: Array, ids: Optional[Array] = None, weights: Optional[Array] = None, *,
                 scales: Optional[Array] = None, cast: Union[bool, str] = False,
                 scales_by_column: bool = False,
                 routing: Optional[Handle] = None, output: Optional[Array] = None,
                 input: Optional[Array] = None, path: str = "auto", most_tokens: int = 0,
                 expanded: Optional[Expanded] = None, rank: Optional[int] = None,
                 stream: Optional[Stream] = None) -> Handle:
        """Sends tokens to the ranks of their experts.

        ``rows``: [tokens, values] of any type, rows of a multiple of 16 bytes, 16-byte aligned; bf16
        with ``cast``, which makes e4m3 and an fp32 scale for 128 values; with ``cast="ue8m0"``, the same
        on all ranks, powers of two, four in an int32, [.., hidden / 512, rounded up]. ``ids``: [tokens,
        top_k], -1 is masked. ``weights``: [tokens, top_k] float32. ``scales``: [tokens, n], go along with
        the rows; ``scales_by_column`` delivers them (or those of a cast) as tensor maps want them. ``rank``
        may be left out where this process has one. ``stream``: default the current one of the rows'
        framework.

        ``routing`` instead of ids and weights: as many other tokens go the ways of an earlier dispatch
        of the rank, as in a backward pass; all ranks give the same earlier one. ``output`` and ``input``:
        parts of :meth:`user_memory` on multiples of 128 bytes, for what arrives
        (:meth:`output_bytes`) and for what the experts make (``Sizes.input_bytes``), instead of a slot.

        ``path``: "small" for few tokens, which has slots of its own and neither routing nor output,
        "large", or by size, small where ``most_tokens`` (the most of any rank, the same on all; 0:
        ``Options.max_tokens``) are at most ``Options.small_tokens``. After a small dispatch the rows of
        source s begin at ``s * received.source_stride``.

        ``expanded``: where copies of the rows go, expert by expert (:meth:`expanded_for`), as if
        :meth:`group_rows` and :meth:`expand_rows` followed; :meth:`grouped` has the lists. With
        ``Options.expand_sms`` rows are copied while others are on their way; on the small path with
        ``Options.small_expand_sms``.
        Each rank chooses for itself. More choices than there is room for are a fault of the rank.

        The arrays have to stay as they are until the dispatch has run. Rows are copied when
        handles hold all slots; without ``Options.fall_back`` this raises :class:`crossdock.Busy`.
        """
        how: Optional[Tuple[Any, Any, Any, str, int, bool, Any]] = None
        plain = routing is None and output is None and input is None and expanded is None
        if not plain or path != "auto" or most_tokens != 0:
            how = (None if routing is None else routing._native, output, input, path, most_tokens, False,
                   None if expanded is None else expanded._arguments)
        native = self._native.dispatch(self._rank(rank), rows, ids, weights, scales, cast,
                                       scales_by_column, how, stream)
        return Handle(native, rows, scales, cast)

    def dispatch_send(self, rows: Array, ids: Array, weights: Optional[Array] = None, *,
                      scales: Optional[Array] = None, cast: Union[bool, str] = False,
                      scales_by_column: bool = False, most_tokens: int = 0, rank: Optional[int] = None,
                      stream: Optional[Stream] = None) -> Handle:
        """The first half of a dispatch of few tokens: sends, and waits for nobody's rows. What arrives is
        there after :meth:`dispatch_receive`, a launch of its own, so that no SM waits in between."""
        native = self._native.dispatch(self._rank(rank), rows, ids, weights, scales, cast, scales_by_column,
                                       (None, None, None, "small", most_tokens, True, None), stream)
        return Handle(native, rows, scales, cast)

    def dispatch_receive(self, handle: Handle, *, expanded: Optional[Expanded] = None,
                         stream: Optional[Stream] = None) -> None:
        """The second half: once for each :meth:`dispatch_send`, or never. ``expanded``: where copies of
        the rows go, as for :meth:`dispatch`."""
        self._native.dispatch_receive(handle._native, None if expanded is None else expanded._arguments,
                                      stream)

    def mask(self, peer: int, masked: bool = True, *, rank: Optional[int] = None,
             stream: Optional[Stream] = None) -> None:
        """Goes on without rank ``peer``, or with it again, in the order of the stream
        (``Options.masks``); with ``mask_late`` masking also ends waits for it in calls that run beside. For
        ranks that one goes on without: one that still runs may add up rows of a later call. Both ranks of
        a pair let the other in before the same dispatch, after the same calls; else the group needs
        :meth:`reset`. A rank cannot go on without itself."""
        self._native.mask(self._rank(rank), peer, masked, stream)

    def clear_mask(self, *, rank: Optional[int] = None, stream: Optional[Stream] = None) -> None:
        """Nobody is masked from then on."""
        self._native.clear_mask(self._rank(rank), stream)

    def read_mask(self, told: Array, *, rank: Optional[int] = None,
                  stream: Optional[Stream] = None) -> None:
        """``told``, int32 [world] of the rank's GPU, becomes 1 for every masked rank and 0 for the others,
        in the order of the stream."""
        self._native.read_mask(self._rank(rank), told, stream)

    def mask_memory(self, rank: Optional[int] = None) -> Array:
        """int32 [1] where kernels look, a bit for each masked rank: to set one, not to clear it, between two calls of
        the stream is as good as :meth:`mask`, if nothing of the group runs on another (``|=`` is no atomic)."""
        rank = self._rank(rank)
        return _arrays.to_framework(self._native.mask_memory(rank), _arrays.library_for(self._device(rank)))

    def masked(self, *, rank: Optional[int] = None, timeout: float = 10.0) -> list[int]:
        """The ranks that are masked now; not in the order of any stream."""
        bits = self._native.masked(self._rank(rank), timeout)
        return [peer for peer in range(self._native.world) if bits >> peer & 1]

    def reserve_copies(self, copies: int, *, rank: Optional[int] = None) -> None:
        """Memory for ``copies`` handles more than there are slots, before a capture that needs it."""
        self._native.reserve_copies(self._rank(rank), copies)

    def user_memory(self, rank: Optional[int] = None) -> Array:
        """The caller's part of the rank's window, ``Options.user_bytes`` as uint8; zero after a reset."""
        array = self._native.user_memory(self._rank(rank))
        return _arrays.to_framework(array, _arrays.library_for(self._device(self._rank(rank))))

    def output_bytes(self, rows: Array, *, scales: Optional[Array] = None, cast: Union[bool, str] = False,
                     scales_by_column: bool = False, rank: Optional[int] = None) -> int:
        """Bytes that a dispatch of such tokens fills, whatever their number."""
        return int(self._native.output_bytes(self._rank(rank), rows, scales, cast, scales_by_column))

    def group_rows(self, handle: Handle, *, stream: Optional[Stream] = None) -> Grouped:
        """Lists the received rows by expert, after the dispatch in the stream."""
        framework = handle._native.framework
        return Grouped(*(_arrays.to_framework(array, framework)
                         for array in self._native.group_rows(handle._native, stream)))

    def grouped(self, handle: Handle) -> Grouped:
        """The lists that :meth:`group_rows`, or a dispatch with ``expanded``, has made of the handle's
        rows."""
        framework = handle._native.framework
        return Grouped(*(_arrays.to_framework(array, framework)
                         for array in self._native.grouped(handle._native)))

    def expand_rows(self, handle: Handle, grouped: Grouped, *, places: Optional[int] = None,
                    rows_per_expert: int = 0, scales_by_column: bool = False,
                    out: Optional[Expanded] = None, stream: Optional[Stream] = None) -> Expanded:
        """Copies of the received rows by expert, for a GEMM that does not gather. ``grouped``: of the
        same handle. ``places``: rows to make room for, default as many as there can be;
        ``rows_per_expert``: a masked layout with that many rows for each expert. ``out``: an earlier
        result, to be written again. More choices than there is room for are a fault of the rank."""
        if out is None:
            if places is None:
                places = int(grouped.rows.shape[0])
            out = self._expanded(Copied.of(handle), places, rows_per_expert, scales_by_column, stream)
        self._native.expand_rows(handle._native, *out._arguments, stream)
        return out

    def empty_expanded(self, handle: Handle, *, rows_per_expert: int,
                       scales_by_column: bool = False) -> Expanded:
        """Memory for a masked layout, for ``expand_rows(out=...)`` later."""
        return self._expanded(Copied.of(handle), 0, rows_per_expert, scales_by_column)

    def expanded_for(self, rows: Array, weights: Optional[Array] = None, *,
                     scales: Optional[Array] = None, cast: Union[bool, str] = False,
                     routing: Optional[Handle] = None, places: Optional[int] = None,
                     rows_per_expert: int = 0, scales_by_column: bool = False,
                     rank: Optional[int] = None) -> Expanded:
        """Memory for ``dispatch(expanded=...)`` of tokens like these, however many they are; the
        other arguments are those of :meth:`expand_rows`. Both layouts may be written again and again."""
        rank = self._rank(rank)
        framework, _, values, _ = _native.framework_of(rows, "ep expanded_for", "rows")
        world, experts = self._native.world, self.options.experts
        most = -(-experts // world)
        if places is None:
            places = (self.memory.capacity * self.options.top_k +
                      most * max(self.options.expert_alignment - 1, 0))
        sent, scale_values, scales_dtype = getattr(rows, "dtype", None), 0, None
        if not isinstance(cast, bool) and cast != "ue8m0":
            raise InvalidArgument(f"ep expanded_for: cast = {cast!r} must be True, False or \"ue8m0\"")
        if cast:
            scale_values = -(-self.options.hidden // (_SCALE_GROUP * (4 if cast == "ue8m0" else 1)))
        elif scales is not None:
            scale_values, scales_dtype = int(scales.shape[1]), scales.dtype
        has_weights = routing._native.has_weights if routing is not None else weights is not None
        return self._expanded(
            Copied(rank, self._device(rank), framework, experts // world + (rank < experts % world),
                    values, scale_values, has_weights,
                    _arrays.e4m3_of(framework, sent) if cast else sent, scales_dtype, cast),
            places, rows_per_expert, scales_by_column)

    def empty_combined(self, handle: Handle, *, stream: Optional[Stream] = None) -> Any:
        """Memory for what a combine of the handle makes, bf16 [tokens, hidden], in the order of ``stream``."""
        native = handle._native
        return _arrays.empty(self._native, native, native.tokens, native.hidden, "bfloat16",
                             _arrays.bf16_of(native.framework, handle._sent_dtype), stream)

    def _expanded(self, of: Copied, places: int, rows_per_expert: int, scales_by_column: bool,
                  stream: Optional[Stream] = None) -> Expanded:
        if rows_per_expert:
            places = of.experts * rows_per_expert

        def make(rows: int, columns: int, kind: str, dtype: Optional[Any] = None) -> Any:
            return _arrays.empty(self._native, of, rows, columns, kind, dtype, stream)

        rows = make(places, of.row_values, "uint8", of.rows_dtype)
        number = "int32" if of.cast == "ue8m0" else "float32"
        scales, weights = None, None
        # The scales of a cast come on multiples of 16 bytes, and so they stay.
        width = -(-of.scale_values // 4) * 4 if of.cast else of.scale_values
        if of.scale_values and scales_by_column:
            # Columns on multiples of 16 bytes, as tensor maps want them.
            scales = make(width, -(-places // 4) * 4, number, of.scales_dtype)
            scales = scales.T[:places, :of.scale_values]
        elif of.scale_values:
            scales = make(places, width, number, of.scales_dtype)[:, :of.scale_values]
        if of.has_weights:
            weights = make(places, 1, "float32").reshape(places)
        sources = make(places, 2, "int32")

        def shown(plane: Any) -> Any:
            if plane is None or not rows_per_expert:
                return plane
            return plane.reshape((of.experts, rows_per_expert) + tuple(plane.shape[1:]))

        return Expanded(shown(rows), shown(scales), shown(weights), shown(sources),
                        (rows, scales, weights, sources), rows_per_expert, scales_by_column)

    def reduce_rows(self, handle: Handle, by_place: Array, *, weighted: bool = False,
                    rows_per_expert: int = 0, payload: str = "bf16", ids: Optional[Array] = None,
                    stream: Optional[Stream] = None) -> None:
        """Adds what the experts have made of each received row, bf16 ``[places, hidden]`` in the order
        of :class:`Grouped` (with ``rows_per_expert``: of the rows of a masked layout), into its row of
        ``handle.expert_input``: in the order of the choices, in fp32, times the weights if
        ``weighted``. After ``group_rows`` of the same handle. ``payload``: other than "bf16" the sums are
        written in that format, for a :meth:`combine` with the same payload and ``packed=True``, and
        ``handle.expert_input`` stays as it is. May be called again for another combine at once: it waits
        until the peers have read the rows. Of few tokens that is part of the next combine, which all
        ranks then make in the same place among their calls. ``ids``: a copy of ``received.ids``, [rows that
        arrived, top_k], where the ``output`` that they came in may have been written again since."""
        if rows_per_expert and len(by_place.shape) == 3:
            by_place = _arrays.require_contiguous(by_place, "ep reduce_rows: by_place")
            by_place = by_place.reshape((-1, by_place.shape[-1]))
        self._native.reduce_rows(handle._native, by_place, rows_per_expert, weighted, payload, ids, stream)

    def combine(self, handle: Handle, rows: Optional[Array] = None, *,
                row_weights: Optional[Array] = None, out: Optional[Array] = None,
                bias: Union[Array, Sequence[Array]] = (),
                weights: Union[bool, Array] = False, payload: str = "bf16", packed: bool = False,
                stream: Optional[Stream] = None) -> Any:
        """Brings the rows of ``handle.expert_input`` of all ranks back: the sum for each token this rank
        sent, bf16 [tokens, hidden], in fp32 in the order of the ranks, so its bits are the same in every
        run. ``bias``: one or two arrays like the output, added first. ``out``: where the sum goes; by
        default a new array. ``weights``: True, or an array [tokens, top_k] float32, to get the sums of
        ``expert_input.weights`` too; the result is then (rows, weights).

        ``rows``, bf16 [rows that arrived, hidden], and ``row_weights``, [rows that arrived, top_k]: what
        the experts have made, in the order of the received rows, where it is not in
        ``handle.expert_input``. It is copied there when peers have read what was there before, so that a
        handle may be combined again at once.

        ``payload``: how rows travel, the same on all ranks: "bf16", or on the small path of a group with
        ``Options.compressed`` "fp8" (half of the bytes, errors of a value up to 1/16 of it) or "logfmt10"
        (0.64 of them, errors of a percent). A handful of tokens stays bf16. ``packed``: :meth:`reduce_rows`
        has written them in that format; else a launch before the combine does."""
        native = handle._native
        biases = list(bias) if isinstance(bias, (list, tuple)) else [bias]
        if out is None:
            out = self.empty_combined(handle, stream=stream)
        wanted: Optional[Any] = None
        if weights is True:
            wanted = _arrays.empty(self._native, native, native.tokens, native.top_k, "float32", None, stream)
        elif weights is not False:
            wanted = weights
        self._native.combine(native, out, wanted, biases, rows, row_weights, False, payload, packed,
                             stream)
        return out if wanted is None else (out, wanted)

    def combine_send(self, handle: Handle, *, payload: str = "bf16", packed: bool = False,
                     stream: Optional[Stream] = None) -> None:
        """The first half of a combine: tells the others that ``handle.expert_input`` is ready. One of a
        rank at a time, of few tokens one of each small slot, until :meth:`combine_receive`. ``payload``
        and ``packed``: as for :meth:`combine`; the second half knows them."""
        self._native.combine_send(handle._native, payload, packed, stream)

    def combine_receive(self, handle: Handle, *, out: Array, stream: Optional[Stream] = None) -> Array:
        """The second half: waits for the others' rows and puts the sums into ``out``, bf16 [tokens,
        hidden]."""
        self._native.combine(handle._native, out, None, [], None, None, True, "bf16", False, stream)
        return out

    def synchronize(self, timeout: float = 30.0, *, stream: Optional[Stream] = None) -> None:
        """Waits for what was called, then raises the first fault of a rank of this process. On GPUs it
        waits for ``stream`` (default: the current one of the framework) and the ranks' own; in the twin
        it runs what was called."""
        self._native.synchronize(timeout, stream)

    def check(self) -> None:
        """Raises the first fault of a rank of this process, naming who is to blame. Never waits."""
        self._native.check()

    def reset(self, timeout: float = 30.0) -> None:
        """After a fault: makes the group usable again. Collective among the processes, when no work of
        the group is left on any stream. Handles from before stay valid as memory only."""
        self._native.reset(timeout)

    def reform(self, timeout: float = 60.0) -> None:
        """Of a group with a ``place``: goes on with the processes that are left, which all call this when
        no work of the group is left on any stream, and with new ones, which make a ``Group`` with the same
        arguments for the ranks of those that are gone, and are waited for until they have prepared their
        kernels. Else as :meth:`reset`; where somebody was left out there is other memory behind outputs and
        ``user_memory``. After an error, which all get, the group is of no use until a reform succeeds."""
        self._native.reform(timeout)

    @property
    def vacant_ranks(self) -> list[int]:
        """Ranks that no process has. With ``Options.masks`` they are masked; else every dispatch waits for
        them until its deadline."""
        return list(self._native.vacant_ranks())

    def waiting_ranks(self, timeout: float = 10.0) -> list[int]:
        """Ranks of processes that wait for a :meth:`reform` of all to let them in."""
        return list(self._native.waiting_ranks(timeout))

    def statistics(self, rank: Optional[int] = None, timeout: float = 10.0) -> Statistics:
        """Kept by the device over all dispatches and combines; copied when asked for."""
        return Statistics(*self._native.statistics(self._rank(rank), timeout))

    def statistics_memory(self, rank: Optional[int] = None) -> Tuple[Array, Array, Array]:
        """The same where the device keeps it, as int64: selections of the experts of the rank, and
        nanoseconds waited for each rank by dispatches and by combines. For kernels of the caller."""
        library = _arrays.library_for(self._device(self._rank(rank)))
        selections, waits, combines = (_arrays.to_framework(array, library) for array in
                                       self._native.statistics_memory(self._rank(rank)))
        return selections, waits, combines

    def _device(self, rank: int) -> int:
        return int(dict(self._native.ranks).get(rank, -1))
