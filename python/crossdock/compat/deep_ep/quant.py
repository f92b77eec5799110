"""FP8 with scales that are powers of two, in fp32.

A cast made by the library has fp32 scales of any value, or powers of two packed four to a word; what asks
for fp32 scales that are powers of two is cast here, before the dispatch.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any, Tuple

from ...errors import InvalidArgument
from .frame import Frame, NumPyFrame

Array = Any

__all__ = ["cast_rounded", "need_multiple"]

_GROUP = 128
_LEAST, _MOST = 1e-4, 448.0
_MANTISSA = 0x7FFFFF  #: of fp32; one that is not zero makes the next power of two


def need_multiple(hidden: int, of: int) -> None:
    if hidden % of:
        raise InvalidArgument(f"deep_ep: hidden = {hidden} must be a multiple of {of} for these scales")


def cast_rounded(frame: Frame, x: Array) -> Tuple[Array, Array]:
    """bf16 [tokens, hidden] as e4m3 of the same shape, and its scales, fp32 [tokens, hidden / 128]: for each
    128 values the least power of two with which the largest magnitude is at most 448."""
    tokens, hidden = (int(n) for n in x.shape)
    need_multiple(hidden, _GROUP)
    if isinstance(frame, NumPyFrame):
        return _cast_numpy(x)
    torch = frame.torch  # type: ignore[attr-defined]
    values = x.reshape(tokens, hidden // _GROUP, _GROUP).float()
    largest = values.abs().nan_to_num(0.0, posinf=float("inf")).amax(2).clamp_(min=_LEAST)
    bits = (largest / _MOST).view(torch.int32)
    exponents = (bits >> 23) + ((bits & _MANTISSA) != 0)
    scales = (exponents << 23).view(torch.float32)
    codes = (values / scales.unsqueeze(2)).clamp_(-_MOST, _MOST).to(torch.float8_e4m3fn)
    return codes.reshape(tokens, hidden), scales


def _cast_numpy(x: Array) -> Tuple[Array, Array]:
    import numpy as np

    from ...testing import ep_reference as ref
    codes = x if x.dtype == np.uint16 else x.view(np.uint16)
    tokens, hidden = codes.shape
    values = ref.bf16_decode(codes).reshape(tokens, hidden // _GROUP, _GROUP)
    magnitude = np.abs(values)
    largest = np.max(np.where(np.isnan(magnitude), np.float32(0), magnitude), axis=2, initial=_LEAST)
    bits = (largest / np.float32(_MOST)).astype(np.float32).view(np.int32)
    exponents = (bits >> 23) + ((bits & _MANTISSA) != 0)
    scales = (exponents << 23).astype(np.int32).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        out = ref.e4m3_encode(values / scales[:, :, None]).reshape(tokens, hidden)
    return out, scales
