"""Buffer: the calls that DeepEP's class of this name has."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
from typing import Any, Callable, ClassVar, Optional, Sequence, Tuple, Union

from ... import ep
from ..._ranks import current_device
from ...errors import InvalidArgument, Unsupported
from .config import Config, tuned
from .events import EventHandle, EventOverlap
from .few import options_of
from .frame import frame_of
from .lane import Lane
from .low_latency import Format, LowLatency, LowLatencyHandle
from .normal import How, LikeTopK, Normal, NormalHandle
from .ranks import rank_of
from .settings import Settings
from .world import Shape

Array = Any
Rows = Union[Array, Tuple[Array, Array]]
Bias = Union[Array, Tuple[Array, Array], None]

__all__ = ["Buffer"]


class Buffer:
    """Dispatch and combine between the GPUs of a host.

    ``group``: a process group of ``torch.distributed``, a :class:`crossdock.Exchange`, or a rank of
    :class:`~crossdock.compat.deep_ep.Threads`; or ``comm``, a communicator of mpi4py.
    ``num_nvl_bytes`` decides for how many tokens a call may be, see the guide. ``num_rdma_bytes``,
    ``num_qps_per_rank``, ``allow_nvlink_for_low_latency_mode``, ``allow_mnnvl`` and ``use_fabric`` are
    accepted: there is NVLink only. Nothing is collective until the first dispatch.

    One thread at a time may use a buffer. Errors are those of :mod:`crossdock.errors`.
    """

    num_sms: ClassVar[int] = 20

    def __init__(self, group: Any = None, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0,
                 low_latency_mode: bool = False, num_qps_per_rank: int = 24,
                 allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
                 explicitly_destroy: bool = False, enable_shrink: bool = False, comm: Any = None,
                 use_fabric: bool = False) -> None:
        self._rank = rank_of(group, comm)
        self.rank, self.group_size, self.group = self._rank.rank(), self._rank.size(), group
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink
        self._lane = Lane(-1 if self._rank.twin else current_device())
        self._settings = Settings.read(type(self).num_sms)
        self._normal = Normal(self._rank, self._lane, num_nvl_bytes, self._settings)
        self._low_latency = LowLatency(self._rank, self._lane, self._settings, enable_shrink)
        self._closed = False

    # ---- life --------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Gives the memory back when the calls are over that this rank has made. Local: it waits for no other
        rank. Twice is no error."""
        if not self._closed:
            self._closed = True
            with contextlib.ExitStack() as last:  # whatever is said of a call that does not end
                last.callback(self._low_latency.close)
                last.callback(self._normal.close)
                self._lane.finish([*self._normal.groups, *self._low_latency.groups], self._settings.timeout)

    @staticmethod
    def is_sm90_compiled() -> bool:
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """The most SMs that normal calls of buffers made later use."""
        if new_num_sms < 2 or new_num_sms % 2:
            raise InvalidArgument(f"deep_ep: num_sms = {new_num_sms} must be even and at least 2")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event on the current stream."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> Any:
        """torch's stream of asynchronous calls. None in the twin, which has no streams."""
        return self._lane.stream

    def get_local_device_id(self) -> int:
        return -1 if self._rank.twin else current_device()

    def get_num_rdma_ranks(self) -> int:
        return 1

    def get_rdma_rank(self) -> int:
        return 0

    def is_internode_available(self) -> bool:
        return False

    def get_local_buffer_tensor(self, dtype: Any, size: Optional[Any] = None, offset: int = 0,
                                use_rdma_buffer: bool = False) -> Array:
        """The memory where rows arrive, as ``dtype`` from byte ``offset`` on. There is some after the
        first dispatch. ``use_rdma_buffer``: an array without elements, for callers that clean all of it, and
        Unsupported with a ``size``: rows of low-latency calls lie in slots, and rely on no zeros."""
        if use_rdma_buffer:
            if size is not None:
                raise Unsupported("deep_ep: rows of low-latency calls arrive in slots of the library: take what "
                                  "the call returns")
            return _nothing_of(dtype, self.get_local_device_id())
        worlds = self._normal.worlds
        if not worlds:
            raise InvalidArgument("deep_ep: the buffer has no memory before its first dispatch, which "
                                  "says what rows it is for")
        memory = worlds[-1].memory
        if type(dtype).__module__ == "torch" and type(memory).__module__ == "numpy":
            import torch
            memory = torch.from_numpy(memory)
        size_of = int(dtype.itemsize) if hasattr(dtype, "itemsize") else 1
        values = memory[offset:offset + (len(memory) - offset) // size_of * size_of].view(dtype)
        if size is None:
            return values
        wanted = 1
        for n in size:
            wanted *= int(n)
        if wanted > len(values):
            raise InvalidArgument(f"deep_ep: the buffer has {len(values)} values of {dtype} from byte "
                                  f"{offset} on, fewer than size = {tuple(size)}")
        return values[:wanted].reshape(tuple(int(n) for n in size))

    # ---- many tokens -------------------------------------------------------------------------------

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return tuned(num_ranks, Buffer.num_sms, False)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return tuned(num_ranks, Buffer.num_sms, True)

    def get_dispatch_layout(
            self, topk_idx: Array, num_experts: int, previous_event: Optional[EventOverlap] = None,
            async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Tuple[Array, Optional[Array], Array, Array, EventOverlap]:
        """``topk_idx``: [tokens, top_k] int64 or int32, -1 for none. Returns num_tokens_per_rank [ranks]
        int32, None (there are no RDMA ranks), num_tokens_per_expert [num_experts] int32,
        is_token_in_rank [tokens, ranks] bool, and the event."""
        made, event = self._normal.layout(topk_idx, num_experts,
                                          How(previous_event, async_finish, allocate_on_comm_stream))
        return made.tokens_per_rank, None, made.tokens_per_expert, made.is_token_in_rank, event

    def dispatch(self, x: Rows, handle: Optional[NormalHandle] = None,
                 num_tokens_per_rank: Optional[Array] = None,
                 num_tokens_per_rdma_rank: Optional[Array] = None,
                 is_token_in_rank: Optional[Array] = None,
                 num_tokens_per_expert: Optional[Array] = None, topk_idx: Optional[Array] = None,
                 topk_weights: Optional[Array] = None, expert_alignment: int = 1,
                 num_worst_tokens: int = 0, config: Optional[Config] = None,
                 previous_event: Optional[EventOverlap] = None, async_finish: bool = False,
                 allocate_on_comm_stream: bool = False) -> Tuple[Any, ...]:
        """Brings tokens to the ranks of their experts.

        ``x``: bf16 [tokens, hidden], or (e4m3 [tokens, hidden], scales [tokens, n] of 4-byte values).
        Returns recv_x (of the same kind), recv_topk_idx [rows, top_k] of the type of ``topk_idx`` (experts
        of this rank from 0 on, -1 for others), recv_topk_weights [rows, top_k] float32, a list of the
        choices of each expert rounded up to ``expert_alignment``, the handle, and the event.

        With ``handle`` other rows go the ways of an earlier dispatch; all but recv_x and the event are
        None then. With ``num_worst_tokens`` the host waits for nothing: outputs have that many rows,
        unused ones ids of -1, and the list is empty. Where ``recv_x`` is still held by many earlier calls
        it is a copy; else it is memory of the library, and work on it has to be ordered before the
        current stream at the next call that is made after it was dropped."""
        how = How(previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise InvalidArgument("deep_ep dispatch: a handle brings its ids and weights along: leave "
                                      "topk_idx and topk_weights out")
            return self._normal.dispatch_again(x, _own(handle), how).as_tuple()
        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise InvalidArgument("deep_ep dispatch: num_tokens_per_rank, is_token_in_rank and "
                                  "num_tokens_per_expert of get_dispatch_layout() are missing (or a "
                                  "handle)")
        if topk_weights is not None and topk_idx is None:
            raise InvalidArgument("deep_ep dispatch: topk_weights without topk_idx: give both or neither")
        like = LikeTopK(topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert)
        return self._normal.dispatch(x, like, num_worst_tokens, expert_alignment, how).as_tuple()

    def combine(self, x: Array, handle: NormalHandle, topk_weights: Optional[Array] = None,
                bias: Bias = None, config: Optional[Config] = None,
                previous_event: Optional[EventOverlap] = None, async_finish: bool = False,
                allocate_on_comm_stream: bool = False
                ) -> Tuple[Array, Optional[Array], EventOverlap]:
        """The plain sum of the rows that all ranks have made of each token, bf16 [tokens, hidden], in
        fp32 and in the order of the ranks. ``x``: bf16 [rows of recv_x, hidden]. ``topk_weights``,
        [rows, top_k], are added up too. ``bias``: one or two [tokens, hidden], added first."""
        biases: Sequence[Array] = [] if bias is None else (
            list(bias) if isinstance(bias, (tuple, list)) else [bias])
        return self._normal.combine(x, _own(handle), topk_weights, [b for b in biases if b is not None],
                                    How(previous_event, async_finish, allocate_on_comm_stream))

    #: There is one path, over NVLink.
    internode_dispatch = dispatch
    internode_combine = combine

    # ---- few tokens --------------------------------------------------------------------------------

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int,
                                       num_ranks: int, num_experts: int) -> int:
        """Bytes that low-latency calls of such sizes take of a GPU, for a top_k of 8 and rows in BF16; with
        use_fp8 they take less. Any number may be given as num_rdma_bytes: memory is made when it is known
        what for."""
        shape = Shape(num_experts, 8, hidden, wide_ids=True)
        options = options_of(shape, num_ranks, num_max_dispatch_tokens_per_rank, 1.0, False)
        sizes = ep.sizes(options, num_ranks)
        return sizes.window_bytes + sizes.local_bytes

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int,
                                 num_experts: int) -> None:
        """Nothing: normal and low-latency calls have memory of their own, and no call relies on zeros."""

    def low_latency_dispatch(
            self, x: Array, topk_idx: Array, num_max_dispatch_tokens_per_rank: int, num_experts: int,
            cumulative_local_expert_recv_stats: Optional[Array] = None,
            dispatch_wait_recv_cost_stats: Optional[Array] = None, use_fp8: bool = True,
            round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False,
            return_recv_hook: bool = False
    ) -> Tuple[Rows, Array, LowLatencyHandle, EventOverlap, Callable[[], None]]:
        """``x``: bf16 [tokens, hidden]. Returns recv_x [experts of this rank, ranks * most tokens, hidden]
        bf16, or a tuple of e4m3 and scales [.., .., hidden / 128] float32 (``use_ue8m0``: int32
        [.., .., hidden / 512], four exponents each), stored by column; recv_count [experts of this rank]
        int32; the handle; the event; and the hook. Rows of an expert are in the order of their rank and
        token; what lies behind recv_count is not defined.

        With ``return_recv_hook`` results are there after the hook, which may be called twice; no SM waits
        until then. Statistics
        are added to: choices of each expert, int32, and nanoseconds waited for each rank, int64."""
        return self._low_latency.dispatch(
            x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,
            Format(use_fp8, round_scale, use_ue8m0), cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats, async_finish, return_recv_hook)

    def low_latency_combine(
            self, x: Array, topk_idx: Array, topk_weights: Array, handle: LowLatencyHandle,
            use_logfmt: bool = False, zero_copy: bool = False, async_finish: bool = False,
            return_recv_hook: bool = False, out: Optional[Array] = None,
            combine_wait_recv_cost_stats: Optional[Array] = None
    ) -> Tuple[Array, EventOverlap, Callable[[], None]]:
        """The sum of what the experts have made of each token, times ``topk_weights`` [tokens, top_k]
        float32: bf16 [tokens, hidden], a new array or ``out``; the event; and the hook. ``x``: bf16, like
        recv_x; with ``zero_copy`` it has been written into get_next_low_latency_combine_buffer().
        ``use_logfmt``: what a rank has made of a token travels in 10 bits a value on a logarithmic scale,
        with errors of a percent; hidden has to be a multiple of 512. Where num_max_dispatch_tokens_per_rank
        is at most 8, however many tokens a call has, rows stay bf16, but not with ``enable_shrink``, nor if
        they were sent with ``use_ue8m0``.
        ``combine_wait_recv_cost_stats``, [ranks] int64, is added to: nanoseconds waited for each rank, for
        the weights of its tokens and for its rows."""
        return self._low_latency.combine(x, topk_idx, topk_weights, handle, use_logfmt, zero_copy,
                                         async_finish, return_recv_hook, out,
                                         combine_wait_recv_cost_stats)

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Array:
        """[experts of this rank, ranks * most tokens, hidden] bf16, for ``zero_copy``."""
        return self._low_latency.combine_buffer(handle)

    # ---- ranks that are left out -------------------------------------------------------------------

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Low-latency calls go on without a rank, or with it again, from the next one on. Both ranks of a
        pair let the other in before the same dispatch, after the same calls."""
        self._need_shrink()
        self._low_latency.mask(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: Array) -> None:
        """``mask_status``, [ranks] int32, becomes 1 for every rank that is left out, by the caller or
        because it did not come in time, and 0 for the others."""
        self._need_shrink()
        self._low_latency.tell_masks(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """No rank is left out afterwards."""
        self._need_shrink()
        self._low_latency.clear_masks()

    def _need_shrink(self) -> None:
        if not self.enable_shrink:
            raise InvalidArgument("deep_ep: the calls of the mask buffer need enable_shrink = True")


def _own(handle: Any) -> NormalHandle:
    if not isinstance(handle, NormalHandle):
        raise InvalidArgument(f"deep_ep: handle is a {type(handle).__name__}: give what dispatch() of "
                              "this package returned")
    return handle


def _nothing_of(dtype: Any, device: int) -> Array:
    """An array of the framework that ``dtype`` is of, without elements."""
    if type(dtype).__module__ == "torch":
        import torch
        return torch.empty(0, dtype=dtype, device="cpu" if device < 0 else f"cuda:{device}")
    import numpy
    return numpy.empty(0, dtype)
