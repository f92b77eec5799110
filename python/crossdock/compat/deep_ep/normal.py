"""Dispatch and combine of many tokens: what Buffer.dispatch and Buffer.combine do."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json
import weakref
from typing import Any, Optional, Sequence, Tuple, Union

from ... import ep
from ...errors import DeadlineExceeded, InvalidArgument, Unsupported
from .events import EventOverlap, capturing
from .frame import Frame, frame_of
from .lane import Event, Lane
from .ranks import Rank, do_all
from .settings import Settings
from .world import Shape, World

Array = Any
Rows = Union[Array, Tuple[Array, Array]]

__all__ = ["Dispatched", "How", "Layout", "LikeTopK", "Normal", "NormalHandle", "split"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Who gets how many of this rank's tokens."""

    tokens_per_rank: Array  #: [ranks] int32
    tokens_per_expert: Array  #: [experts] int32
    is_token_in_rank: Array  #: [tokens, ranks] bool


@dataclasses.dataclass(frozen=True, eq=False)
class NormalHandle:
    """The routing of a dispatch, for combine and for dispatches that take the same ways. Its memory is a
    few words for each token.

    As a sequence it has the places of an intranode handle of DeepEP: of these there are the first,
    rank_prefix_matrix, which is made when it is asked for, and is_token_in_rank."""

    world: World
    ep: ep.Handle
    is_token_in_rank: Array
    rows: int  #: of recv_x
    top_k: int  #: columns of recv_topk_idx; 0: it was dispatched without
    guessed: bool = False  #: rows are the caller's guess, which the host may learn to be too few

    @property
    def rank_prefix_matrix(self) -> Array:
        """[ranks, ranks] int32: in the column of this rank, where the rows of each rank end in recv_x. What
        other ranks receive is not known here: -1."""
        frame = frame_of(self.is_token_in_rank, "is_token_in_rank")
        ends = frame.adopt(self.ep.received.source_ends)
        here = frame.arange(self.world.rank.size(), "int32", ends) == self.world.rank.rank()
        return frame.where(here[None, :], ends[:, None], -1)

    def __len__(self) -> int:
        return len(_PARTS)

    def __getitem__(self, index: int) -> Array:
        name, missing = _PARTS[index]
        if missing:
            raise Unsupported(f"deep_ep: handle[{index}] would be {name}: {missing}")
        return getattr(self, name)


_CHANNELS = "rows go straight to their place here, not through channels"
#: Of the tuple that DeepEP's intranode dispatch returns, and why one is not there.
_PARTS = (
    ("rank_prefix_matrix", ""),
    ("channel_prefix_matrix", _CHANNELS),
    ("recv_channel_prefix_matrix", _CHANNELS),
    ("recv_src_idx", "it lies with recv_x, whose memory a handle does not keep"),
    ("is_token_in_rank", ""),
    ("send_head", _CHANNELS),
)


@dataclasses.dataclass(frozen=True)
class LikeTopK:
    """Where the tokens of a dispatch go, as its caller says it."""

    topk_idx: Optional[Array]
    topk_weights: Optional[Array]
    is_token_in_rank: Array
    tokens_per_expert: Array

    @property
    def experts(self) -> int:
        return int(self.tokens_per_expert.shape[0])


@dataclasses.dataclass(frozen=True)
class How:
    """The order of a call among others. ``on_comm_stream`` changes nothing: arrays of a call are kept for both
    streams."""

    previous_event: Event = None
    asynchronous: bool = False
    on_comm_stream: bool = False

    def __post_init__(self) -> None:
        if self.on_comm_stream and not (self.asynchronous and self.previous_event is not None):
            raise InvalidArgument("deep_ep: allocate_on_comm_stream needs previous_event and an "
                                  "asynchronous call: what is allocated there may be in use on the "
                                  "current stream else")


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """What a dispatch returns, in this order."""

    recv_x: Rows
    recv_topk_idx: Optional[Array]
    recv_topk_weights: Optional[Array]
    counts: Optional[list[int]]
    handle: Optional[NormalHandle]
    event: EventOverlap

    def as_tuple(self) -> Tuple[Any, ...]:
        return (self.recv_x, self.recv_topk_idx, self.recv_topk_weights, self.counts, self.handle,
                self.event)


def split(x: Rows) -> Tuple[Array, Optional[Array]]:
    """Rows and their scales; x may be a tuple of both."""
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise InvalidArgument(f"deep_ep: x is a tuple of {len(x)}: it must be (rows, scales)")
        return x[0], x[1]
    return x, None


