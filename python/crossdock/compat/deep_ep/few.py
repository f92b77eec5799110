"""The groups behind low-latency calls: one for the rows, on the path for few tokens, whose slots are used
in turns, and a small one for the weights, which come with the combine only and follow the rows.

Ranks that are left out are masked in both.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any, Sequence

from ... import ep
from ...errors import InvalidArgument
from .ranks import Rank, do_all
from .settings import Settings
from .world import Shape

__all__ = ["MOST_TOKENS", "SLOTS", "FewWorld", "WaitClock", "options_of", "why_plain"]

#: Results that may be held at a time: a dispatch ends the one before the last.
SLOTS = 2
#: Of a rank in a call.
MOST_TOKENS = 1024


def options_of(shape: Shape, world: int, tokens: int, wait: float, shrink: bool,
               copy_sms: int = 0) -> ep.Options:
    """Of the group for the rows, which may travel compressed where a group can do that. ``copy_sms``: SMs
    that copy them to their experts in the same launch."""
    plain = ep.Options(
        experts=shape.experts, top_k=shape.top_k, max_tokens=tokens, hidden=shape.hidden,
        wide_ids=shape.wide_ids, slots=0, fall_back=False, small_tokens=tokens, small_slots=SLOTS,
        row_bytes=shape.hidden if shape.cast else 0, wait=wait, cast=shape.cast, expert_alignment=1,
        host_counts=False, masks=shrink, mask_late=shrink, small_expand_sms=copy_sms)
    return plain if why_plain(plain, world) else dataclasses.replace(plain, compressed=True)


def why_plain(options: ep.Options, world: int) -> str:
    """Why rows of such a group may not travel compressed; empty if they may."""
    try:
        ep.sizes(dataclasses.replace(options, compressed=True), world)
    except InvalidArgument as refused:
        return refused.message
    return ""


class WaitClock:
    """Nanoseconds waited for each rank, [ranks] int64, by what is called after this was made, in the order
    of the stream. ``kept``: where groups keep them."""

    def __init__(self, frame: Any, kept: Sequence[Any]) -> None:
        self._frame = frame
        self._kept = [(waits, frame.clone(waits)) for waits in kept]

    def add(self, waited: Any) -> None:
        """To ``waited``."""
        for now, before in self._kept:
            self._frame.copy(waited, waited + (now - before))


class FewWorld:
    """The groups of all ranks for calls of one shape. Collective to make."""

    def __init__(self, rank: Rank, shape: Shape, tokens: int, settings: Settings, shrink: bool) -> None:
        self.rank, self.shape, self.timeout = rank, shape, settings.timeout
        mine = [dataclasses.asdict(shape), tokens, shrink]
        for other, data in enumerate(rank.gather(json.dumps(mine).encode(), self.timeout)):
            if json.loads(data) != mine:
                raise InvalidArgument(f"deep_ep: rank {rank.rank()} calls with {mine}, and rank {other} "
                                      f"with {json.loads(data)}: all ranks make the same calls")
        if tokens > MOST_TOKENS:
            raise InvalidArgument(f"deep_ep: num_max_dispatch_tokens_per_rank = {tokens} must be at most "
                                  f"{MOST_TOKENS}; dispatch() is for more")
        options = options_of(shape, rank.size(), tokens, settings.wait, shrink, settings.expand_sms)
        self.options = options
        self.group: ep.Group = rank.make(ep.Group, options, self.timeout)
        weights = self.weight_options(options, shape)
        self._weights: ep.Group = rank.make(ep.Group, weights, self.timeout)
        self._columns = weights.row_bytes // 4
        # Where each group says who is left out: it stays where it is.
        self._mask_words = [group.mask_memory(rank.rank()) for group in self.groups] if shrink else []
        self._pending: dict[int, bool] = {}  # masks that the twin has not run yet

    @staticmethod
    def weight_options(options: ep.Options, shape: Shape) -> ep.Options:
        """Of the group for the weights beside that of the rows."""
        columns = -(-shape.top_k // 4) * 4
        return dataclasses.replace(options, hidden=8, row_bytes=columns * 4, cast=False, expert_alignment=0,
                                   compressed=False, small_expand_sms=0)

    @property
    def groups(self) -> Sequence[ep.Group]:
        return self.group, self._weights

    def clock(self, frame: Any, *, dispatches: bool = False, weights: bool = False,
              combines: bool = False) -> WaitClock:
        """Of what waits from now on: dispatches of rows, those of weights, combines."""
        kept = []
        for group, part, wanted in ((self.group, 1, dispatches), (self._weights, 1, weights),
                                    (self.group, 2, combines)):
            if wanted:
                kept.append(frame.adopt(group.statistics_memory(self.rank.rank())[part]))
        return WaitClock(frame, kept)

    def run(self) -> None:
        """What was called, in the twin; on GPUs it runs by itself."""
        for group in self.groups:
            self.rank.meet(group, self.timeout)
        self._pending.clear()

    def bring_weights(self, frame: Any, handle: ep.Handle, ids: Any, weights: Any) -> None:
        """The weights of this rank's tokens go the ways of the tokens and into the handle."""
        rows = frame.contiguous(frame.pad_columns(weights, self._columns, 0))
        self._mask_in(1, 0)
        sent = self._weights.dispatch(rows, frame.contiguous(ids), rank=self.rank.rank())
        self.rank.meet(self._weights, self.timeout)
        self._mask_in(0, 1)
        frame.copy(handle.received.weights, sent.received.rows[:, :self.shape.top_k])
        sent.close()

    # ---- ranks that are left out -------------------------------------------------------------------

    def _mask_in(self, group: int, other: int) -> None:
        """Whom ``other`` goes on without, in the order of the stream: a rank that was late for the weights
        alone would get sums with weights that have not come."""
        if self._mask_words:
            mine = self._mask_words[group]
            mine |= self._mask_words[other]

    def mask(self, peer: int, masked: bool) -> None:
        for group in self.groups:
            group.mask(peer, masked, rank=self.rank.rank())
        self._pending[peer] = masked

    def add_masks(self, frame: Any, told: Any) -> None:
        """``told``, int32 [ranks], becomes 1 for each rank that is left out."""
        mine = self.rank.rank()
        if self.rank.twin:
            out = {peer for group in self.groups for peer in group.masked(rank=mine)}
            for peer in range(self.rank.size()):
                if self._pending.get(peer, peer in out):
                    told[peer] = 1
            return
        for group in self.groups:
            words = frame.empty((self.rank.size(),), told.dtype, told)
            group.read_mask(words, rank=mine)
            frame.copy(told, told | words)

    def close(self) -> None:
        self._mask_words = []
        do_all(functools.partial(self.rank.leave, group) for group in self.groups)
