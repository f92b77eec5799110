"""Dispatch and combine of few tokens in a masked layout: what Buffer.low_latency_... do.

dispatch: rows travel once to each rank, on the path for few tokens, and are copied to the rows of their
experts there, by CROSSDOCK_DEEP_EP_EXPAND_SMS SMs in the same launch, or else in launches of their own;
combine: the weights, which its caller has only now, follow the rows, each rank adds up what
its experts have made of a token, and one row for each token and rank travels back. With a hook each is two
launches, and no SM waits in between.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Callable, Iterator, Optional, Sequence, Tuple, Union

from ... import ep
from ...errors import InvalidArgument
from .events import EventOverlap, Mark
from .few import SLOTS, FewWorld, WaitClock, why_plain
from .frame import Frame, frame_of
from .lane import Lane
from .quant import cast_rounded, need_multiple
from .ranks import Rank, do_all
from .settings import Settings
from .world import Shape

Array = Any
Hook = Callable[[], None]

__all__ = ["LowLatency", "LowLatencyHandle"]


@dataclasses.dataclass
class Pending:
    """A combine that has been sent. Its slot is good again when it has been received, so somebody has to do
    that even when its caller has dropped the handle and the hook."""

    receive: Callable[..., None]
    sent: bool = False  #: and not received
    combined: bool = False  #: at least once


class LowLatencyHandle:
    """(src_info, layout_range, num_max_dispatch_tokens_per_rank, hidden, num_experts), as a sequence; the
    first two are made when they are asked for.

    src_info: [experts of the rank, rows] int32, the token's number at its rank. layout_range: [experts of
    the rank, ranks] int64, where the rows of each rank begin in those of an expert, times 2**32, plus how
    many there are."""

    def __init__(self, world: FewWorld, handle: ep.Handle, expanded: ep.Expanded, max_tokens: int) -> None:
        self.world, self.ep, self.expanded = world, handle, expanded
        self.max_tokens = max_tokens
        self.scratch: Optional[Array] = None  #: of get_next_low_latency_combine_buffer
        self.pending = Pending(_nothing)
        self._counts: Optional[Array] = None

    def tell(self, counts: Array) -> None:
        """[experts of the rank] int32, written in the order of the stream."""
        self._counts = counts

    def expire(self) -> None:
        """A later dispatch needs the slot."""
        self._counts = None
        self.ep.close()

    @property
    def counts(self) -> Array:
        """[experts of the rank] int32."""
        if self._counts is None:
            raise InvalidArgument("deep_ep: the handle is of a low-latency dispatch after which there have "
                                  "been two more: combine before, at most two results are kept")
        return self._counts

    @property
    def src_info(self) -> Array:
        sources = self.expanded.sources
        frame = frame_of(sources, "sources")
        rows = frame.arange(int(sources.shape[1]), "int32", sources)
        used = rows[None, :] < self.counts[:, None]
        return frame.where(used, sources[:, :, 1], -1)

    @property
    def layout_range(self) -> Array:
        sources = self.expanded.sources
        frame = frame_of(sources, "sources")
        rows = frame.arange(int(sources.shape[1]), "int32", sources)
        used = rows[None, :] < self.counts[:, None]
        ranks = frame.arange(self.world.rank.size(), "int32", sources)
        here = (sources[:, :, 0][:, :, None] == ranks[None, None, :]) & used[:, :, None]
        counts = frame.cast(here.sum(1), frame.dtype("int64"))
        begins = counts.cumsum(1) - counts
        return begins * 2**32 + counts

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        makers: Sequence[Callable[[], Any]] = (
            lambda: self.src_info, lambda: self.layout_range, lambda: self.max_tokens,
            lambda: self.world.shape.hidden, lambda: self.world.shape.experts)
        return makers[index]()

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(5))


@dataclasses.dataclass(frozen=True)
class Format:
    """Of the rows that are delivered."""

    fp8: bool
    round_scale: bool
    ue8m0: bool

    def __post_init__(self) -> None:
        if self.ue8m0 and not (self.fp8 and self.round_scale):
            raise InvalidArgument("deep_ep: use_ue8m0 needs use_fp8 and round_scale: its scales are "
                                  "powers of two of FP8 rows")


class LowLatency:
    """The low-latency calls of one buffer. ``shrink``: ranks may be left out, and one that does not come is."""

    def __init__(self, rank: Rank, lane: Lane, settings: Settings, shrink: bool) -> None:
        self._rank, self._lane, self._settings, self._shrink = rank, lane, settings, shrink
        self._worlds: dict[Tuple[Shape, int], FewWorld] = {}
        # Of each world, the last SLOTS results.
        self._held: dict[int, list[Tuple[weakref.ref[LowLatencyHandle], Pending]]] = {}
        self._masked: set[int] = set()  # by the caller, for worlds that are made later

    @property
    def groups(self) -> Sequence[ep.Group]:
        return [group for world in self._worlds.values() for group in world.groups]

    def close(self) -> None:
        worlds = list(self._worlds.values())
        self._worlds.clear()
        self._held.clear()
        do_all(world.close for world in worlds)

    # One for each format: FP8 rows need half of the memory.
    def _world(self, frame: Frame, x: Array, ids: Array, most: int, experts: int, fp8: bool) -> FewWorld:
        if experts % self._rank.size():
            raise InvalidArgument(f"deep_ep: num_experts = {experts} must be a multiple of the "
                                  f"{self._rank.size()} ranks")
        if int(x.shape[0]) > most:
            raise InvalidArgument(f"deep_ep: {x.shape[0]} tokens are more than "
                                  f"num_max_dispatch_tokens_per_rank = {most}")
        hidden = int(x.shape[1])
        shape = Shape(experts, int(ids.shape[1]), hidden, wide_ids=ids.dtype == frame.dtype("int64"),
                      alignment=1, cast=fp8, host_counts=False)
        if (shape, most) not in self._worlds:
            made = FewWorld(self._rank, shape, most, self._settings, self._shrink)
            for peer in self._masked:
                made.mask(peer, True)
            self._worlds[shape, most] = made
        return self._worlds[shape, most]

    # ---- dispatch ----------------------------------------------------------------------------------

    def dispatch(self, x: Array, ids: Array, most: int, experts: int, form: Format,
                 counted: Optional[Array], waited: Optional[Array], asynchronous: bool,
                 hooked: bool) -> Tuple[Any, Array, LowLatencyHandle, EventOverlap, Hook]:
        frame = frame_of(x, "x")
        _either(asynchronous, hooked)
        self._check(x, ids, experts, counted, waited)
        world = self._world(frame, x, ids, most, experts, form.fp8)
        rows = world.rank.size() * most
        with self._lane.call(None, asynchronous) as call:
            # Before anything is launched: what fails after that leaves a kernel behind that reads them.
            call.keep(frame, x, ids, counted, waited)
            self._make_room(world)
            clock = world.clock(frame, dispatches=waited is not None)
            handle, expanded = self._send(frame, world, x, ids, form, hooked, rows)
            kept = LowLatencyHandle(world, handle, expanded, most)
            # At once: the slot has had its turn, whatever fails from here on.
            self._held.setdefault(id(world), []).append((weakref.ref(kept), kept.pending))
            scales = None if expanded.scales is None else _columns_for(frame, expanded.scales)
            counts = frame.clone(handle.received.expert_counts)
            kept.tell(counts)
            written = (expanded.rows, expanded.scales, expanded.weights, expanded.sources, scales, counts,
                       counted, waited)

            def deliver(clock: WaitClock) -> None:
                world.run()
                if scales is not None:
                    frame.copy(scales, frame.swap_last(expanded.scales))
                frame.copy(counts, handle.received.expert_counts)
                if counted is not None:
                    frame.copy(counted, counted + counts)
                if waited is not None:
                    clock.add(waited)

            def receive() -> None:
                with self._lane.call() as later:
                    clock = world.clock(frame, dispatches=waited is not None)
                    world.group.dispatch_receive(handle, expanded=expanded)
                    deliver(clock)
                    later.keep_all(frame, *written)

            if hooked:
                world.run()
            else:
                deliver(clock)
            call.keep(frame, *written)
        out = expanded.rows if scales is None else (expanded.rows, frame.swap_last(scales))
        return out, counts, kept, call.event, _once(receive if hooked else None)

    def _check(self, x: Array, ids: Array, experts: int, counted: Optional[Array],
               waited: Optional[Array]) -> None:
        """Before room is made: a call that is refused ends no earlier result."""
        size = self._rank.size()
        if len(ids.shape) != 2 or len(x.shape) != 2 or ids.shape[0] != x.shape[0]:
            raise InvalidArgument(f"deep_ep low_latency_dispatch: topk_idx is {tuple(ids.shape)} and x "
                                  f"{tuple(x.shape)}: they must be [tokens, top_k] and [tokens, hidden]")
        for name, told, most in (("cumulative_local_expert_recv_stats", counted, experts // size),
                                 ("dispatch_wait_recv_cost_stats", waited, size)):
            if told is not None and tuple(told.shape) != (most,):
                raise InvalidArgument(f"deep_ep low_latency_dispatch: {name} is {tuple(told.shape)}: it must "
                                      f"be [{most}]")

    def _make_room(self, world: FewWorld) -> None:
        """Slots are used in turns: the result from two dispatches ago ends, as its caller knows."""
        held = self._held.setdefault(id(world), [])
        while len(held) >= SLOTS:
            kept, pending = held.pop(0)
            pending.receive(early=True)
            handle = kept()
            if handle is not None:
                handle.expire()

    def _send(self, frame: Frame, world: FewWorld, x: Array, ids: Array, form: Format, half: bool,
              per_expert: int) -> Tuple[ep.Handle, ep.Expanded]:
        # Weights come with the combine; here is where they will be.
        weights = frame.full((int(ids.shape[0]), int(ids.shape[1])), 0, "float32", ids)
        ids, rows, scales = frame.contiguous(ids), x, None
        cast: Union[bool, str] = form.fp8 and not form.round_scale
        if form.ue8m0:
            need_multiple(int(x.shape[1]), 512)
            cast = "ue8m0"
        elif form.fp8 and form.round_scale:
            rows, scales = cast_rounded(frame, x)
        mine, group = world.rank.rank(), world.group
        expanded = group.expanded_for(rows, weights, scales=scales, cast=cast, rows_per_expert=per_expert,
                                      rank=mine)
        if half:
            return group.dispatch_send(rows, ids, weights, scales=scales, cast=cast, rank=mine), expanded
        handle = group.dispatch(rows, ids, weights, scales=scales, cast=cast, expanded=expanded, rank=mine)
        return handle, expanded

    # ---- combine -----------------------------------------------------------------------------------

    def combine(self, x: Array, ids: Array, weights: Array, handle: LowLatencyHandle, logfmt: bool,
                zero_copy: bool, asynchronous: bool, hooked: bool, out: Optional[Array],
                waited: Optional[Array]) -> Tuple[Array, EventOverlap, Hook]:
        world, frame = handle.world, frame_of(weights, "topk_weights")
        _ = handle.counts  # it is still there
        _either(asynchronous, hooked)
        if zero_copy:
            if handle.scratch is None:
                raise InvalidArgument("deep_ep: zero_copy needs rows in "
                                      "get_next_low_latency_combine_buffer() of this handle")
            x = handle.scratch
        rows = world.rank.size() * handle.max_tokens
        shape = (world.shape.experts // world.rank.size(), rows, world.shape.hidden)
        if tuple(int(n) for n in x.shape) != shape:
            raise InvalidArgument(f"deep_ep low_latency_combine: x is {tuple(x.shape)}: it must be {shape}")
        if logfmt and not world.options.compressed:
            raise InvalidArgument("deep_ep low_latency_combine: use_logfmt needs rows that may travel "
                                  f"compressed: {why_plain(world.options, world.rank.size())}")
        payload = "logfmt10" if logfmt else "bf16"
        pending = handle.pending
        pending.receive(early=True)  # of a combine before this one
        count = waited is not None
        with self._lane.call(None, asynchronous) as call:
            clock = world.clock(frame, weights=count, combines=count and not hooked)
            world.bring_weights(frame, handle.ep, ids, weights)
            world.group.reduce_rows(handle.ep, x, rows_per_expert=rows, weighted=True, payload=payload)
            made = world.group.empty_combined(handle.ep) if out is None else out
            if hooked:
                world.group.combine_send(handle.ep, payload=payload, packed=logfmt)
            else:
                world.group.combine(handle.ep, out=made, payload=payload, packed=logfmt)
            pending.sent, pending.combined = hooked, pending.combined or not hooked
            world.run()
            if waited is not None:
                clock.add(waited)
            call.keep(frame, x, ids, weights, made, waited)

        def receive() -> None:
            with self._lane.call() as later:
                clock = world.clock(frame, combines=count)
                world.group.combine_receive(handle.ep, out=made)
                pending.sent, pending.combined = False, True
                world.run()
                if waited is not None:
                    clock.add(waited)
                later.keep_all(frame, made, waited)

        if hooked:
            pending.receive = _once(receive)
        return made, call.event, pending.receive if hooked else _nothing

    # ---- ranks that are left out -------------------------------------------------------------------

    def mask(self, peer: int, masked: bool) -> None:
        if not 0 <= peer < self._rank.size() or peer == self._rank.rank():
            raise InvalidArgument(f"deep_ep: rank_to_mask = {peer} must be another of the "
                                  f"{self._rank.size()} ranks")
        self._mask([peer], masked)

    def clear_masks(self) -> None:
        self._mask([peer for peer in range(self._rank.size()) if peer != self._rank.rank()], False)

    def _mask(self, peers: Sequence[int], masked: bool) -> None:
        """In all groups, or in none where one of them would refuse it."""
        if not masked:
            self._need_nothing_open()
        with self._lane.call():
            for world in self._worlds.values():
                for peer in peers:
                    world.mask(peer, masked)
        (self._masked.update if masked else self._masked.difference_update)(peers)

    def _need_nothing_open(self) -> None:
        """A handle does not know who was left out in the middle of its dispatch, so whoever comes back then
        would be asked for rows that it has not got."""
        for held in self._held.values():
            for kept, pending in held:
                if pending.sent:
                    raise InvalidArgument("deep_ep: a combine waits for its hook: call it before a rank is "
                                          "let in again")
                if not pending.combined and kept() is not None:
                    raise InvalidArgument("deep_ep: a low-latency dispatch has not been combined yet: combine "
                                          "it, or drop its handle, before a rank is let in again")

    def tell_masks(self, told: Array) -> None:
        """1 for every rank that is left out, by the caller or because it did not come; 0 for the others."""
        if tuple(told.shape) != (self._rank.size(),):
            raise InvalidArgument(f"deep_ep: mask_status is {tuple(told.shape)}: it must be int32 "
                                  f"[{self._rank.size()}]")
        frame = frame_of(told, "mask_status")
        told[:] = 0
        if not self._worlds:
            for peer in self._masked:
                told[peer] = 1
        with self._lane.call():
            for world in self._worlds.values():
                world.add_masks(frame, told)

    def combine_buffer(self, handle: LowLatencyHandle) -> Array:
        """[experts of the rank, rows, hidden] bf16, for the experts to write to."""
        if handle.scratch is None:
            rows = handle.expanded.rows
            frame = frame_of(rows, "rows")
            name = "uint16" if not hasattr(frame, "torch") else "bfloat16"
            dtype = rows.dtype if rows.dtype.itemsize == 2 else frame.dtype(name)
            handle.scratch = frame.empty((int(rows.shape[0]), int(rows.shape[1]),
                                          handle.world.shape.hidden), dtype, rows)
        return handle.scratch


def _either(asynchronous: bool, hooked: bool) -> None:
    if asynchronous and hooked:
        raise InvalidArgument("deep_ep: async_finish and return_recv_hook exclude each other")


def _nothing(early: bool = False) -> None:
    """The hook of a call that is whole."""


def _once(work: Optional[Hook]) -> Callable[..., None]:
    """A hook that does its work when it is called first. ``early``: by a later call, perhaps on another stream
    than that of the caller, who still calls the hook: the current stream waits for the work then. What the work
    raised is raised again."""
    left: list[Optional[Hook]] = [work]
    done: list[Mark] = []
    failed: list[BaseException] = []

    def hook(early: bool = False) -> None:
        now, left[0] = left[0], None
        if now is not None:
            try:
                now()
            except BaseException as error:
                failed.append(error)
                raise
            if early:
                done.append(Mark())
        elif failed:
            raise failed[0]
        elif done:
            done[0].current_stream_wait()
    return hook


def _columns_for(frame: Frame, scales: Array) -> Array:
    """Memory for the scales of each expert by column, [experts, n, rows]: with the last two swapped its
    strides are (rows * n, 1, rows)."""
    experts, rows, n = (int(size) for size in scales.shape)
    return frame.empty((experts, n, rows), scales.dtype, scales)
