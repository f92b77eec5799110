"""./x help lists every subcommand, and each tells its own without building anything: x_help_test.py ROOT."""
# SPDX-License-Identifier: Apache-2.0
import pathlib
import re
import subprocess
import sys

root = pathlib.Path(sys.argv[1]).resolve()


def said(*arguments):
    done = subprocess.run([root / "x", *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        sys.exit(f"./x {' '.join(arguments)} failed: {done.stderr}")
    return done.stdout


names = sorted(path.stem for path in (root / "tools/x").glob("*.sh"))
listed = re.findall(r"^  \./x (\w+)", said("help"), re.MULTILINE)
if listed != names:
    sys.exit(f"./x help lists {listed}; tools/x has {names}")
for name in set(names) - {"demo", "bench"}:  # those ask the command, where it is built
    if not said(name, "--help").startswith(name):
        sys.exit(f"./x {name} --help does not begin with its name")
