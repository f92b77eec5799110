"""Which ranks of a group are in this process."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import sys
from typing import Iterable, Optional, Sequence, Tuple

from . import _native
from .errors import InvalidArgument


def local_ranks_of(world: Optional[int], ranks: Optional[Iterable[Tuple[int, int]]], backend: str,
                   exchange: Optional[_native.Exchange]) -> Tuple[int, list[Tuple[int, int]]]:
    """The number of ranks, and (rank, device) of those here; none: all of them, rank r on GPU r."""
    if backend not in ("gpu", "twin"):
        raise InvalidArgument(f"backend = {backend!r} must be 'gpu' or 'twin'")
    if world is None:
        if exchange is None:
            raise InvalidArgument("world is missing: how many ranks are there in all?")
        world = exchange.members
    if ranks is not None or exchange is None:
        return world, list(ranks) if ranks is not None else []
    if exchange.members != world:
        raise InvalidArgument(f"world = {world} ranks in {exchange.members} processes: say which are in "
                              "this one, ranks = [(rank, device), ...]")
    return world, [(exchange.member, current_device() if backend == "gpu" else -1)]


def only_rank_of(ranks: Sequence[int]) -> Optional[int]:
    return ranks[0] if len(ranks) == 1 else None


def current_device() -> int:
    """The GPU of a process that has one rank: torch's current one, else by torchrun's variable."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.current_device())
    return int(os.environ.get("LOCAL_RANK", "0"))
