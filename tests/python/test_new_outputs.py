"""In which order of a stream new outputs are allocated, with a torch of our own that only writes that down."""
# SPDX-License-Identifier: Apache-2.0
import contextlib
import sys
import types

import numpy as np
import pytest

from crossdock import InvalidArgument, _arrays, ep, moe


class Torch:
    """As much of torch as allocates; ``empty`` says on which stream it was called."""

    bfloat16, float32, int32, uint8 = "bfloat16", "float32", "int32", "uint8"

    def __init__(self):
        self.current, self.cuda = 77, self
        self.device = lambda kind, ordinal: (kind, ordinal)

    def empty(self, shape, dtype, device):
        return Made(shape, self.current)

    def ExternalStream(self, number, device):
        return types.SimpleNamespace(cuda_stream=number)

    def default_stream(self, device):
        return types.SimpleNamespace(cuda_stream=0)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.cuda_stream
        yield
        self.current = before


class Made:
    def __init__(self, shape, stream):
        self.shape, self.on = shape, stream

    def reshape(self, shape):
        return Made(shape, self.on)


@pytest.fixture
def torch(monkeypatch):
    made = Torch()
    monkeypatch.setitem(sys.modules, "torch", made)
    _arrays._torch_device.cache_clear()
    yield made
    _arrays._torch_device.cache_clear()


STREAMS = (None, 5, types.SimpleNamespace(cuda_stream=5), types.SimpleNamespace(ptr=5),
           types.SimpleNamespace(__cuda_stream__=lambda: (0, 5)), 0, 1)
ORDERS = (77, 5, 5, 5, 5, 0, 0)  # of the current stream, of that stream, of the default one


def group_of(kind, **calls):
    """A group or a layer without a library below."""
    made = object.__new__(kind)
    made._native = types.SimpleNamespace(
        twin=False, **{name: lambda *_: None for name in ("combine", "expand_rows", "forward", "forward_end")}, **calls)
    made._only_rank = None
    made.options = types.SimpleNamespace(hidden=8)
    return made


@pytest.mark.parametrize("stream, order", [*zip(STREAMS, ORDERS)])
def test_outputs_of_a_group_are_in_the_order_of_the_stream_of_the_call(torch, stream, order):
    native = types.SimpleNamespace(framework=_arrays.TORCH, device=0, rank=0, tokens=3, hidden=8, top_k=2, experts=2,
                                   row_values=8, scale_values=0, has_weights=True)
    handle = ep.Handle(native, types.SimpleNamespace(dtype="bfloat16"), None, False)
    group = group_of(ep.Group)
    assert [each.on for each in group.combine(handle, weights=True, stream=stream)] == [order] * 2
    grouped = types.SimpleNamespace(rows=np.zeros(4))
    out = group.expand_rows(handle, grouped, stream=stream)
    assert [each.on for each in (out.rows, out.weights, out.sources)] == [order] * 3
    assert torch.current == 77


@pytest.mark.parametrize("stream, order", [*zip(STREAMS, ORDERS)])
def test_outputs_of_a_layer_are_in_the_order_of_the_stream_of_the_call(torch, stream, order):
    layer = group_of(moe.Layer, place_of_rows=lambda rank, rows: (_arrays.TORCH, 3, 8, 0))
    assert layer.forward(object(), object(), rank=0, stream=stream).on == order
    half = types.SimpleNamespace(rank=0, tokens=3, framework=_arrays.TORCH, device=0, ended=False)
    assert layer.forward_end(moe.BegunForward(half, "bfloat16"), stream=stream).on == order


@pytest.mark.parametrize("stream, order", [*zip(STREAMS, ORDERS)])
def test_outputs_of_a_product_are_in_the_order_of_the_stream_of_the_call(torch, monkeypatch, stream, order):
    torch.float8_e4m3fn = types.SimpleNamespace(itemsize=1)
    monkeypatch.setattr(moe._native, "framework_of", lambda *_: (_arrays.TORCH, 4, 128, 0))
    gemm = object.__new__(moe.Gemm)
    gemm._native = types.SimpleNamespace(twin=False, run=lambda *_: None)
    weights = types.SimpleNamespace(shape=(2, 256, 128), dtype=torch.float8_e4m3fn,
                                    reshape=lambda *_: None, is_contiguous=lambda: True)
    rows = types.SimpleNamespace(dtype=torch.float8_e4m3fn)
    out, scales = gemm.run(rows, weights, swiglu=moe.Swiglu(), stream=stream)
    assert (out.on, scales.on) == (order, order)
    assert gemm.run(rows, weights, stream=stream).on == order


def test_what_is_no_stream_is_named(torch):
    place = _arrays.Place(0, 0, _arrays.TORCH)
    with pytest.raises(InvalidArgument, match="stream is a str: give a torch"):
        _arrays.empty(types.SimpleNamespace(twin=False), place, 3, 8, "bfloat16", stream="5")
