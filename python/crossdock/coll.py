"""Collectives over NVLink that leave the SMs to others: gathers and scatters by copy engines, tensors from
rank to rank, rows of a table that is dealt to the ranks::

    options = coll.Options(session_bytes=1 << 20)
    with coll.Group(options, world=4) as group:
        with group.session(rank=0) as session:
            session.all_gather(x, out=everything)         # [world, *x.shape]

Calls put work on the current stream and return; all of it may be captured into a CUDA graph. Every rank
makes the same collective calls in the same order. With ``backend="twin"`` they run on the CPU, on NumPy
arrays or CPU tensors, and are over when :meth:`Group.synchronize` has returned.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import Any, Iterable, Optional, Tuple

from . import _arrays, _native
from ._ranks import local_ranks_of, only_rank_of, rank_or_only

Array = Any
Stream = Any

__all__ = ["Array", "Group", "Options", "Session", "Sizes", "Stream", "sizes"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a group is made for; the same on every rank."""

    session_bytes: int = 0  #: inputs of one session of a rank, each rounded up to 128; 0: no sessions
    gathers: int = 8  #: how many inputs a session may have, 1 to 32
    reduce: bool = False  #: reduce_scatter will be called
    tensor_bytes: int = 0  #: the largest tensor that is sent; 0: none are
    inflight: int = 2  #: tensors of one rank on their way to another, 1 to 64
    any_rank: bool = False  #: tensors go to any other rank, not only to the next and the previous
    shard_rows: int = 0  #: rows of the table at each rank; 0: there is no table
    row_bytes: int = 0  #: of a row of the table, a multiple of 16
    wide_indices: bool = False  #: row numbers are int64, else int32
    fetch_sms: int = 16  #: SMs of a fetch
    wait: float = 2.0  #: seconds a stream waits for a peer before the call has failed, naming it


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Memory of one rank, in bytes."""

    control_bytes: int
    session_bytes: int
    pipeline_bytes: int
    table_bytes: int
    window_bytes: int  #: all of these, which peers can reach
    local_bytes: int  #: besides


def sizes(options: Options, world: int) -> Sizes:
    """The memory that a group of ``world`` ranks would take, and whether its options are right."""
    return Sizes(**_native.coll_sizes(options, world))


class Session:
    """Gathers and scatters whose inputs stay in the rank's window until all peers have read them. A rank
    has one at a time."""

    def __init__(self, native: _native.CollSession, framework: int) -> None:
        self._native, self._framework = native, framework

    def input(self, nbytes: int) -> Array:
        """The place of the next input in the window, uint8: what is written there need not be copied."""
        return _arrays.to_framework(self._native.input(nbytes), self._framework)

    def all_gather(self, input: Array, out: Array) -> None:
        """``out`` [world, ...]: the input of each rank. A multiple of 16 bytes. No SM."""
        self._native.all_gather(_flat(input, "all_gather: input"), _flat(out, "all_gather: out"))

    def reduce_scatter(self, input: Array, out: Array) -> None:
        """``out``: the sum of the ranks' ``input[rank of this]``, in fp32 in the order of the ranks;
        ``input`` [world, ...], bf16 or fp32. Copy engines bring the parts, one kernel adds them up. In
        the twin ``out`` is an array of :meth:`Group.empty`."""
        self._native.reduce_scatter(_flat(input, "reduce_scatter: input"),
                                    _flat(out, "reduce_scatter: out"))

    def end(self) -> None:
        """Tells the peers that their inputs have been read. Twice is no error."""
        self._native.end()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.end()


def _flat(array: Array, what: str) -> Array:
    """As one dimension where it has none or more than two. ``what``: the call and the argument."""
    if 1 <= len(array.shape) <= 2:
        return array  # the call refuses gaps
    return _arrays.require_contiguous(array, f"coll {what}").reshape(-1)


class Group:
    """The ranks of one NVLink domain; made as :class:`crossdock.ep.Group` is."""

    def __init__(self, options: Options, *, world: Optional[int] = None,
                 ranks: Optional[Iterable[Tuple[int, int]]] = None, backend: str = "gpu",
                 exchange: Optional[_native.Exchange] = None, timeout: float = 60.0) -> None:
        world, local = local_ranks_of(world, ranks, backend, exchange)
        self.options = options
        self._native: Optional[_native.Coll] = _native.coll_group(options, world, local,
                                                                  backend == "twin", exchange, timeout)
        self._only_rank = only_rank_of(self._open().ranks)

    def _open(self) -> _native.Coll:
        if self._native is None:
            from .errors import Closed
            raise Closed("coll: the group is closed: make a new one")
        return self._native

    def _rank(self, rank: Optional[int]) -> int:
        return rank_or_only(rank, self._only_rank, self._open().ranks)

    @property
    def world(self) -> int:
        return self._open().world

    def session(self, *, rank: Optional[int] = None, stream: Optional[Stream] = None) -> Session:
        """Begins one: the stream goes on when all peers have read the inputs of the one before."""
        native = self._open()
        framework = _arrays.NUMPY if native.twin else _arrays.library_for(0)
        return Session(native.begin(self._rank(rank), stream), framework)

    def send(self, tensor: Array, to: int, *, rank: Optional[int] = None,
             stream: Optional[Stream] = None) -> None:
        """To another rank, in the order of the calls; it may be overwritten afterwards. No SM."""
        self._open().send(self._rank(rank), to, _flat(tensor, "send: tensor"), stream)

    def receive(self, tensor: Array, source: int, *, rank: Optional[int] = None,
                stream: Optional[Stream] = None) -> None:
        """The next tensor of ``source``, of the same size."""
        self._open().receive(self._rank(rank), source, _flat(tensor, "receive: tensor"), stream)

    def shard(self, *, rank: Optional[int] = None) -> Array:
        """The rank's rows of the table, uint8; zero at first."""
        native = self._open()
        return _arrays.to_framework(native.shard(self._rank(rank)),
                                    _arrays.NUMPY if native.twin else _arrays.library_for(0))

    def write_rows(self, rows: Array, first: int = 0, *, rank: Optional[int] = None,
                   stream: Optional[Stream] = None) -> None:
        """Over the rank's rows from ``first`` on, each of ``row_bytes``. Collective: fetches after it see
        what all have written."""
        self._open().write_rows(self._rank(rank), first, rows, stream)

    def fetch_rows(self, numbers: Array, out: Array, *, rank: Optional[int] = None,
                   stream: Optional[Stream] = None) -> None:
        """``out[i]``, of ``row_bytes``: row ``numbers[i]`` of the table, zero where that is -1. Not
        collective."""
        self._open().fetch_rows(self._rank(rank), _flat(numbers, "fetch_rows: numbers"), out,
                                self.options.wide_indices, stream)

    def empty(self, nbytes: int, *, rank: Optional[int] = None) -> Array:
        """Memory of the rank, uint8: in the twin kernels reach no other, so that is where the numbers and
        rows of a fetch and the output of a reduce_scatter have to be."""
        native = self._open()
        return _arrays.to_framework(native.empty(self._rank(rank), nbytes),
                                    _arrays.NUMPY if native.twin else _arrays.library_for(0))

    def barrier(self, *, rank: Optional[int] = None, stream: Optional[Stream] = None) -> None:
        """The stream goes on when those of all ranks have come to it. No SM."""
        self._open().barrier(self._rank(rank), stream)

    def synchronize(self, timeout: float = 30.0, *, stream: Optional[Stream] = None) -> None:
        """Waits for ``stream`` or the current one and for the ranks' own (in the twin: for all calls), then
        :meth:`check`."""
        self._open().synchronize(timeout, stream)

    def check(self) -> None:
        """Raises the first failure of a rank of this process. Never waits."""
        self._open().check()

    def reset(self, timeout: float = 30.0) -> None:
        """After a failure: collective, when no work of the group is left on any stream."""
        self._open().reset(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Waits as :meth:`synchronize` does and lets go of the memory. Local: peers are not waited for. What
        other streams still wait for is let go at once then, as after a failure. Twice is no error."""
        native, self._native = self._native, None
        try:
            if native is not None and not native.twin:
                native.synchronize(timeout, None)
        finally:
            del native  # now, and not when an error that is on its way has been looked at

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        try:
            self.close()
        except Exception:
            # What went wrong inside the block says more than what follows from it.
            if error is None:
                raise
