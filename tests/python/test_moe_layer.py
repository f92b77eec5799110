"""Expert layers from Python in the twin: whole forwards against the reference, halves, siblings,
statistics, mistakes, faults."""
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

from cases import TIMEOUT, raises
from crossdock import Busy, Closed, Incompatible, InvalidArgument, moe
from crossdock.testing import ep_reference as ep_ref
from moe_cases import Case, check, data_of, forward, given, loaded, residual_of


@pytest.mark.parametrize("case", [
    Case(world=1, experts=4, top_k=2),
    Case(world=1, experts=4, format="bf16", weights=False),
    Case(world=2, experts=5, residual=True),
    Case(world=2, format="bf16", residual=True),
    Case(world=2, quantised=True, wide_ids=True),
    Case(world=4, experts=9, max_tokens=6, wide_ids=True, residual=True),
    Case(world=4, format="bf16", max_tokens=6, inter=256),
    Case(world=2, shared_inter=256, residual=True),
    Case(world=2, bias=True, residual=True),
    Case(world=1, experts=4, bias=True, format="bf16", weights=False),
    Case(world=1, experts=4, shared_inter=128, shared_weights=True, quantised=True),
    Case(world=4, experts=8, max_tokens=6, format="bf16", shared_inter=128, shared_weights=True),
    Case(world=2, scales="ue8m0", max_tokens=4, hidden=640, residual=True),
    Case(world=2, format="e2m1", max_tokens=4),
    Case(world=2, format="e2m1", scales="ue8m0", max_tokens=4, hidden=640, quantised=True),
    Case(world=1, experts=2, format="e2m1", scales="ue8m0", max_tokens=3, shared_inter=128, bias=True),
    Case(world=1, experts=2, format="e2m1", hidden=128, max_tokens=3),
], ids=lambda c: f"{c.world}-{c.format}-{c.scales}-{c.quantised}-{c.shared_inter}-{c.bias}")
def test_forwards_give_what_the_reference_gives(case):
    data = data_of(case)
    with loaded(case, data) as layer:
        outs = forward(layer, data)
        assert outs[0].dtype == np.uint16
        check(outs, data.want())
        again = forward(layer, data)
        for out, same in zip(outs, again):
            np.testing.assert_array_equal(out, same)


def test_outputs_of_the_caller_and_types_of_ml_dtypes():
    case = Case(world=1, experts=2, top_k=2, max_tokens=4)
    data = data_of(case)
    with loaded(case, data) as layer:
        wide = np.full((4, 2 * case.hidden), 0xFFFF, np.uint16)
        out = layer.forward(data.sent[0].rows, data.sent[0].ids, data.sent[0].weights,
                            out=wide[:, :case.hidden])
        rows = data.sent[0].rows.view(ml_dtypes.bfloat16)
        typed = layer.forward(rows, data.sent[0].ids, data.sent[0].weights)
        layer.synchronize(TIMEOUT)
        assert typed.dtype == ml_dtypes.bfloat16
        check([out], data.want())
        np.testing.assert_array_equal(typed.view(np.uint16), out)
        assert np.all(wide[:, case.hidden:] == 0xFFFF)


@pytest.mark.parametrize("shared_inter", [0, 128])
def test_halves_give_the_bits_of_wholes(shared_inter):
    case = Case(residual=True, shared_inter=shared_inter)
    data = data_of(case)
    other = data_of(dataclasses.replace(case, seed=2))
    with loaded(case, data) as layer:
        whole = [forward(layer, d) for d in (data, other)]
        begun = {}

        def begin(d):
            begun[id(d)] = [layer.forward_begin(**given(d, r)) for r in layer.local_ranks]

        def end(d):
            return [layer.forward_end(b, **residual_of(d, b.rank)) for b in begun[id(d)]]

        begin(data)
        begin(other)
        with raises(Busy, "2 forwards of rank 0 have begun, as many as there are slots"):
            begin(data)
        outs = [end(data)]
        begin(data)
        outs += [end(other), end(data)]
        layer.synchronize(TIMEOUT)
        for got, want in zip(outs, (whole[0], whole[1], whole[0])):
            for one, same in zip(got, want):
                np.testing.assert_array_equal(one, same)
        assert all(b.ended for b in begun[id(data)])
        with raises(InvalidArgument, "this forward has ended"):
            layer.forward_end(begun[id(data)][0])


