#!/usr/bin/env python3
"""Writes crossdock/ptx/wgmma_operands.cuh: the operand strings of wgmma, one set per register count.

Run it from anywhere; `--check` only compares and fails if the checked-in file differs.
SPDX-License-Identifier: Apache-2.0
"""
import pathlib
import sys
import textwrap

WIDTHS = (8, 16, 32, 64, 96, 128, 192, 256)  # N of m64nN; a thread holds N / 2 accumulators
TARGET = pathlib.Path(__file__).parent / "crossdock" / "ptx" / "wgmma_operands.cuh"
HEADER = """\
// Written by device/generate_wgmma.py; change that file, not this one. The operand strings of wgmma
// for R = N / 2 accumulator registers, which are the operands 0 to R - 1 of the asm statement:
//   SS: R descriptor A, R+1 descriptor B, R+2 scale-d, R+3 and R+4 transpose A and B
//   RS: R to R+3 registers of A, R+4 descriptor B, R+5 scale-d, R+6 transpose B
// `SCALE` is the operand that says whether to accumulate, `SS8` and `RS8` the forms for 8-bit
// elements, which cannot be transposed.
// SPDX-License-Identifier: Apache-2.0
// clang-format off
#pragma once
"""


def define(name, text):
    """One #define whose string literal is split over lines of at most 96 columns."""
    pieces = textwrap.wrap(text, 90, break_long_words=False)
    pieces = [p + " " for p in pieces[:-1]] + pieces[-1:]
    lines = [f"#define CROSSDOCK_WGMMA_{name} \\"] + [f'  "{p}" \\' for p in pieces[:-1]]
    return "\n".join(lines + [f'  "{pieces[-1]}"'])


def operands(n):
    r = n // 2
    d = "{" + ", ".join(f"%{i}" for i in range(r)) + "}"
    a = "{" + ", ".join(f"%{r + i}" for i in range(4)) + "}"
    ss = f"{d}, %{r}, %{r + 1}, p, 1, 1"
    return [
        f"// n = {n}",
        f'#define CROSSDOCK_WGMMA_SCALE_SS_{r} "%{r + 2}"',
        f'#define CROSSDOCK_WGMMA_SCALE_RS_{r} "%{r + 5}"',
        define(f"SS8_{r}", ss),
        f'#define CROSSDOCK_WGMMA_SS_{r} CROSSDOCK_WGMMA_SS8_{r} ", %{r + 3}, %{r + 4}"',
        define(f"RS8_{r}", f"{d}, {a}, %{r + 4}, p, 1, 1"),
        f'#define CROSSDOCK_WGMMA_RS_{r} CROSSDOCK_WGMMA_RS8_{r} ", %{r + 6}"',
    ]


def main():
    text = HEADER + "\n" + "\n\n".join("\n".join(operands(n)) for n in WIDTHS) + "\n"
    if "--check" in sys.argv[1:]:
        sys.exit(0 if TARGET.read_text() == text else f"{TARGET} is stale: run {__file__}")
    TARGET.write_text(text)


if __name__ == "__main__":
    main()
