"""The few array operations that this package needs, for torch tensors and for NumPy arrays.

Types go by name ("int32"). Nothing here waits for a GPU: torch's operations go to the current stream.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from typing import Any, Optional, Tuple

from ...errors import InvalidArgument

Array = Any


class Frame:
    """Operations of one framework. ``like``: an array that says on which device a new one is made."""

    gpu = False

    def dtype(self, name: str) -> Any:
        raise NotImplementedError

    def integers(self, dtype: Any) -> bool:
        """Whether it is a type of whole numbers."""
        raise NotImplementedError

    def empty(self, shape: Tuple[int, ...], dtype: Any, like: Array) -> Array:
        raise NotImplementedError

    def full(self, shape: Tuple[int, ...], value: Any, dtype: str, like: Array) -> Array:
        raise NotImplementedError

    def arange(self, n: int, dtype: str, like: Array) -> Array:
        raise NotImplementedError

    def cast(self, array: Array, dtype: Any) -> Array:
        """Another type by value; the array itself where it has that type."""
        raise NotImplementedError

    def where(self, condition: Array, yes: Any, no: Any) -> Array:
        raise NotImplementedError

    def counts(self, values: Array, most: int) -> Array:
        """How often each of 0 to most - 1 is in ``values``, [most] int32. Others are not counted."""
        raise NotImplementedError

    def contiguous(self, array: Array) -> Array:
        raise NotImplementedError

    def clone(self, array: Array) -> Array:
        raise NotImplementedError

    def copy(self, to: Array, of: Array) -> None:
        to[...] = of

    def adopt(self, array: Array) -> Array:
        """Memory of the library, which comes as NumPy's in the twin, as an array of this framework."""
        return array

    def swap_last(self, array: Array) -> Array:
        """A view with the last two dimensions exchanged."""
        raise NotImplementedError

    def pad_columns(self, array: Array, columns: int, value: Any) -> Array:
        """[rows, columns], with ``value`` in the columns that ``array`` does not have."""
        have = int(array.shape[1])
        if have == columns:
            return array
        out = self.empty((int(array.shape[0]), columns), array.dtype, array)
        out[:, :have] = array
        out[:, have:] = value
        return out


class NumPyFrame(Frame):
    def __init__(self) -> None:
        import numpy
        self.np = numpy

    def dtype(self, name: str) -> Any:
        return self.np.dtype(name)

    def integers(self, dtype: Any) -> bool:
        return self.np.dtype(dtype).kind in "iu"

    def empty(self, shape: Tuple[int, ...], dtype: Any, like: Array) -> Array:
        return self.np.empty(shape, dtype)

    def full(self, shape: Tuple[int, ...], value: Any, dtype: str, like: Array) -> Array:
        return self.np.full(shape, value, dtype)

    def arange(self, n: int, dtype: str, like: Array) -> Array:
        return self.np.arange(n, dtype=dtype)

    def cast(self, array: Array, dtype: Any) -> Array:
        return array if array.dtype == dtype else array.astype(dtype)

    def where(self, condition: Array, yes: Any, no: Any) -> Array:
        return self.np.where(condition, yes, no)

    def counts(self, values: Array, most: int) -> Array:
        flat = values[(values >= 0) & (values < most)]
        return self.np.bincount(flat, minlength=most).astype(self.np.int32)

    def contiguous(self, array: Array) -> Array:
        return self.np.ascontiguousarray(array)

    def clone(self, array: Array) -> Array:
        return array.copy()

    def swap_last(self, array: Array) -> Array:
        return array.swapaxes(-1, -2)


class TorchFrame(Frame):
    def __init__(self, gpu: bool) -> None:
        self.torch = sys.modules["torch"]
        self.gpu = gpu

    def dtype(self, name: str) -> Any:
        return getattr(self.torch, name)

    def integers(self, dtype: Any) -> bool:
        return not (dtype.is_floating_point or dtype.is_complex)

    def empty(self, shape: Tuple[int, ...], dtype: Any, like: Array) -> Array:
        return self.torch.empty(shape, dtype=dtype, device=like.device)

    def full(self, shape: Tuple[int, ...], value: Any, dtype: str, like: Array) -> Array:
        return self.torch.full(shape, value, dtype=self.dtype(dtype), device=like.device)

    def arange(self, n: int, dtype: str, like: Array) -> Array:
        return self.torch.arange(n, dtype=self.dtype(dtype), device=like.device)

    def cast(self, array: Array, dtype: Any) -> Array:
        return array.to(dtype)

    def where(self, condition: Array, yes: Any, no: Any) -> Array:
        return self.torch.where(condition, yes, no)

    def counts(self, values: Array, most: int) -> Array:
        # torch.bincount would wait for the GPU to learn the largest value.
        flat = values.reshape(-1).to(self.torch.int64)
        flat = self.torch.where((flat < 0) | (flat >= most), most, flat)
        out = self.torch.zeros(most + 1, dtype=self.torch.int32, device=values.device)
        return out.scatter_add_(0, flat, self.torch.ones_like(flat, dtype=self.torch.int32))[:most]

    def contiguous(self, array: Array) -> Array:
        return array.contiguous()

    def clone(self, array: Array) -> Array:
        return array.clone()

    def adopt(self, array: Array) -> Array:
        return array if isinstance(array, self.torch.Tensor) else self.torch.from_numpy(array)

    def swap_last(self, array: Array) -> Array:
        return array.transpose(-1, -2)


_numpy: Optional[NumPyFrame] = None
_torch: dict[bool, TorchFrame] = {}


def frame_of(array: Array, what: str) -> Frame:
    """The operations for an argument. Raises InvalidArgument where it is neither torch's nor NumPy's."""
    global _numpy
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        gpu = bool(array.is_cuda)
        if gpu not in _torch:
            _torch[gpu] = TorchFrame(gpu)
        return _torch[gpu]
    if type(array).__module__ == "numpy" or hasattr(array, "__array_interface__"):
        if _numpy is None:
            _numpy = NumPyFrame()
        return _numpy
    raise InvalidArgument(f"{what} is a {type(array).__name__}: it must be a torch tensor (or, in the "
                          "twin, a NumPy array)")
