#!/usr/bin/env python3
"""Times the products of `crossdock bench moe` as torch makes them, mostly through cuBLASLt.

Called by the bench on the same GPU, once for each case, while the bench itself waits. A grouped product is
taken with its experts' own matrices; a dense one multiplies as many rows by one matrix, which is the same
number of operations with less to load. Each result is compared with fp64 for some rows before it is timed, and
launches are replays of a CUDA graph. One line for each kind:
RESULT {"kind": ..., "burst_us": ..., "sustained_us": ...} or {"kind": ..., "error": ...}; and one with "torch".
SPDX-License-Identifier: Apache-2.0
"""
import argparse
import json
import statistics
import sys
import time

SKIPPED = 77
GROUP = 128  # values that share a scale
LARGEST = 448.0
ERROR = 1e-2  # relative, of some rows; rounding the result to bf16 alone gives 1.7e-3


def codes(torch, *shape):
    """Codes that fill e4m3, as quantised tensors do."""
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    for part in out.view(-1).split(1 << 26):
        part.copy_((torch.randn(part.shape, device="cuda") * 110).clamp(-LARGEST, LARGEST))
    return out


def scales(torch, *shape):
    return torch.rand(shape, device="cuda") * 1e-3 + 1e-4


def e4m3_tensorwise(torch, case):
    a, b = codes(torch, case.experts * case.rows, case.k), codes(torch, case.n, case.k)
    scale_a, scale_b = scales(torch, 1)[0], scales(torch, 1)[0]

    def run():
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)

    return run, lambda row: (b.double() @ a[row].double()) * (scale_a.double() * scale_b.double())


def e4m3_blockwise(torch, case):
    """Scales as ours: 1 x 128 of the rows, 128 x 128 of the matrix."""
    rows = case.experts * case.rows
    a, b = codes(torch, rows, case.k), codes(torch, case.n, case.k)
    scale_a = scales(torch, case.k // GROUP, rows).t()  # column by column
    scale_b = scales(torch, case.n // GROUP, case.k // GROUP)

    def run():
        return torch._scaled_mm(a, b.t(), scale_a, scale_b.t(), out_dtype=torch.bfloat16)

    def exact(row):
        left = a[row].double() * scale_a[row].double().repeat_interleave(GROUP)
        right = scale_b.double().repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
        return (b.double() * right) @ left

    return run, exact


def ends(torch, case):
    return torch.arange(1, case.experts + 1, device="cuda", dtype=torch.int32) * case.rows


def e4m3_grouped(torch, case):
    """One scale for each row and each column: torch has no grouped product with ours."""
    a, b = codes(torch, case.experts * case.rows, case.k), codes(torch, case.experts, case.n, case.k)
    scale_a, scale_b = scales(torch, case.experts * case.rows), scales(torch, case.experts, case.n)
    offsets = ends(torch, case)

    def run():
        return torch._scaled_grouped_mm(a, b.transpose(-2, -1), scale_a, scale_b, offs=offsets,
                                        out_dtype=torch.bfloat16, use_fast_accum=True)

    def exact(row):
        expert = row // case.rows
        return (b[expert].double() @ a[row].double()) * scale_a[row].double() * scale_b[expert].double()

    return run, exact


def numbers(torch, *shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def bf16_dense(torch, case):
    a, b = numbers(torch, case.experts * case.rows, case.k), numbers(torch, case.n, case.k)
    return lambda: a @ b.t(), lambda row: b.double() @ a[row].double()


def bf16_grouped(torch, case):
    a, b = numbers(torch, case.experts * case.rows, case.k), numbers(torch, case.experts, case.n, case.k)
    offsets = ends(torch, case)
    return (lambda: torch._grouped_mm(a, b.transpose(-2, -1), offs=offsets),
            lambda row: b[row // case.rows].double() @ a[row].double())


KINDS = {
    "fp8": {"tensorwise": e4m3_tensorwise, "blockwise": e4m3_blockwise, "grouped": e4m3_grouped},
    "bf16": {"dense": bf16_dense, "grouped": bf16_grouped},
}


def check(torch, result, exact, rows):
    """Some rows against fp64."""
    wrong = total = 0.0
    for row in {0, rows // 3, rows - 1}:
        want = exact(row)
        wrong += float(((result[row].double() - want) ** 2).sum())
        total += float((want**2).sum())
    error = (wrong / total) ** 0.5
    if not error <= ERROR:
        raise RuntimeError(f"the result is wrong: relative error {error:.3g}")


class Timer:
    def __init__(self, torch, run):
        self.torch = torch
        self.graph = torch.cuda.CUDAGraph()
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            run()

    def of(self, launches):
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(launches):
            self.graph.replay()
        end.record()
        self.torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / launches

    def burst(self, repeat, idle):
        times = []
        for _ in range(repeat):
            time.sleep(idle)
            times.append(self.of(1))
        return statistics.median(times)

    def sustained(self, guess_us, warm_up):
        self.of(max(1, int(warm_up * 1e6 / guess_us)))
        return self.of(max(3, int(1e5 / guess_us)))


def measure(torch, make, case):
    run, exact = make(torch, case)
    check(torch, run(), exact, case.experts * case.rows)
    timer = Timer(torch, run)
    burst = timer.burst(case.repeat, case.idle_ms * 1e-3)
    return {"burst_us": burst, "sustained_us": timer.sustained(burst, case.warm_up_ms * 1e-3)}


def main():
    parser = argparse.ArgumentParser()
    for name in ("experts", "rows", "n", "k"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--format", choices=sorted(KINDS), required=True)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--idle-ms", type=float, default=20)
    parser.add_argument("--warm-up-ms", type=float, default=250)
    case = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        print(f"skipped: {error}")
        return SKIPPED
    if not torch.cuda.is_available():
        print("skipped: torch sees no GPU")
        return SKIPPED
    print("RESULT " + json.dumps({"torch": torch.__version__}), flush=True)
    for kind, make in KINDS[case.format].items():
        try:
            line = {"kind": kind, **measure(torch, make, case)}
        except Exception as error:  # a kind that this torch or this GPU refuses, with its own words
            line = {"kind": kind, "error": str(error).strip().split("\n")[0][:200]}
        print("RESULT " + json.dumps(line), flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
