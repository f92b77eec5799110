"""The package as a whole: versions and settings, its types, and what its module exports."""
# SPDX-License-Identifier: Apache-2.0
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

import crossdock
from crossdock import _native, ep

SOURCE = pathlib.Path(__file__).resolve().parents[2] / "python"


def test_version_and_settings():
    assert crossdock.__version__.count(".") == 2 and crossdock.wire_version >= 1
    assert f'version = "{crossdock.__version__}"' in (SOURCE / "pyproject.toml").read_text()
    names = {setting.name: setting for setting in crossdock.settings()}
    assert "cuda.driver" in names and all(s.meaning for s in names.values())
    changed = subprocess.run(
        [sys.executable, "-c", "import crossdock; print([s for s in crossdock.settings() if s.name == "
         "'cuda.driver'][0])"], env={**os.environ, "CROSSDOCK_CUDA_DRIVER": "libother.so"},
        capture_output=True, text=True, check=True).stdout
    assert "libother.so" in changed and "CROSSDOCK_CUDA_DRIVER" in changed


def test_importing_pulls_in_no_framework():
    code = "import sys, crossdock.ep; print(sorted({'torch', 'numpy', 'cupy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          check=True).stdout.strip() == "[]"


def test_defaults_follow_the_library():
    assert [ep.default_dispatch_sms(w) for w in (2, 4, 8)] == [18, 12, 11]
    assert [ep.default_combine_sms(w) for w in (2, 4, 32)] == [12, 8, 8]


def test_the_module_exports_its_entry_only():
    exported = subprocess.run(["nm", "-D", "--defined-only", _native.__file__], capture_output=True,
                              text=True)
    if exported.returncode != 0:
        pytest.skip("nm is not there to list symbols")
    ours = [line.split()[-1] for line in exported.stdout.splitlines() if " T " in line]
    assert "PyInit__native" in ours
    assert not [name for name in ours if "crossdock" in name]


def test_the_example_of_the_readme_runs():
    examples = re.findall(r"```python\n(.*?)```", (SOURCE.parent / "README.md").read_text(), re.DOTALL)
    assert examples
    for example in examples:
        done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed = {int(n) for n in re.findall(r"\d+", done.stdout)}
        assert printed == {1, 2}, done.stdout


def test_types_are_right():
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed (./x setup)")
    package = pathlib.Path(crossdock.__file__).parent
    done = subprocess.run([sys.executable, "-m", "mypy", "--config-file", SOURCE / "pyproject.toml",
                           "--cache-dir", package.parent / ".mypy_cache"], cwd=SOURCE, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stub_names_what_the_module_has():
    """Names and members of _native.pyi are those of the module, no more and no fewer."""
    import ast
    tree = ast.parse((SOURCE / "crossdock" / "_native.pyi").read_text())

    def names_in(body):
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.AnnAssign):
                yield node.target.id

    def own(thing):
        inherited = set(dir(object)) | {"__module__", "__new__"}
        return {name for name in vars(thing) if name not in inherited or name == "__init__"}

    def public(names):
        return {name for name in names if not name.startswith("__")}

    assert public(names_in(tree.body)) == public(vars(_native))
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            stub, real = set(names_in(node.body)), own(getattr(_native, node.name))
            assert public(stub) == public(real), node.name
            assert {n for n in stub if n.startswith("__")} <= set(dir(getattr(_native, node.name)))
