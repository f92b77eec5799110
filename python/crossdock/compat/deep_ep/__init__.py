"""DeepEP's interface on top of Crossdock: the same classes, calls, shapes, types and results, for the GPUs
of one host, and, with NumPy arrays or tensors on the CPU, in the twin::

    from crossdock.compat.deep_ep import Buffer           # or: import deep_ep, once it is installed
    buffer = Buffer(group, num_nvl_bytes=1 << 30)

docs/migrating_from_deep_ep.md lists every call and where it differs.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

from .buffer import Buffer
from .config import Config
from .elastic import ElasticBuffer
from .elastic_handle import EPHandle
from .events import EventHandle, EventOverlap
from .low_latency import LowLatencyHandle
from .normal import NormalHandle
from .ranks import Threads

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap",
           "LowLatencyHandle", "NormalHandle",
           "Threads", "topk_idx_t"]


def __getattr__(name: str) -> Any:
    """``topk_idx_t``, the type of expert ids by default; it needs torch, so it is made on demand."""
    if name == "topk_idx_t":
        import torch
        return torch.int64
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
