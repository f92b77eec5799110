"""torch tensors on the CPU, in the twin: what goes in as a tensor comes out as one, of the right type."""
# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import crossdock
from cases import TIMEOUT, Case, bf16_rows, raises, tokens_of
from crossdock.testing import ep_reference as ref


def tensor(array, dtype=None):
    if array is None:
        return None
    out = torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)
    return out if dtype is None else out.view(dtype)


def codes(given):
    if given.dtype == torch.bfloat16:
        return given.view(torch.int16).numpy().view(np.uint16)
    return (given.view(torch.uint8) if given.dtype == torch.float8_e4m3fn else given).numpy()


@pytest.mark.parametrize("change", [
    {}, {"payload": "e4m3"}, {"payload": "cast"}, {"wide_ids": True}, {"weights": False}, {"idle": 1},
    {"payload": "cast", "scales_by_column": True}, {"payload": "e4m3", "scales_by_column": True}])
def test_rounds(change):
    change = dict(change)
    idle = change.pop("idle", None)  # a rank without tokens, whose tensors have no address
    case = Case(**{"hidden": 512, "alignment": 8, **change})
    sent = [tokens_of(case, r, 3) for r in range(2)]
    if idle is not None:
        of = sent[idle]
        sent[idle] = ref.Tokens(of.rows[:0], of.ids[:0], of.weights[:0])
    want = [ref.dispatch(r, case.experts, sent, case.payload == "cast") for r in range(2)]
    payload = torch.float8_e4m3fn if case.payload == "e4m3" else torch.bfloat16
    with case.group() as group:
        handles = [group.dispatch(tensor(of.rows, payload), tensor(of.ids), tensor(of.weights),
                                  scales=tensor(of.scales), cast=case.payload == "cast",
                                  scales_by_column=case.scales_by_column, rank=r)
                   for r, of in enumerate(sent)]
        grouped = [group.group_rows(handle) for handle in handles]
        group.synchronize(TIMEOUT)
        made = []
        for r, handle in enumerate(handles):
            n, got = handle.rows(), handle.received
            assert got.rows.dtype == (payload if case.payload != "cast" else torch.float8_e4m3fn)
            for part in ("rows", "ids", "tokens", "weights", "scales"):
                expected = getattr(want[r], part)
                if expected is None:
                    assert getattr(got, part) is None
                else:
                    np.testing.assert_array_equal(codes(getattr(got, part)[:n]), expected, part)
            lists = ref.group_rows(want[r], case.alignment)
            np.testing.assert_array_equal(codes(grouped[r].offsets), lists.offsets)
            made.append(bf16_rows(r, (n, case.hidden)))
            handle.expert_input.rows[:n] = tensor(made[r], torch.bfloat16)
            handle.expert_input.weights.zero_()
        bias = [bf16_rows(r + 7, (len(of.ids), case.hidden)) for r, of in enumerate(sent)]
        outs = [group.combine(handle, bias=tensor(bias[r], torch.bfloat16), weights=True)
                for r, handle in enumerate(handles)]
        group.synchronize(TIMEOUT)
        for r, (rows, weights) in enumerate(outs):
            assert rows.dtype == torch.bfloat16 and weights.dtype == torch.float32
            np.testing.assert_array_equal(codes(rows), ref.combine(r, want, made, len(sent[r].ids),
                                                                   [bias[r]]))
            assert not weights.any()


def test_an_output_tensor_of_the_caller():
    case = Case(world=1)
    of = tokens_of(case, 0, 1)
    with case.group() as group:
        handle = group.dispatch(tensor(of.rows, torch.bfloat16), tensor(of.ids))
        group.synchronize(TIMEOUT)
        handle.expert_input.rows.fill_(2)
        out = torch.full((24, 2 * case.hidden), 7, dtype=torch.bfloat16)[:, :case.hidden]
        assert group.combine(handle, out=out) is out
        group.synchronize(TIMEOUT)
        assert set(out.float().unique().tolist()) <= {0.0, 2.0}


def test_mistakes_are_named():
    case = Case(world=1)
    of = tokens_of(case, 0, 1)
    rows, ids = tensor(of.rows, torch.bfloat16), tensor(of.ids)
    with case.group() as group:
        for change, texts in [
                ({"rows": rows.t().contiguous().t()}, ["rows", "must be contiguous"]),
                ({"rows": rows.float(), "cast": True}, ["rows is torch.float32", "takes bfloat16"]),
                ({"rows": rows.view(torch.int16), "cast": True}, ["takes bfloat16"]),
                ({"rows": rows[:1].expand(24, -1)}, ["neither overlap"]),
                ({"ids": ids.long()}, ["ids is torch.int64 [24, 3]", "wide_ids = False"]),
                ({"rows": rows.to("meta")}, ["rows has no memory"])]:
            with raises(crossdock.InvalidArgument, *texts):
                group.dispatch(**{"rows": rows, "ids": ids, **change})


def test_gloo_brings_processes_together(tmp_path):
    import multiprocessing
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=gather_in_process, args=(str(tmp_path / "store"), rank))
                for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0]


def gather_in_process(file, rank):
    import os
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    exchange = crossdock.torch_exchange()
    assert (exchange.member, exchange.members) == (rank, 2)
    for size in (0, 1, 1000):
        parts = exchange.all_gather(bytes([65 + rank]) * (size + rank), 60)
        assert parts == [b"A" * size, b"B" * (size + 1)], parts
    if rank == 0:  # the other one does not come, and may be gone already
        with pytest.raises((crossdock.DeadlineExceeded, crossdock.PeerLost), match="torch.distributed"):
            exchange.all_gather(b"x", 0.5)
