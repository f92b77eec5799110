"""``python -m crossdock.compat install|uninstall|status [deep_ep]``."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import sys
from typing import Optional, Sequence

from ..errors import InvalidArgument
from . import install as packages


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """0: done; for status: what is imported is ours. 1: it is not. 2: refused."""
    parser = argparse.ArgumentParser(prog="python -m crossdock.compat",
                                     description="Other libraries' names for Crossdock.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("install", "make `import deep_ep` resolve to Crossdock"),
                       ("uninstall", "take it out again"),
                       ("status", "say what `import deep_ep` resolves to")):
        command = commands.add_parser(name, help=text)
        command.add_argument("package", nargs="?", default="deep_ep", help="deep_ep")
        if name != "status":
            command.add_argument("--target", metavar="FOLDER", help="instead of site-packages")
        if name == "install":
            command.add_argument("--force", action="store_true",
                                 help="also where there is one that is not ours; it is kept aside")
    given = parser.parse_args(arguments)
    try:
        if given.command == "install":
            print(packages.install(given.package, target=given.target, force=given.force))
            return 0
        if given.command == "uninstall":
            left = packages.uninstall(given.package, target=given.target)
            print("deep_ep of Crossdock was not installed" if left is None else "uninstalled")
            for path in left or []:
                print(f"files that are not ours are in {path} now")
            return 0
        state = packages.status(given.package)
        print(state)
        return 0 if state.ours else 1
    except InvalidArgument as error:
        print(error.message, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
