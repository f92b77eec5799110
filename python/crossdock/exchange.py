"""How the processes of a group find each other while it is made or reset.

One member is one process. All a group needs is an all-gather of bytes: over a metadata store, over
``torch.distributed`` (and so under torchrun), or over any function of the caller. A group whose ranks
are all in one process needs none.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import datetime
import os
import time
from dataclasses import dataclass
from typing import Any, Callable, Optional, Sequence

from ._native import Exchange
from ._native import function_exchange as _function_exchange
from ._native import store_exchange as _store_exchange
from .errors import InvalidArgument

__all__ = ["Exchange", "MeetingPlace", "function_exchange", "store_exchange", "torch_exchange"]


@dataclass(frozen=True)
class MeetingPlace:
    """Where the processes of an elastic group meet: when it is made, and again (``Group.reform``) when a
    rank has gone or another wants to come. The same for all of them, but for ``settle``.

    ``store``: as for :func:`store_exchange`. ``name``: used for one group in the life of the store.
    ``fewest``: ranks with which the group goes on, the other seats being vacant, 0: all of them; more than
    half of the world, unless the caller makes sure that ranks which cannot see each other do not go on
    apart. ``settle``: seconds for which a process waits for seats that nobody has taken, from the last one
    on that was; longer than ranks take to notice that one of them is gone.
    """

    store: str
    name: str
    fewest: int = 0
    settle: float = 5.0

    def __post_init__(self) -> None:
        for name, kind, what in (("store", str, "a string, as tcp://host:port"), ("name", str, "a string"),
                                 ("fewest", int, "a number of ranks"), ("settle", (int, float), "seconds")):
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise InvalidArgument(f"MeetingPlace: {name} = {value!r} must be {what}")


def store_exchange(url: str, name: str, member: int, members: int, *,
                   timeout: float = 60.0) -> Exchange:
    """Over the store at ``url``: ``tcp://host:port`` or ``http://host:port`` of ``crossdock store``,
    ``file:///folder`` that all processes see, ``inproc://name`` within one process.

    ``name`` is used for one group in the life of the store; every member gives the same one.
    """
    return _store_exchange(url, name, member, members, timeout)


def function_exchange(member: int, members: int,
                      all_gather: Callable[[bytes, float], Sequence[bytes]]) -> Exchange:
    """Over a function that gets this member's bytes and the seconds it may take, and returns the
    bytes of all members, by member. What it raises becomes the error of the group's call:
    ``TimeoutError`` is ``DeadlineExceeded``, ``ConnectionError`` is ``PeerLost``."""
    return _function_exchange(member, members, all_gather)


def torch_exchange(group: Optional[Any] = None) -> Exchange:
    """Over a process group of ``torch.distributed``, by default the one of all processes.

    Used only while a group of ours is made or reset; its data never goes through it.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        from .errors import InvalidArgument
        raise InvalidArgument("torch_exchange: torch.distributed is not initialised: call "
                              "init_process_group() first")
    member, members = dist.get_rank(group), dist.get_world_size(group)
    # NCCL gathers memory of GPUs only.
    on_gpu = str(dist.get_backend(group)) == "nccl"

    def gather(part: Any, deadline: float) -> list[Any]:
        parts = [torch.empty_like(part) for _ in range(members)]
        work = dist.all_gather(parts, part, group=group, async_op=True)
        try:
            work.wait(datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as e:  # torch has no class of its own for this
            if "imed out" in str(e) or "imeout" in str(e):
                raise TimeoutError(f"torch.distributed: {e}") from e
            raise ConnectionError(f"torch.distributed: {e}") from e
        if on_gpu:  # that was the stream's wait, and copies to the host have no deadline
            arrived = torch.cuda.Event()
            arrived.record()
            wait_until(arrived.query, deadline, "torch.distributed: the all-gather has not ended")
        return [p.cpu() for p in parts]

    def all_gather(data: bytes, seconds: float) -> list[bytes]:
        deadline = time.monotonic() + seconds
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(
            0, dtype=torch.uint8)
        sizes = [int(s) for s in gather(torch.tensor([len(data)], device=device), deadline)]
        padded = torch.zeros(max(max(sizes), 1), dtype=torch.uint8)
        padded[:len(data)] = own
        parts = gather(padded.to(device), deadline)
        return [bytes(p[:size].tolist()) for p, size in zip(parts, sizes)]

    return function_exchange(member, members, all_gather)


def mpi_exchange(comm: Any) -> Exchange:
    """Over a communicator of mpi4py, which is for this alone from a deadline on that has passed: what was
    called there cannot be taken back."""
    left_behind: list[Any] = []  # MPI may still write to the buffers of what did not end

    def gather(data: bytearray, deadline: float) -> list[bytearray]:
        parts = bytearray(len(data) * comm.Get_size())
        request = comm.Iallgather(data, parts)
        try:
            wait_until(request.Test, deadline, "MPI: the all-gather has not ended")
        except TimeoutError:
            left_behind.append((request, data, parts))
            raise
        return [parts[i:i + len(data)] for i in range(0, len(parts), len(data))]

    def all_gather(data: bytes, seconds: float) -> list[bytes]:
        deadline = time.monotonic() + seconds
        sizes = [int.from_bytes(part, "little")
                 for part in gather(bytearray(len(data).to_bytes(8, "little")), deadline)]
        padded = bytearray(data).ljust(max(max(sizes), 1), b"\0")
        return [bytes(part[:size]) for part, size in zip(gather(padded, deadline), sizes)]

    return function_exchange(comm.Get_rank(), comm.Get_size(), all_gather)


def wait_until(done: Callable[[], Any], deadline: float, what: str) -> None:
    """Asks again and again: what is waited for here can only be asked. ``deadline``: of time.monotonic()."""
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} in time")
        os.sched_yield()
