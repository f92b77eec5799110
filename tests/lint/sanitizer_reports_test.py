"""What ./x gpu --sanitize takes for a known report and what it does not: reports made here, against the device
sources of this tree, so that a known place that is no longer in them is found too; and that its rows name tests."""
# SPDX-License-Identifier: Apache-2.0
import fnmatch
import re
import sys
import unittest
from pathlib import Path

ROOT = Path(sys.argv.pop(1))
sys.path.insert(0, str(ROOT / "tools/x/lib"))
import sanitizer_reports as reports  # noqa: E402

SOURCES = reports.Sources(ROOT / "device")
PASSED = "[ RUN      ] Ep.One\n[       OK ] Ep.One (3 ms)\n[  PASSED  ] 1 test.\n"
KERNEL = "void crossdock::device::kernel::{}<(crossdock::device::Config){{4}}>(crossdock::device::Params)"


def line_of(file, text):
    """The number of the first line of a device file that has the text."""
    lines = SOURCES.files[file][0]
    return next(i for i, line in enumerate(lines, 1) if text in line)


def race(kernel, write, read, hazards=4):
    name = KERNEL.format(kernel)
    return race_in(name, write, name, read, hazards)


def race_in(writer, write, reader, read, hazards=4):
    return [f"========= Error: Race reported between Write access at {writer}+0x1a30 in {write[0]}:{write[1]}",
            f"=========     and Read access at {reader}+0x2280 in {read[0]}:{read[1]} [{hazards} hazards]",
            "========= "]


def log_of(*found, summary=None):
    lines = ["========= COMPUTE-SANITIZER"]
    for report in found:
        lines += report
    n = len(found) if summary is None else summary
    lines.append(f"========= RACECHECK SUMMARY: {n} hazard{'s' if n != 1 else ''} displayed ({n} errors, 0 warnings)")
    return "\n".join(lines) + "\n"


OUTPUTS = ("dispatch_block.cuh", line_of("dispatch_block.cuh", "at<u64>(shared.outputs)[destination] ="))
OUTPUT = ("dispatch_block.cuh", line_of("dispatch_block.cuh", "return reinterpret_cast<u8*>(at<u64>(shared.outputs)"))
COPY_4 = ("async_copy.cuh", line_of("async_copy.cuh", "cp.async.ca.shared.global"))
COPY_16 = ("async_copy.cuh", line_of("async_copy.cuh", "cp.async.cg.shared.global"))
SCALES = ("swapped.cuh", line_of("swapped.cuh", "ptx::ld_shared(reinterpret_cast<const U32x2*>(rows"))
LOAD = ("memory.cuh", line_of("memory.cuh", "ld.shared.v2.u32") + 4)  # the end of the statement
BLOCK = "crossdock::device::EpDispatchBlock<crossdock::device::EpDispatchConfig{(unsigned int)8, (bool)0}>"
DEVICE = "crossdock::device::"
PTX = DEVICE + "ptx::"
ELSEWHERE = ("dispatch_block.cuh", line_of("dispatch_block.cuh", "EpRoute& route(u32 group"))


