#!/usr/bin/env python3
"""House rules that no other tool knows: licence line, opening paragraph, size limits, merges left half done.

A missing licence line and the marks of a merge are errors. Sizes and opening paragraphs are warnings, unless --strict; a file
may waive its size with a comment `size-limit: <reason>`.
"""
# SPDX-License-Identifier: Apache-2.0
import argparse
import re
import subprocess
import sys
from pathlib import Path

LICENCE = "SPDX-License-Identifier: Apache-2.0"
CODE = {".hpp", ".cpp", ".h", ".cuh", ".cu", ".c"}
SCRIPTS = {".py", ".sh"}
# Of the longest folder that a file is in.
MAX_LINES = {"include": 400, "device": 300, "python/src": 200, "": 500}
COUNTED = CODE | {".py"}
MAX_FUNCTION = 60
MAX_KERNEL_FUNCTION = 120
FUNCTION_START = re.compile(r"^(?![\s#/}]|namespace|class|struct|enum|union|extern|using|constexpr std::array)"
                            r".*\)[^;]*\{$")


# Formatters and linters let them pass.
MERGE_MARKS = ("<" * 7 + " ", ">" * 7 + " ")


def tracked(root):
    """Files git knows; without git, all that are in no build folder and no hidden one but .ci."""
    try:
        out = subprocess.run(["git", "-C", root, "ls-files", "-z", "-c", "-o", "--exclude-standard"],
                             capture_output=True, check=True).stdout
        names = [n for n in out.decode().split("\0") if n]
        paths = [root / n for n in names]
    except (OSError, subprocess.CalledProcessError):
        parts = lambda p: p.relative_to(root).parts  # noqa: E731
        paths = [p for p in root.rglob("*")
                 if not any(part == "build" or part.startswith(".") and part != ".ci"
                            for part in parts(p))]
    return [p for p in paths if p.is_file()]


def function_lengths(lines):
    """(first line, length) of functions that start in column 0 and end with a `}` there."""
    start = None
    for number, line in enumerate(lines, 1):
        if start is None and FUNCTION_START.match(line):
            start = number
        elif start is not None and line.startswith("}"):
            yield start, number - start + 1
            start = None


def most_lines(name):
    folders = [folder.as_posix() for folder in name.parents][:-1] + [""]
    return next(MAX_LINES[folder] for folder in folders if folder in MAX_LINES)


def check(root, path):
    """Yields (is_error, text)."""
    name = path.relative_to(root)
    if path.suffix not in CODE | SCRIPTS:
        return
    text = path.read_text(errors="replace")
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith(MERGE_MARKS):
            yield True, f"{name}:{number}: a merge left half done: '{line}'"
    if LICENCE not in "\n".join(lines[:40]):
        yield True, f"{name}:1: lacks '{LICENCE}' near the top"
    if path.suffix not in COUNTED or "size-limit:" in text:
        return
    if len(lines) > most_lines(name):
        yield False, f"{name}:1: {len(lines)} lines, limit {most_lines(name)}"
    if path.suffix not in CODE:
        return
    top = name.parts[0]
    limit = MAX_KERNEL_FUNCTION if top == "device" else MAX_FUNCTION
    for start, length in function_lengths(lines):
        if length > limit:
            yield False, f"{name}:{start}: function of {length} lines, limit {limit}"
    is_test = top == "tests" and path.name.endswith("_test.cpp")
    if not is_test and not text.startswith(("//", "/*")):
        yield False, f"{name}:1: open with what the file owns, its thread, and what it must not do"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parent.parent)
    options = parser.parse_args()
    root = options.root.resolve()
    failed = False
    for path in tracked(root):
        for is_error, text in check(root, path):
            is_error = is_error or options.strict
            failed |= is_error
            print(f"{text}" if is_error else f"warning: {text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