def test_what_begins_keeps_its_input_until_it_ends():
    case = Case(world=1, experts=2, top_k=2, max_tokens=4)
    data = data_of(case)
    with loaded(case, data) as layer:
        want = forward(layer, data)[0]
        begun = layer.forward_begin(data.sent[0].rows.copy(), data.sent[0].ids.copy(),
                                    data.sent[0].weights.copy())
        gc.collect()
        layer.synchronize(TIMEOUT)  # between the halves
        out = layer.forward_end(begun)
        layer.synchronize(TIMEOUT)
        np.testing.assert_array_equal(out, want)
        del begun
        dropped = layer.forward_begin(data.sent[0].rows, data.sent[0].ids)
        del dropped  # gives its slot back
        for _ in range(3):
            np.testing.assert_array_equal(forward(layer, data)[0], want)


# Until then no stream waits for the dispatch that reads it, so it must not be used for something else.
def test_what_is_dropped_keeps_its_input_until_the_ranks_next_call():
    case = Case(world=1, experts=2, top_k=2, max_tokens=4)
    data = data_of(case)
    with loaded(case, data) as layer:
        arrays = [data.sent[0].rows.copy(), data.sent[0].ids.copy()]
        held = [weakref.ref(array) for array in arrays]
        begun = layer.forward_begin(*arrays)
        arrays.clear()
        del begun
        gc.collect()
        assert all(ref() is not None for ref in held)
        forward(layer, data)
        assert all(ref() is None for ref in held)


# The twin runs what has begun when it is waited for, whether or not anybody wants the rest.
def test_the_twin_reads_what_was_given_to_a_forward_that_was_dropped():
    case = Case(world=2, max_tokens=4)
    data = data_of(case)
    with loaded(case, data) as layer:
        begun = [layer.forward_begin(**given(data, r)) for r in layer.local_ranks]
        del begun
        # Memory of ids that are gone would be taken for these, and name no experts.
        taken = [np.from_dlpack(layer._native.empty(r, "int16", case.max_tokens, 2 * case.top_k))
                 for r in layer.local_ranks for _ in range(8)]
        for array in taken:
            array[:] = 0x7FFF
        layer.synchronize(TIMEOUT)
        check(forward(layer, data), data.want())


def test_siblings_share_all_but_the_weights():
    case = Case(world=2, max_tokens=4)
    data = data_of(case)
    other = dataclasses.replace(data, gate_up=data.gate_up[:, ::-1].copy())
    layer = loaded(case, data)
    second = layer.sibling()
    with raises(InvalidArgument, "rank 0 has no weights yet"):
        forward(second, data)
    for rank in second.local_ranks:
        second.load(other.weights(rank), rank=rank)
    first_outs = [layer.forward(**given(data, r)) for r in (0, 1)]
    second_outs = [second.forward(**given(data, r)) for r in (0, 1)]
    second.synchronize(TIMEOUT)
    check(first_outs, data.want())
    check(second_outs, other.want())
    layer.close()
    check(forward(second, data), other.want())
    second.close()
    with raises(Closed, "the layer is closed"):
        forward(second, data)


