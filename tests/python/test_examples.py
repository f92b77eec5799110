"""The examples in Python run as they are."""
# SPDX-License-Identifier: Apache-2.0
import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def test_an_expert_layer():
    done = subprocess.run([sys.executable, str(EXAMPLES / "02_moe_layer" / "layer.py")], timeout=120,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("differ from the reference") == 2
