"""The group behind a buffer, and the memory its rows arrive in.

A buffer learns experts, top_k and hidden when it is first used, so that is when its group is made: the
ranks agree about the largest number of tokens then. Rows arrive in regions of ``Group.user_memory``, and
what the experts made of them is read by peers in one block behind those:

    | region 0 | region 1 | ... | expert outputs |

A handle therefore keeps the routing only. A region is free again when no array of it is left, and when
the caller's stream has passed the point where that was noticed. What a graph writes when it is replayed is not
seen here, so regions whose arrays a capture has got are for captures from then on: those share them, as
replays come one after the other, and what other calls return is never written by a replay.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json
from typing import Any, Optional

from ... import ep
from ...errors import Busy, InvalidArgument
from .events import EventHandle, capturing
from .ranks import Rank

__all__ = ["TOKENS_OF_AN_SM", "Region", "Shape", "World"]

_LINE = 128
#: The most that the counts of one SM of a dispatch have room for.
TOKENS_OF_AN_SM = 4094


@dataclasses.dataclass(frozen=True)
class Shape:
    """What calls of one kind have in common."""

    experts: int
    top_k: int
    hidden: int
    wide_ids: bool
    row_bytes: int = 0
    scale_bytes: int = 0
    alignment: int = 0
    cast: bool = False
    host_counts: bool = True
    expand_sms: int = 0


@dataclasses.dataclass
class Region:
    """A place for the rows of one dispatch."""

    output: Any
    user: Optional[ep.Handle] = None  #: whose arrays lie here; None: free
    fence: Optional[EventHandle] = None  #: the caller's stream when they were seen to be gone
    freed: int = 0  #: when that was, in calls
    captured: bool = False  #: a capture has given out its arrays: for captures alone
    passing: bool = False  #: a capture copies from it: for copies alone, which replays may write between


class World:
    """A group of all ranks and the regions of this one."""

    def __init__(self, rank: Rank, shape: Shape, tokens: int, regions: int, sms: tuple[int, int],
                 wait: float, timeout: float) -> None:
        self.rank, self.shape, self.timeout = rank, shape, timeout
        agreed = [json.loads(data) for data in
                  rank.gather(json.dumps([dataclasses.asdict(shape), tokens, *sms]).encode(), timeout)]
        self._check(agreed)
        self.max_tokens = -(-max(each[1] for each in agreed) // 32) * 32
        fewest = -(-self.max_tokens // TOKENS_OF_AN_SM)  # SMs, whatever the caller would have
        options = ep.Options(
            experts=shape.experts, top_k=shape.top_k, max_tokens=self.max_tokens, hidden=shape.hidden,
            row_bytes=shape.row_bytes, scale_bytes=shape.scale_bytes, wide_ids=shape.wide_ids, slots=0,
            fall_back=False, user_bytes=_LINE, dispatch_sms=[max(each[2], fewest) for each in agreed],
            combine_sms=[each[3] for each in agreed], wait=wait, cast=shape.cast,
            expert_alignment=shape.alignment, host_counts=shape.host_counts,
            expand_sms=shape.expand_sms)
        sizes = ep.sizes(options, rank.size())
        self._block = -(-sizes.rows_bytes // _LINE) * _LINE
        self.group: ep.Group = rank.make(ep.Group, dataclasses.replace(
            options, user_bytes=regions * self._block + sizes.input_bytes), timeout)
        self.capacity = sizes.capacity
        self._calls = 0
        self.memory = self.group.user_memory(rank.rank())
        self._input = self.memory[regions * self._block:]
        self.regions = [Region(self.memory[i * self._block:(i + 1) * self._block])
                        for i in range(regions)]

    def _check(self, agreed: list[Any]) -> None:
        for other, (shape, *_) in enumerate(agreed):
            if shape != dataclasses.asdict(self.shape):
                raise InvalidArgument(f"deep_ep: rank {self.rank.rank()} calls with {self.shape}, and "
                                      f"rank {other} with {shape}: all ranks make the same calls")

    def need_tokens(self, tokens: int, fix: str) -> None:
        if tokens > self.max_tokens:
            raise InvalidArgument(f"deep_ep: {tokens} tokens are more than the {self.max_tokens} that "
                                  f"the buffer was made for when it was first used: {fix}")

    def notice(self) -> None:
        """At the beginning of a call, on the caller's stream: regions of which no array is left."""
        self._calls += 1
        for region in self.regions:
            if region.user is not None and (region.user.closed or region.user.arrays == 0):
                region.user = None
                region.fence = None if self.rank.twin or capturing() else EventHandle()
                region.freed = self._calls

    def take(self) -> tuple[Region, bool]:
        """A region for a dispatch on the current stream, and whether its arrays may be given out: the
        last free one is kept for those that are copied. One whose last user is most likely over."""
        captured = capturing()
        free = sorted((region for region in self.regions if region.user is None),
                      key=lambda region: (region.passing, region.freed))
        if captured:
            for region in free:
                if region.captured:
                    region.fence = None
                    return region, True
        free = [region for region in free if not region.captured]
        if not free:
            raise Busy(f"deep_ep: all {len(self.regions)} places for rows are in use"
                       f"{self._by_captures()}: CROSSDOCK_DEEP_EP_REGIONS makes more")
        region = free[0]
        if region.fence is not None and not captured:
            region.fence.current_stream_wait()
        region.fence = None
        lend = len(free) > 1 and not region.passing
        if captured:
            region.captured, region.passing = lend, not lend
        return region, lend

    def _by_captures(self) -> str:
        count = sum(region.captured for region in self.regions)
        return f", {count} of them for graphs that have been captured" if count else ""

    def dispatch(self, region: Region, rows: Any, ids: Any, weights: Any, *, scales: Any = None,
                 cast: bool = False, scales_by_column: bool = False,
                 routing: Optional[ep.Handle] = None,
                 expanded: Optional[ep.Expanded] = None) -> ep.Handle:
        """On the current stream, into the region, which is the handle's until its arrays are gone."""
        handle = self.group.dispatch(rows, ids, weights, scales=scales, cast=cast, routing=routing,
                                     scales_by_column=scales_by_column, output=region.output,
                                     input=self._input, expanded=expanded, rank=self.rank.rank())
        region.user = handle
        return handle

    def run(self) -> None:
        """What was called, in the twin; on GPUs it runs by itself."""
        self.rank.meet(self.group, self.timeout)

    def close(self) -> None:
        for region in self.regions:
            region.user = None
        self.rank.leave(self.group)