class Reports(unittest.TestCase):
    def judge(self, log, output=PASSED, status=9, tool="racecheck"):
        return reports.judge(tool, log, output, status, SOURCES)

    def assert_known(self, report, name):
        line, wrong = self.judge(log_of(report))
        self.assertEqual(wrong, [])
        self.assertIn(f"1 x {name}", line)

    def assert_wrong(self, says, *arguments, **options):
        _, wrong = self.judge(*arguments, **options)
        self.assertTrue(any(re.search(says, text) for text in wrong), wrong)

    def test_the_two_known_races(self):
        self.assert_known(race("ep_dispatch", OUTPUTS, OUTPUT), "outputs of the destinations")
        self.assert_known(race("ep_dispatch_expanded", OUTPUTS, OUTPUT), "outputs of the destinations")
        self.assert_known(race("grouped_gemm", COPY_4, SCALES), "scales of gathered rows")

    # As an H200 reported them with lines: by functions that were inlined, without the kernel.
    def test_the_two_known_races_by_inlined_functions(self):
        self.assert_known(race_in(BLOCK + "::wait_output(unsigned int) const", OUTPUTS,
                                  BLOCK + "::output(unsigned int) const", OUTPUT), "outputs of the destinations")
        copy, load = PTX + "copy_async_4(void *, const void *, unsigned int)", PTX + "ld_shared(const U32x2 *)"
        report = race_in(copy, COPY_4, load, LOAD)
        self.assert_known(report, "scales of gathered rows")
        self.assert_known([report[0].replace("Write", "Read").replace(copy, load).replace(":".join(map(str, COPY_4)),
                                                                                          ":".join(map(str, LOAD))),
                           report[1].replace("Read", "Write").replace(load, copy).replace(":".join(map(str, LOAD)),
                                                                                          ":".join(map(str, COPY_4))),
                           report[2]], "scales of gathered rows")
        # A scale that was read one at a time, as no tile of few rows does, may be read too early.
        self.assert_wrong("Race reported", log_of(race_in(copy, COPY_4, PTX + "ld_shared(const float *)", LOAD)))
        copy_16 = PTX + "copy_async_16(void *, const void *)"
        self.assert_wrong("Race reported", log_of(race_in(copy_16, COPY_16, load, LOAD)))

    # As an H200 reported it: one read against many writes, of which no line is told, or the line in what was inlined.
    def test_values_that_another_warp_stores(self):
        flags = ["128", "4", 1, 0, 1, 0, 0, 1, 0]
        def report(flags=flags, load="U32x4", where="", of="void {0}kernel::grouped_gemm<{1}>({0}GroupedGemmParams)"):
            config = ", ".join(f"({'unsigned int' if isinstance(f, str) else 'bool'}){f}" for f in flags)
            kernel = of.format(DEVICE, f"{DEVICE}GroupedGemmConfig{{{config}}}")
            line = line_of("memory.cuh", f"ld.shared.v{load[-1]}.u32") + 4
            return [f"========= Error: Race reported between Read access at {PTX}ld_shared(const {DEVICE}{load} *)"
                    f"+0x17400 in memory.cuh:{line}",
                    *(f"=========     and Write access at {kernel}+0x12a{n}0{where} [592 hazards]" for n in range(16))]
        self.assert_known(report(), "values that another warp stores")
        self.assert_wrong("Race reported", log_of(report(load="U32x2")))
        self.assert_wrong("Race reported", log_of(report(where=" in swiglu.cuh:160")))
        for other in (3, 4, 6, 7):  # swapped, no SwiGLU, e2m1, nothing is handed over
            changed = [1 - f if i == other else f for i, f in enumerate(flags)]
            self.assert_wrong("Race reported", log_of(report(flags=changed)))
        inlined = {"of": "{0}GemmSwigluStore<{1}>::quantise(const {0}GemmBlock<{1}> &, unsigned int)",
                   "where": f" in swiglu.cuh:{line_of('swiglu.cuh', 'ptx::e4m3x2_from_f32') - 1}"}
        self.assert_known(report(**inlined), "values that another warp stores")
        self.assert_wrong("Race reported", log_of(report(**(inlined | {"where": " in swiglu.cuh:20"}))))
        self.assert_wrong("Race reported", log_of(report(flags=["64", *flags[1:]], **inlined)))
        writes = report()
        self.assert_wrong("Race reported", log_of([*writes[:5], writes[5].replace("Write", "Read"), *writes[6:]]))

    def test_the_callers_of_an_inlined_access_are_told_below_it(self):
        report = race("grouped_gemm", COPY_4, ("memory.cuh", line_of("memory.cuh", "ld.shared.v2.u32")))
        report.insert(1, "=========         Device Frame:copy_scales(unsigned int) const in load_role.cuh:179")
        self.assert_known(report, "scales of gathered rows")

    def test_other_places_and_kernels_are_not_known(self):
        self.assert_wrong("Race reported", log_of(race("ep_dispatch", OUTPUTS, ELSEWHERE)))
        self.assert_wrong("Race reported", log_of(race("ep_dispatch", ELSEWHERE, OUTPUT)))
        self.assert_wrong("Race reported", log_of(race("ep_combine", OUTPUTS, OUTPUT)))
        self.assert_wrong("Race reported", log_of(race("grouped_gemm", COPY_16, SCALES)))

    def test_a_report_without_lines_is_not_known(self):
        bare = [re.sub(r" in \S+:\d+", "", line) for line in race("ep_dispatch", OUTPUTS, OUTPUT)]
        self.assert_wrong("Race reported", log_of(bare))

    def test_two_writes_are_not_known(self):
        report = [line.replace("Read access", "Write access") for line in race("ep_dispatch", OUTPUTS, OUTPUT)]
        self.assert_wrong("Race reported", log_of(report))

    def test_one_unknown_beside_a_known_one(self):
        line, wrong = self.judge(log_of(race("ep_dispatch", OUTPUTS, OUTPUT), race("ep_combine", OUTPUTS, OUTPUT)))
        self.assertEqual(len(wrong), 1)
        self.assertIn("2 reports (known: 1 x", line)

    def test_other_tools_know_none(self):
        self.assert_wrong("Race reported", log_of(race("ep_dispatch", OUTPUTS, OUTPUT)), tool="memcheck")

    def test_nothing_found(self):
        line, wrong = self.judge("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", status=0,
                                 tool="memcheck")
        self.assertEqual((line, wrong), ("1 passed, 0 skipped, 0 reports", []))

    def test_reports_that_were_not_read(self):
        self.assert_wrong("tell of 2 reports, and 1", log_of(race("ep_dispatch", OUTPUTS, OUTPUT), summary=2))
        self.assert_wrong("no summary", "========= COMPUTE-SANITIZER\n", status=0)
        self.assert_wrong("status 9 without a report", log_of(), status=9)
        self.assert_wrong("status 1 without a report", log_of(race("ep_dispatch", OUTPUTS, OUTPUT)), status=1)

    def test_tests_that_fail_hang_or_are_none(self):
        failed = "[ RUN      ] Ep.One\n[  FAILED  ] Ep.One (3 ms)\n"
        self.assert_wrong("test failed: Ep.One", log_of(), output=failed, status=1)
        self.assert_wrong("want of time in Ep.One", "", output="[ RUN      ] Ep.One\n", status=reports.STOPPED)
        self.assert_wrong("in the middle of Ep.One", log_of(), output="[ RUN      ] Ep.One\n", status=139)
        self.assert_wrong("no test was run", log_of(), output="", status=0)


class Rows(unittest.TestCase):
    def test_every_pattern_names_a_test(self):
        text = (ROOT / "tools/x/lib/gpu_sanitize.sh").read_text(encoding="utf-8")
        rows = re.findall(r"^(memcheck|racecheck|synccheck)\|gpu_(\w+)\|(\d+)\|([^|]+)\|.+$", text, re.MULTILINE)
        self.assertEqual({tool for tool, *_ in rows}, {"memcheck", "racecheck", "synccheck"})
        for tool, suite, _, patterns in rows:
            names = []
            for file in (ROOT / "tests/gpu" / suite).glob("*.cpp"):
                names += re.findall(r"^TEST(?:_F|_P)?\((\w+), (\w+)\)", file.read_text(encoding="utf-8"), re.MULTILINE)
            for pattern in re.split("[:-]", patterns):
                self.assertTrue(fnmatch.filter([".".join(name) for name in names], pattern),
                                f"{tool} gpu_{suite}: {pattern} is no test")


if __name__ == "__main__":
    unittest.main()
