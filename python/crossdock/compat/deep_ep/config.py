"""Tuning values, as their users pass them along."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses

from ...errors import InvalidArgument
from .settings import Settings
from .world import Shape

__all__ = ["Config", "tuned"]


@dataclasses.dataclass(frozen=True)
class Config:
    """How many SMs a call may use. Chunk sizes are kept and have no effect: rows go straight to their
    final place, not through rings of chunks."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"deep_ep Config: {field.name} = {value!r} must be a positive "
                                      "whole number")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of a buffer for 4096 tokens a rank if ``hidden_bytes`` are of a row in FP8, for 8192 if they are
        of one in bf16: what the experts make of a row is bf16. All that may arrive has its place there,
        :class:`Settings` ``regions`` times, unlike in rings of chunks."""
        shape = Shape(experts=256, top_k=32, hidden=-(-hidden_bytes // 8) * 8, wide_ids=True)
        return Settings.read().room(shape, num_ranks, 4096)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: all ranks are in one NVLink domain."""
        return 0


def tuned(num_ranks: int, num_sms: int, combine: bool) -> Config:
    """For any number of ranks that NVLink connects, at most 32. The chunk sizes of four ranks are those that
    callers know; none has an effect."""
    if not 1 <= num_ranks <= 32:
        raise InvalidArgument(f"deep_ep: num_ranks = {num_ranks} must be 1 to 32: all ranks are in one "
                              "NVLink domain of one host")
    if num_ranks == 4:
        return Config(num_sms, num_max_nvl_chunked_send_tokens=9 if combine else 6,
                      num_max_rdma_chunked_recv_tokens=128)
    return Config(num_sms)
