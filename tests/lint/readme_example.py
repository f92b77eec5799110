"""Compiles the C++ example of README.md against the installed headers: readme_example.py ROOT COMPILER."""
# SPDX-License-Identifier: Apache-2.0
import re
import subprocess
import sys
from pathlib import Path

root, compiler = Path(sys.argv[1]), sys.argv[2]
examples = re.findall(r"```cpp\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
if not examples:
    sys.exit("README.md has no C++ example")
for example in examples:
    done = subprocess.run([compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror",
                           f"-I{root / 'include'}", "-x", "c++", "-"],
                          input=example, text=True, check=False)
    if done.returncode != 0:
        sys.exit("an example of README.md does not compile")