def test_shared_experts_are_checked():
    case = Case(world=1, experts=2, top_k=2, max_tokens=4, shared_inter=128)
    data = data_of(case)
    with case.layer() as layer:
        assert layer.shared_layout() == (1, "e4m3", 1, 256, 128, "f32")
        assert layer.memory.shared_bytes > 0
        layer.load(data.weights(0))
        with raises(InvalidArgument, "rank 0 has no weights of shared experts yet: load_shared()"):
            forward(layer, data)
        with raises(Incompatible, "2 experts", "rank 0 takes", "1 experts"):
            layer.load_shared(data.weights(0))
        layer.load_shared(data.shared_expert())
        with raises(InvalidArgument, "shared_weights is float32 [3]"):
            layer.forward(**{**given(data, 0), "shared_weights": np.ones(3, np.float32)})
        check(forward(layer, data), data.want())
    with Case(world=1, experts=2, top_k=2, max_tokens=4).layer() as layer:
        with raises(InvalidArgument, "shared_inter = 0"):
            layer.load_shared(data.shared_expert())
        layer.load(data.weights(0))
        with raises(InvalidArgument, "this one has shared_inter = 0"):
            layer.forward(**{**given(data, 0), "shared_weights": np.ones(4, np.float32)})
    with raises(InvalidArgument, "shared_inter = 100 must be a multiple of 128: pad to 128"):
        moe.layer_sizes(Case().options().__class__(**{**Case().options().__dict__, "shared_inter": 100}), 2)


def test_biases():
    case = Case(world=1, experts=2, top_k=2, max_tokens=4, bias=True)
    data = data_of(case)
    gate_up, down = data.bias(0)
    with case.layer() as layer:
        with raises(InvalidArgument, "rank 0 has no weights yet"):
            layer.load_bias(down=down)
        layer.load(data.weights(0))
        for change, texts in (({"down": down[:1]}, ["down is float32 [1, 256]", "[2, 256]"]),
                              ({"gate_up": gate_up.astype(np.float64)}, ["gate_up is float64"]),
                              ({"down": ep_ref.bf16_encode(down)}, ["must be of one type"])):
            with raises(InvalidArgument, *texts):
                layer.load_bias(**{"gate_up": gate_up, "down": down, **change})
        codes = [ep_ref.bf16_encode(b) for b in (np.roll(gate_up, case.inter, axis=1), down)]
        layer.load_bias(gate_up=codes[0], down=codes[1], up_first=True)
        check(forward(layer, data), data.want())


@pytest.mark.parametrize("format, scales", [("e2m1", "ue8m0"), ("e4m3", "f32"), ("bf16", "f32")])
def test_weights_prepared_on_a_rank(format, scales):
    case = Case(world=2, experts=4, format=format, scales=scales, max_tokens=3, shared_inter=128)
    data = data_of(case)
    with loaded(case, data) as layer:
        want = forward(layer, data)
        made = []
        for rank in layer.local_ranks:
            mine = data.experts_of(rank)
            host = data.weights(rank)
            made.append(layer.prepare(data.gate_up[mine], data.down[mine], rank=rank))
            assert made[rank].layout == layer.weight_layout(rank)
            assert made[rank].report == host.report
            for name in ("gate_up", "down", "gate_up_scales", "down_scales"):
                np.testing.assert_array_equal(getattr(made[rank], name), getattr(host, name))
            layer.use(made[rank], rank=rank)
            shared = layer.prepare(*data.shared, rank=rank)
            layer.use_shared(shared, rank=rank)
        with raises(InvalidArgument, "the weights were prepared on rank 0"):
            layer.use(made[0], rank=1)
        with raises(Incompatible, "2 experts", "rank 0 takes", "1 experts"):
            layer.use_shared(made[0], rank=0)
        with raises(InvalidArgument, "of gate_up at expert 0, row 0, column 5 must be finite"):
            wrong = data.gate_up[:2].copy()
            wrong[0, 0, 5] = np.nan
            layer.prepare(wrong, data.down[:2], rank=0)
        del made, shared
        gc.collect()
        for out, same in zip(forward(layer, data), want):
            np.testing.assert_array_equal(out, same)


