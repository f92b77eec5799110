"""What ElasticBuffer has besides dispatch and combine: gathers, tensors to the next rank, and rows of a
table that is dealt to the ranks. Over :mod:`crossdock.coll`, each with a group of its own, made when it is
configured."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, Callable, Iterator, Optional, Sequence, Tuple

from ... import coll
from ...errors import InvalidArgument
from .elastic_calls import by_columns
from .events import Mark
from .frame import Frame, NumPyFrame, frame_of
from .lane import Lane
from .ranks import Rank, do_all
from .settings import Settings

Array = Any
Shapes = Sequence[Sequence[int]]

__all__ = ["Extras", "bytes_of_shapes"]

_LINE = 128


def bytes_of_shapes(shapes: Shapes, item_bytes: int) -> int:
    """Of tensors in one session of a rank, each beginning at a multiple of 128."""
    return sum(-(-math.prod(shape) * item_bytes // _LINE) * _LINE for shape in shapes)


class Extras:
    """Of one buffer."""

    def __init__(self, rank: Rank, lane: Lane, settings: Settings) -> None:
        self._rank, self._lane, self._settings = rank, lane, settings
        self._gathers: Optional[coll.Group] = None
        self._pipeline: Optional[coll.Group] = None
        self._table: Optional[coll.Group] = None
        self._session: Optional[coll.Session] = None
        self._begun: Optional[Mark] = None  # when the session's memory may be written
        self._inplace: list[Tuple[Array, Array]] = []
        self._scales: Optional[Array] = None
        self._row: Tuple[int, Any] = (0, None)

    @property
    def groups(self) -> Sequence[coll.Group]:
        return [group for group in (self._gathers, self._pipeline, self._table) if group is not None]

    def close(self) -> None:
        self._session = None
        self._inplace.clear()
        groups = self.groups
        self._gathers = self._pipeline = self._table = None
        do_all(functools.partial(self._rank.leave, group) for group in groups)

    def _make(self, old: Optional[coll.Group], options: coll.Options) -> coll.Group:
        """In the place of ``old``, which the caller has given up."""
        if old is not None:
            self._rank.leave(old)
        return self._rank.make(coll.Group, options, self._settings.timeout)

    def _run(self, group: coll.Group) -> None:
        group.check()
        self._rank.meet(group, self._settings.timeout)

    # ---- gathers -----------------------------------------------------------------------------------

    def agrs_set_config(self, max_session_bytes: int, max_gathers: int) -> None:
        for name, value in (("num_max_session_bytes", max_session_bytes),
                            ("num_max_all_gathers_per_session", max_gathers)):
            if value < 1:
                raise InvalidArgument(f"deep_ep agrs_set_config: {name} = {value} must be at least 1")
        old, self._gathers = self._gathers, None
        self._gathers = self._make(old, coll.Options(
            session_bytes=max_session_bytes, gathers=max_gathers, wait=self._settings.wait))

    def create_session(self) -> None:
        if self._gathers is None:
            raise InvalidArgument("deep_ep: agrs_set_config() comes before a session")
        if self._session is not None:
            raise InvalidArgument("deep_ep: there is a session already: destroy_agrs_session() first")
        with self._lane.call(None, True) as call:
            self._session = self._gathers.session(rank=self._rank.rank(), stream=call.stream)
            self._begun = Mark()

    def destroy_session(self) -> None:
        if self._session is None:
            raise InvalidArgument("deep_ep: there is no session: create_agrs_session() first")
        with self._lane.call(None, True):
            self._session.end()
        self._session, self._begun, self._inplace = None, None, []
        assert self._gathers is not None
        self._run(self._gathers)

    @contextlib.contextmanager
    def new_session(self) -> Iterator[None]:
        self.create_session()
        try:
            yield
        finally:
            self.destroy_session()

    def _open_session(self) -> coll.Session:
        if self._session is None:
            raise InvalidArgument("deep_ep: there is no session: create_agrs_session(), or with "
                                  "agrs_new_session()")
        return self._session

    def inplace_tensors(self, shapes: Shapes, dtype: Any) -> list[Array]:
        """Inputs of later gathers, in memory that peers read: what comes later on the current stream may write
        there, when all have read what was gathered from it in the session before."""
        out = []
        if self._begun is not None:
            self._begun.current_stream_wait()
        for shape in shapes:
            item = int(dtype.itemsize)
            place = self._open_session().input(-(-math.prod(shape) * item // 16) * 16)
            tensor = _viewed(place[:math.prod(shape) * item], dtype).reshape(tuple(shape))
            self._inplace.append((tensor, place))
            out.append(tensor)
        return out

    def all_gather(self, given: Sequence[Array]) -> Tuple[list[Array], Callable[[], None]]:
        """[ranks, ...] of each, and what makes the current stream wait for them."""
        session = self._open_session()
        if not given:
            raise InvalidArgument("deep_ep all_gather: there is no tensor: give at least one")
        frame = frame_of(given[0], "the tensor")
        out = [frame.empty((self._rank.size(), *each.shape), each.dtype, each) for each in given]
        with self._lane.call(None, True) as call:
            for each, result in zip(given, out):
                source = frame.contiguous(each)
                nbytes = math.prod(each.shape) * int(each.dtype.itemsize)
                if nbytes % 16:
                    raise InvalidArgument(f"deep_ep all_gather: a tensor of {nbytes} bytes: it must be a "
                                          "multiple of 16")
                session.all_gather(source, result)
                call.keep(frame, each, source, result)
        assert self._gathers is not None
        self._run(self._gathers)
        return out, call.event.current_stream_wait

    # ---- pipeline ----------------------------------------------------------------------------------

    def pp_set_config(self, max_tensor_bytes: int, inflight: int) -> None:
        old, self._pipeline = self._pipeline, None
        self._pipeline = self._make(old, coll.Options(
            tensor_bytes=-(-max_tensor_bytes // 16) * 16, inflight=inflight, wait=self._settings.wait))

    def _neighbour(self, other: int) -> coll.Group:
        if self._pipeline is None:
            raise InvalidArgument("deep_ep: pp_set_config() comes before the first tensor")
        rank, size = self._rank.rank(), self._rank.size()
        if other not in ((rank + 1) % size, (rank - 1) % size) or other == rank:
            raise InvalidArgument(f"deep_ep: rank {other} is not next to rank {rank} in the ring of {size}")
        return self._pipeline

    def send(self, tensor: Array, to: int) -> None:
        group = self._neighbour(to)
        with self._lane.call():
            group.send(tensor, to, rank=self._rank.rank())
        group.check()

    def receive(self, tensor: Array, source: int) -> None:
        group = self._neighbour(source)
        with self._lane.call():
            group.receive(tensor, source, rank=self._rank.rank())
        # In the twin waiting is for all ranks of the process, so all have to have sent.
        self._run(group)

    # ---- rows of a table ---------------------------------------------------------------------------

    def engram_write(self, storage: Array, scales: Optional[Array]) -> None:
        """[entries, hidden], the rank's part of the table."""
        frame = frame_of(storage, "storage")
        entries, values = (int(n) for n in storage.shape)
        row_bytes = values * int(storage.dtype.itemsize)
        if row_bytes % 16:
            raise InvalidArgument(f"deep_ep engram_write: rows of {row_bytes} bytes: they must be a "
                                  "multiple of 16")
        options = coll.Options(shard_rows=entries, row_bytes=row_bytes, wait=self._settings.wait)
        if self._table is None or self._table.options != options:
            old, self._table = self._table, None
            self._table = self._make(old, options)
        self._scales, self._row = scales, (values, storage.dtype)
        with self._lane.call():
            self._table.write_rows(frame.contiguous(storage), rank=self._rank.rank())
        self._run(self._table)

    def engram_fetch(self, indices: Array, by_column: bool) -> Callable[[], Any]:
        """Of [tokens, n] a token's entries lie side by side, and there is always a pair of them and of the
        scales; of any other shape a row for each, alone where there are no scales."""
        if self._table is None:
            raise InvalidArgument("deep_ep: engram_write() comes before the first fetch")
        frame = frame_of(indices, "indices")
        shape = tuple(int(n) for n in indices.shape)
        count, (values, dtype) = math.prod(shape), self._row
        numbers = frame.cast(frame.contiguous(indices), frame.dtype("int32")).reshape(-1)
        with self._lane.call(None, True) as call:
            rows = self._fetch(frame, numbers, count, values, dtype)
            call.keep(frame, numbers, rows)
        self._run(self._table)
        several = len(shape) == 2
        wanted = (shape[0], shape[1] * values) if several else (*shape, values)
        scales = None
        if self._scales is not None:
            scales = self._scales[frame.cast(numbers, frame.dtype("int64"))]
            if several:
                scales = scales.reshape((shape[0], shape[1] * int(self._scales.shape[1])))
            if by_column:
                scales = by_columns(frame, scales)

        def hook() -> Any:
            call.event.current_stream_wait()
            fetched = rows.reshape(wanted)
            return (fetched, scales) if several or scales is not None else fetched
        return hook

    def _fetch(self, frame: Frame, numbers: Array, count: int, values: int, dtype: Any) -> Array:
        assert self._table is not None
        rank = self._rank.rank()
        if not self._rank.twin:
            out = frame.empty((count, values), dtype, numbers)
            self._table.fetch_rows(numbers, out, rank=rank)
            return out
        # Kernels of the twin reach memory of their rank only.
        row = values * int(dtype.itemsize)
        inside = self._table.empty(count * 4, rank=rank).view("int32")
        place = self._table.empty(count * row, rank=rank).reshape(count, row)
        inside[...] = numbers if isinstance(frame, NumPyFrame) else numbers.numpy()
        self._table.fetch_rows(inside, place, rank=rank)
        return _viewed(place, dtype)


def _viewed(place: Array, dtype: Any) -> Array:
    """Memory of the library, NumPy's in the twin, as an array of the framework that ``dtype`` is of."""
    if type(dtype).__module__ == "torch" and type(place).__module__ == "numpy":
        import torch
        place = torch.from_numpy(place)
    return place.view(dtype)
