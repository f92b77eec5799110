"""An expert layer from Python: in the twin on NumPy arrays, or with --gpu on all GPUs with torch tensors.
The result is compared with the NumPy reference."""
# SPDX-License-Identifier: Apache-2.0
import argparse

import numpy as np

from crossdock import moe
from crossdock.testing import ep_reference as ep_ref
from crossdock.testing import moe_reference as ref


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true")
    gpu = parser.parse_args().gpu
    if gpu:
        import torch
        world = torch.cuda.device_count()
    else:
        world = 2

    options = moe.Options(experts=2 * world, top_k=2, max_tokens=8, hidden=256, inter=128)
    random = np.random.default_rng(0)
    gate_up = random.normal(0, 1 / 16, (options.experts, 2 * options.inter, options.hidden))
    down = random.normal(0, 1 / 11, (options.experts, options.hidden, options.inter))
    gate_up, down = ref.round_bf16(gate_up), ref.round_bf16(down)

    def tokens(rank: int) -> ep_ref.Tokens:
        own = np.random.default_rng([1, rank])
        return ep_ref.Tokens(rows=ep_ref.bf16_encode(own.normal(0, 1, (8, options.hidden))),
                             ids=own.integers(0, options.experts, (8, 2), dtype=np.int32),
                             weights=own.random((8, 2), dtype=np.float32))

    def on_gpu(of: ep_ref.Tokens, rank: int) -> list:
        import torch
        parts = [torch.from_numpy(a).to(f"cuda:{rank}") for a in (of.rows.view(np.int16), of.ids, of.weights)]
        return [parts[0].view(torch.bfloat16), *parts[1:]]

    sent = [tokens(rank) for rank in range(world)]
    with moe.Layer(options, world=world, backend="gpu" if gpu else "twin") as layer:
        for rank in layer.local_ranks:
            mine = slice(2 * rank, 2 * rank + 2)
            layer.load(moe.Weights.prepare(gate_up[mine], down[mine]), rank=rank)
        outs = []
        for rank, of in enumerate(sent):
            rows, ids, weights = on_gpu(of, rank) if gpu else (of.rows, of.ids, of.weights)
            outs.append(layer.forward(rows, ids, weights, rank=rank))
        layer.synchronize()
        print("choices of each expert:", [n for r in layer.local_ranks
                                          for n in layer.statistics(r).expert_selections])

    wants = ref.forward(sent, ref.experts_of(gate_up, down, options.format))
    for rank, (out, want) in enumerate(zip(outs, wants)):
        codes = out.view(torch.int16).cpu().numpy() if gpu else out
        far, unequal = ref.far_from(codes, want)
        print(f"rank {rank}: {unequal:.1%} of the values differ from the reference in their last bits")
        # On GPUs the last bits of a product turn codes of e4m3 by a step.
        if far > (8 if gpu else 1):
            raise SystemExit(f"rank {rank}: a value is {far} times farther away than roundings explain")


if __name__ == "__main__":
    main()
