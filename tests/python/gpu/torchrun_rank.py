"""One rank under torchrun (test_ep_torch.py starts it): torchrun_rank.py gloo|nccl."""
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist

import crossdock
from cases import Case, tokens_of
from crossdock import ep
from crossdock.testing import ep_reference as ref


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(sys.argv[1])
    case = Case(world=world, experts=16, top_k=4, max_tokens=100, hidden=512, wide_ids=True)
    sent = [tokens_of(case, r, 7) for r in range(world)]
    want = [ref.dispatch(r, case.experts, sent) for r in range(world)]
    options = ep.Options(experts=16, top_k=4, max_tokens=100, hidden=512, wide_ids=True)
    with ep.Group(options, exchange=crossdock.torch_exchange(), timeout=180) as group:
        assert group.world == world and group.local_ranks == [rank]
        mine = sent[rank]
        rows = torch.from_numpy(mine.rows.view(np.int16)).cuda().view(torch.bfloat16)
        ids, weights = torch.from_numpy(mine.ids).cuda(), torch.from_numpy(mine.weights).cuda()
        for _ in range(3):
            with group.dispatch(rows, ids, weights) as handle:
                n = handle.rows()
                got = handle.received.rows[:n].view(torch.int16).cpu().numpy().view(np.uint16)
                np.testing.assert_array_equal(got, want[rank].rows)
                handle.expert_input.rows[:n] = handle.received.rows[:n]
                out = group.combine(handle)
        group.synchronize(60)
        made = [w.rows for w in want]
        np.testing.assert_array_equal(out.view(torch.int16).cpu().numpy().view(np.uint16),
                                      ref.combine(rank, want, made, len(mine.ids)))
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank}: right", flush=True)


if __name__ == "__main__":
    main()
