"""Arrays of the library as arrays of the framework that the tokens came from."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import functools
import sys
from typing import Any, Callable, Optional

from . import _native

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


def bf16_of(framework: int, rows_dtype: Any) -> Optional[Any]:
    """The type of bf16 rows: the framework's own. NumPy has none: that of ml_dtypes where the tokens
    came in a type of ml_dtypes, else codes as uint16."""
    if framework == NUMPY and _of_ml_dtypes(rows_dtype):
        import ml_dtypes
        return ml_dtypes.bfloat16
    return None


def e4m3_of(framework: int, rows_dtype: Any) -> Optional[Any]:
    """The type of rows that were cast, by the same rule: else codes as uint8."""
    if framework == TORCH:
        return sys.modules["torch"].float8_e4m3fn
    if framework == NUMPY and _of_ml_dtypes(rows_dtype):
        import ml_dtypes
        return ml_dtypes.float8_e4m3fn
    return None


def _of_ml_dtypes(dtype: Any) -> bool:
    return str(getattr(getattr(dtype, "type", None), "__module__", "")).startswith("ml_dtypes")


def empty(group: _native.Group, handle: _native.Handle, type_name: str, columns: int,
          rows_dtype: Any) -> Any:
    """An output of a row for each token of the dispatch."""
    framework = handle.framework
    if framework == TORCH and handle.device >= 0:
        torch = sys.modules["torch"]
        return torch.empty((handle.tokens, columns), dtype=getattr(torch, type_name),
                           device=_torch_device(handle.device))
    if framework == CUPY:
        import cupy
        with cupy.cuda.Device(handle.device):
            return cupy.empty((handle.tokens, columns),
                              dtype="uint16" if type_name == "bfloat16" else type_name)
    if not group.twin:
        from .errors import InvalidArgument
        raise InvalidArgument("ep combine: no library to make the output with: the tokens were given "
                              "by DLPack alone; give out")
    array = group.empty(handle.rank, type_name, handle.tokens, columns)
    kind = bf16_of(framework, rows_dtype) if type_name == "bfloat16" else None
    return to_framework(array, framework, kind)


@functools.lru_cache(maxsize=None)
def _torch_device(ordinal: int) -> Any:
    return sys.modules["torch"].device("cuda", ordinal)
