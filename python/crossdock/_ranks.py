"""Which ranks of a group are in this process, and what everything that has such ranks can do."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any, Iterable, Optional, Sequence, Tuple, TypeVar

from . import _native
from .errors import InvalidArgument


def local_ranks_of(world: Optional[int], ranks: Optional[Iterable[Tuple[int, int]]], backend: str,
                   exchange: Optional[_native.Exchange],
                   place: bool = False) -> Tuple[int, list[Tuple[int, int]]]:
    """The number of ranks, and (rank, device) of those here; none: all of them, rank r on GPU r.
    ``place``: of an elastic group."""
    if backend not in ("gpu", "twin"):
        raise InvalidArgument(f"backend = {backend!r} must be 'gpu' or 'twin'")
    if place and exchange is not None:
        raise InvalidArgument("exchange and place: give one of them; at its place an elastic group makes "
                              "exchanges of its own")
    if place and (world is None or ranks is None):
        raise InvalidArgument("a group with a place needs world, the number of its seats, and the ranks of "
                              "this process, ranks = [(rank, device), ...]")
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


def rank_or_only(rank: Optional[int], only: Optional[int], ranks: Sequence[int]) -> int:
    """The rank that a call is for; it may be left out in a process that has one."""
    if rank is not None:
        return rank
    if only is None:
        raise InvalidArgument(f"rank is missing: this process has the ranks {list(ranks)}")
    return only


def current_device() -> int:
    """The GPU of a process that has one rank: torch's current one, else by torchrun's variable, modulo the GPUs
    that CUDA_VISIBLE_DEVICES leaves it: a launcher may show each process its own alone."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.current_device())
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return local % len(visible) if visible else local


_Self = TypeVar("_Self", bound="RankOwner")


class RankOwner:
    """A group or a layer: ranks of this process, and memory that :meth:`close` lets go of."""

    _native: Any
    _only_rank: Optional[int]

    def _own(self, native: Any) -> None:
        self._native = native
        self._only_rank = only_rank_of(self.local_ranks)

    @property
    def world(self) -> int:
        return int(self._native.world)

    @property
    def local_ranks(self) -> list[int]:
        """The ranks of this process."""
        return [rank for rank, _ in self._native.ranks]

    @property
    def closed(self) -> bool:
        return bool(self._native.closed)

    def close(self, timeout: float = 10.0) -> None:
        """Waits for what is on the GPU's streams and lets go of the memory, which goes when the last that
        shares it is gone too: handles and arrays, siblings. Local: peers are not waited for. Twice is no
        error. What is dropped without it must have nothing running."""
        if self._native.closed:
            return
        try:
            if not self._native.twin:
                self._native.synchronize(timeout, None)
        finally:
            self._native.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        try:
            self.close()
        except Exception:
            # What went wrong inside the block says more than what follows from it.
            if error is None:
                raise

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"ranks {self.local_ranks} of {self.world}"
        return f"<{type(self).__module__}.{type(self).__name__}: {state}>"

    def _rank(self, rank: Optional[int]) -> int:
        if rank is not None:
            return rank
        return rank_or_only(None, self._only_rank, self.local_ranks)
