"""The checkers against small trees made here: each rule must be seen broken once."""
# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

CMAKE_DIR = Path(sys.argv.pop(1))
RULES = "base:\nwire: base\ntransport: base wire\n"
PARAGRAPH = "// What it owns.\n// SPDX-License-Identifier: Apache-2.0\n"


class Tree(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.write("cmake/layers.txt", RULES)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run_script(self, script, *arguments):
        done = subprocess.run([sys.executable, CMAKE_DIR / script, *arguments],
                              capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    def layers(self, name, text):
        self.write(name, text)
        return self.run_script("check_layers.py", self.root)


class Layers(Tree):
    def assert_refused(self, name, text, says):
        code, output = self.layers(name, text)
        self.assertEqual(code, 1, output)
        self.assertIn(says, output)
        self.assertIn(f"{name}:1:", output)

    def test_allowed_edges_pass(self):
        self.write("include/crossdock/core/a.hpp", "#include <vector>\n")
        self.write("src/transport/tcp/lane.hpp", "")
        code, output = self.layers("src/transport/tcp/a.cpp",
                                   '#include <sys/socket.h>\n#include <crossdock/core/a.hpp>\n'
                                   '#include "base/fd.hpp"\n#include "transport/tcp/lane.hpp"\n'
                                   '#include "transport/transport.hpp"\n')
        self.assertEqual((code, output), (0, ""))

    def test_upward_edge(self):
        self.assert_refused("src/base/a.cpp", '#include "wire/b.hpp"\n', "must not include layer wire")

    def test_unknown_layer(self):
        self.assert_refused("src/base/a.cpp", '#include "bse/b.hpp"\n', "is in no layer")
        self.assert_refused("src/other/a.cpp", "\n", "is no layer of")

    def test_relative_include(self):
        self.assert_refused("src/base/a.cpp", '#include "b.hpp"\n', "from src/ down")

    def test_transport_includes_another(self):
        self.assert_refused("src/transport/tcp/a.cpp", '#include "transport/shm/b.hpp"\n',
                            "transport tcp must not include transport shm")

    def test_library_includes_tests_or_tools(self):
        self.assert_refused("src/base/a.cpp", '#include "support/temp_dir.hpp"\n', "must not include")

    def test_missing_installed_header(self):
        self.assert_refused("src/base/a.cpp", "#include <crossdock/core/no.hpp>\n", "there is no")

    def test_public_header_with_third_party(self):
        self.assert_refused("include/crossdock/core/a.hpp", "#include <fmt/format.h>\n",
                            "standard library only")
        self.assert_refused("include/crossdock/core/a.hpp", '#include "base/fd.hpp"\n',
                            "standard library only")

    def test_device_with_host_header(self):
        self.assert_refused("device/crossdock/a.cuh", "#include <vector>\n", "no host header")

    def test_broken_rules(self):
        self.write("cmake/layers.txt", "base: nothing\n")
        code, _ = self.run_script("check_layers.py", self.root)
        self.assertNotEqual(code, 0)


class Headers(Tree):
    def headers(self, text):
        self.write("include/a.hpp", text)
        return self.run_script("check_headers.py", "--include", self.root / "include",
                               self.root / "include")

    def test_self_contained(self):
        code, output = self.headers("#pragma once\n#include <string>\nstd::string f();\n")
        self.assertEqual(code, 0, output)

    def test_missing_include(self):
        code, output = self.headers("#pragma once\nstd::string f();\n")
        self.assertEqual(code, 1)
        self.assertIn("a.hpp", output)

    def test_missing_guard(self):
        self.assertEqual(self.headers("struct A {};\n")[0], 1)

    def test_nothing_to_check_is_a_mistake(self):
        (self.root / "none").mkdir()
        self.assertEqual(self.run_script("check_headers.py", self.root / "none")[0], 1)


class Style(Tree):
    def style(self, name, text, *arguments):
        self.write(name, text)
        return self.run_script("check_style.py", *arguments, self.root)

    def test_licence_is_required(self):
        code, output = self.style("src/base/a.cpp", "// A paragraph.\n")
        self.assertEqual(code, 1)
        self.assertIn("SPDX", output)

    def test_a_merge_left_half_done_is_an_error(self):
        for mark in ("<" * 7 + " HEAD", ">" * 7 + " other"):
            code, output = self.style("src/base/a.cpp", PARAGRAPH + mark + "\n")
            self.assertEqual(code, 1)
            self.assertIn("a.cpp:3: a merge left half done", output)

    def test_long_function_and_file_warn(self):
        body = PARAGRAPH + "void f() {\n" + "  g();\n" * 70 + "}\n"
        code, output = self.style("src/base/a.cpp", body)
        self.assertEqual(code, 0)
        self.assertIn("a.cpp:3: function of 72 lines", output)
        self.assertEqual(self.style("src/base/a.cpp", body, "--strict")[0], 1)
        _, output = self.style("src/base/a.cpp", PARAGRAPH + "\n" * 600)
        self.assertIn("602 lines, limit 500", output)
        _, output = self.style("include/a.hpp", PARAGRAPH + "\n" * 450)
        self.assertIn("452 lines, limit 400", output)
        _, output = self.style("python/src/a.cpp", PARAGRAPH + "\n" * 250)
        self.assertIn("252 lines, limit 200", output)
        script = '"""A module."""\n# SPDX-License-Identifier: Apache-2.0\n'
        _, output = self.style("python/crossdock/a.py", script + "\n" * 500)
        self.assertIn("a.py:1: 502 lines, limit 500", output)
        self.assertNotIn("b.py", self.style("python/crossdock/b.py", script + "\n" * 498)[1])

    def test_waiver(self):
        code, output = self.style("src/base/a.cpp",
                                  PARAGRAPH + "// size-limit: a table\n" + "\n" * 600, "--strict")
        self.assertEqual((code, output), (0, ""))


if __name__ == "__main__":
    unittest.main()
