"""What a dispatch of :mod:`crossdock.ep` gives: its handle, the arrays behind it, and those by expert."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from types import TracebackType
from typing import Any, NamedTuple, Optional, Tuple, Union

from . import _arrays, _native

Array = Any

__all__ = ["Copied", "Expanded", "ExpertInput", "Grouped", "Handle", "Received"]


class Received:
    """What a dispatch delivers: ``capacity`` rows, of which ``Handle.rows()`` are used, in the order
    of their source rank, and of the tokens of one rank. Each part is made when it is asked for."""

    __slots__ = ("_handle", "_rows_dtype", "_scales_dtype")

    def __init__(self, handle: _native.Handle, rows_dtype: Any, scales_dtype: Any) -> None:
        self._handle = handle
        self._rows_dtype = rows_dtype
        self._scales_dtype = scales_dtype

    def _part(self, name: str, dtype: Optional[Any] = None) -> Any:
        array = self._handle.received(name)
        return None if array is None else _arrays.to_framework(array, self._handle.framework, dtype)

    @property
    def rows(self) -> Array:
        """[capacity, values], of the type of the tokens; e4m3 where they were cast."""
        return self._part("rows", self._rows_dtype)

    @property
    def scales(self) -> Optional[Array]:
        """[capacity, scales of a row]; by column the strides are [1, columns]. None: there are none."""
        return self._part("scales", self._scales_dtype)

    @property
    def ids(self) -> Array:
        """[capacity, top_k] int32: the expert, counted from the first of this rank; -1: of another."""
        return self._part("ids")

    @property
    def weights(self) -> Optional[Array]:
        """[capacity, top_k] float32; 0 where ids are -1. None: the dispatch had none."""
        return self._part("weights")

    @property
    def tokens(self) -> Array:
        """[capacity] int32: the token's number at its rank."""
        return self._part("tokens")

    @property
    def source_ends(self) -> Array:
        """[world] int32: where the rows of each rank end."""
        return self._part("source_ends")

    @property
    def source_stride(self) -> int:
        """Rows from source to source, of which those up to ``source_ends`` are used; 0: no gaps."""
        return self._handle.source_stride

    @property
    def expert_counts(self) -> Array:
        """[experts of this rank] int32: choices of each, on the device, not padded."""
        return self._part("expert_counts")


class ExpertInput:
    """Where the experts put their output: row ``i`` belongs to the received row ``i``."""

    __slots__ = ("_handle", "_bf16")

    def __init__(self, handle: _native.Handle, bf16: Any) -> None:
        self._handle = handle
        self._bf16 = bf16

    @property
    def rows(self) -> Array:
        """[capacity, hidden] bf16: write here what ``combine`` shall add up. None where ``dispatch`` was
        given an output and no input."""
        return self._part("rows", self._bf16)

    @property
    def weights(self) -> Array:
        """[capacity, top_k] float32: what ``combine`` adds up with ``weights=True``. None as ``rows``."""
        return self._part("weights", None)

    def _part(self, name: str, dtype: Optional[Any]) -> Any:
        array = self._handle.expert_input(name)
        return None if array is None else _arrays.to_framework(array, self._handle.framework, dtype)


class Handle:
    """The routing and the memory of one dispatch. Its slot (or copy) goes back to later dispatches when
    it is closed (or dropped) and no array of it is left. A graph that has captured the dispatch uses the
    slot in every replay: hold the handle as long."""

    __slots__ = ("_native", "_rows_dtype", "_sent_dtype", "_scales_dtype", "_cast")

    def __init__(self, native: _native.Handle, rows: Any, scales: Any, cast: Union[bool, str]) -> None:
        self._native = native
        self._cast = cast
        self._sent_dtype = getattr(rows, "dtype", None)
        self._scales_dtype = None if scales is None else getattr(scales, "dtype", None)
        self._rows_dtype = (_arrays.e4m3_of(native.framework, self._sent_dtype)
                            if cast else self._sent_dtype)

    @property
    def rank(self) -> int:
        return self._native.rank

    @property
    def tokens(self) -> int:
        """Tokens that this rank sent: rows of the combined output."""
        return self._native.tokens

    @property
    def received(self) -> Received:
        return Received(self._native, self._rows_dtype, self._scales_dtype)

    @property
    def expert_input(self) -> ExpertInput:
        return ExpertInput(self._native,
                           _arrays.bf16_of(self._native.framework, self._sent_dtype))

    @property
    def copied(self) -> bool:
        """All slots were held: the rows have been copied to ordinary memory. Nothing else differs."""
        return self._native.copied

    def rows(self, timeout: float = 10.0) -> int:
        """How many rows arrive: known long before they are there, so that outputs of that size can be
        made while they travel; with ``Options.mask_late`` when the dispatch has ended, since until then a
        rank may be left out. Waits without the GIL. Not for captured calls, whose launches come later."""
        return self._native.rows(timeout)

    def expert_counts(self, timeout: float = 10.0) -> list[int]:
        """Choices of each expert of this rank, once all rows are there. Waits as :meth:`rows`."""
        return self._native.expert_counts(timeout)

    @property
    def arrays(self) -> int:
        """How many arrays of it there are still: they keep its slot after :meth:`close`."""
        return self._native.arrays

    @property
    def closed(self) -> bool:
        return self._native.closed

    def close(self) -> None:
        """Gives the slot back, to the calls that come later in the stream. Twice is no error."""
        self._native.close()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: Optional[type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.tokens} tokens"
        return f"<crossdock.ep.Handle of rank {self.rank}: {state}>"


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Received rows by expert: a place for every choice of an expert of this rank, expert by expert,
    each beginning at a multiple of ``Options.expert_alignment``. Nothing is copied: places name rows."""

    offsets: Array  #: [experts of the rank + 1] int32, padded
    aligned_counts: Array  #: [experts of the rank] int32: places, with padding
    rows: Array  #: [places] int32: a received row, in order; -1: padding
    positions: Array  #: [capacity, top_k] int32: the place of a choice of this rank


@dataclasses.dataclass(frozen=True)
class Expanded:
    """Copies of the received rows by expert: [places, ...] in the order of :class:`Grouped` or, with
    ``rows_per_expert``, [experts of the rank, rows_per_expert, ...], of which
    ``Received.expert_counts`` are used. Padding up to the alignment is zero; what lies behind it is not
    written."""

    rows: Array  #: [..., values], like those received
    scales: Optional[Array]  #: [..., scales of a row]; None: there are none
    weights: Optional[Array]  #: [...] float32; None: the dispatch had none
    sources: Array  #: [..., 2] int32: the rank that sent it, and the token's number there; -1: padding
    _planes: Tuple[Any, Any, Any, Any] = dataclasses.field(repr=False)
    _rows_per_expert: int = dataclasses.field(repr=False)
    _scales_by_column: bool = dataclasses.field(repr=False)

    @property
    def _arguments(self) -> Tuple[Tuple[Any, Any, Any, Any], int, bool]:
        return self._planes, self._rows_per_expert, self._scales_by_column


class Copied(NamedTuple):
    """What rows look like that are copied by expert, and whose they are."""

    rank: int
    device: int
    framework: int
    experts: int  #: of the rank
    row_values: int
    scale_values: int  #: 0: none
    has_weights: bool
    rows_dtype: Any
    scales_dtype: Any
    cast: Union[bool, str]

    @classmethod
    def of(cls, handle: Handle) -> Copied:
        native = handle._native
        return cls(native.rank, native.device, native.framework, native.experts, native.row_values,
                   native.scale_values, native.has_weights, handle._rows_dtype, handle._scales_dtype,
                   handle._cast)
