"""python -m crossdock.compat: installs, says so, refuses, and leaves no trace."""
# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import subprocess
import sys

import pytest

import crossdock
from crossdock.compat import install


def python(folder, *arguments):
    """A Python of its own that looks into the folder first."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, *arguments], env={**os.environ, "PYTHONPATH": path},
                          capture_output=True, text=True)


def compat(folder, *arguments):
    return python(folder, "-m", "crossdock.compat", *arguments)


def test_install_import_status_uninstall(tmp_path):
    before = compat(tmp_path, "status")
    assert before.returncode == 1 and "not installed" in before.stdout
    for _ in range(2):  # again is no error
        done = compat(tmp_path, "install", "deep_ep", "--target", str(tmp_path))
        assert done.returncode == 0 and done.stdout.strip() == str(tmp_path / "deep_ep"), done.stderr
        assert not (tmp_path / "deep_ep" / "utils.py").exists(), "an earlier version's is taken away"
        (tmp_path / "deep_ep" / "utils.py").write_text(install._HEAD + "raise ImportError\n")
    code = ("import deep_ep, deep_ep.utils, deep_ep.buffer, deep_ep_cpp, crossdock.compat.deep_ep as ours\n"
            "assert deep_ep.Buffer is ours.Buffer is deep_ep.buffer.Buffer\n"
            "assert deep_ep.utils.EventOverlap is ours.EventOverlap\n"
            "assert deep_ep_cpp.Config is ours.Config and deep_ep.Threads is ours.Threads\n"
            "print(deep_ep.__version__)")
    done = python(tmp_path, "-c", code)
    assert done.returncode == 0 and done.stdout.strip().endswith("+crossdock"), done.stderr
    state = compat(tmp_path, "status")
    assert state.returncode == 0 and crossdock.__version__ in state.stdout
    assert compat(tmp_path, "uninstall", "--target", str(tmp_path)).returncode == 0
    assert list(tmp_path.iterdir()) == []
    again = compat(tmp_path, "uninstall", "--target", str(tmp_path))
    assert again.returncode == 0 and "was not installed" in again.stdout


def test_what_others_have_put_there_stays(tmp_path):
    def files(folder):
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py"))
    utils = tmp_path / "deep_ep" / "utils"
    texts = {"envs.py": "of = 'the script'\n", "more/deep.py": "", "__init__.py": "ours = False\n"}
    for n, left in enumerate(("deep_ep.left_by_crossdock", "deep_ep.left_by_crossdock.2")):
        assert compat(tmp_path, "install", "--target", str(tmp_path)).returncode == 0
        (utils / "more").mkdir()
        for name, text in texts.items():
            (utils / name).write_text(text)
        (tmp_path / "deep_ep" / "buffer.py").write_text(install._HEAD + "of = 'an earlier version'\n")
        assert compat(tmp_path, "install", "--target", str(tmp_path)).returncode == 0
        assert {name: (utils / name).read_text() for name in texts} == texts
        code = ("import deep_ep, deep_ep.buffer, deep_ep.utils.envs\n"
                "assert deep_ep.buffer.Buffer is deep_ep.Buffer\n"
                "print(deep_ep.utils.envs.of, deep_ep.utils.ours)")
        done = python(tmp_path, "-c", code)
        assert done.stdout.strip() == "the script False", done.stderr
        done = compat(tmp_path, "uninstall", "--target", str(tmp_path))
        assert done.returncode == 0 and f"not ours are in {tmp_path / left} now" in done.stdout, done.stdout
        assert files(tmp_path / left) == sorted("utils/" + name for name in texts)
        assert python(tmp_path, "-c", "import deep_ep").returncode == 1
        assert len(list(tmp_path.iterdir())) == n + 1


def real_one(folder):
    (folder / "deep_ep").mkdir(parents=True)
    (folder / "deep_ep" / "__init__.py").write_text("whose = 'theirs'\n")


def test_one_that_is_not_ours_is_left_alone(tmp_path):
    real_one(tmp_path)
    state = compat(tmp_path, "status")
    assert state.returncode == 1 and "not ours" in state.stdout
    refused = compat(tmp_path, "install", "--target", str(tmp_path))
    assert refused.returncode == 2 and "--force" in refused.stderr
    # Also where it would be found in another folder.
    elsewhere = compat(tmp_path, "install", "--target", str(tmp_path / "other"))
    assert elsewhere.returncode == 2 and not (tmp_path / "other").exists()
    assert "was not installed" in compat(tmp_path, "uninstall", "--target", str(tmp_path)).stdout
    assert python(tmp_path, "-c", "import deep_ep; print(deep_ep.whose)").stdout.strip() == "theirs"


def test_force_keeps_it_aside_until_ours_goes(tmp_path):
    real_one(tmp_path)
    for _ in range(2):
        assert compat(tmp_path, "install", "--force", "--target", str(tmp_path)).returncode == 0
    assert compat(tmp_path, "status").returncode == 0
    (tmp_path / "deep_ep" / "utils" / "envs.py").write_text("")
    assert compat(tmp_path, "uninstall", "--target", str(tmp_path)).returncode == 0
    assert python(tmp_path, "-c", "import deep_ep; print(deep_ep.whose)").stdout.strip() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep_ep", "deep_ep.left_by_crossdock"]
    assert (tmp_path / "deep_ep.left_by_crossdock" / "utils" / "envs.py").is_file()


def test_other_names_are_refused():
    with pytest.raises(crossdock.InvalidArgument, match="what can be installed is deep_ep"):
        install.install("nccl")
    assert compat(pathlib.Path("/nonexistent"), "install", "nccl").returncode == 2
