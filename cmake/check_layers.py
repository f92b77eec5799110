#!/usr/bin/env python3
"""Checks every include of the tree against the layer rules.

  src/<layer>/    other layers only as cmake/layers.txt allows; a transport never another transport
  include/        the C++ standard library and other installed headers only
  device/         <cstdint>, <cstddef> and other files of device/ only
  everywhere      nothing includes tools/ or tests/ except they themselves

Prints one line a violation and exits with 1 when there is any.
"""
# SPDX-License-Identifier: Apache-2.0
import re
import sys
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
SUFFIXES = {".hpp", ".cpp", ".h", ".cuh", ".cu", ".def"}
DEVICE_STANDARD = {"cstdint", "cstddef"}
# Installed headers may use these C headers besides extension-less C++ ones.
PUBLIC_C = {"stddef.h", "stdint.h", "stdbool.h"}


def read_rules(path):
    """`layer: allowed allowed` -> {layer: {allowed}}; a layer may always include itself."""
    rules = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        layer, colon, allowed = line.partition(":")
        if not colon:
            raise SystemExit(f"{path}:{number}: expected 'layer: allowed layers'")
        rules[layer.strip()] = set(allowed.split()) | {layer.strip()}
    for layer, allowed in rules.items():
        for unknown in allowed - rules.keys():
            raise SystemExit(f"{path}: {layer} may include '{unknown}', which is no layer")
    return rules


def includes(path):
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group(1) == "<", match.group(2)


class Checker:
    def __init__(self, root):
        self.root = root
        self.rules = read_rules(root / "cmake" / "layers.txt")
        self.problems = []

    def files(self, folder):
        base = self.root / folder
        return sorted(p for p in base.rglob("*") if p.suffix in SUFFIXES) if base.is_dir() else []

    def problem(self, path, number, text):
        self.problems.append(f"{path.relative_to(self.root)}:{number}: {text}")

    def check_source(self, path):
        parts = path.relative_to(self.root / "src").parts
        layer = parts[0]
        if layer not in self.rules:
            self.problem(path, 1, f"folder src/{layer} is no layer of cmake/layers.txt")
            return
        for number, angled, name in includes(path):
            first = name.split("/")[0]
            if first in ("tools", "tests", "support"):
                self.problem(path, number, f"the library must not include {name}")
            elif angled and first == "crossdock":
                self.check_installed_or_device(path, number, name)
            elif not angled and "/" not in name:
                self.problem(path, number, f'write "{layer}/.../{name}", from src/ down')
            elif not angled and first not in self.rules:
                self.problem(path, number, f"{name} is in no layer")
            elif not angled and first not in self.rules[layer]:
                self.problem(path, number, f"layer {layer} must not include layer {first} ({name})")
            elif not angled:
                self.check_transport(path, number, parts, name)

    def check_transport(self, path, number, parts, name):
        """src/transport/<one>/ includes the contract and itself, never src/transport/<other>/."""
        target = name.split("/")
        if target[0] != "transport" or len(target) < 3 or len(parts) < 3:
            return
        if parts[0] == "transport" and parts[1] != target[1]:
            self.problem(path, number, f"transport {parts[1]} must not include transport {target[1]}")

    def check_installed_or_device(self, path, number, name):
        if not any((self.root / folder / name).is_file() for folder in ("include", "device")):
            self.problem(path, number, f"there is no installed or device header <{name}>")

    def check_public(self, path):
        for number, angled, name in includes(path):
            if name.startswith("crossdock/"):
                if not angled or not (self.root / "include" / name).is_file():
                    self.problem(path, number, f"{name} is no installed header")
            elif not angled or not (re.fullmatch(r"[a-z_]+", name) or name in PUBLIC_C):
                self.problem(path, number, f"installed headers use the standard library only: {name}")

    def check_device(self, path):
        for number, _, name in includes(path):
            if name.startswith("crossdock/"):
                if not (self.root / "device" / name).is_file():
                    self.problem(path, number, f"{name} is not in device/")
            elif name not in DEVICE_STANDARD:
                self.problem(path, number, f"device code includes no host header: {name}")

    def run(self):
        for path in self.files("src"):
            self.check_source(path)
        for path in self.files("include"):
            self.check_public(path)
        for path in self.files("device"):
            self.check_device(path)
        return self.problems


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    problems = Checker(root).run()
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
