"""Rows of the experts that lie elsewhere, groups whose outputs are all the caller's, how many arrays of a
handle there are, and the path for few tokens. In the twin against the NumPy reference."""
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import sys
import types

import numpy as np
import pytest

import crossdock
from cases import TIMEOUT, Case, bf16_rows, check_received, dispatch, raises, tokens_of
from crossdock import _arrays, ep
from crossdock.testing import ep_reference as ref


def one_round(case, seed):
    sent = [tokens_of(case, r, seed) for r in range(case.world)]
    return sent, [ref.dispatch(r, case.experts, sent, case.payload == "cast") for r in range(case.world)]


def made_of(case, want, seed):
    rows = [bf16_rows(seed * 10 + r, (len(w.tokens), case.hidden)) for r, w in enumerate(want)]
    weights = [np.random.default_rng([seed, r]).random((len(w.tokens), case.top_k), dtype=np.float32)
               for r, w in enumerate(want)]
    return rows, weights


def test_a_handle_is_combined_many_times_with_nothing_in_between():
    case = Case(world=2)
    sent, want = one_round(case, 1)
    with case.group() as group:
        handles = dispatch(case, group, sent)
        group.synchronize(TIMEOUT)
        rounds = [made_of(case, want, seed) for seed in range(4)]
        outs = [[group.combine(handle, rows[r], row_weights=weights[r], weights=True)
                 for r, handle in enumerate(handles)] for rows, weights in rounds]
        group.synchronize(TIMEOUT)
        for (rows, weights), of_round in zip(rounds, outs):
            for r, (out, sums) in enumerate(of_round):
                count = len(sent[r].ids)
                np.testing.assert_array_equal(out, ref.combine(r, want, rows, count))
                np.testing.assert_array_equal(sums, ref.combine_weights(r, want, weights, count, case.top_k))
        rows = rounds[0][0][0]
        with raises(crossdock.InvalidArgument, "rows is", "must be dense", "at most 48 can"):
            group.combine(handles[0], np.zeros((49, case.hidden), np.uint16))
        with raises(crossdock.InvalidArgument, "rows is float32"):
            group.combine(handles[0], np.zeros(rows.shape, np.float32))
        with raises(crossdock.InvalidArgument, "row_weights is float64"):
            group.combine(handles[0], rows, row_weights=np.zeros((len(rows), case.top_k)))


def test_sums_of_choices_too():
    case = Case(world=2, alignment=4)
    sent, want = one_round(case, 2)
    with case.group() as group:
        handles = dispatch(case, group, sent)
        for handle in handles:
            group.group_rows(handle)
        group.synchronize(TIMEOUT)
        lists = [ref.group_rows(w, 4) for w in want]
        outs, expected = [], []
        for seed in range(3):  # reduce_rows waits until peers have read the sums before
            made = [bf16_rows(seed * 10 + r, (len(of.rows), case.hidden)) for r, of in enumerate(lists)]
            for r, handle in enumerate(handles):
                group.reduce_rows(handle, made[r], weighted=True)
            outs.append([group.combine(handle) for handle in handles])
            sums = [ref.reduce_rows(want[r], lists[r], made[r], True) for r in range(2)]
            expected.append([ref.combine(r, want, sums, len(sent[r].ids)) for r in range(2)])
        group.synchronize(TIMEOUT)
        np.testing.assert_equal(outs, expected)


