"""The ranks of the tests here: one for each GPU, or GPU_TEST_RANKS of them where that is more; they share
GPUs then. Kernels of ranks wait for each other, so each rank has a stream to itself where GPUs are shared:
calls that would go to the default stream go to that of their rank, after what the default stream has had."""
# SPDX-License-Identifier: Apache-2.0
import contextlib
import os

import torch

from crossdock import ep, moe

GPUS = max(min(torch.cuda.device_count(), 8), 1)
WORLD = max(GPUS, min(int(os.environ.get("GPU_TEST_RANKS", "0")), 8))
SHARED = WORLD > GPUS
if SHARED:
    os.environ["CROSSDOCK_SYMM_SHARE_GPUS"] = "true"

_streams = {}


def device_of(rank):
    return rank % GPUS


def stream_of(rank):
    """Of a rank that shares its GPU."""
    if rank not in _streams:
        _streams[rank] = torch.cuda.Stream(device_of(rank))
    return _streams[rank]


def at(rank):
    """What torch and the group do inside is in the order of the rank's stream."""
    return torch.cuda.stream(stream_of(rank)) if SHARED else torch.cuda.device(device_of(rank))


def all_idle():
    """Of every GPU; torch.cuda.synchronize() alone means the current one."""
    for device in range(GPUS):
        torch.cuda.synchronize(device)


def _tensors(*of):
    for value in of:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(*value)
        elif isinstance(value, dict):
            yield from _tensors(*value.values())


@contextlib.contextmanager
def _turn(rank, given, *used):
    """Where a call for `rank` goes that was given a stream, or none. Tensors in `used` were made on the default stream:
    torch must not give their memory to others there while the rank's stream reads it."""
    device = device_of(rank)
    default = torch.cuda.default_stream(device)
    if not SHARED or given is not None or torch.cuda.current_stream(device) != default:
        yield
        return
    stream = stream_of(rank)
    stream.wait_stream(default)
    for tensor in _tensors(*used):
        if tensor.is_cuda:
            tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        yield


class Group(ep.Group):
    """ep.Group, whose calls go to the streams of their ranks where GPUs are shared."""

    def dispatch(self, *arguments, rank, stream=None, **more):
        with _turn(rank, stream, arguments, more):
            return super().dispatch(*arguments, rank=rank, stream=stream, **more)

    def group_rows(self, handle, *, stream=None):
        with _turn(handle.rank, stream):
            return super().group_rows(handle, stream=stream)

    def expand_rows(self, handle, *arguments, stream=None, **more):
        with _turn(handle.rank, stream, arguments, more):
            return super().expand_rows(handle, *arguments, stream=stream, **more)

    def reduce_rows(self, handle, *arguments, stream=None, **more):
        with _turn(handle.rank, stream, arguments, more):
            super().reduce_rows(handle, *arguments, stream=stream, **more)

    def combine(self, handle, *arguments, stream=None, **more):
        with _turn(handle.rank, stream, arguments, more):
            return super().combine(handle, *arguments, stream=stream, **more)

    def synchronize(self, timeout=30.0, *, stream=None):
        if SHARED:
            all_idle()
        super().synchronize(timeout, stream=stream)


class Layer(moe.Layer):
    """moe.Layer, likewise."""

    def forward(self, *arguments, rank, stream=None, **more):
        with _turn(rank, stream, arguments, more):
            return super().forward(*arguments, rank=rank, stream=stream, **more)

    def forward_begin(self, *arguments, rank, stream=None, **more):
        with _turn(rank, stream, arguments, more):
            return super().forward_begin(*arguments, rank=rank, stream=stream, **more)

    def forward_end(self, begun, *, stream=None, **more):
        with _turn(begun.rank, stream, more):
            return super().forward_end(begun, stream=stream, **more)

    def synchronize(self, timeout=30.0, *, stream=None):
        if SHARED:
            all_idle()
        super().synchronize(timeout, stream=stream)
