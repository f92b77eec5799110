"""One rank under torchrun (test_deep_ep.py starts it): torchrun_deep_ep.py gloo|nccl."""
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "compat"))

import torch
import torch.distributed as dist

import elastic_rounds
import extras_rounds
import low_latency_rounds
import normal_rounds
from kits import TorchKit


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(sys.argv[1])
    group, kit = dist.group.WORLD, TorchKit(f"cuda:{torch.cuda.current_device()}")
    sizes = {"world": world, "experts": 4 * world, "top_k": 3}
    normal_rounds.whole_round(group, kit, normal_rounds.Case(**sizes))
    normal_rounds.whole_round(group, kit, normal_rounds.Case(**sizes, fp8=True),
                              lambda: {"async_finish": True})
    low_latency_rounds.whole_round(group, kit, low_latency_rounds.Case(**sizes))
    elastic_rounds.whole_round(group, kit, elastic_rounds.Case(**sizes, expand=True))
    pipeline = [extras_rounds.pipeline] if world > 1 else []  # it takes two
    for one in (extras_rounds.gathers, *pipeline, extras_rounds.table):
        one(group, kit)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank}: right", flush=True)


if __name__ == "__main__":
    main()