def test_formats_and_scales_are_checked():
    case = Case(world=1, experts=2, top_k=2, max_tokens=4, hidden=640, format="e2m1", scales="ue8m0",
                quantised=True)
    data = data_of(case)
    with loaded(case, data) as layer:
        assert layer.weight_layout() == (1, "e2m1", 2, 640, 128, "ue8m0")
        assert layer.memory.weights.scale_bytes == 1
        want = forward(layer, data)[0]
        good = given(data, 0)
        words = layer.forward(**{**good, "scales": good["scales"].view(np.int32)})
        typed = layer.forward(**{**good, "scales": good["scales"].view(ml_dtypes.float8_e8m0fnu)})
        layer.synchronize(TIMEOUT)
        np.testing.assert_array_equal(words, want)
        np.testing.assert_array_equal(typed, want)
        for scales, texts in ((data.sent[0].scales, ["scales is float32", "uint8 or float8_e8m0fnu"]),
                              (good["scales"][:, :5].copy(), ["scales is uint8 [4, 5]", "[4, 8]"]),
                              (good["scales"].view(np.int32)[:, :1].copy(), ["int32 [4, 1]", "[4, 2]"]),
                              (None, ["rows of e4m3 need scales"])):
            with raises(InvalidArgument, *texts):
                layer.forward(**{**good, "scales": scales})
        for other in ({"format": "e4m3", "scales": "ue8m0"}, {"format": "e2m1"}, {"format": "bf16"}):
            with raises(Incompatible, "rank 0 takes version 1, e2m1, 2 experts, hidden 640, inter 128, ue8m0"):
                layer.load(moe.Weights.prepare(data.gate_up, data.down, **other))
    for change, text in (({"scales": "f16"}, 'scales = f16 must be one of "f32", "ue8m0"'),
                         ({"format": "bf16"}, "scales = ue8m0 with format = bf16")):
        with raises(InvalidArgument, text):
            moe.layer_sizes(dataclasses.replace(case.options(), **change), 1)


def test_statistics_and_memory():
    case = Case(world=2)
    data = data_of(case)
    with loaded(case, data) as layer:
        for _ in range(2):
            forward(layer, data)
        for rank in (0, 1):
            got = layer.statistics(rank)
            mine = data.experts_of(rank)
            want = [2 * sum(int(np.sum(of.ids == e)) for of in data.sent)
                    for e in range(mine.start, mine.stop)]
            assert got.expert_selections == want
            assert len(got.source_wait_ns) == 2 and len(got.combine_wait_ns) == 2
        assert layer.memory == moe.layer_sizes(case.options(), 2)
        assert layer.memory.output_bytes == layer.memory.places * case.hidden * 2
        assert "ranks [0, 1] of 2" in repr(layer)
    assert "closed" in repr(layer)


def test_wrong_options_are_named():
    good = Case().options()
    for change, texts in (({"hidden": 200}, ["hidden = 200", "pad to 256"]),
                          ({"inter": 100}, ["inter = 100", "pad to 128"]),
                          ({"experts": 1}, ["1 experts are fewer than the 2 ranks"]),
                          ({"clamp": -1.0}, ["clamp = -1"]),
                          ({"top_k": 0}, ["top_k = 0"]),
                          ({"format": "fp8"}, ["format = fp8 must be one of"]),
                          ({"tile": "7"}, ["tile = 7 must be one of"]),
                          ({"max_tokens": -1}, ["max_tokens = -1 must be a whole number"]),
                          ({"wait": "x"}, [])):
        options = dataclasses.replace(good, **change)
        with pytest.raises(Exception) as caught:
            moe.Layer(options, world=2, backend="twin")
        for text in texts:
            assert isinstance(caught.value, InvalidArgument) and text in caught.value.message
    with raises(InvalidArgument, "world is missing"):
        moe.Layer(good, backend="twin")
    with raises(InvalidArgument, "backend = 'cpu'"):
        moe.Layer(good, world=2, backend="cpu")


