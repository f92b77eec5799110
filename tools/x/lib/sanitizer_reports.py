#!/usr/bin/env python3
"""Judges one run of a test suite under compute-sanitizer: everything that it reports is an error, except the
races of `KNOWN`, which are none.

usage: sanitizer_reports.py --tool NAME --log FILE --output FILE --status N [--device FOLDER]

FILE after --log is what compute-sanitizer wrote, after --output what the tests wrote; N is the exit status of
compute-sanitizer, 124 where it was stopped for want of time. Prints one line for the table of ./x gpu --sanitize,
then every report that is not known. Exit code 1 where there is any, where a test has failed, or where not all is
accounted for: a report that this script does not understand is not known.

A known race is told by a function of it (the kernel, or what was inlined into it: compute-sanitizer names the
innermost one that it has a name for) and by the source of both accesses, for which kernels are compiled with their
lines (jit.line_info). Lines move, so what counts is the text around the line in the source: a
statement has several.
"""
# SPDX-License-Identifier: Apache-2.0
import argparse
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

STOPPED = 124
WITH_REPORTS = 9  # gpu_sanitize.sh asks compute-sanitizer for it


@dataclass(frozen=True)
class Place:
    """An access: file name, and what its line in the source has in it. Without a file: the report names no line, and
    its own text has this in it."""
    file: str
    text: str


@dataclass(frozen=True)
class Known:
    name: str
    functions: tuple[str, ...]  # expressions, each of which one of the report's lines has
    writes: tuple[Place, ...]
    reads: tuple[Place, ...]


KNOWN = (
    # The addresses of the destinations' outputs. A notify warp writes them after a barrier of the notify warps
    # alone; the others read them behind the block's next barrier, which all threads pass. A kernel of ten lines
    # with just that (a named barrier of some warps, a write, the block's barrier, reads) is reported the same way,
    # and is not without the named barrier: barriers seem to be counted, and not told apart.
    Known("outputs of the destinations", (r"\bep_dispatch|\bEpDispatchBlock<",),
          writes=(Place("dispatch_block.cuh", r"shared\.outputs"),),
          reads=(Place("dispatch_block.cuh", r"shared\.outputs"),)),
    # Scales of gathered rows. Threads that gather bring them by cp.async of four bytes, which nothing else does,
    # wait for it, and arrive at full[stage]; the math warps read them when they have seen that phase. The readers
    # have passed a named barrier that the writers have not, as above.
    Known("scales of gathered rows",
          (r"\bgrouped_gemm|\bcopy_async_4\(", r"\bgrouped_gemm|\bld_shared\(const (crossdock::device::)?U32x2 \*\)"),
          writes=(Place("load_role.cuh", r"copy_async_4|input_scales"),
                  Place("async_copy.cuh", r"cp\.async\.ca\.shared\.global \[%0\], \[%1\], 4")),
          reads=(Place("swapped.cuh", r"ld_shared|input_scales"),
                 Place("memory.cuh", r"ld\.shared"))),
    # Values of SwiGLU that another warp stores. Each lane of a math warp writes its own, and after a barrier of the
    # warp one lane arrives for all at handed[group]; the warp that stores reads them when it has seen that phase. A
    # kernel of ten lines with just that (writes, __syncwarp, one lane's arrival; a wait, reads) is reported the same
    # way, and is not where every lane arrives: what lanes of a warp tell each other seems not to be carried on.
    Known("values that another warp stores",
          (r"\b(grouped_gemm|GemmSwigluStore)<.*GroupedGemmConfig\{\(unsigned int\)128, \(unsigned int\)4, "
           r"\(bool\)1, \(bool\)0, \(bool\)1, \(bool\)[01], \(bool\)0, \(bool\)1, \(bool\)0\}",
           r"\bld_shared\(const (crossdock::device::)?U32x4 \*\)"),
          writes=(Place("", r"kernel::grouped_gemm<"), Place("swiglu.cuh", r"e4m3x2_from_f32")),
          reads=(Place("memory.cuh", r"ld\.shared\.v4"),)),
)

RACE = re.compile(r"^(?:Error|Warning|Info): Race reported between (Read|Write) access at (.*)", re.IGNORECASE)
AND_ACCESS = re.compile(r"^\s*and (Read|Write) access at (.*)", re.IGNORECASE)
LOCATION = re.compile(r"(?:in|at) (?:\S*/)?([\w.]+\.cuh?):(\d+)|\b(?:\S*/)?([\w.]+\.cuh):(\d+)")
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed)")


def body_of(line):
    """A line without the prefix of compute-sanitizer; None: it is not one of its lines."""
    return line[len("========="):].strip("\n")[1:] if line.startswith("=========") else None


