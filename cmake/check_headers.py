#!/usr/bin/env python3
"""Compiles each header of some folders alone: each must include what it uses.

  check_headers.py --compiler c++ --include DIR [--include DIR ...] FOLDER...

Installed headers are checked with include/ as the only include folder, so that they cannot lean on
private ones.
"""
# SPDX-License-Identifier: Apache-2.0
import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Private headers may have been written for these; the library is built with them.
DEFINITIONS = ["-DFMT_HEADER_ONLY=1", "-DXXH_INLINE_ALL=1"]


def compile_alone(options, header):
    command = [options.compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror",
               "-x", "c++", *DEFINITIONS, *(f"-I{folder}" for folder in options.include), "-"]
    # Twice: the second time must be harmless (#pragma once).
    source = f'#include "{header.resolve()}"\n' * 2
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"{header}:\n{done.stderr}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", default="c++")
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("folders", nargs="+", type=Path)
    options = parser.parse_args()
    headers = sorted(h for folder in options.folders for h in folder.rglob("*.hpp"))
    if not headers:
        print("no headers found in", *options.folders)
        return 1
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = [f for f in pool.map(lambda h: compile_alone(options, h), headers) if f]
    for failure in failures:
        print(failure)
    print(f"{len(headers)} headers, {len(failures)} not self-contained")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