def test_a_group_whose_outputs_are_all_the_callers():
    case = Case(world=2)
    sent, want = one_round(case, 3)
    sizes = ep.sizes(case.options(), 2)
    block = -(-sizes.rows_bytes // 128) * 128
    options = dataclasses.replace(case.options(), slots=0, user_bytes=2 * block + sizes.input_bytes)
    assert ep.sizes(options, 2).window_bytes < sizes.window_bytes + options.user_bytes
    with ep.Group(options, world=2, backend="twin", timeout=TIMEOUT) as group:
        with raises(crossdock.InvalidArgument, "slots = 0", "give an output in user_memory()"):
            group.dispatch(sent[0].rows, sent[0].ids, rank=0)
        held = []
        for turn in range(2):  # both use one block for what the experts make
            for r, of in enumerate(sent):
                memory = group.user_memory(r)
                held.append(group.dispatch(
                    of.rows, of.ids, of.weights, rank=r, output=memory[turn * block:(turn + 1) * block],
                    input=memory[2 * block:]))
        group.synchronize(TIMEOUT)
        outs, rounds = [], []
        for turn in range(2):
            rows, _ = made_of(case, want, turn)
            rounds.append(rows)
            outs += [group.combine(handle, rows[handle.rank]) for handle in held[2 * turn:2 * turn + 2]]
        group.synchronize(TIMEOUT)
        for i, handle in enumerate(held):
            check_received(case, handle, want[handle.rank])
            np.testing.assert_array_equal(
                outs[i], ref.combine(handle.rank, want, rounds[i // 2], len(sent[handle.rank].ids)))
    with raises(crossdock.InvalidArgument, "slots = 0 must be 1 to 16"):
        ep.sizes(dataclasses.replace(case.options(), slots=0), 2)


def test_sums_of_choices_whose_ids_the_caller_has_kept():
    """The output of the first dispatch is that of the second, too."""
    case = Case(world=2, alignment=4)
    rounds = [one_round(case, seed) for seed in (1, 2)]
    sizes = ep.sizes(case.options(), 2)
    block = -(-sizes.rows_bytes // 128) * 128
    options = dataclasses.replace(case.options(), slots=0, user_bytes=block + sizes.input_bytes)
    with ep.Group(options, world=2, backend="twin", timeout=TIMEOUT) as group:
        held = []
        for sent, want in rounds:
            handles = []
            for r, of in enumerate(sent):
                memory = group.user_memory(r)
                handles.append(group.dispatch(of.rows, of.ids, of.weights, rank=r, output=memory[:block],
                                              input=memory[block:]))
                group.group_rows(handles[r])
            group.synchronize(TIMEOUT)
            held.append((handles, [h.received.ids[:len(w.ids)].copy() for h, w in zip(handles, want)]))
        for seed, ((sent, want), (handles, ids)) in enumerate(zip(rounds, held)):
            lists = [ref.group_rows(w, 4) for w in want]
            made = [bf16_rows(seed * 10 + r, (len(of.rows), case.hidden)) for r, of in enumerate(lists)]
            for r, handle in enumerate(handles):
                group.reduce_rows(handle, made[r], ids=ids[r])
            outs = [group.combine(handle) for handle in handles]
            group.synchronize(TIMEOUT)
            sums = [ref.reduce_rows(want[r], lists[r], made[r], False) for r in range(2)]
            for r, out in enumerate(outs):
                np.testing.assert_array_equal(out, ref.combine(r, want, sums, len(sent[r].ids)))
        for wrong, text in ((ids[0].astype(np.int64), "it must be int32"), (ids[0][:, :1], "it must be [")):
            with raises(crossdock.InvalidArgument, "ids is", text):
                group.reduce_rows(handles[0], made[0], ids=wrong)


def test_calls_before_the_first_dispatch_are_in_the_order_of_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    case = Case(world=1)
    with case.group() as group:
        assert group._native.framework == _arrays.NONE
        with monkeypatch.context() as imported:
            imported.setitem(sys.modules, "torch", types.SimpleNamespace())
            assert group._native.framework == _arrays.TORCH
        dispatch(case, group, one_round(case, 1)[0])
        assert group._native.framework == _arrays.NUMPY
        group.synchronize(TIMEOUT)


def test_arrays_of_a_handle_are_counted():
    case = Case(world=1)
    sent, _ = one_round(case, 1)
    with case.group() as group:
        handle = dispatch(case, group, sent)[0]
        assert handle.arrays == 0
        rows = handle.received.rows
        part, counts = rows[2:5], handle.received.expert_counts
        assert handle.arrays == 2
        del rows
        assert handle.arrays == 2  # part is of it
        del part, counts
        assert handle.arrays == 0
        handle.close()
        with raises(crossdock.Closed, "is closed"):
            _ = handle.arrays
        group.synchronize(TIMEOUT)


# ---- few tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", ["bf16", "cast"])
def test_the_path_for_few_tokens(payload):
    case = Case(world=3, experts=9, max_tokens=16, payload=payload, hidden=256, alignment=4)
    options = dataclasses.replace(case.options(), small_tokens=16, slots=0)
    assert ep.sizes(options, 3).small_bytes > 0
    with ep.Group(options, world=3, backend="twin", timeout=TIMEOUT) as group:
        for seed in range(4):
            sent, want = one_round(case, seed)
            handles = [group.dispatch(of.rows, of.ids, of.weights, rank=r, cast=payload == "cast",
                                      path="small" if seed % 2 else "auto") for r, of in enumerate(sent)]
            expanded = [group.expand_rows(handle, group.group_rows(handle), rows_per_expert=48)
                        for handle in handles]
            group.synchronize(TIMEOUT)
            for r, handle in enumerate(handles):
                got, stride = handle.received, handle.received.source_stride
                assert stride == 16
                places = np.concatenate([np.arange(s * stride, got.source_ends[s]) for s in range(3)])
                np.testing.assert_array_equal(got.tokens[places], want[r].tokens)
                np.testing.assert_array_equal(got.rows[places], want[r].rows)
                copies = ref.expand_rows(want[r], ref.group_rows(want[r], 4), 48)
                plane = expanded[r].rows.reshape(-1, expanded[r].rows.shape[-1])
                np.testing.assert_array_equal(plane[copies.written], copies.rows[copies.written])
                handle.expert_input.rows[places] = bf16_rows(r + seed, (len(places), case.hidden))
            outs = [group.combine(handle) for handle in handles]
            group.synchronize(TIMEOUT)
            made = [bf16_rows(r + seed, (len(w.tokens), case.hidden)) for r, w in enumerate(want)]
            for r, out in enumerate(outs):
                np.testing.assert_array_equal(out, ref.combine(r, want, made, len(sent[r].ids)))
            with raises(crossdock.InvalidArgument, "leave Combined::experts empty"):
                group.combine(handles[0], made[0])
            for handle in handles:
                handle.close()


def test_wrong_paths():
    case = Case(world=1)
    sent, _ = one_round(case, 1)
    with case.group() as group:
        with raises(crossdock.InvalidArgument, 'path = fast must be "auto", "small" or "large"'):
            group.dispatch(sent[0].rows, sent[0].ids, path="fast")
        with raises(crossdock.InvalidArgument, "small_tokens = 0"):
            group.dispatch(sent[0].rows, sent[0].ids, path="small")
        with raises(crossdock.InvalidArgument, "more than most_tokens = 3"):
            group.dispatch(sent[0].rows, sent[0].ids, most_tokens=3)
