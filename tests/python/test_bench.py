"""``python -m crossdock.bench ep`` in the twin: what comes back is compared, and its JSON is whole."""
# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys

ARGUMENTS = ["--backend", "twin", "--tokens", "1", "--hidden", "512", "--experts", "8", "--top-k", "2",
             "--repeat", "1"]


def bench(*more, **environment):
    return subprocess.run([sys.executable, "-m", "crossdock.bench", "ep", *ARGUMENTS, *more],
                          env={**os.environ, **environment}, capture_output=True, text=True,
                          check=False, timeout=250)


def test_calls_are_timed_and_told(tmp_path):
    file = tmp_path / "ep.json"
    # The ranks of the twin are in one process, whatever has started it.
    done = bench("--output", str(file), RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert report["schema"] == "crossdock.bench.python_ep/1" and report["data"] == "right"
    assert report["world"] == "2"
    values = {figure["name"]: figure["value"] for figure in report["results"]}
    assert values["python_dispatch_fp8_call_us"] > 0 and values["python_combine_call_us"] > 0


def test_a_rank_needs_a_world_and_a_gpu():
    done = bench("--rank", "1", "--world", "2")
    assert done.returncode != 0 and "--rank needs --world, and GPUs" in done.stderr