def reports_of(lines):
    """What was reported: lists of lines. A report begins at a line that is not indented."""
    reports = []
    for line in lines:
        body = body_of(line)
        if body is None or not body.strip():
            continue
        if not body.startswith(" "):
            reports.append([body])
        elif reports:
            reports[-1].append(body)
    return [r for r in reports if not r[0].startswith("COMPUTE-SANITIZER") and not SUMMARY.search(r[0])]


class Sources:
    """Lines of the device code by file name; several files may have one name."""

    STATEMENT = 6  # lines of one, whose last is reported where it is an asm of several

    def __init__(self, folder):
        self.files = {}
        for path in sorted(Path(folder).rglob("*.cuh")):
            self.files.setdefault(path.name, []).append(path.read_text(encoding="utf-8").splitlines())

    def has(self, place, file, line):
        if file != place.file:
            return False
        return any(re.search(place.text, "\n".join(lines[max(0, line - self.STATEMENT):line + 1]))
                   for lines in self.files.get(file, []))


@dataclass
class Access:
    kind: str
    text: str  # all lines that tell of it

    def is_at(self, places, sources):
        found = [(m[1] or m[3], int(m[2] or m[4])) for m in LOCATION.finditer(self.text)]
        if not found:
            return any(not place.file and re.search(place.text, self.text) for place in places)
        return any(sources.has(place, file, line) for place in places for file, line in found)


def race_of(report):
    """The accesses of a report of a race, the first against all others, or None: it is something else."""
    first = RACE.match(report[0])
    if not first:
        return None
    accesses = [Access(first[1].lower(), first[2])]
    for line in report[1:]:
        if second := AND_ACCESS.match(line):
            accesses.append(Access(second[1].lower(), second[2]))
        else:
            accesses[-1].text += "\n" + line
    return accesses if len(accesses) > 1 else None


def known_of(report, sources):
    accesses = race_of(report)
    if accesses is None or any(a.kind == accesses[0].kind for a in accesses[1:]):
        return None
    for known in KNOWN:
        named = all(any(re.search(function, line) for line in report) for function in known.functions)
        if named and all(a.is_at(known.writes if a.kind == "write" else known.reads, sources) for a in accesses):
            return known.name
    return None


def tests_of(output):
    """Of the tests: how many passed, which failed, and which was running when all ended."""
    passed = re.findall(r"^\[       OK \] (\S+)", output, re.MULTILINE)
    skipped = re.findall(r"^\[  SKIPPED \] (\S+) \(", output, re.MULTILINE)
    failed = re.findall(r"^\[  FAILED  \] (\S+?),? \(", output, re.MULTILINE)
    begun = re.findall(r"^\[ RUN      \] (\S+)", output, re.MULTILINE)
    ended = {*passed, *skipped, *failed}
    return passed, skipped, failed, [name for name in begun if name not in ended]


def judge(tool, log, output, status, sources):
    """The line of the table, and what is wrong: a list of texts."""
    wrong = []
    known = Counter()
    reports = reports_of(log.splitlines())
    for report in reports:
        name = known_of(report, sources) if tool == "racecheck" else None
        if name is None:
            wrong.append("\n".join(report))
        else:
            known[name] += 1
    summaries = [int(m[1] or m[2]) for m in SUMMARY.finditer(log)]
    passed, skipped, failed, running = tests_of(output)
    wrong += [f"test failed: {name}" for name in failed]
    if status == STOPPED:
        wrong.append("stopped for want of time" + (f" in {running[0]}" if running else ""))
    elif running:
        wrong.append(f"ended in the middle of {running[0]}")
    elif not passed and not skipped:
        wrong.append("no test was run")
    # Its errors make compute-sanitizer exit with another status than the tests have; both are seen above.
    expected = (0, STOPPED, WITH_REPORTS) if known else (0, STOPPED)
    if status not in expected and not wrong:
        wrong.append(f"exit status {status} without a report of it")
    if status != STOPPED and not summaries:
        wrong.append("compute-sanitizer has written no summary")
    elif status != STOPPED and sum(summaries) != len(reports):
        wrong.append(f"the summaries tell of {sum(summaries)} reports, and {len(reports)} were read")
    line = f"{len(passed)} passed, {len(skipped)} skipped, {len(reports)} reports"
    if known:
        line += " (known: " + ", ".join(f"{n} x {name}" for name, n in sorted(known.items())) + ")"
    return line, wrong


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--tool", required=True)
    options.add_argument("--log", required=True, type=Path)
    options.add_argument("--output", required=True, type=Path)
    options.add_argument("--status", required=True, type=int)
    options.add_argument("--device", default="device", type=Path)
    o = options.parse_args()
    log = o.log.read_text(encoding="utf-8", errors="replace") if o.log.exists() else ""
    line, wrong = judge(o.tool, log, o.output.read_text(encoding="utf-8", errors="replace"), o.status,
                        Sources(o.device))
    print(line + ("" if not wrong else f"; WRONG: {len(wrong)}"))
    for text in wrong:
        print("    " + text.replace("\n", "\n    "))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
