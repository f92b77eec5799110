"""Dispatch and combine of ElasticBuffer: compact, a row for each token that arrives, or expanded, a row
for each of its choices, expert after expert."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from typing import Any, Optional, Sequence, Tuple, Union

from ... import ep
from ...errors import InvalidArgument
from .elastic_handle import EPHandle
from .events import EventOverlap, event_of
from .frame import Frame, frame_of
from .lane import Event, Lane
from .normal import split
from .ranks import Rank, do_all
from .settings import Settings
from .world import Shape, World

Array = Any
Rows = Union[Array, Tuple[Array, Array]]

__all__ = ["ElasticCalls", "Wanted", "by_columns"]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """How a dispatch shall deliver."""

    experts: int
    most: int  #: tokens of a rank; 0: what the ranks have agreed on
    alignment: int
    sync: bool
    expand: bool
    by_column: bool
    num_sms: int
    copy_ids: bool


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of a call among others."""

    previous: Event = None
    before_epilogue: Event = None
    asynchronous: bool = False


@dataclasses.dataclass
class Outputs:
    rows: Array
    scales: Optional[Array]
    ids: Optional[Array]
    weights: Optional[Array]

    def x(self) -> Rows:
        return self.rows if self.scales is None else (self.rows, self.scales)


class ElasticCalls:
    """The calls of one buffer. ``tokens``, ``hidden``: what it was made for, 0 for what calls say."""

    def __init__(self, rank: Rank, lane: Lane, tokens: int, hidden: int, room: int,
                 settings: Settings) -> None:
        self._rank, self._lane, self._settings = rank, lane, settings
        self._tokens, self._hidden, self._room = tokens, hidden, room
        self._worlds: dict[Shape, World] = {}

    @property
    def worlds(self) -> Sequence[World]:
        return list(self._worlds.values())

    @property
    def groups(self) -> Sequence[ep.Group]:
        return [world.group for world in self._worlds.values()]

    def close(self) -> None:
        worlds = self.worlds
        self._worlds.clear()
        do_all(world.close for world in worlds)

    def world(self, shape: Shape, tokens: int) -> World:
        if shape not in self._worlds:
            s, size = self._settings, self._rank.size()
            least = self._tokens or s.least_tokens(shape, size, self._room)
            self._worlds[shape] = World(self._rank, shape, max(tokens, least), s.regions, s.sms(size),
                                        s.wait, s.timeout)
        world = self._worlds[shape]
        world.need_tokens(tokens, "make the buffer with a larger num_max_tokens_per_rank")
        world.notice()
        return world

    # ---- dispatch ----------------------------------------------------------------------------------

    def dispatch(self, x: Rows, ids: Array, weights: Optional[Array], wanted: Wanted, order: Order,
                 stats: Optional[Array], again: Optional[EPHandle]) -> Tuple[Any, ...]:
        """``again``: of a dispatch with the same ids, whose numbers the host knows then."""
        rows, scales = split(x)
        frame = frame_of(rows, "x")
        # Not the group of ``again``: other rows may be wider, and its routing is not used.
        world = self.world(self._shape(frame, rows, scales, ids, wanted),
                           max(int(rows.shape[0]), wanted.most))
        if not wanted.most:
            wanted = dataclasses.replace(wanted, most=world.max_tokens)
        with self._lane.call(order.previous, order.asynchronous) as call:
            _wait_also(order.before_epilogue)
            # Before anything is launched: what fails after that leaves a kernel behind that reads them.
            call.keep(frame, rows, scales, ids, weights, stats)
            region, lend = world.take()
            by_column = wanted.by_column and not wanted.expand and scales is not None
            factors = None if scales is None else frame.contiguous(scales)
            beside = self._beside(world, rows, weights, factors, wanted, again, int(ids.shape[1]))
            # Not by the routing of the handle: what it would deliver besides rows lay in a region.
            handle = world.dispatch(region, rows, frame.contiguous(ids), weights, scales=factors,
                                    scales_by_column=by_column, expanded=beside)
            grouped = None
            if wanted.expand:
                grouped = world.group.grouped(handle) if beside else world.group.group_rows(handle)
            world.run()
            made = self._handle(frame, world, handle, grouped, ids, wanted, again)
            out = self._expanded(frame, world, handle, grouped, beside, made, wanted) if grouped else (
                self._compact(frame, handle, made, wanted, lend, ids.dtype))
            if stats is not None:
                stats += made.num_unaligned_recv_tokens_per_expert
            call.keep(frame, out.rows, out.scales, out.ids, out.weights, *made.arrays)
        return out.x(), out.ids, out.weights, made, call.event

    # What comes back is as wide as what is sent, but where several values lie in one integer.
    def _shape(self, frame: Frame, rows: Array, scales: Optional[Array], ids: Array,
               wanted: Wanted) -> Shape:
        width, item = int(rows.shape[1]), int(rows.dtype.itemsize)
        hidden = width if item == 2 or not frame.integers(rows.dtype) else self._hidden or width
        scale_bytes = 0 if scales is None else int(scales.shape[1]) * int(scales.dtype.itemsize)
        return Shape(wanted.experts, int(ids.shape[1]), hidden,
                     wide_ids=ids.dtype == frame.dtype("int64"),
                     row_bytes=width * item if width * item > hidden * 2 else 0,
                     scale_bytes=scale_bytes if scale_bytes > hidden // 128 * 4 else 0,
                     alignment=wanted.alignment,
                     expand_sms=self._settings.expand_sms if wanted.expand else 0)

    def _places(self, world: World, wanted: Wanted, again: Optional[EPHandle],
                top_k: int) -> Optional[int]:
        """Rows of an expanded output, where they are known before the dispatch."""
        if again is not None:
            return again.num_expanded_tokens
        if wanted.sync:
            return None
        local, align = wanted.experts // world.rank.size(), wanted.alignment
        n = world.rank.size() * wanted.most
        return -(-(n * min(top_k, local) + (align - 1) * local) // align) * align

    def _beside(self, world: World, rows: Array, weights: Optional[Array], scales: Optional[Array],
                wanted: Wanted, again: Optional[EPHandle], top_k: int) -> Optional[ep.Expanded]:
        """Where rows are copied by expert while others are on their way, if they can be."""
        places = self._places(world, wanted, again, top_k)
        if not wanted.expand or not world.shape.expand_sms or places is None:
            return None
        return world.group.expanded_for(rows, weights, scales=scales, places=max(places, 1),
                                        scales_by_column=wanted.by_column, rank=world.rank.rank())

    def _handle(self, frame: Frame, world: World, handle: ep.Handle, grouped: Optional[ep.Grouped],
                ids: Array, wanted: Wanted, again: Optional[EPHandle]) -> EPHandle:
        got, align, most = handle.received, wanted.alignment, wanted.most
        known = self._places(world, wanted, again, int(ids.shape[1]))
        counts, ends = frame.clone(got.expert_counts), frame.clone(got.source_ends)
        per_expert: list[int] = []
        if again is not None:
            n = again.num_recv_tokens
            per_expert = again.num_recv_tokens_per_expert_list
        elif wanted.sync:
            n = handle.rows(world.timeout)
            per_expert = [-(-c // align) * align for c in handle.expert_counts(world.timeout)]
        else:
            n = world.rank.size() * most
        places = sum(per_expert) if known is None else known
        if grouped is not None:
            psum = frame.cast(grouped.offsets[:-1] + counts, frame.dtype("int32"))
        else:
            aligned = (counts + (align - 1)) // align * align
            psum = frame.cast(aligned.cumsum(0), frame.dtype("int32"))
        synced = wanted.sync if again is None else again.synced
        if synced:
            arrived = frame.clone(got.ids[:n])
        else:
            arrived = frame.where((frame.arange(n, "int32", ids) < ends[-1])[:, None], got.ids[:n], -1)
        # Of its own, so that the handle keeps no region.
        positions = None if grouped is None else frame.where(arrived >= 0, grouped.positions[:n], -1)
        return EPHandle(world, handle, positions, frame.clone(got.tokens[:n]), arrived, synced,
                        wanted.expand, wanted.experts, align, most, wanted.num_sms,
                        frame.clone(ids) if wanted.copy_ids and again is None else ids, n,
                        places if wanted.expand else 0, per_expert, ends, psum, counts)

    def _compact(self, frame: Frame, handle: ep.Handle, made: EPHandle, wanted: Wanted, lend: bool,
                 dtype: Any) -> Outputs:
        got, n = handle.received, made.num_recv_tokens
        rows, scales, weights = got.rows[:n], got.scales, got.weights
        if not lend:
            rows = frame.clone(rows)
        if weights is not None:
            weights = weights[:n] if lend else frame.clone(weights[:n])
        if scales is not None and wanted.by_column:
            scales = by_columns(frame, scales[:n])
        elif scales is not None:
            scales = scales[:n] if lend else frame.clone(scales[:n])
        ids = frame.cast(made.received_ids, dtype)
        if ids is made.received_ids:  # callers may write to theirs
            ids = frame.clone(ids)
        return Outputs(rows, scales, ids, weights)

    def _expanded(self, frame: Frame, world: World, handle: ep.Handle, grouped: ep.Grouped,
                  out: Optional[ep.Expanded], made: EPHandle, wanted: Wanted) -> Outputs:
        places = made.num_expanded_tokens
        if out is None:
            out = world.group.expand_rows(handle, grouped, places=max(places, 1),
                                          scales_by_column=wanted.by_column)
            world.run()
        scales = None if out.scales is None else out.scales[:places]
        return Outputs(out.rows[:places], scales, None,
                       None if out.weights is None else out.weights[:places])

    # ---- barrier -----------------------------------------------------------------------------------

    def barrier(self, with_cpu_sync: bool) -> None:
        size = self._rank.size()
        world = self.world(Shape(experts=size, top_k=1, hidden=8, wide_ids=False), 1)
        like = world.memory
        frame = frame_of(like, "memory")
        with self._lane.call() as call:
            region, _ = world.take()
            none = frame.empty((0, 16), like.dtype, like)
            handle = world.dispatch(region, none, frame.full((0, 1), -1, "int32", like), None)
            world.run()
            call.keep(frame, none)
        if with_cpu_sync:
            handle.expert_counts(world.timeout)

    # ---- combine -----------------------------------------------------------------------------------

    def combine(self, x: Array, handle: EPHandle, weights: Optional[Array], bias: Sequence[Array],
                order: Order) -> Tuple[Array, Optional[Array], EventOverlap]:
        frame, world = frame_of(x, "x"), handle.world
        rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        if int(x.shape[0]) != rows:
            raise InvalidArgument(f"deep_ep combine: x has {x.shape[0]} rows: it must have the {rows} of "
                                  "the dispatch")
        world.notice()
        with self._lane.call(order.previous, order.asynchronous) as call:
            _wait_also(order.before_epilogue)
            by_row = weights
            if handle.positions is not None and weights is not None:
                here = handle.positions >= 0
                by_row = frame.where(here, weights[frame.where(here, handle.positions, 0)], 0)
            if by_row is not None:
                by_row = frame.contiguous(frame.cast(by_row, frame.dtype("float32")))
            made: Any
            if handle.do_expand:
                if rows:
                    world.group.reduce_rows(handle.dispatched, frame.contiguous(x),
                                            ids=handle.received_ids)
                made = world.group.combine(handle.dispatched, row_weights=by_row, bias=bias,
                                           weights=weights is not None)
            else:
                made = world.group.combine(handle.dispatched, frame.contiguous(x), row_weights=by_row,
                                           bias=bias, weights=weights is not None)
            world.run()
            out, sums = made if weights is not None else (made, None)
            call.keep(frame, x, weights, *bias, out, sums, handle.positions, handle.received_ids)
        return out, sums, call.event


def _wait_also(event: Event) -> None:
    """An epilogue of its own there is not: the whole call waits."""
    before = event_of(event)
    if before is not None:
        before.current_stream_wait()


def by_columns(frame: Frame, scales: Array) -> Array:
    """[rows, n] by column, each column on a multiple of 16 bytes and no farther apart than that."""
    rows, n = (int(size) for size in scales.shape)
    out = frame.empty((n, -(-rows // 4) * 4), scales.dtype, scales)
    columns = out[:, :rows]
    frame.copy(columns, frame.swap_last(scales))
    return frame.swap_last(out)[:rows]
