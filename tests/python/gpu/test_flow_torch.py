"""Copies by expert, a routing used again, copies when slots run out, and outputs of the caller, on GPUs
with torch tensors against the NumPy reference."""
# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cases import Case, bf16_rows
from crossdock import ep
from crossdock.testing import ep_reference as ref
from ranks import SHARED, WORLD, Group, all_idle, at, device_of
from test_ep_torch import (CASE, TIMEOUT, Sent, check_received, dispatch, finite, identity_wanted,
                           make_group, to_gpu, to_host)

#: The blocks of all ranks of a GPU have to run at once.
COPY_SMS = 8 if SHARED else 24


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("change", [{}, {"payload": "cast", "scales_by_column": True},
                                    {"payload": "e4m3"}])
@pytest.mark.parametrize("beside", [False, True])
def test_copies_by_expert_and_back(change, masked, beside):
    case = Case(**{**CASE.__dict__, "alignment": 16, "max_tokens": 60, **change})
    per_expert = case.world * case.max_tokens * case.top_k if masked else 0
    sent = [Sent(case, r, 3) for r in range(WORLD)]
    plain = [of.plain for of in sent]
    want = [ref.dispatch(r, case.experts, plain, case.payload == "cast") for r in range(WORLD)]
    with make_group(case, expand_sms=COPY_SMS if beside else 0) as group:
        if beside:
            copies = [group.expanded_for(of.rows, of.weights, scales=of.scales, rank=r,
                                         cast=case.payload == "cast", rows_per_expert=per_expert,
                                         scales_by_column=case.scales_by_column)
                      for r, of in enumerate(sent)]
            handles = [group.dispatch(of.rows, of.ids, of.weights, scales=of.scales, rank=r,
                                      cast=case.payload == "cast", expanded=copies[r],
                                      scales_by_column=case.scales_by_column)
                       for r, of in enumerate(sent)]
        else:
            handles = dispatch(case, group, sent)
            grouped = [group.group_rows(handle) for handle in handles]
            copies = [group.expand_rows(handle, of, rows_per_expert=per_expert,
                                        scales_by_column=case.scales_by_column)
                      for handle, of in zip(handles, grouped)]
        group.synchronize(TIMEOUT)
        sums = []
        for r, got in enumerate(copies):
            lists = ref.group_rows(want[r], case.alignment)
            expected = ref.expand_rows(want[r], lists, per_expert)
            here = len(expected.written)
            for part in ("rows", "scales", "weights", "sources"):
                wanted, plane = getattr(expected, part), getattr(got, part)
                if wanted is None:
                    assert plane is None, part
                    continue
                plane = to_host(plane)
                plane = plane.reshape((-1,) + plane.shape[2:]) if masked else plane
                np.testing.assert_array_equal(plane[:here][expected.written],
                                              wanted[expected.written], part)
            made = bf16_rows(r, (max(here, 1), case.hidden))
            shape = (-1, per_expert, case.hidden) if masked else (-1, case.hidden)
            group.reduce_rows(handles[r], to_gpu(made, r, torch.bfloat16).reshape(shape), weighted=True,
                              rows_per_expert=per_expert)
            by_place = made
            if masked:
                sizes = np.diff(lists.offsets)
                inside = np.arange(sizes.sum()) - np.repeat(lists.offsets[:-1], sizes)
                by_place = made[np.repeat(np.arange(len(sizes)), sizes) * per_expert + inside]
            sums.append(ref.reduce_rows(want[r], lists, by_place, True))
        outputs = [group.combine(handle) for handle in handles]
        group.synchronize(TIMEOUT)
        for r, out in enumerate(outputs):
            np.testing.assert_array_equal(to_host(out), ref.combine(r, want, sums, len(plain[r].ids)))


