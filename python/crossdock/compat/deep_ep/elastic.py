"""ElasticBuffer: the calls that DeepEP's class of this name has."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
from typing import Any, Callable, Optional, Sequence, Tuple, Union

from ... import ep
from ..._ranks import current_device
from ...errors import InvalidArgument
from .elastic_calls import ElasticCalls, Order, Wanted
from .elastic_extras import Extras, bytes_of_shapes
from .elastic_handle import EPHandle
from .events import EventHandle, EventOverlap
from .lane import Event, Lane
from .ranks import rank_of
from .settings import Settings

Array = Any
Shapes = Sequence[Sequence[int]]
Rows = Union[Array, Tuple[Array, Array]]
Bias = Union[Array, Tuple[Array, Array], None]

__all__ = ["ElasticBuffer"]


class ElasticBuffer:
    """Dispatch and combine between the GPUs of a host, of any number of tokens.

    ``group``: as for :class:`Buffer`. Either ``num_bytes`` or ``num_max_tokens_per_rank`` and ``hidden``
    say how large the buffer is. Results are the same in every run, ``deterministic`` or not. Accepted
    without effect, since there is NVLink only: ``allow_hybrid_mode``, ``sl_idx``,
    ``num_allocated_qps``; also ``prefer_overlap_with_compute``, and ``allow_multiple_reduction``: what a
    rank's experts make of a token is added up there in fp32 and travels as one bf16 row.

    One thread at a time may use a buffer. Errors are those of :mod:`crossdock.errors`.
    """

    def __init__(self, group: Any, num_bytes: Optional[int] = None, num_cpu_bytes: int = 0,
                 num_max_tokens_per_rank: int = 0, hidden: int = 0, num_topk: int = 0,
                 use_fp8_dispatch: bool = False, deterministic: bool = False,
                 allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
                 prefer_overlap_with_compute: bool = True, sl_idx: int = 3, num_allocated_qps: int = 0,
                 num_cpu_timeout_secs: int = 300, num_gpu_timeout_secs: int = 100,
                 explicitly_destroy: bool = False) -> None:
        if num_bytes is None and not (num_max_tokens_per_rank and hidden):
            raise InvalidArgument("deep_ep ElasticBuffer: num_bytes is missing, or "
                                  "num_max_tokens_per_rank and hidden instead of it")
        self._rank = rank_of(group)
        self.group, self.rank, self.num_ranks = group, self._rank.rank(), self._rank.size()
        self.rank_idx, self.num_allocated_qps = self.rank, num_allocated_qps
        self.num_max_tokens_per_rank, self.explicitly_destroy = num_max_tokens_per_rank, explicitly_destroy
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank
        self._num_bytes, self._of_buffer = num_bytes, (num_max_tokens_per_rank, hidden, num_topk)
        self._lane = Lane(-1 if self._rank.twin else current_device())
        self._settings = Settings.read(wait=num_gpu_timeout_secs, timeout=num_cpu_timeout_secs)
        self._calls = ElasticCalls(self._rank, self._lane, num_max_tokens_per_rank, hidden, num_bytes or 0,
                                   self._settings)
        self._extras = Extras(self._rank, self._lane, self._settings)
        self._closed = False

    # ---- life --------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Gives the memory back when the calls are over that this rank has made. Local: it waits for no other
        rank. Twice is no error."""
        if not self._closed:
            self._closed = True
            with contextlib.ExitStack() as last:  # whatever is said of a call that does not end
                last.callback(self._extras.close)
                last.callback(self._calls.close)
                self._lane.finish([*self._calls.groups, *self._extras.groups], self._settings.timeout)

    @staticmethod
    def capture() -> EventHandle:
        """An event on the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """torch's stream of asynchronous calls. None in the twin, which has no streams."""
        return self._lane.stream

    def get_physical_domain_size(self) -> Tuple[int, int]:
        """(RDMA ranks, NVLink ranks)"""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> Tuple[int, int]:
        """(scale-out ranks, scale-up ranks)"""
        return 1, self.num_ranks

    # ---- sizes -------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """As it was given, else the hint for the numbers given instead."""
        if self._num_bytes is not None:
            return self._num_bytes
        return self.get_buffer_size_hint(self._rank, *self._of_buffer)

    @staticmethod
    def get_buffer_size_hint(group: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0,
                             use_fp8_dispatch: bool = False, allow_hybrid_mode: bool = True,
                             allow_multiple_reduction: bool = True) -> int:
        """Bytes of a rank's buffer; without ``num_topk`` for a top_k of 32."""
        world = rank_of(group).size()
        regions = Settings.read().regions
        options = ep.Options(experts=256, top_k=num_topk or 32, max_tokens=num_max_tokens_per_rank,
                             hidden=hidden, cast=False, slots=1, fall_back=False)
        sizes = ep.sizes(options, world)
        return sizes.control_bytes + regions * sizes.rows_bytes + sizes.input_bytes

    @staticmethod
    def get_engram_storage_size_hint(num_entries: int, hidden: int, num_max_tokens_per_rank: int,
                                     dtype: Any = None) -> Tuple[int, int]:
        """Bytes of a rank's ``num_entries`` rows of a table, by default of bf16, and 0, those of the host:
        tables are in memory of the GPUs, and fetched rows are the caller's."""
        return num_entries * hidden * (2 if dtype is None else int(dtype.itemsize)), 0

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Bytes for tensors on their way to the two neighbours."""
        return 2 * num_max_inflight_tensors * (-(-num_max_tensor_bytes // 128) * 128)

    @staticmethod
    def get_agrs_num_max_session_bytes(group: Any, shapes: Any, dtype: Any) -> int:
        """Bytes of one session in which tensors of these shapes, or of this one, are gathered."""
        return bytes_of_shapes([shapes] if _is_one(shapes) else shapes, int(dtype.itemsize))

    @staticmethod
    def get_agrs_buffer_size_hint(group: Any, num_max_session_bytes: int) -> int:
        """The same: what is gathered is the caller's."""
        return num_max_session_bytes

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, num_scaleout_topk: int = 0,
                                rdma_gbs: float = 0, nvlink_gbs: float = 0, sm_read_gbs: float = 200,
                                sm_write_gbs: float = 50) -> int:
        """SMs that fill NVLink, even and at least 4. The bandwidths are measured ones of our own."""
        sms = self._settings.sms(self.num_ranks)[0]
        return max(-(-sms // 2) * 2, 4)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """0: there is no RDMA."""
        return 0

    # ---- dispatch and combine ----------------------------------------------------------------------

    def dispatch(self, x: Rows, topk_idx: Optional[Array] = None, topk_weights: Optional[Array] = None,
                 cumulative_local_expert_recv_stats: Optional[Array] = None,
                 num_experts: Optional[int] = None, num_max_tokens_per_rank: Optional[int] = None,
                 expert_alignment: Optional[int] = None, num_sms: int = 0, num_qps: int = 0,
                 previous_event: Event = None, previous_event_before_epilogue: Event = None,
                 async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False,
                 handle: Optional[EPHandle] = None, do_handle_copy: bool = True,
                 do_cpu_sync: Optional[bool] = None, do_expand: bool = False,
                 do_zero_padding: bool = False, use_tma_aligned_col_major_sf: bool = False
                 ) -> Tuple[Rows, Optional[Array], Optional[Array], EPHandle, EventOverlap]:
        """Brings tokens to the ranks of their experts.

        ``x``: [tokens, values], rows of a multiple of 16 bytes of any type, or (rows, scales [tokens, n] of
        4-byte values). Returns recv_x of the same kind, recv_topk_idx, recv_topk_weights, the handle
        and the event. Compact: a row for each token that arrives, ids [rows, top_k] of this rank's experts
        or -1, weights [rows, top_k]. ``do_expand``: a row for each choice, expert after expert, each
        beginning at a multiple of ``expert_alignment``; padding is zero, ids are None, weights [rows].
        ``use_tma_aligned_col_major_sf``: scales by column.

        ``do_cpu_sync``, the default without a handle: outputs have as many rows as arrive. Else they have
        room for the most there can be, and only the handle's arrays tell how many there are. With
        ``handle`` tokens, of any type and with weights or without, go the ways of an earlier dispatch, and
        nothing is waited for.
        ``cumulative_local_expert_recv_stats``: [experts of this rank] int32, added to.
        ``allocate_on_comm_stream`` has no effect: results are kept for both streams."""
        order = Order(previous_event, previous_event_before_epilogue, async_with_compute_stream)
        if handle is not None:
            if topk_idx is not None:
                raise InvalidArgument("deep_ep dispatch: a handle brings its ids along: leave topk_idx out")
            wanted = Wanted(handle.num_experts, handle.num_max_tokens_per_rank, handle.expert_alignment,
                            False, handle.do_expand, use_tma_aligned_col_major_sf,
                            num_sms or handle.num_sms, False)
            return self._calls.dispatch(x, handle.topk_idx, topk_weights, wanted, order,
                                        cumulative_local_expert_recv_stats, handle)
        if topk_idx is None or num_experts is None:
            raise InvalidArgument("deep_ep dispatch: topk_idx and num_experts are missing (or a handle)")
        if num_experts % self.num_ranks:
            raise InvalidArgument(f"deep_ep dispatch: num_experts = {num_experts} must be a multiple of "
                                  f"the {self.num_ranks} ranks")
        most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        rows = x[0] if isinstance(x, (tuple, list)) else x
        sync = do_cpu_sync is None or do_cpu_sync
        if not sync and not most:
            raise InvalidArgument("deep_ep dispatch: num_max_tokens_per_rank is missing: without CPU sync "
                                  "outputs have room for the most there can be")
        if most and int(rows.shape[0]) > most:
            raise InvalidArgument(f"deep_ep dispatch: {rows.shape[0]} tokens are more than "
                                  f"num_max_tokens_per_rank = {most}")
        wanted = Wanted(num_experts, most, expert_alignment or 1, sync, do_expand,
                        use_tma_aligned_col_major_sf, num_sms, do_handle_copy)
        return self._calls.dispatch(x, topk_idx, topk_weights, wanted, order,
                                    cumulative_local_expert_recv_stats, None)

    def combine(self, x: Array, handle: EPHandle, topk_weights: Optional[Array] = None, bias: Bias = None,
                num_sms: int = 0, num_qps: int = 0, previous_event: Event = None,
                previous_event_before_epilogue: Event = None, async_with_compute_stream: bool = False,
                allocate_on_comm_stream: bool = False
                ) -> Tuple[Array, Optional[Array], EventOverlap]:
        """The plain sum of what all ranks have made of each token, bf16 [tokens, hidden]. ``x``: bf16, a
        row for each of recv_x; ``topk_weights``, like those received, are brought back as [tokens, top_k].
        ``bias``: one or two [tokens, hidden], added first."""
        biases: Sequence[Array] = [] if bias is None else (
            list(bias) if isinstance(bias, (tuple, list)) else [bias])
        if not isinstance(handle, EPHandle):
            raise InvalidArgument(f"deep_ep: handle is a {type(handle).__name__}: give what dispatch() "
                                  "returned")
        return self._calls.combine(x, handle, topk_weights, [b for b in biases if b is not None],
                                   Order(previous_event, previous_event_before_epilogue,
                                         async_with_compute_stream))

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False,
                sequential: bool = True) -> None:
        """What comes later on the current stream begins when all ranks have come here; with
        ``with_cpu_sync`` the host waits too. It is a dispatch without tokens, on the current stream. Calls
        of a buffer come one after the other on whatever streams, so ``use_comm_stream`` and ``sequential``
        have no effect."""
        self._calls.barrier(with_cpu_sync)

    # ---- gathers -----------------------------------------------------------------------------------

    def agrs_set_config(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> None:
        """Before the first session; collective. At most 32 gathers a session."""
        self._extras.agrs_set_config(num_max_session_bytes, num_max_all_gathers_per_session)

    def create_agrs_session(self) -> None:
        """Begins a session on the communication stream: inputs stay until it ends. Collective."""
        self._extras.create_session()

    def destroy_agrs_session(self) -> None:
        self._extras.destroy_session()

    def agrs_new_session(self, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
        """``with buffer.agrs_new_session():`` begins a session and ends it; nothing if not ``enabled``."""
        return self._extras.new_session() if enabled else contextlib.nullcontext()

    def agrs_get_inplace_tensor(self, shapes: Any, dtype: Any) -> Any:
        """Tensors in memory that peers read, a tuple of one for each shape (or one, for one shape):
        gathering what was written there copies nothing first. Write on the stream that is current now, or
        after it."""
        one = _is_one(shapes)
        made = self._extras.inplace_tensors([shapes] if one else shapes, dtype)
        return made[0] if one else tuple(made)

    def all_gather(self, t: Any) -> Tuple[Any, ...]:
        """[ranks, ...] of a tensor, or of each of a list, each of a multiple of 16 bytes, new arrays; and
        behind them what makes the current stream wait for them. By copy engines: no SM."""
        several = isinstance(t, (list, tuple))
        gathered, wait = self._extras.all_gather(t if several else [t])
        return (*gathered, wait)

    # ---- tensors to the next rank ------------------------------------------------------------------

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Before the first tensor; collective."""
        self._extras.pp_set_config(num_max_tensor_bytes, num_max_inflight_tensors)

    def pp_send(self, t: Array, dst_rank_idx: int, num_sms: int = 0) -> None:
        """To the next or the previous rank of the ring; by a copy engine, so without SMs."""
        self._extras.send(t, dst_rank_idx)

    def pp_recv(self, t: Array, src_rank_idx: int, num_sms: int = 0) -> None:
        """The next tensor of a neighbour, of the same size."""
        self._extras.receive(t, src_rank_idx)

    # ---- rows of a table ---------------------------------------------------------------------------

    def engram_write(self, storage: Array, sf: Optional[Array] = None) -> None:
        """``storage``: [entries, hidden], this rank's rows of a table; row i of rank r is number
        r * entries + i. ``sf``: scales of all rows of the table, [ranks * entries, n], which every rank
        has. Collective."""
        self._extras.engram_write(storage, sf)

    def engram_fetch(self, indices: Array, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
                     ) -> Callable[[], Any]:
        """Rows of any rank by their numbers, int32, pulled over NVLink beside the current stream. Returns
        what makes the current stream wait and gives, for [tokens, n] numbers, [tokens, n * hidden] and the
        scales [tokens, n * packs] or None; for [m] numbers [m, hidden], and only with scales a tuple of
        that and of them, [m, packs]. ``use_tma_aligned_col_major_sf``: scales by column."""
        return self._extras.engram_fetch(indices, use_tma_aligned_col_major_sf)


def _is_one(shapes: Any) -> bool:
    """Whether it is the shape of one tensor, not several."""
    return len(shapes) == 0 or isinstance(shapes[0], int)