def test_wrong_forwards_launch_nothing():
    case = Case(world=1, experts=2, top_k=2, max_tokens=4)
    data = data_of(case)
    of = data.sent[0]
    with loaded(case, data) as layer:
        def refuse(*texts, **change):
            arguments = {**given(data, 0), **change}
            for call in (layer.forward, layer.forward_begin):
                with raises(InvalidArgument, *texts):
                    call(**{k: v for k, v in arguments.items()
                            if call == layer.forward or k not in ("out", "residual")})

        refuse("rows is float32", "bfloat16", rows=of.rows.astype(np.float32))
        refuse("rows is uint16 [4, 128]", "[tokens, 256]", rows=of.rows[:, :128])
        refuse("5 tokens are more than the max_tokens = 4", rows=np.zeros((5, 256), np.uint16),
               ids=np.zeros((5, 2), np.int32), weights=None)
        refuse("ids is int64", "wide_ids = False", ids=of.ids.astype(np.int64))
        refuse("ids is int32 [4, 1]", "[4, 2]", ids=of.ids[:, :1])
        refuse("weights is float64", "float32", weights=of.weights.astype(np.float64))
        refuse("weights is float32 [3, 2]", weights=of.weights[:3])
        refuse("rows of e4m3 need scales", rows=ep_ref.cast(of.rows)[0])
        refuse("rows of bf16 have no scales", scales=np.ones((4, 2), np.float32))
        refuse("scales is float32 [4, 1]", "[4, 2]", rows=ep_ref.cast(of.rows)[0],
               scales=np.ones((4, 1), np.float32))
        refuse("ids must be a torch tensor, a NumPy array", ids=[[1, 2]])
        refuse("rank 3 is not one of the 1 ranks", rank=3)
        for change, texts in (({"out": np.zeros((3, 256), np.uint16)}, ["out is uint16 [3, 256]"]),
                              ({"out": np.zeros((4, 256), np.float32)}, ["out is float32"]),
                              ({"residual": np.zeros((4, 128), np.uint16)}, ["residual is"])):
            with raises(InvalidArgument, *texts):
                layer.forward(**{**given(data, 0), **change})
        check(forward(layer, data), data.want())


def test_a_fault_is_named_and_reset_heals():
    case = Case(world=2, max_tokens=4)
    data = data_of(case)
    with loaded(case, data) as layer:
        right = data.sent[0].ids.copy()
        data.sent[0].ids[1, 0] = 99
        with raises(InvalidArgument, "expert 99"):
            forward(layer, data)
        with raises(InvalidArgument, "expert 99"):
            layer.check()
        layer.reset(TIMEOUT)
        data.sent[0].ids[:] = right
        check(forward(layer, data), data.want())


def test_rows_are_copied_beside_a_dispatch_only_where_they_are_copied():
    def control(**change):
        options = moe.Options(experts=64, top_k=4, hidden=256, inter=128, **change)
        return moe.layer_sizes(options, 8).group.control_bytes

    # 64 rows an expert are gathered, 72 are copied.
    assert control(max_tokens=128, expand_sms=24) == control(max_tokens=128)
    assert control(max_tokens=144, expand_sms=24) > control(max_tokens=144)
    assert control(max_tokens=144, expand_sms="auto") == control(max_tokens=144, expand_sms=24)
    with raises(InvalidArgument, 'expand_sms = some must be a whole number or "auto"'):
        control(max_tokens=144, expand_sms="some")
    # Unless the caller says which.
    assert control(max_tokens=144, expand_sms=24, row_order="gather") == control(max_tokens=144)
    assert control(max_tokens=8, expand_sms=24, row_order="copy") > control(max_tokens=8)
    with raises(InvalidArgument, 'row_order = sorted must be one of "auto", "gather", "copy"'):
        control(max_tokens=8, row_order="sorted")


@pytest.mark.parametrize("order", ["gather", "copy"])
def test_rows_in_either_order_give_the_same_bits(order):
    case = Case(world=2, experts=4, max_tokens=6)
    data = data_of(case)
    with loaded(case, data) as layer:
        expected = forward(layer, data)
    with loaded(case, data, row_order=order) as layer:
        for out, same in zip(forward(layer, data), expected):
            np.testing.assert_array_equal(out, same)
