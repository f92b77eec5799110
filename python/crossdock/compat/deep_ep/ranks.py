"""Who the ranks of a buffer are, and how they agree on something: processes, as under torchrun, or threads
of one process, which also run in the twin without a GPU."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Iterable, Optional, Protocol, Sequence, TypeVar

from ..._native import Exchange
from ...errors import DeadlineExceeded, InvalidArgument
from ...exchange import mpi_exchange, torch_exchange

T = TypeVar("T")


class Group(Protocol):
    """What the groups of the library have in common."""

    def synchronize(self, timeout: float, *, stream: Optional[Any] = None) -> None: ...
    def close(self) -> None: ...


G = TypeVar("G", bound=Group)

__all__ = ["ProcessRank", "Rank", "ThreadRank", "Threads", "do_all", "rank_of"]

# How much longer than an action may take the other threads wait for its end.
_MARGIN = 10.0


def do_all(actions: Iterable[Callable[[], None]]) -> None:
    """Every one of them, whatever another raises; then one of the errors, if there were any."""
    with contextlib.ExitStack() as last:
        for action in actions:
            last.callback(action)


class Rank:
    """One rank, as its own thread or process sees it."""

    twin = False

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world

    def gather(self, data: bytes, timeout: float) -> Sequence[bytes]:
        """The bytes of all ranks, by rank. Collective."""
        raise NotImplementedError

    def make(self, kind: Callable[..., G], options: Any, timeout: float) -> G:
        """A group of all ranks, of a class like :class:`crossdock.ep.Group`. Collective."""
        raise NotImplementedError

    def meet(self, group: Group, timeout: float) -> None:
        """In the twin kernels of all ranks run together: waits for the others and runs what was called.
        On GPUs nothing."""

    def leave(self, group: Group) -> None:
        """The rank needs the group no more."""
        group.close()


class ProcessRank(Rank):
    """A process a rank, brought together by an exchange."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.member, exchange.members)
        self._exchange = exchange

    def gather(self, data: bytes, timeout: float) -> Sequence[bytes]:
        return self._exchange.all_gather(data, timeout)

    def make(self, kind: Callable[..., G], options: Any, timeout: float) -> G:
        return kind(options, exchange=self._exchange, timeout=timeout)


class Threads:
    """``world`` ranks in this process, each used by a thread of its own: ``backend`` "gpu", rank r on
    GPU r, or "twin", on the CPU. In the twin every call of a buffer is collective: it waits until all
    ranks have called, at most ``timeout`` seconds."""

    def __init__(self, world: int, *, backend: str = "gpu", timeout: float = 60.0) -> None:
        if backend not in ("gpu", "twin"):
            raise InvalidArgument(f"backend = {backend!r} must be 'gpu' or 'twin'")
        self.world, self.twin, self.timeout = world, backend == "twin", timeout
        self._barrier = threading.Barrier(world)
        self._here: list[Any] = [None] * world
        self._result: Any = None
        self._error: Optional[BaseException] = None
        self._users: dict[int, int] = {}

    def rank(self, rank: int) -> ThreadRank:
        """What the thread of ``rank`` gives as ``group``."""
        return ThreadRank(self, rank)

    def together(self, rank: int, value: Any, action: Callable[[list[Any]], T], takes: float = 0.0) -> T:
        """Waits for all ranks; one of them runs ``action`` on the values of all, which ``takes`` so many
        seconds at most, and all get its result or its error."""
        self._here[rank] = value
        if self._wait(self.timeout) == 0:
            self._error = None
            try:
                self._result = action(list(self._here))
            except Exception as error:
                self._error = error
        self._wait(max(self.timeout, takes) + _MARGIN)
        if self._error is not None:
            raise self._error
        result: T = self._result
        return result

    def _wait(self, timeout: float) -> int:
        try:
            return self._barrier.wait(timeout)
        except threading.BrokenBarrierError:
            raise DeadlineExceeded(f"deep_ep: not all {self.world} ranks have made this call within "
                                   f"{timeout} s, or one of them has failed") from None

    def run(self, function: Callable[[ThreadRank], T]) -> list[T]:
        """``function`` on a thread of each rank; what they return, by rank. The first error is raised
        when all have ended; the others need not wait for who has failed."""
        results: list[Any] = [None] * self.world
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                if not self.twin:
                    import torch
                    torch.cuda.set_device(rank % torch.cuda.device_count())  # symm.share_gpus
                results[rank] = function(self.rank(rank))
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(r,)) for r in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            self._barrier.reset()
            raise errors[0]
        return results

    def make(self, rank: int, kind: Callable[..., G], options: Any, timeout: float) -> G:
        backend = "twin" if self.twin else "gpu"
        group: G = self.together(rank, None, lambda _: kind(options, world=self.world, backend=backend,
                                                            timeout=timeout), timeout)
        # Assigned: a group that was here before may have gone without having been left by all.
        self.together(rank, None, lambda _: self._users.update({id(group): self.world}))
        return group

    def leave(self, group: Group) -> None:
        """The last rank to leave closes the group."""
        with _leaving:
            left = self._users.get(id(group), 1) - 1
            self._users[id(group)] = left
        if left == 0:
            self._users.pop(id(group), None)
            group.close()


_leaving = threading.Lock()


class ThreadRank(Rank):
    """A rank of :class:`Threads`."""

    def __init__(self, threads: Threads, rank: int) -> None:
        super().__init__(rank, threads.world)
        self._threads = threads
        self.twin = threads.twin

    def gather(self, data: bytes, timeout: float) -> Sequence[bytes]:
        return self._threads.together(self._rank, data, lambda all_of_them: list(all_of_them))

    def make(self, kind: Callable[..., G], options: Any, timeout: float) -> G:
        return self._threads.make(self._rank, kind, options, timeout)

    def meet(self, group: Group, timeout: float) -> None:
        if self.twin:
            self._threads.together(self._rank, None, lambda _: group.synchronize(timeout), timeout)

    def leave(self, group: Group) -> None:
        self._threads.leave(group)


def rank_of(group: Any, comm: Any = None) -> Rank:
    """From what a buffer is given: a process group of torch, a :class:`crossdock.Exchange`, a rank of
    :class:`Threads`, or ``comm``, a communicator of mpi4py."""
    if isinstance(group, Rank):
        return group
    if isinstance(group, Exchange):
        return ProcessRank(group)
    if group is None and comm is not None:
        return ProcessRank(mpi_exchange(comm))
    if group is None:
        raise InvalidArgument("deep_ep: group is missing: give a process group of torch.distributed, or "
                              "comm, a communicator of mpi4py")
    return ProcessRank(torch_exchange(group))
