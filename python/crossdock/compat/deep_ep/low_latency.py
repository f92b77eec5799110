"""Dispatch and combine of few tokens in a masked layout: what Buffer.low_latency_... do.

dispatch: rows travel once to each rank and are copied to the rows of their experts there; combine: the
weights, which its caller has only now, follow the rows, each rank adds up what its experts have made of a
token, and one row for each token and rank travels back.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Callable, Iterator, Optional, Sequence, Tuple, Union

from ... import ep
from ...errors import InvalidArgument
from .events import EventOverlap
from .frame import Frame, frame_of
from .lane import Lane
from .quant import cast_rounded
from .ranks import Rank
from .settings import Settings
from .world import Region, Shape, World

Array = Any
Hook = Callable[[], None]

__all__ = ["LowLatency", "LowLatencyHandle"]


class LowLatencyHandle:
    """(src_info, layout_range, num_max_dispatch_tokens_per_rank, hidden, num_experts), as a sequence; the
    first two are made when they are asked for.

    src_info: [experts of the rank, rows] int32, the token's number at its rank. layout_range: [experts of
    the rank, ranks] int64, where the rows of each rank begin in those of an expert, times 2**32, plus how
    many there are."""

    def __init__(self, world: World, handle: ep.Handle, region: Region, expanded: ep.Expanded,
                 max_tokens: int) -> None:
        self.world, self.ep, self.region, self.expanded = world, handle, region, expanded
        self.max_tokens = max_tokens
        self.scratch: Optional[Array] = None  #: of get_next_low_latency_combine_buffer
        # Keeps the region, where the weights will be, as long as it is held.
        self._counts: Optional[Array] = handle.received.expert_counts

    def expire(self) -> None:
        """A later dispatch needs the memory."""
        self._counts = None

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
    """The low-latency calls of one buffer."""

    def __init__(self, rank: Rank, lane: Lane, settings: Settings) -> None:
        self._rank, self._lane, self._settings = rank, lane, settings
        self._worlds: dict[Tuple[Shape, int], World] = {}
        self._waits: dict[int, Array] = {}
        self._held: list[weakref.ref[LowLatencyHandle]] = []

    @property
    def worlds(self) -> Sequence[World]:
        return list(self._worlds.values())

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()

    def _world(self, frame: Frame, x: Array, ids: Array, most: int, experts: int) -> World:
        if experts % self._rank.size():
            raise InvalidArgument(f"deep_ep: num_experts = {experts} must be a multiple of the "
                                  f"{self._rank.size()} ranks")
        hidden = int(x.shape[1])
        shape = Shape(experts, int(ids.shape[1]), hidden, wide_ids=ids.dtype == frame.dtype("int64"),
                      alignment=1, cast=hidden % 128 == 0, host_counts=False)
        if (shape, most) not in self._worlds:
            s = self._settings
            # Two results may be held, and the weights of a combine need room on their way.
            self._worlds[shape, most] = World(self._rank, shape, most, 3, s.sms(self._rank.size()),
                                              s.wait, s.timeout)
        world = self._worlds[shape, most]
        if int(x.shape[0]) > most:
            raise InvalidArgument(f"deep_ep: {x.shape[0]} tokens are more than "
                                  f"num_max_dispatch_tokens_per_rank = {most}")
        world.notice()
        return world

    # ---- dispatch ----------------------------------------------------------------------------------

    def dispatch(self, x: Array, ids: Array, most: int, experts: int, form: Format,
                 counted: Optional[Array], waited: Optional[Array], asynchronous: bool,
                 hooked: bool) -> Tuple[Any, Array, LowLatencyHandle, EventOverlap, Hook]:
        frame = frame_of(x, "x")
        _either(asynchronous, hooked)
        world = self._world(frame, x, ids, most, experts)
        with self._lane.call(None, asynchronous) as call:
            self._make_room(world)
            region, _ = world.take()
            handle = self._send(frame, world, region, x, ids, form)
            expanded = world.group.expand_rows(handle, world.group.group_rows(handle),
                                               rows_per_expert=world.rank.size() * most)
            world.run()
            scales = None if expanded.scales is None else _by_column(frame, expanded.scales)
            counts = frame.clone(handle.received.expert_counts)
            if counted is not None:
                counted += counts
            if waited is not None:
                self._add_waits(frame, world, waited)
            call.keep(frame, x, ids, expanded.rows, scales, counts, counted)
        kept = LowLatencyHandle(world, handle, region, expanded, most)
        self._held.append(weakref.ref(kept))
        out = expanded.rows if scales is None else (expanded.rows, scales)
        return out, counts, kept, call.event, _once(None)

    def _make_room(self, world: World) -> None:
        """Besides this dispatch one more region has to be free, for weights on their way: the oldest
        results go, as their callers know."""
        for held in list(self._held):
            handle = held()
            if handle is None:
                self._held.remove(held)
            elif handle.world is world and world.free_regions < 2:
                handle.expire()
                self._held.remove(held)
                world.notice()

    def _send(self, frame: Frame, world: World, region: Region, x: Array, ids: Array,
              form: Format) -> ep.Handle:
        # Weights come with the combine; here is where they will be.
        weights = frame.full((int(ids.shape[0]), int(ids.shape[1])), 0, "float32", ids)
        ids = frame.contiguous(ids)
        if not form.fp8:
            return world.dispatch(region, x, ids, weights)
        if not form.round_scale:
            return world.dispatch(region, x, ids, weights, cast=True)
        rows, scales = cast_rounded(frame, x, form.ue8m0)
        return world.dispatch(region, rows, ids, weights, scales=scales)

    def _add_waits(self, frame: Frame, world: World, waited: Array) -> None:
        """Nanoseconds that this dispatch has waited for each rank."""
        waits = frame.adopt(world.group.statistics_memory(world.rank.rank())[1])
        before = self._waits.get(id(world))
        waited += waits if before is None else waits - before
        self._waits[id(world)] = frame.clone(waits)

    # ---- combine -----------------------------------------------------------------------------------

    def combine(self, x: Array, ids: Array, weights: Array, handle: LowLatencyHandle, zero_copy: bool,
                asynchronous: bool, hooked: bool,
                out: Optional[Array]) -> Tuple[Array, EventOverlap, Hook]:
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
        world.notice()
        with self._lane.call(None, asynchronous) as call:
            self._send_weights(frame, handle, weights)
            world.group.reduce_rows(handle.ep, x, rows_per_expert=rows, weighted=True)
            made = world.group.combine(handle.ep, out=out)
            world.run()
            call.keep(frame, x, ids, weights, made)
        return made, call.event, _once(None)

    def _send_weights(self, frame: Frame, handle: LowLatencyHandle, weights: Array) -> None:
        """The weights of this rank's tokens go where the tokens went, as rows of their own."""
        world, top_k = handle.world, handle.world.shape.top_k
        rows = frame.contiguous(frame.pad_columns(weights, -(-top_k // 4) * 4, 0))
        region, _ = world.take()
        sent = world.dispatch(region, rows, None, None, routing=handle.ep)
        world.run()
        frame.copy(handle.ep.received.weights, sent.received.rows[:, :top_k])
        del sent
        # Read in the order of the stream; the next call may have the region.
        region.user = None

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


def _once(work: Optional[Hook]) -> Hook:
    """A hook that does its work when it is called first, and nothing later."""
    left = [work]

    def hook() -> None:
        now, left[0] = left[0], None
        if now is not None:
            now()
    return hook


def _by_column(frame: Frame, scales: Array) -> Array:
    """The same values, each expert's by column: strides (rows * n, 1, rows)."""
    experts, rows, n = (int(size) for size in scales.shape)
    out = frame.empty((experts, n, rows), scales.dtype, scales)
    frame.copy(out, frame.swap_last(scales))
    return frame.swap_last(out)
