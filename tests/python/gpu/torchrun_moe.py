"""One rank of an expert layer under torchrun (test_moe_torch.py starts it)."""
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist

import crossdock
from crossdock import moe
from crossdock.testing import moe_reference as ref
from moe_cases import Case, data_of


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    case = Case(world=world, experts=8, top_k=4, max_tokens=40, hidden=256, inter=128)
    data = data_of(case)
    of = data.sent[rank]
    with moe.Layer(case.options(), exchange=crossdock.torch_exchange(), timeout=180) as layer:
        assert layer.world == world and layer.local_ranks == [rank]
        layer.load(data.weights(rank))
        rows = torch.from_numpy(of.rows.view(np.int16)).cuda().view(torch.bfloat16)
        ids, weights = torch.from_numpy(of.ids).cuda(), torch.from_numpy(of.weights).cuda()
        for _ in range(3):
            out = layer.forward(rows, ids, weights)
        layer.synchronize(60)
        got = out.view(torch.int16).cpu().numpy().view(np.uint16)
        far, _ = ref.far_from(got, data.want()[rank])
        assert far <= 8, f"a value is {far} times too far away"
        dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank}: right", flush=True)


if __name__ == "__main__":
    main()
