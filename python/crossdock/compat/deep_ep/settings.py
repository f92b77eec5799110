"""What a buffer is made with besides its arguments."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import os

from ... import ep
from ...errors import InvalidArgument
from .world import TOKENS_OF_AN_SM, Shape

__all__ = ["Settings"]

_MOST_CHOICES = 1 << 30  # of all tokens that a rank can get


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdigit():
        raise InvalidArgument(f"{name} = {text!r} must be a whole number")
    return int(text)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Numbers of the environment, and those of the class or call that made the buffer."""

    regions: int = 3  #: dispatches in memory at a time; one of them only on its way to a copy
    max_tokens: int = 0  #: of a rank in a call; 0: by the buffer's bytes and its first call
    wait: float = 100.0  #: seconds that a kernel waits for a peer
    timeout: float = 100.0  #: seconds that the host waits
    num_sms: int = 0  #: the most a call may use; 0: as many as fill the wire
    expand_sms: int = 0  #: that copy rows by expert beside a dispatch; 0: copies follow it

    @staticmethod
    def read(num_sms: int = 0, wait: float = 100.0, timeout: float = 100.0) -> Settings:
        """CROSSDOCK_DEEP_EP_REGIONS, _MAX_TOKENS, _TIMEOUT and _EXPAND_SMS change the defaults."""
        seconds = _number("CROSSDOCK_DEEP_EP_TIMEOUT", 0)
        regions = _number("CROSSDOCK_DEEP_EP_REGIONS", 3)
        if not 2 <= regions <= 64:
            raise InvalidArgument(f"CROSSDOCK_DEEP_EP_REGIONS = {regions} must be 2 to 64")
        return Settings(regions, _number("CROSSDOCK_DEEP_EP_MAX_TOKENS", 0), seconds or wait,
                        seconds or timeout, num_sms, _number("CROSSDOCK_DEEP_EP_EXPAND_SMS", 0))

    def sms(self, world: int) -> tuple[int, int]:
        """Of a dispatch and of a combine."""
        numbers = ep.default_dispatch_sms(world), ep.default_combine_sms(world)
        return numbers if self.num_sms == 0 else (min(numbers[0], self.num_sms),
                                                  min(numbers[1], self.num_sms))

    def least_tokens(self, shape: Shape, world: int, room: int) -> int:
        """How many tokens a group is made for at least: as many as its memory can be for in ``room``
        bytes, and as the SMs of a dispatch are enough for."""
        if self.max_tokens:
            return self.max_tokens
        tokens = room * 1024 // self._bytes_of_1024(shape, world)
        most = min(TOKENS_OF_AN_SM * self.sms(world)[0], _MOST_CHOICES // (world * shape.top_k))
        return min(tokens, most // 32 * 32)

    def room(self, shape: Shape, world: int, tokens: int) -> int:
        """Bytes that are for so many tokens of a rank: the other way round."""
        return -(-self._bytes_of_1024(shape, world) * tokens // 1024)

    def _bytes_of_1024(self, shape: Shape, world: int) -> int:
        """Of 1024 tokens a rank: places for all that may arrive, and one input of the experts' rows."""
        options = ep.Options(experts=shape.experts, top_k=shape.top_k, max_tokens=1024,
                             hidden=shape.hidden, row_bytes=shape.row_bytes,
                             scale_bytes=shape.scale_bytes, slots=1, fall_back=False, cast=shape.cast)
        sizes = ep.sizes(options, world)
        return self.regions * sizes.rows_bytes + sizes.input_bytes
