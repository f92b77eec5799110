"""EPHandle: what ElasticBuffer.dispatch leaves for combine, and for dispatches that go the same ways."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from typing import Any, Optional, Sequence

from ... import ep
from .frame import frame_of
from .world import World

Array = Any

__all__ = ["EPHandle"]


@dataclasses.dataclass(eq=False)
class EPHandle:
    """The routing of one dispatch. Its memory is a few words for each token and row, all of its own: the
    region of the dispatch is written again while the handle is there. Fields of forwarding over RDMA are None:
    there is none."""

    world: World
    dispatched: ep.Handle
    positions: Optional[Array]  #: expanded: [rows, top_k] int32, where each choice is; -1: not here
    received_tokens: Array  #: [rows] int32, each row's token at its rank
    received_ids: Array  #: [rows, top_k] int32, experts of this rank or -1; all -1 where none arrived

    synced: bool  #: the host knows how many rows arrived, and outputs have as many

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Array
    num_recv_tokens: int  #: rows of a compact layout; without CPU sync the most there can be
    num_expanded_tokens: int  #: rows of recv_x when expanded, else 0
    num_recv_tokens_per_expert_list: list[int]  #: rounded up to the alignment; without CPU sync empty
    psum_num_recv_tokens_per_scaleup_rank: Array  #: [ranks] int32, inclusive
    #: [experts of the rank] int32. Compact: inclusive sums of the rounded counts. Expanded: where the
    #: expert's rows begin plus how many there are.
    psum_num_recv_tokens_per_expert: Array
    num_unaligned_recv_tokens_per_expert: Array  #: [experts of the rank] int32

    token_metadata_at_forward: Optional[Array] = None
    channel_linked_list: Optional[Array] = None
    _metadata: Optional[Array] = None  #: what a caller has assigned to recv_src_metadata

    @property
    def dst_buffer_slot_idx(self) -> Array:
        """[tokens, top_k] int32, all -1: rows go straight to their place, and there are no slots."""
        frame = frame_of(self.topk_idx, "ids")
        return frame.full(tuple(int(n) for n in self.topk_idx.shape), -1, "int32", self.topk_idx)

    @property
    def arrays(self) -> Sequence[Optional[Array]]:
        """All that the dispatch has written for the handle, which callers read on their own streams."""
        return (self.positions, self.received_tokens, self.received_ids, self.topk_idx,
                self.psum_num_recv_tokens_per_scaleup_rank, self.psum_num_recv_tokens_per_expert,
                self.num_unaligned_recv_tokens_per_expert)

    @property
    def recv_src_metadata(self) -> Array:
        """[rows, top_k + 2] int32: the source's rank times the most tokens, plus the token; the source's
        rank times top_k, plus the first choice of an expert here; and for each choice the row of
        recv_x when expanded, else -1. Rows that did not arrive: -1. Callers may assign a part of it."""
        if self._metadata is not None:
            return self._metadata
        frame = frame_of(self.received_ids, "ids")
        n, top_k = int(self.received_ids.shape[0]), int(self.received_ids.shape[1])
        ends = self.psum_num_recv_tokens_per_scaleup_rank
        row = frame.arange(n, "int32", ends)
        source = frame.cast((row[:, None] >= ends[None, :]).sum(1), frame.dtype("int32"))
        lanes = frame.where(self.received_ids >= 0, frame.arange(top_k, "int32", ends)[None, :], top_k)
        out = frame.full((n, top_k + 2), -1, "int32", ends)
        out[:, 0] = source * self.num_max_tokens_per_rank + self.received_tokens
        first = lanes.min(1)
        out[:, 1] = source * top_k + (first if hasattr(first, "dtype") else first.values)
        if self.positions is not None:
            out[:, 2:] = self.positions
        return frame.where((row < ends[-1])[:, None], out, -1)

    @recv_src_metadata.setter
    def recv_src_metadata(self, value: Array) -> None:
        self._metadata = value
