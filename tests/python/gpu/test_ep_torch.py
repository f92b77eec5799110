"""crossdock.ep on GPUs with torch tensors, against the NumPy reference: rounds, streams, graphs, who
keeps what, mistakes, and processes under torchrun."""
# SPDX-License-Identifier: Apache-2.0
import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import crossdock
from cases import Case, bf16_rows, raises, tokens_of
from crossdock import ep
from crossdock.testing import ep_reference as ref
from ranks import GPUS, SHARED, WORLD, Group, all_idle, at, device_of

TIMEOUT = 60.0


def to_gpu(array, rank, dtype=None):
    """Codes of NumPy as a tensor; `dtype` names what they are codes of."""
    if array is None:
        return None
    carrier = array.view(np.int16) if array.dtype == np.uint16 else array
    tensor = torch.from_numpy(np.ascontiguousarray(carrier)).to(f"cuda:{device_of(rank)}")
    return tensor if dtype is None else tensor.view(dtype)


def to_host(tensor):
    """A tensor as NumPy, bf16 and e4m3 as their codes."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).cpu().numpy().view(np.uint16)
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).cpu().numpy()
    return tensor.cpu().numpy()


def make_group(case, **changes):
    options = ep.Options(experts=case.experts, top_k=case.top_k, max_tokens=case.max_tokens,
                         hidden=case.hidden, wide_ids=case.wide_ids, slots=case.slots, fall_back=False,
                         expert_alignment=case.alignment, **changes)
    return Group(options, world=WORLD, timeout=240)


class Sent:
    """Tokens of one rank on its GPU."""

    def __init__(self, case, rank, seed):
        self.plain = tokens_of(case, rank, seed)
        payload = torch.float8_e4m3fn if case.payload == "e4m3" else torch.bfloat16
        self.rows = to_gpu(self.plain.rows, rank, payload)
        self.ids = to_gpu(self.plain.ids, rank)
        self.weights = to_gpu(self.plain.weights, rank)
        self.scales = to_gpu(self.plain.scales, rank)


def dispatch(case, group, sent, **more):
    return [group.dispatch(of.rows, of.ids, of.weights, scales=of.scales, rank=r,
                           cast=case.payload == "cast", scales_by_column=case.scales_by_column, **more)
            for r, of in enumerate(sent)]


def check_received(handle, want):
    n = handle.rows(timeout=TIMEOUT)
    got = handle.received
    assert got.rows.device == torch.device("cuda", device_of(handle.rank))
    assert n == len(want.tokens)
    for part in ("rows", "ids", "tokens", "weights", "scales"):
        expected = getattr(want, part)
        if expected is None:
            assert getattr(got, part) is None, part
        else:
            np.testing.assert_array_equal(to_host(getattr(got, part)[:n]), expected, part)
    np.testing.assert_array_equal(to_host(got.source_ends), want.source_ends)
    np.testing.assert_array_equal(to_host(got.expert_counts), want.expert_counts)
    assert handle.expert_counts(timeout=TIMEOUT) == list(want.expert_counts)


CASE = Case(world=WORLD, experts=16, top_k=4, max_tokens=200, hidden=512)


@pytest.mark.parametrize("change", [
    {}, {"payload": "e4m3"}, {"payload": "cast"}, {"wide_ids": True}, {"weights": False},
    {"payload": "cast", "scales_by_column": True}, {"payload": "e4m3", "scales_by_column": True}])
def test_rounds(change):
    case = Case(**{**CASE.__dict__, **change})
    with make_group(case) as group:
        for seed in (1, 2, 3):
            sent = [Sent(case, r, seed) for r in range(WORLD)]
            plain = [of.plain for of in sent]
            want = [ref.dispatch(r, case.experts, plain, case.payload == "cast")
                    for r in range(WORLD)]
            handles = dispatch(case, group, sent)
            group.synchronize(TIMEOUT)
            made = []
            for r, handle in enumerate(handles):
                check_received(handle, want[r])
                n = handle.rows()
                made.append(bf16_rows(seed * 100 + r, (n, case.hidden)))
                handle.expert_input.rows[:n] = to_gpu(made[r], r, torch.bfloat16)
            bias = [bf16_rows(seed + r, (len(of.ids), case.hidden)) for r, of in enumerate(plain)]
            outputs = [group.combine(handle, bias=to_gpu(bias[r], r, torch.bfloat16))
                       for r, handle in enumerate(handles)]
            group.synchronize(TIMEOUT)
            for r, rows in enumerate(outputs):
                assert rows.dtype == torch.bfloat16
                np.testing.assert_array_equal(
                    to_host(rows), ref.combine(r, want, made, len(plain[r].ids), [bias[r]]))
            del handles, handle


def test_rows_by_expert():
    case = Case(**{**CASE.__dict__, "alignment": 128})
    sent = [Sent(case, r, 5) for r in range(WORLD)]
    want = [ref.dispatch(r, case.experts, [of.plain for of in sent]) for r in range(WORLD)]
    with make_group(case) as group:
        handles = dispatch(case, group, sent)
        grouped = [group.group_rows(handle) for handle in handles]
        group.synchronize(TIMEOUT)
        lists = [ref.group_rows(delivery, 128) for delivery in want]
        made = []
        for r, got in enumerate(grouped):
            np.testing.assert_array_equal(to_host(got.offsets), lists[r].offsets)
            np.testing.assert_array_equal(to_host(got.rows)[:lists[r].offsets[-1]], lists[r].rows)
            made.append(bf16_rows(r, (max(int(lists[r].offsets[-1]), 1), case.hidden)))
            group.reduce_rows(handles[r], to_gpu(made[r], r, torch.bfloat16), weighted=True)
        outputs = [group.combine(handle) for handle in handles]
        group.synchronize(TIMEOUT)
        sums = [ref.reduce_rows(want[r], lists[r], made[r], True) for r in range(WORLD)]
        for r in range(WORLD):
            np.testing.assert_array_equal(to_host(outputs[r]),
                                          ref.combine(r, want, sums, len(sent[r].ids)))


def identity(group, sent):
    """Experts that change nothing, all in stream order."""
    outs = []
    for r, of in enumerate(sent):
        with at(r), group.dispatch(of.rows, of.ids, rank=r) as handle:
            handle.expert_input.rows.copy_(handle.received.rows)
            outs.append(group.combine(handle))
    return outs


def identity_wanted(case, plain, rank):
    want = [ref.dispatch(r, case.experts, plain) for r in range(WORLD)]
    return ref.combine(rank, want, [w.rows for w in want], len(plain[rank].ids))


def finite(case, rank, seed):
    of = Sent(case, rank, seed)
    values = np.random.default_rng([seed, rank]).normal(0, 3, of.plain.rows.shape)
    of.plain.rows = ref.bf16_encode(values.astype(np.float32))
    of.rows = to_gpu(of.plain.rows, rank, torch.bfloat16)
    return of


def test_calls_follow_the_current_stream():
    """Tokens are made late on a side stream; a dispatch on any other stream would take them too early."""
    with make_group(CASE) as group:
        wanted = [finite(CASE, r, 3) for r in range(WORLD)]
        sent = [finite(CASE, r, 3) for r in range(WORLD)]
        for of in sent:
            of.rows.zero_()
        all_idle()
        streams = [torch.cuda.Stream(device_of(r)) for r in range(WORLD)]
        outs = []
        for r in range(WORLD):
            with torch.cuda.stream(streams[r]):
                torch.cuda._sleep(20_000_000)
                sent[r].rows.copy_(wanted[r].rows)
                handle = group.dispatch(sent[r].rows, sent[r].ids, rank=r)
                handle.expert_input.rows.copy_(handle.received.rows)
                outs.append(group.combine(handle))
                handle.close()
        for r, stream in enumerate(streams):
            stream.synchronize()
        group.check()
        for r in range(WORLD):
            np.testing.assert_array_equal(
                to_host(outs[r]), identity_wanted(CASE, [of.plain for of in wanted], r))


def test_a_stream_may_be_given():
    with make_group(CASE) as group:
        sent = [finite(CASE, r, 4) for r in range(WORLD)]
        all_idle()
        streams = [torch.cuda.Stream(device_of(r)) for r in range(WORLD)]
        handles = [group.dispatch(of.rows, of.ids, rank=r,
                                  stream=streams[r] if r % 2 == 0 else streams[r].cuda_stream)
                   for r, of in enumerate(sent)]
        for stream in streams:
            stream.synchronize()
        want = [ref.dispatch(r, CASE.experts, [of.plain for of in sent]) for r in range(WORLD)]
        for r, handle in enumerate(handles):
            n = handle.rows()
            np.testing.assert_array_equal(to_host(handle.received.rows[:n]), want[r].rows)
        with raises(crossdock.InvalidArgument, "stream is a str"):
            group.dispatch(sent[0].rows, sent[0].ids, rank=0, stream="side")


def test_graphs_replay_with_new_routing():
    """One process captures all its ranks, each on its own GPU, and replays them together."""
    with make_group(CASE) as group:
        sent = [finite(CASE, r, 1) for r in range(WORLD)]
        identity(group, sent)  # nothing is compiled or allocated later
        group.synchronize(TIMEOUT)
        graphs, outs, sides = [], [], []
        for r, of in enumerate(sent):
            with at(r):
                graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device_of(r))
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    with group.dispatch(of.rows, of.ids, rank=r) as handle:
                        handle.expert_input.rows.copy_(handle.received.rows)
                        outs.append(group.combine(handle))
                graphs.append(graph)
                sides.append(side)
        for seed in range(2, 12):
            fresh = [finite(CASE, r, seed) for r in range(WORLD)]
            for r in range(WORLD):
                sent[r].rows.copy_(fresh[r].rows)
                sent[r].ids.copy_(fresh[r].ids)
            all_idle()
            for r in range(WORLD):
                with at(r):
                    graphs[r].replay()
            all_idle()
            group.check()
            for r in range(WORLD):
                np.testing.assert_array_equal(
                    to_host(outs[r]), identity_wanted(CASE, [of.plain for of in fresh], r))
        del graphs


def test_ranks_may_run_ahead_on_threads_of_their_own():
    """Far enough that streams' queues fill: a launch that waits must not keep the others from theirs."""
    with make_group(CASE, wait=20.0) as group:
        sent = [finite(CASE, r, 8) for r in range(WORLD)]
        all_idle()
        outs, failed = [None] * WORLD, []

        def run(rank):
            try:
                torch.cuda.set_device(device_of(rank))
                of = sent[rank]
                with at(rank):
                    for _ in range(2000):
                        with group.dispatch(of.rows, of.ids, rank=rank) as handle:
                            handle.expert_input.rows.copy_(handle.received.rows)
                            outs[rank] = group.combine(handle)
                    torch.cuda.current_stream().synchronize()
            except Exception as e:  # told to the test's thread
                failed.append(e)

        threads = [threading.Thread(target=run, args=(r,)) for r in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, failed
        group.synchronize(TIMEOUT)
        for r in range(WORLD):
            np.testing.assert_array_equal(
                to_host(outs[r]), identity_wanted(CASE, [of.plain for of in sent], r))


def test_a_tensor_keeps_its_slot():
    with make_group(CASE) as group:
        sent = [finite(CASE, r, 1) for r in range(WORLD)]
        handles = dispatch(CASE, group, sent)
        group.synchronize(TIMEOUT)
        n = handles[0].rows()
        part = handles[0].received.rows[:n].view(torch.int16)[:, 8:]
        before = part.clone()
        for handle in handles:
            handle.close()
        del handle, handles
        others = [finite(CASE, r, 2) for r in range(WORLD)]
        held = dispatch(CASE, group, others)
        with raises(crossdock.Busy, "all 2 slots of rank 0"):
            group.dispatch(others[0].rows, others[0].ids, rank=0)
        group.synchronize(TIMEOUT)
        assert torch.equal(part, before)
        del part
        gc.collect()
        held += dispatch(CASE, group, others)
        group.synchronize(TIMEOUT)


def test_tensors_outlive_the_group():
    group = make_group(CASE)
    sent = [finite(CASE, r, 1) for r in range(WORLD)]
    handles = dispatch(CASE, group, sent)
    group.synchronize(TIMEOUT)
    n = handles[0].rows()
    rows = handles[0].received.rows
    before = rows[:n].clone()
    group.close()
    del handles, group
    gc.collect()
    assert torch.equal(rows[:n], before)


def test_mistakes_are_named():
    with make_group(CASE) as group:
        of = finite(CASE, 0, 1)
        for change, texts in [
                ({"rows": of.rows.cpu()}, ["rows is on the host", "rank 0 runs on GPU 0"]),
                ({"ids": of.ids.cpu()}, ["ids is on the host"]),
                ({"rows": of.rows.t().contiguous().t()}, ["rows", "must be contiguous"]),
                ({"rows": of.rows.float(), "cast": True}, ["torch.float32", "a cast takes bfloat16"]),
                ({"rows": of.rows[:1].expand(200, -1)}, ["neither overlap"]),
                ({"rows": of.rows[:, 1:257]}, ["multiples of 16"]),
                ({"ids": of.ids.long()}, ["torch.int64", "wide_ids = False"])]:
            arguments = {"rows": of.rows, "ids": of.ids, "rank": 0, **change}
            with raises(crossdock.InvalidArgument, *texts):
                group.dispatch(**arguments)
        if GPUS > 1:
            with raises(crossdock.InvalidArgument, "rows is on GPU 0", "rank 1 runs on GPU 1"):
                group.dispatch(of.rows, of.ids, rank=1)


def test_faults_are_raised_and_the_context_stays_usable():
    with make_group(CASE, wait=0.5) as group:
        sent = [finite(CASE, r, 1) for r in range(WORLD)]
        good = sent[0].ids.clone()
        sent[0].ids[3, 1] = 4711
        for handle in dispatch(CASE, group, sent):
            handle.close()
        del handle
        with pytest.raises(crossdock.Error) as caught:
            group.synchronize(TIMEOUT)
        assert "4711" in caught.value.message or "rank 0" in caught.value.message
        group.reset(TIMEOUT)
        sent[0].ids.copy_(good)
        outs = identity(group, sent)
        group.synchronize(TIMEOUT)
        np.testing.assert_array_equal(to_host(outs[0]),
                                      identity_wanted(CASE, [of.plain for of in sent], 0))


def test_waiting_for_rows_leaves_the_stream_alone():
    """The number of rows reaches the host while later work is still in the stream."""
    with make_group(CASE) as group:
        sent = [finite(CASE, r, 6) for r in range(WORLD)]
        all_idle()
        handles = dispatch(CASE, group, sent)
        for r in range(WORLD):
            with at(r):
                torch.cuda._sleep(2_000_000_000)
        n = [handle.rows(timeout=TIMEOUT) for handle in handles]
        with at(0):
            assert not torch.cuda.current_stream().query()
        group.synchronize(TIMEOUT)
        want = [ref.dispatch(r, CASE.experts, [of.plain for of in sent]) for r in range(WORLD)]
        assert n == [len(w.tokens) for w in want]


def test_other_libraries_by_dlpack():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if SHARED:
        pytest.skip("ranks that share a GPU need streams of their own")
    with make_group(CASE) as group:
        plain = [finite(CASE, r, 2).plain for r in range(WORLD)]
        handles = []
        for r, of in enumerate(plain):
            with cupy.cuda.Device(r):
                handles.append(group.dispatch(cupy.asarray(of.rows), cupy.asarray(of.ids),
                                              cupy.asarray(of.weights), rank=r))
        group.synchronize(TIMEOUT)
        want = [ref.dispatch(r, CASE.experts, plain) for r in range(WORLD)]
        made = []
        for r, handle in enumerate(handles):
            with cupy.cuda.Device(r):
                n = handle.rows()
                rows = handle.received.rows
                assert isinstance(rows, cupy.ndarray)
                np.testing.assert_array_equal(cupy.asnumpy(rows[:n]).view(np.uint16), want[r].rows)
                made.append(bf16_rows(r, (n, CASE.hidden)))
                handle.expert_input.rows[:n] = cupy.asarray(made[r])
        outs = []
        for r, handle in enumerate(handles):
            with cupy.cuda.Device(r):
                outs.append(group.combine(handle))
        group.synchronize(TIMEOUT)
        for r in range(WORLD):
            with cupy.cuda.Device(r):
                np.testing.assert_array_equal(cupy.asnumpy(outs[r]),
                                              ref.combine(r, want, made, len(plain[r].ids)))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_processes_under_torchrun(backend):
    """Each process one rank, met over torch.distributed; what it gets is compared in every process."""
    if SHARED and backend == "nccl":
        pytest.skip("NCCL wants a GPU for each rank")
    script = os.path.join(os.path.dirname(__file__), "torchrun_rank.py")
    # All on this host: the interface that needs no name service.
    local = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                           f"--nproc-per-node={WORLD}", script, backend], capture_output=True, text=True,
                          env={**os.environ, **local}, timeout=240)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count("right") == WORLD
