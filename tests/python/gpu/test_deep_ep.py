"""crossdock.compat.deep_ep on GPUs with torch: the rounds of tests/python/compat with a thread for each
GPU, streams and events, graphs, and processes under torchrun."""
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

ROUNDS = pathlib.Path(__file__).resolve().parents[1] / "compat"
sys.path.insert(0, str(ROUNDS))

import elastic_rounds
import extras_rounds
import low_latency_rounds
import normal_rounds
from crossdock.compat import deep_ep
from kits import TorchKit
from ranks import SHARED, WORLD, at, device_of


def run(function, *arguments, **more):
    """On a thread for each rank."""
    def one(group):
        with at(group.rank()):
            return function(group, TorchKit(f"cuda:{device_of(group.rank())}", SHARED), *arguments, **more)

    return deep_ep.Threads(WORLD, timeout=120).run(one)


def case_of(module, **change):
    return module.Case(**{"world": WORLD, "experts": 8 * WORLD, "top_k": 4, **change})


# ---- many tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [
    {}, {"fp8": True}, {"with_topk": False}, {"fp8": True, "with_topk": False, "alignment": 128},
    {"counts": (500, 77), "hidden": 2048}])
def test_normal(change):
    run(normal_rounds.whole_round, case_of(normal_rounds, **change))


def after_an_event(name):
    """On the communication stream, after what the current one has been given so far."""
    return lambda: {"previous_event": deep_ep.Buffer.capture(), name: True,
                    "allocate_on_comm_stream": True}


@pytest.mark.parametrize("fp8", [False, True])
def test_normal_asynchronous(fp8):
    case = case_of(normal_rounds, fp8=fp8)
    run(normal_rounds.whole_round, case, after_an_event("async_finish"))
    run(normal_rounds.whole_round, case, lambda: {"async_finish": True})
    run(normal_rounds.whole_round, case, lambda: {"previous_event": deep_ep.Buffer.capture()})


def test_normal_worst_case_and_held():
    run(normal_rounds.worst_case_round, case_of(normal_rounds), 24 * WORLD)
    run(normal_rounds.held_results, case_of(normal_rounds), 6)


# ---- few tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [
    {}, {"fp8": False}, {"round_scale": True}, {"round_scale": True, "ue8m0": True, "hidden": 512},
    {"counts": (3, 0)}, {"most": 128, "counts": (128, 100), "hidden": 2048}])
def test_low_latency(change):
    run(low_latency_rounds.whole_round, case_of(low_latency_rounds, **change))


def test_low_latency_two_at_a_time():
    run(lambda group, kit, case: low_latency_rounds.two_at_a_time(group, kit, case)[0].destroy(),
        case_of(low_latency_rounds))


@pytest.mark.parametrize("hooked", [False, True])
def test_ranks_are_left_out_and_come_back(hooked):
    """Buffers with enable_shrink: masks are set, told and cleared, and rows and sums follow them."""
    if WORLD < 2:
        pytest.skip("needs two ranks: GPU_TEST_RANKS=2")
    run(low_latency_rounds.shrink_and_grow, case_of(low_latency_rounds), hooked)


def test_a_rank_that_does_not_come_is_left_out(monkeypatch):
    if WORLD < 2:
        pytest.skip("needs two ranks: GPU_TEST_RANKS=2")
    # How long the others wait for it, and how long kernels may take to compile.
    monkeypatch.setenv("CROSSDOCK_DEEP_EP_TIMEOUT", "20")
    run(low_latency_rounds.silent, case_of(low_latency_rounds))


# ---- elastic -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("change", [
    {}, {"fp8": True, "by_column": True}, {"expand": True},
    {"expand": True, "fp8": True, "by_column": True, "alignment": 128}])
def test_elastic(change, sync):
    run(elastic_rounds.whole_round, case_of(elastic_rounds, sync=sync, rounds=3, **change))


def test_elastic_asynchronous():
    run(elastic_rounds.whole_round, case_of(elastic_rounds, expand=True),
        after_an_event("async_with_compute_stream"))


@pytest.mark.parametrize("what", ["gathers", "pipeline", "table"])
def test_elastic_extras(what):
    if what == "pipeline" and WORLD < 2:
        pytest.skip("a pipeline takes at least two GPUs")
    run(getattr(extras_rounds, what))


# ---- streams -------------------------------------------------------------------------------------


def test_memory_is_not_used_again_before_its_readers_are_done():
    """Asynchronous dispatches that wait for an event alone, while the current stream, busy for long, still
    has to read results that have been dropped."""

    def one(group, kit, case):
        rank = group.rank()
        buffer = deep_ep.Buffer(group, 1 << 20)
        results = []
        for seed in range(6):
            sent = case.sent(seed)
            mine, got = sent[rank], case.received(sent)[rank]
            layout = normal_rounds.check_layout(buffer, kit, case, mine)
            rows, ids = kit.bf16(mine.rows), kit.array(mine.ids)
            before = buffer.capture()
            torch.cuda._sleep(20_000_000)
            recv_x, _, _, _, _, event = buffer.dispatch(rows, **layout, topk_idx=ids, async_finish=True,
                                                        previous_event=before)
            event.current_stream_wait()
            torch.cuda._sleep(20_000_000)
            results.append((recv_x.clone(), np.stack([sent[s].rows[t] for s, t in got.pairs])))
            del recv_x
        for read, wanted in results:
            np.testing.assert_array_equal(kit.codes(read), wanted)
        buffer.destroy()

    run(one, case_of(normal_rounds))


def test_low_latency_in_a_graph_with_other_routings():
    if SHARED:
        pytest.skip("a capture of torch waits for its GPU, and so for ranks that wait for this one")

    def one(group, kit, case):
        rank = group.rank()
        buffer = deep_ep.Buffer(group, low_latency_mode=True)
        first = case.sent()[rank]
        rows, ids = kit.bf16(first.rows), kit.array(first.ids)
        weights = kit.array(first.weights)

        def step():
            recv_x, count, handle, _, hook = buffer.low_latency_dispatch(
                rows, ids, case.most, case.experts, use_fp8=False, return_recv_hook=True)
            hook()
            out, _, hook = buffer.low_latency_combine(recv_x, ids, weights, handle, return_recv_hook=True)
            hook()
            return out, count

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            out, count = step()
        for seed in range(1, 6):
            sent = case.sent(seed)
            mine = sent[rank]
            rows.copy_(kit.bf16(mine.rows))
            ids.copy_(kit.array(mine.ids))
            weights.copy_(kit.array(mine.weights))
            graph.replay()
            torch.cuda.synchronize()
            scale = np.where(mine.ids >= 0, mine.weights, 0).sum(1)[:, None]
            values = low_latency_rounds.ref.bf16_decode(mine.rows).astype(np.float64) * scale
            low_latency_rounds.close_enough(kit.codes(out), values)
            np.testing.assert_array_equal(
                kit.codes(count), low_latency_rounds.want.masked(rank, case.experts, sent).counts())
        del graph
        buffer.destroy()

    run(one, case_of(low_latency_rounds, fp8=False))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_processes(backend):
    if SHARED and backend == "nccl":
        pytest.skip("NCCL wants a GPU for each rank")
    script = pathlib.Path(__file__).resolve().parent / "torchrun_deep_ep.py"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}",
         str(script), backend], capture_output=True, text=True, timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": right") == WORLD