def layout_of(frame: Frame, topk_idx: Array, experts: int, world: int) -> Layout:
    """From [tokens, top_k] expert ids, -1 for none."""
    if experts % world:
        raise InvalidArgument(f"deep_ep: num_experts = {experts} must be a multiple of the {world} ranks")
    owner = frame.where(topk_idx < 0, -1, topk_idx // (experts // world))
    in_rank = (owner[:, :, None] == frame.arange(world, "int64", topk_idx)[None, None, :]).any(1)
    per_rank = frame.cast(in_rank.sum(0), frame.dtype("int32"))
    return Layout(per_rank, frame.counts(topk_idx, experts), in_rank)


class Normal:
    """The calls of one buffer. ``room``: bytes that the caller has set aside, which decide for how many
    tokens the group is made where that is more than the first call has."""

    def __init__(self, rank: Rank, lane: Lane, room: int, settings: Settings) -> None:
        self._rank, self._lane, self._room, self._settings = rank, lane, room, settings
        self._worlds: dict[Shape, World] = {}
        # Ids by the layout tensor made from them: dispatch may be given that tensor alone.
        self._ids: dict[int, Tuple[Any, Array]] = {}

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

    # ---- layout ----------------------------------------------------------------------------------

    def layout(self, topk_idx: Array, experts: int, how: How) -> Tuple[Layout, EventOverlap]:
        frame = frame_of(topk_idx, "topk_idx")
        with self._lane.call(how.previous_event, how.asynchronous) as call:
            made = layout_of(frame, topk_idx, experts, self._rank.size())
            # Field by field: dataclasses.astuple copies tensors, and the copies would be kept.
            call.keep(frame, topk_idx, made.tokens_per_rank, made.tokens_per_expert,
                      made.is_token_in_rank)
        key = id(made.is_token_in_rank)
        reference = weakref.ref(made.is_token_in_rank, lambda _: self._ids.pop(key, None))
        self._ids[key] = (reference, topk_idx)
        return made, call.event

    def _ids_of(self, is_token_in_rank: Array) -> Optional[Array]:
        """Those that a layout was made from."""
        known = self._ids.get(id(is_token_in_rank))
        return known[1] if known is not None and known[0]() is is_token_in_rank else None

    def _instead_of_ids(self, frame: Frame, is_token_in_rank: Array, experts: int) -> Array:
        """The first expert of every rank that the token goes to; made on the stream of the dispatch, which
        need not wait for the current one."""
        world = self._rank.size()
        first = frame.arange(world, "int64", is_token_in_rank) * (experts // world)
        return frame.where(is_token_in_rank, first[None, :], -1)

    # ---- dispatch --------------------------------------------------------------------------------

    def _world(self, shape: Shape, tokens: int) -> World:
        if shape not in self._worlds:
            s = self._settings
            least = s.least_tokens(shape, self._rank.size(), self._room)
            self._worlds[shape] = World(self._rank, shape, max(tokens, least), s.regions,
                                        s.sms(self._rank.size()), s.wait, s.timeout)
        world = self._worlds[shape]
        world.need_tokens(tokens, "make the buffer with more num_nvl_bytes, set "
                          "CROSSDOCK_DEEP_EP_MAX_TOKENS, or make the largest call first")
        world.notice()
        return world

    def dispatch(self, x: Rows, like: LikeTopK, worst: int, alignment: int, how: How) -> Dispatched:
        """Tokens by their ids. ``worst``: rows of the output, whose number the host does not learn then;
        0: as many as arrive."""
        rows, scales = split(x)
        frame = frame_of(rows, "x")
        ids = self._ids_of(like.is_token_in_rank) if like.topk_idx is None else like.topk_idx
        real, top_k = ids is not None, 0 if like.topk_idx is None else int(like.topk_idx.shape[1])
        wide, choices = (True, self._rank.size()) if ids is None else (
            ids.dtype == frame.dtype("int64"), int(ids.shape[1]))
        world = self._world(_shape_of(rows, scales, choices, wide, like.experts), int(rows.shape[0]))
        if worst > world.capacity:
            raise InvalidArgument(f"deep_ep: num_worst_tokens = {worst} is more than the "
                                  f"{world.capacity} rows that can arrive at a rank")
        with self._lane.call(how.previous_event, how.asynchronous) as call:
            # Before anything is launched: what fails after that leaves a kernel behind that reads them.
            call.keep(frame, rows, scales, like.topk_idx, like.topk_weights, like.is_token_in_rank, ids)
            if ids is None:
                ids = self._instead_of_ids(frame, like.is_token_in_rank, like.experts)
            region, lend = world.take()
            handle = world.dispatch(region, rows, frame.contiguous(ids), like.topk_weights,
                                    scales=_dense(frame, scales))
            world.run()
            n = worst or handle.rows(world.timeout)
            out = _received(frame, handle, n, lend)
            out_ids, out_weights = _choices(frame, handle, n, lend, worst, ids.dtype) if top_k else (
                None, None)
            counts = [] if worst else self._counts(world, handle, like, real, alignment)
            call.keep(frame, *split(out), out_ids, out_weights)
        kept = NormalHandle(world, handle, like.is_token_in_rank, n, top_k,
                            0 < worst < world.capacity and not capturing())
        return Dispatched(out, out_ids, out_weights, counts, kept, call.event)

    def _counts(self, world: World, handle: ep.Handle, like: LikeTopK, real: bool,
                alignment: int) -> list[int]:
        """Choices of this rank's experts, each rounded up to a multiple of ``alignment``."""
        if real:
            counts = handle.expert_counts(world.timeout)
        else:
            sent = json.dumps([int(n) for n in like.tokens_per_expert.tolist()]).encode()
            sums = [sum(each) for each in zip(*(json.loads(data) for data in
                                                self._rank.gather(sent, world.timeout)))]
            here = like.experts // self._rank.size()
            counts = sums[self._rank.rank() * here:(self._rank.rank() + 1) * here]
        return [-(-n // alignment) * alignment for n in counts]

    def dispatch_again(self, x: Rows, handle: NormalHandle, how: How) -> Dispatched:
        """Other rows, as many, the same ways."""
        rows, scales = split(x)
        frame, world = frame_of(rows, "x"), handle.world
        world.notice()
        with self._lane.call(how.previous_event, how.asynchronous) as call:
            region, lend = world.take()
            again = world.dispatch(region, rows, None, None, scales=_dense(frame, scales),
                                   routing=handle.ep)
            world.run()
            out = _received(frame, again, handle.rows, lend)
            call.keep(frame, rows, scales, *split(out))
        return Dispatched(out, None, None, None, None, call.event)

    # ---- combine ---------------------------------------------------------------------------------

    def combine(self, x: Array, handle: NormalHandle, weights: Optional[Array], bias: Sequence[Array],
                how: How) -> Tuple[Array, Optional[Array], EventOverlap]:
        """The sum of what all ranks have made of this rank's tokens."""
        frame, world = frame_of(x, "x"), handle.world
        if int(x.shape[0]) != handle.rows:
            raise InvalidArgument(f"deep_ep combine: x has {x.shape[0]} rows, and the dispatch has "
                                  f"delivered {handle.rows}: give a row for each")
        if weights is not None and not handle.top_k:
            raise InvalidArgument("deep_ep combine: topk_weights need a dispatch with topk_idx")
        _need_room(handle)
        world.notice()
        with self._lane.call(how.previous_event, how.asynchronous) as call:
            made = world.group.combine(handle.ep, frame.contiguous(x), bias=bias,
                                       row_weights=None if weights is None else frame.contiguous(weights),
                                       weights=weights is not None)
            world.run()
            out, sums = made if weights is not None else (made, None)
            call.keep(frame, x, weights, *bias, out, sums)
        return out, sums, call.event


def _need_room(handle: NormalHandle) -> None:
    """Before a combine: all that arrived has to have a row. Waits for nothing, so this sees what the host has
    learnt by now."""
    if not handle.guessed:
        return
    try:
        arrived = handle.ep.rows(0)
    except DeadlineExceeded:
        return
    if arrived > handle.rows:
        raise InvalidArgument(f"deep_ep: {arrived} rows have arrived where num_worst_tokens = {handle.rows}: the "
                              f"others are lost: give a number that is enough, at most {handle.world.capacity}")


def _shape_of(rows: Array, scales: Optional[Array], choices: int, wide: bool, experts: int) -> Shape:
    hidden = int(rows.shape[1])
    scale_bytes = 0 if scales is None else int(scales.shape[1]) * int(scales.dtype.itemsize)
    # A bf16 row and an fp32 scale for 128 values fit anyway: one group for calls with and without.
    return Shape(experts, choices, hidden, wide_ids=wide,
                 scale_bytes=scale_bytes if scale_bytes > hidden // 128 * 4 else 0)


def _dense(frame: Frame, scales: Optional[Array]) -> Optional[Array]:
    """Scales may come with any strides; a row of them has to be contiguous."""
    return None if scales is None else frame.contiguous(scales)


def _received(frame: Frame, handle: ep.Handle, n: int, lend: bool) -> Rows:
    """The first ``n`` rows: where they arrived, or a copy."""
    got = handle.received
    rows, scales = got.rows[:n], got.scales
    if not lend:
        rows = frame.clone(rows)
    if scales is None:
        return rows
    return rows, scales[:n] if lend else frame.clone(scales[:n])


def _choices(frame: Frame, handle: ep.Handle, n: int, lend: bool, worst: int,
             dtype: Any) -> Tuple[Array, Optional[Array]]:
    """Ids and weights of the first ``n`` rows; rows behind those that arrived get ids of -1."""
    got = handle.received
    ids, weights = got.ids[:n], got.weights
    if worst:
        used = frame.arange(n, "int32", ids) < got.source_ends[-1]
        ids = frame.where(used[:, None], ids, -1)
    ids = frame.cast(ids, dtype)
    if ids.dtype == frame.dtype("int32") and not worst and not lend:
        ids = frame.clone(ids)
    if weights is not None:
        weights = weights[:n] if lend else frame.clone(weights[:n])
    return ids, weights
