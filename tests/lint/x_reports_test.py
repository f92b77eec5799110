"""./x test fails for what a sanitizer finds in a process whose output nobody reads: x_reports_test.py ROOT CXX."""
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

root, compiler = pathlib.Path(sys.argv.pop(1)).resolve(), sys.argv.pop(1)
# Without what the run that this is part of tells sanitizers: they would report to that one.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.endswith("SAN_OPTIONS")}
READS_WHAT_IS_FREED = "int main() { int* p = new int(1); delete p; return *p; }"
READS_WHAT_IS_THERE = "int main() { int* p = new int(0); const int v = *p; delete p; return v; }"


class Reports(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name) / "a tree"  # people have such paths
        self.folder.mkdir()

    # What ./x test does once all is built, with a ctest that runs `source` and keeps its output.
    def run_ctest(self, source, exit_code=0):
        program = self.folder / "program"
        build = [compiler, "-O0", "-fsanitize=address", "-x", "c++", "-", "-o", program]
        built = subprocess.run(build, input=source, capture_output=True, text=True, timeout=60)
        if built.returncode != 0:
            self.skipTest(f"the compiler has no AddressSanitizer: {built.stderr}")
        ctest = self.folder / "ctest"
        ctest.write_text(f'#!/bin/sh\n"{program}" >/dev/null 2>&1\nexit {exit_code}\n')
        ctest.chmod(0o755)
        script = ('set -euo pipefail; source "$1/tools/x/lib/common.sh"; source "$1/tools/x/test.sh"; '
                  'ROOT=$2 PATH=$2:$PATH; run_ctest asan')
        return subprocess.run(["bash", "-c", script, "bash", root, self.folder], capture_output=True, text=True,
                              timeout=60, env=ENVIRONMENT)

    def test_a_report_that_the_test_kept_fails(self):
        done = self.run_ctest(READS_WHAT_IS_FREED)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("heap-use-after-free", done.stdout)
        self.assertIn(f"in 1 processes; the first is above, all are in {self.folder}/build/asan/reports", done.stderr)

    def test_without_a_report_the_tests_decide(self):
        self.assertEqual(self.run_ctest(READS_WHAT_IS_THERE).returncode, 0)
        self.assertEqual(self.run_ctest(READS_WHAT_IS_THERE, exit_code=8).returncode, 1)

    def test_reports_of_the_run_before_do_not_count(self):
        self.assertEqual(self.run_ctest(READS_WHAT_IS_FREED).returncode, 1)
        self.assertEqual(self.run_ctest(READS_WHAT_IS_THERE).returncode, 0)


unittest.main()
