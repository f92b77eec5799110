#!/usr/bin/env python3
"""Fails when a setting of src/base/config_table.cpp is read nowhere: a knob that does nothing.

SPDX-License-Identifier: Apache-2.0
"""
import pathlib
import re
import sys


def main():
    root = pathlib.Path(sys.argv[1])
    table = root / "src/base/config_table.cpp"
    names = re.findall(r'Setting\{"([^"]+)"', table.read_text(encoding="utf-8"))
    if not names:
        print(f"{table}: no settings found; has its form changed?")
        return 1
    # The GPU fixture reads cuda.driver for the callers of Driver::load, who pass the library on.
    folders = ("src", "tools", "tests/gpu")
    texts = [
        file.read_text(encoding="utf-8")
        for folder in folders
        for file in (root / folder).rglob("*.[ch]pp")
        if file != table
    ]
    unread = [name for name in names if not any(f'"{name}"' in text for text in texts)]
    for name in unread:
        print(f"{table}: setting '{name}' is read nowhere; use it or remove it")
    print(f"{len(names)} settings, {len(unread)} unread")
    return 1 if unread else 0


if __name__ == "__main__":
    sys.exit(main())
