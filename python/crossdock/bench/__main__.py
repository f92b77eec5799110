"""``python -m crossdock.bench ep``: host time of one Python call of dispatch, of combine and of what a
step does between them. What arrives is compared before anything is timed. Times of the GPU are
``crossdock bench ep``'s business; calls here are timed as they return, a few at a time so that no queue
is full. All ranks in one process, or one in each: ``torchrun --nproc-per-node 4 -m crossdock.bench ep``.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any, Callable, Optional

import crossdock
from crossdock import ep

AIM_US = 20.0
BATCH = 8  # calls of a rank between waits


def exchange_of(args: argparse.Namespace) -> Optional[crossdock.Exchange]:
    """Where the processes meet that have a rank each; None: all ranks are in this one."""
    if args.rank is None:
        return None
    if args.store:
        return crossdock.store_exchange(args.store, "python-bench-ep", args.rank, args.world)
    import torch.distributed as dist
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=args.rank, world_size=args.world)
    return crossdock.torch_exchange()


class Bench:
    """A group, with tokens of bf16 and of e4m3 on each rank of this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.options = ep.Options(experts=args.experts, top_k=args.top_k, max_tokens=args.tokens,
                                  hidden=args.hidden, slots=2)
        ranks = None if args.rank is None else [(args.rank, args.device)]
        self.group = ep.Group(self.options, world=args.world, ranks=ranks, backend=args.backend,
                              exchange=exchange_of(args), timeout=240)
        make = self._tokens_of_torch if args.backend == "gpu" else self._tokens_of_numpy
        self.ranks = self.group.local_ranks
        self.sent = {rank: make(rank) for rank in self.ranks}

    def _tokens_of_torch(self, rank: int) -> dict[str, Any]:
        import torch
        a = self.args
        device = f"cuda:{rank if a.rank is None else a.device}"
        random = torch.Generator(device).manual_seed(rank)
        rows = torch.randn(a.tokens, a.hidden, device=device, generator=random)
        scores = torch.rand(a.tokens, a.experts, device=device, generator=random)
        return {"bf16": rows.bfloat16(), "fp8": rows.to(torch.float8_e4m3fn),
                "scales": torch.ones(a.tokens, a.hidden // 128, device=device),
                "ids": scores.topk(a.top_k).indices.int(),
                "weights": torch.full((a.tokens, a.top_k), 1 / a.top_k, device=device),
                "out": torch.empty(a.tokens, a.hidden, device=device, dtype=torch.bfloat16)}

    def _tokens_of_numpy(self, rank: int) -> dict[str, Any]:
        import numpy as np
        a, random = self.args, np.random.default_rng(rank)
        codes = random.integers(0, 0x70, (a.tokens, a.hidden), dtype=np.uint8)
        order = np.argsort(random.random((a.tokens, a.experts)), axis=1)
        return {"bf16": (codes.astype(np.uint16) << 4) + 0x3C00, "fp8": codes,
                "scales": np.ones((a.tokens, a.hidden // 128), np.float32),
                "ids": order[:, :a.top_k].astype(np.int32),
                "weights": np.full((a.tokens, a.top_k), 1 / a.top_k, np.float32),
                "out": np.empty((a.tokens, a.hidden), np.uint16)}

    def dispatch(self, rank: int, payload: str) -> ep.Handle:
        one = self.sent[rank]
        return self.group.dispatch(one["fp8" if payload == "fp8" else "bf16"], one["ids"],
                                   one["weights"], scales=one["scales"] if payload == "fp8" else None,
                                   cast=payload == "cast", rank=rank)

    def verify(self) -> None:
        """Experts that change nothing give every token back, times the ranks it went to."""
        import numpy as np

        from crossdock.testing import ep_reference as ref
        handles = [self.dispatch(rank, "bf16") for rank in self.ranks]
        self.group.synchronize(60)
        for handle in handles:
            n = handle.rows()
            handle.expert_input.rows[:n] = handle.received.rows[:n]
        outs = [self.group.combine(handle) for handle in handles]
        self.group.synchronize(60)
        firsts = [ref.first_expert(self.args.experts, self.args.world, r)
                  for r in range(1, self.args.world)]
        for one, out in zip(self.sent.values(), outs):
            owners = np.searchsorted(firsts, _codes(one["ids"]), side="right")
            copies = [len(set(row)) for row in owners.tolist()]
            want = ref.bf16_decode(_codes(one["bf16"])) * np.array(copies, np.float32)[:, None]
            if not np.array_equal(_codes(out), ref.bf16_encode(want)):
                raise SystemExit("bench ep: what came back is not what was sent")

    def time(self, prepare: Callable[[int], Any], call: Callable[[int, Any], Any]) -> float:
        """Median microseconds of `call`, over the ranks of this process and all rounds."""
        times: list[int] = []
        for _ in range(self.args.repeat):
            for _ in range(BATCH):
                for rank in self.ranks:
                    given = prepare(rank)
                    start = time.perf_counter_ns()
                    made = call(rank, given)
                    times.append(time.perf_counter_ns() - start)
                    for handle in (given, made):
                        if isinstance(handle, ep.Handle):
                            handle.close()
                    del given, made, handle
            self.group.synchronize(60)
        return statistics.median(times[len(times) // 10:]) / 1000

    def figures(self) -> list[dict[str, Any]]:
        """Name, value, unit and aim of everything measured."""

        def nothing(_: int) -> None:
            return None

        found = {}
        for payload in ("bf16", "fp8", "cast"):
            def call(rank: int, _: Any, payload: str = payload) -> ep.Handle:
                return self.dispatch(rank, payload)

            found[f"python_dispatch_{payload}_call_us"] = self.time(nothing, call)

        def handle_of(rank: int) -> ep.Handle:
            return self.dispatch(rank, "bf16")

        found["python_received_rows_us"] = self.time(handle_of, lambda _, h: h.received.rows)
        found["python_combine_call_us"] = self.time(
            handle_of, lambda rank, h: self.group.combine(h, out=self.sent[rank]["out"]))
        found["python_combine_new_output_us"] = self.time(handle_of,
                                                          lambda _, h: self.group.combine(h))
        aimed = self.args.backend == "gpu"
        return [{"name": name, "value": round(value, 3), "unit": "us"} |
                ({"aim": AIM_US, "aim_met": value <= AIM_US} if aimed and "_call_" in name else {})
                for name, value in found.items()]


def _codes(array: Any) -> Any:
    """As NumPy; bf16 as uint16."""
    import numpy as np
    if isinstance(array, np.ndarray):
        return array
    import torch
    if array.dtype != torch.bfloat16:
        return array.cpu().numpy()
    return array.view(torch.int16).cpu().numpy().view(np.uint16)


def facts_of(args: argparse.Namespace) -> dict[str, Any]:
    facts = {"schema": "crossdock.bench.python_ep/1", "version": crossdock.__version__,
             "python": sys.version.split()[0], "backend": args.backend}
    if args.backend == "gpu":
        import torch
        facts |= {"torch": torch.__version__,
                  "gpus": f"{args.world} x {torch.cuda.get_device_name(0)}",
                  "processes": str(1 if args.rank is None else args.world)}
    return facts | {key: str(getattr(args, key))
                    for key in ("world", "tokens", "hidden", "experts", "top_k", "repeat")}


def bench_ep(args: argparse.Namespace) -> None:
    if args.backend == "gpu" and args.world == 0:
        import torch
        args.world = torch.cuda.device_count()
    args.world = args.world or 2
    if args.rank is not None and args.backend == "gpu":
        import torch
        if args.device is None:  # each process may see its own GPU alone, which is number 0 there
            local = args.rank if args.local_rank is None else args.local_rank
            args.device = local % torch.cuda.device_count()
        torch.cuda.set_device(args.device)
    bench = Bench(args)
    with bench.group:
        bench.verify()
        report = facts_of(args) | {"data": "right", "results": bench.figures()}
    if args.rank:
        return
    text = json.dumps({**report, "results": []}, indent=2)
    lines = ",\n    ".join(json.dumps(figure) for figure in report["results"])
    text = text.replace('"results": []', f'"results": [\n    {lines}\n  ]')
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    if args.json:
        print(text)
        return
    where = "in one process" if args.rank is None else "in a process each"
    print(f"host time of one call, {args.world} ranks {where}, {args.tokens} tokens")
    for figure in report["results"]:
        aim = f"   aim <= {figure['aim']:.0f}" if "aim" in figure else ""
        print(f"  {figure['name']:34}{figure['value']:9.2f} us{aim}")


def use_launcher(args: argparse.Namespace) -> None:
    """What torchrun tells by environment, where it is not given; not in the twin, whose ranks are all in
    one process."""
    def told(name: str) -> Optional[int]:
        return int(os.environ[name]) if os.environ.get(name) else None

    args.local_rank = None
    world = told("WORLD_SIZE") or 1
    if args.backend == "gpu" and world > 1 and (args.rank is not None or args.world == 0):
        args.rank = told("RANK") if args.rank is None else args.rank
        args.world = args.world or world
        args.local_rank = told("LOCAL_RANK")
    if args.rank is not None and (args.world == 0 or args.backend == "twin"):
        raise SystemExit("bench ep: --rank needs --world, and GPUs")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m crossdock.bench", description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("ep", help="host time of one Python call of dispatch and combine")
    one.add_argument("--backend", choices=["gpu", "twin"], default="gpu",
                     help="twin: on the CPU; its calls copy the tokens, so its times say little")
    one.add_argument("--world", type=int, default=0, help="ranks; 0: all GPUs, 2 in the twin")
    one.add_argument("--rank", type=int,
                     help="one process a rank: which one this is; default RANK, and for --world "
                     "WORLD_SIZE, as torchrun sets them")
    one.add_argument("--device", type=int,
                     help="one process a rank: its GPU; default LOCAL_RANK, else the rank's number, "
                     "modulo the GPUs that it sees")
    one.add_argument("--store", default="",
                     help="one process a rank: where they meet, a store's URL; default "
                     "torch.distributed at MASTER_ADDR and MASTER_PORT")
    one.add_argument("--tokens", type=int, default=128)
    one.add_argument("--hidden", type=int, default=7168)
    one.add_argument("--experts", type=int, default=256)
    one.add_argument("--top-k", type=int, default=8)
    one.add_argument("--repeat", type=int, default=25, help=f"rounds of {BATCH} calls a rank")
    one.add_argument("--json", action="store_true")
    one.add_argument("--output", help="write the JSON to this file too")
    one.set_defaults(run=bench_ep)
    args = parser.parse_args()
    use_launcher(args)
    args.run(args)


if __name__ == "__main__":
    main()