def test_copies_beside_a_dispatch_in_a_graph():
    case = Case(**{**CASE.__dict__, "alignment": 16, "max_tokens": 60})
    with make_group(case, expand_sms=COPY_SMS if SHARED else "auto") as group:
        sent = [Sent(case, r, 3) for r in range(WORLD)]
        copies = [group.expanded_for(of.rows, of.weights, rank=r) for r, of in enumerate(sent)]
        dispatch(case, group, sent)  # nothing is compiled or allocated later
        group.synchronize(TIMEOUT)
        graphs, handles, sides = [], [], []
        for r, of in enumerate(sent):
            with at(r):
                graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device_of(r))
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    handles.append(group.dispatch(of.rows, of.ids, of.weights, expanded=copies[r], rank=r))
                graphs.append(graph)
                sides.append(side)
        for seed in range(4, 9):
            fresh = [Sent(case, r, seed) for r in range(WORLD)]
            for r in range(WORLD):
                for part in ("rows", "ids", "weights"):
                    getattr(sent[r], part).copy_(getattr(fresh[r], part))
            all_idle()
            for r in range(WORLD):
                with at(r):
                    graphs[r].replay()
            all_idle()
            group.check()
            for r in range(WORLD):
                want = ref.dispatch(r, case.experts, [of.plain for of in fresh])
                expected = ref.expand_rows(want, ref.group_rows(want, case.alignment))
                np.testing.assert_array_equal(to_host(copies[r].rows)[:len(expected.rows)], expected.rows)
        del graphs


def test_held_outputs_are_copied_when_slots_run_out():
    options = ep.Options(experts=CASE.experts, top_k=CASE.top_k, max_tokens=CASE.max_tokens,
                         hidden=CASE.hidden, slots=2)
    with Group(options, world=WORLD, timeout=240) as group:
        rounds = [[finite(CASE, r, seed) for r in range(WORLD)] for seed in range(5)]
        held = [dispatch(CASE, group, sent) for sent in rounds]
        group.synchronize(TIMEOUT)
        assert [handles[0].copied for handles in held] == [False, False, True, True, True]
        for handles, sent in zip(held, rounds):
            for r, handle in enumerate(handles):
                check_received(handle, ref.dispatch(r, CASE.experts, [of.plain for of in sent]))
                handle.expert_input.rows.copy_(handle.received.rows)
        outs = [[group.combine(handle) for handle in handles] for handles in held]
        group.synchronize(TIMEOUT)
        for out, sent in zip(outs, rounds):
            for r in range(WORLD):
                np.testing.assert_array_equal(
                    to_host(out[r]), identity_wanted(CASE, [of.plain for of in sent], r))


def test_other_rows_go_the_same_ways():
    with make_group(CASE) as group:
        first = [finite(CASE, r, 1) for r in range(WORLD)]
        handles = dispatch(CASE, group, first)
        others = [finite(CASE, r, 2) for r in range(WORLD)]
        again = [group.dispatch(of.rows, routing=handles[r], rank=r) for r, of in enumerate(others)]
        group.synchronize(TIMEOUT)
        mixed = [ref.Tokens(other.plain.rows, of.plain.ids, of.plain.weights)
                 for of, other in zip(first, others)]
        for r, handle in enumerate(again):
            check_received(handle, ref.dispatch(r, CASE.experts, mixed))


def test_rows_arrive_where_the_caller_says():
    options = ep.Options(experts=CASE.experts, top_k=CASE.top_k, max_tokens=CASE.max_tokens,
                         hidden=CASE.hidden)
    sizes = ep.sizes(options, WORLD)
    options = dataclasses.replace(options, user_bytes=sizes.rows_bytes // 128 * 128 + 128)
    with Group(options, world=WORLD, timeout=240) as group:
        sent = [finite(CASE, r, 3) for r in range(WORLD)]
        handles = []
        for r, of in enumerate(sent):
            memory = group.user_memory(r)
            assert memory.device == torch.device("cuda", device_of(r))
            handles.append(group.dispatch(of.rows, of.ids, of.weights, rank=r, output=memory))
            assert handles[r].received.rows.data_ptr() == memory.data_ptr()
        group.synchronize(TIMEOUT)
        for r, handle in enumerate(handles):
            check_received(handle, ref.dispatch(r, CASE.experts, [of.plain for of in sent]))
        selections = group.statistics_memory(0)[0]
        assert to_host(selections).tolist() == group.statistics(0).expert_selections
