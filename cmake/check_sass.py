#!/usr/bin/env python3
"""Looks at the machine code of the fp8 kernels for what costs speed without any other sign.

An FFMA that takes all three sources from one register bank waits a cycle, unless the operand cache
(.reuse) has one of them. The main loop of grouped_gemm has 128 FFMAs a stage; builds in which 50 or
more of them conflicted ran 4 to 10 % slower, though nothing was spilled. Also counted: spills, and
moves to the warp's own registers (R2UR) between wgmmas, which hold up each of them: a main loop whose
bounds or descriptors the compiler does not see as uniform ran 20 % slower.

usage: check_sass.py CROSSDOCK [--limit N] [--disassembler PATH]

CROSSDOCK is the command; its `jit dump` writes the machine code of the kernels. Exit code 77 where no
compiler or no disassembler is found, with the reason printed.
"""
# SPDX-License-Identifier: Apache-2.0
import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SKIPPED = 77
FFMA = re.compile(r"FFMA (R\d+), (R\d+)(\.reuse)?, (R\d+)(\.reuse)?, (R\d+)(\.reuse)?")


def bank(register):
    return int(register[1:]) % 2


def look_at(sass):
    """Of one kernel: wgmmas, spills; of its main loop: FFMAs, those with all sources in one bank, moves."""
    # The first four wgmmas begin the first tile; from there on it is the main loop.
    wgmmas = [m.start() for m in re.finditer(r"\b[HQ]GMMA\b", sass)]
    loop = sass[wgmmas[3]:wgmmas[-1]] if len(wgmmas) > 4 else ""
    total = conflicts = 0
    for found in FFMA.finditer(loop):
        total += 1
        sources = [found[2], found[4], found[6]]
        if any(found[i] for i in (3, 5, 7)):
            continue
        conflicts += len(set(sources)) == 3 and len({bank(r) for r in sources}) == 1
    return {
        "ffma": total,
        "conflicts": conflicts,
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "wgmma": len(wgmmas),
        "moves": len(re.findall(r"\bR2UR\b", loop)),
    }


def find_disassembler(given):
    """The one that was asked for, a toolkit's, or the one that `./x setup` has put into .venv."""
    root = Path(__file__).resolve().parent.parent
    wheel = sorted(map(str, root.glob(".venv/lib/python3*/site-packages/nvidia/cu*/bin/nvdisasm")))
    for name in [given] if given else ["cuobjdump", "nvdisasm", "/usr/local/cuda/bin/cuobjdump",
                                       "/usr/local/cuda/bin/nvdisasm", *wheel]:
        if path := shutil.which(name):
            return path
    return None


def disassemble(tool, cubin):
    args = ["-c"] if Path(tool).name == "nvdisasm" else ["--dump-sass"]
    return subprocess.run([tool, *args, cubin], capture_output=True, check=True, text=True).stdout


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("crossdock", type=Path)
    parser.add_argument("--limit", type=int, default=24, help="conflicts that a kernel may have")
    parser.add_argument("--disassembler", default="", help="cuobjdump or nvdisasm")
    options = parser.parse_args()
    tool = find_disassembler(options.disassembler)
    if tool is None:
        print("skipped: neither cuobjdump nor nvdisasm was found; they come with the CUDA toolkit, and "
              "nvdisasm with the wheel nvidia-cuda-nvdisasm, which ./x setup puts into .venv")
        return SKIPPED
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        dump = subprocess.run([options.crossdock, "jit", "dump", "--kernel", "grouped_gemm",
                               "--sm", "90", "--folder", folder], check=False)
        if dump.returncode != 0:
            return dump.returncode
        for cubin in sorted(Path(folder).glob("*.cubin")):
            counts = look_at(disassemble(tool, cubin))
            moves = counts["moves"] if "tile_rows=128" in cubin.stem else 0
            wrong = counts["conflicts"] > options.limit or counts["spills"] > 0 or moves > 0
            failed += wrong
            print(f"{'OVER' if wrong else 'ok  '}  {cubin.stem}: {counts['ffma']} FFMA, "
                  f"{counts['conflicts']} with one bank, {counts['spills']} spill instructions, "
                  f"{counts['wgmma']} wgmma with {counts['moves']} moves between them")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
