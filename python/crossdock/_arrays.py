"""Arrays of the library as arrays of the framework that the tokens came from."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any, Callable, NamedTuple, Optional, Protocol

from . import _native
from .errors import InvalidArgument

NONE, TORCH, NUMPY, CUPY = 0, 1, 2, 3


@functools.lru_cache(maxsize=None)
def _torch_import() -> Callable[[Any], Any]:
    import torch.utils.dlpack
    imported: Callable[[Any], Any] = torch.utils.dlpack.from_dlpack
    return imported


def to_framework(array: _native.Array, framework: int, dtype: Optional[Any] = None) -> Any:
    """``dtype``: the type that the bytes are shown as, where it differs from what they travel as."""
    if framework == TORCH:
        out = _torch_import()(array.capsule())
    elif framework == NUMPY:
        import numpy
        out = numpy.asarray(array)
    elif framework == CUPY:
        import cupy
        out = cupy.from_dlpack(array)
    else:
        return array
    return out if dtype is None or out.dtype == dtype else out.view(dtype)


def require_contiguous(array: Any, what: str) -> Any:
    """The array, which may then be reshaped without a copy that would take a result with it. ``what``: the
    call and the argument, for the error. :class:`crossdock.InvalidArgument` where it has gaps."""
    dense = array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags["C_CONTIGUOUS"]
    if not dense:
        raise InvalidArgument(f"{what} is not contiguous: make it contiguous first")
    return array


def library_for(device: int) -> int:
    """For what belongs to no dispatch: NumPy on the host; on a GPU what the process has imported."""
    if device < 0:
        return NUMPY
    return TORCH if "torch" in sys.modules else CUPY if "cupy" in sys.modules else NONE


def bf16_of(framework: int, rows_dtype: Any) -> Optional[Any]:
    """The type of bf16 rows: the framework's own. NumPy has none: that of ml_dtypes where the tokens
    came in a type of ml_dtypes, else codes as uint16."""
    return _ml_dtype("bfloat16") if framework == NUMPY and _of_ml_dtypes(rows_dtype) else None


def e4m3_of(framework: int, rows_dtype: Any) -> Optional[Any]:
    """The type of rows that were cast, by the same rule: else codes as uint8."""
    if framework == TORCH:
        return sys.modules["torch"].float8_e4m3fn
    return _ml_dtype("float8_e4m3fn") if framework == NUMPY and _of_ml_dtypes(rows_dtype) else None


def _of_ml_dtypes(dtype: Any) -> bool:
    return str(getattr(getattr(dtype, "type", None), "__module__", "")).startswith("ml_dtypes")


def _ml_dtype(name: str) -> Any:
    import ml_dtypes
    import numpy
    return numpy.dtype(getattr(ml_dtypes, name))


class Memory(Protocol):
    """Ranks whose kernels will write an array."""

    @property
    def twin(self) -> bool: ...
    def empty(self, rank: int, type: str, rows: int, columns: int) -> _native.Array: ...


class Whereabouts(Protocol):
    """Whose array it is going to be; a handle says it."""

    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def framework(self) -> int: ...


class Place(NamedTuple):
    rank: int
    device: int
    framework: int


def _memory_of(stream: Optional[Any], framework: int, device: int) -> contextlib.AbstractContextManager[Any]:
    """New arrays are in the order of ``stream``, which a call is given; None: of the current one. Else they could
    lie where something of the current stream is still read."""
    if stream is None:
        return contextlib.nullcontext()
    number = _native.stream_number(stream)
    if framework == TORCH:
        cuda = sys.modules["torch"].cuda
        context: contextlib.AbstractContextManager[Any] = cuda.stream(
            cuda.ExternalStream(number, device=device) if number > 1 else cuda.default_stream(device))
        return context
    import cupy
    there: contextlib.AbstractContextManager[Any] = cupy.cuda.ExternalStream(number, device)
    return there


def empty(group: Memory, handle: Whereabouts, rows: int, columns: int, kind: str,
          dtype: Optional[Any] = None, stream: Optional[Any] = None) -> Any:
    """A new array [rows, columns] where the rank's kernels can write, in the order of `stream`: of `dtype`, else
    of the type that `kind` names. In the twin it is zero."""
    framework = handle.framework
    if framework == TORCH and handle.device >= 0:
        torch = sys.modules["torch"]
        with _memory_of(stream, framework, handle.device):
            return torch.empty((rows, columns), dtype=dtype or getattr(torch, kind),
                               device=_torch_device(handle.device))
    if framework == CUPY:
        import cupy
        with cupy.cuda.Device(handle.device), _memory_of(stream, framework, handle.device):
            return cupy.empty((rows, columns),
                              dtype=dtype or ("uint16" if kind == "bfloat16" else kind))
    if not group.twin:
        from .errors import InvalidArgument
        raise InvalidArgument("ep: no library to make an output with: the tokens were given by DLPack "
                              "alone; give it")
    if dtype is not None and dtype.itemsize in _CARRIERS:
        kind = _CARRIERS[dtype.itemsize]
    return to_framework(group.empty(handle.rank, kind, rows, columns), framework, dtype)


_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


@functools.lru_cache(maxsize=None)
def _torch_device(ordinal: int) -> Any:
    return sys.modules["torch"].device("cuda", ordinal)
