"""Makes ``import deep_ep`` resolve to :mod:`crossdock.compat.deep_ep`.

What is installed is a package of a few lines, with a marker that says whose it is. A package of that name
that is not ours is left alone unless told otherwise, and then kept aside, so that it comes back when ours
is taken out. Of our package we take away only files that begin as we write them: what others have put
there stays when it is installed again, and is kept aside when it is taken out.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import pathlib
import shutil
import sysconfig
from typing import List, Optional

from .. import __version__
from ..errors import InvalidArgument

__all__ = ["Status", "install", "status", "uninstall"]

_MARKER = "crossdock_compat.json"
_ASIDE = ".kept_by_crossdock"
_LEFT = ".left_by_crossdock"
_INTERFACE = "2.1.0"  #: of DeepEP, as far as one host goes

_BEGIN = '"""Made by `python -m crossdock.compat install deep_ep`'  #: of every file of ours, in all versions
_HEAD = _BEGIN + ': DeepEP\'s names, by Crossdock."""\n'
_NAMES = "Buffer, Config, ElasticBuffer, EPHandle, EventHandle, EventOverlap"
#: The packages, and the text of their modules.
_PACKAGES = {
    "deep_ep": {
        "__init__.py": _HEAD + f"from crossdock.compat import deep_ep as _deep_ep\n"
                       f"from crossdock.compat.deep_ep import {_NAMES}\n\n"
                       f"__version__ = \"{_INTERFACE}+crossdock\"\n\n\n"
                       "def __getattr__(name):\n    return getattr(_deep_ep, name)\n",
        # A package, as there: what else a script looks for below it can be put there.
        "utils/__init__.py": _HEAD + "from crossdock.compat.deep_ep import EventHandle, EventOverlap\n",
        "buffer.py": _HEAD + "from crossdock.compat.deep_ep import Buffer, Config, EventHandle, "
                     "EventOverlap\n",
    },
    "deep_ep_cpp": {
        "__init__.py": _HEAD + "from crossdock.compat.deep_ep import Config, EventHandle\n\n\n"
                       "def __getattr__(name):\n"
                       "    from crossdock.compat import deep_ep\n    return getattr(deep_ep, name)\n",
    },
}


def _folder(target: Optional[str]) -> pathlib.Path:
    return pathlib.Path(target if target is not None else sysconfig.get_paths()["purelib"])


def _is_ours(package: pathlib.Path) -> bool:
    return (package / _MARKER).is_file()


def _need_known(name: str) -> None:
    if name != "deep_ep":
        raise InvalidArgument(f"compat: there is no {name!r}: what can be installed is deep_ep")


def install(name: str = "deep_ep", *, target: Optional[str] = None, force: bool = False) -> pathlib.Path:
    """Into ``target``, by default the site-packages of this Python; returns the package's folder. Again is
    no error. Raises InvalidArgument where there is a package of this name that is not ours, unless
    ``force``: then it is kept aside until :func:`uninstall`."""
    _need_known(name)
    folder = _folder(target)
    for package in _PACKAGES:
        _need_room(folder / package, force)
    for package, files in _PACKAGES.items():
        path = folder / package
        if path.exists() and not _is_ours(path):
            path.rename(path.with_name(path.name + _ASIDE))
        _clear(path)  # of another version, perhaps
        path.mkdir(parents=True, exist_ok=True)
        (path / _MARKER).write_text(json.dumps({"crossdock": __version__}) + "\n")
        for file, text in files.items():
            (path / file).parent.mkdir(exist_ok=True)
            if not (path / file).exists():  # else somebody has put another one there
                (path / file).write_text(text)
    return folder / name


def _clear(path: pathlib.Path) -> None:
    """Takes away what we have written, and the bytecode beside it."""
    for folder in (path / "utils", path):
        if not folder.is_dir() or folder.is_symlink():
            continue
        for file in list(folder.glob("*.py")):
            if file.is_file() and file.read_text(errors="replace").startswith(_BEGIN):
                file.unlink()
        (folder / _MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _need_room(path: pathlib.Path, force: bool) -> None:
    if force:
        if path.exists() and not _is_ours(path) and path.with_name(path.name + _ASIDE).exists():
            raise InvalidArgument(f"compat: {path.name + _ASIDE} is in {path.parent} already: move it or "
                                  f"{path.name} away first")
        return
    found = path if path.exists() else _found(path.name)
    if found is not None and not _is_ours(found):
        raise InvalidArgument(f"compat: there is a {path.name} that is not ours in {found}: uninstall it, "
                              "or use --force, which keeps one in the same folder aside")


def _found(package: str) -> Optional[pathlib.Path]:
    """Where Python finds a package, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    path = pathlib.Path(spec.origin)
    return path.parent if path.name == "__init__.py" else path


def uninstall(name: str = "deep_ep", *, target: Optional[str] = None) -> Optional[List[pathlib.Path]]:
    """Takes it out again, and brings back what was kept aside. None: it was not there. A package that
    is not ours is left alone. The result: folders, beside the package's place, with files that others had
    put into ours."""
    _need_known(name)
    folder, done = _folder(target), False
    left: List[pathlib.Path] = []
    for package in _PACKAGES:
        path = folder / package
        if not _is_ours(path):
            continue
        _clear(path)
        if path.exists():  # without __init__.py it could still be imported, so it cannot stay there
            left.append(path.rename(_free(path.with_name(path.name + _LEFT))))
        aside = path.with_name(path.name + _ASIDE)
        if aside.exists():
            aside.rename(path)
        done = True
    return left if done else None


def _free(path: pathlib.Path) -> pathlib.Path:
    """The path, or the first of it with a number that does not exist."""
    numbered = (path.with_name(f"{path.name}.{n}") for n in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if not p.exists())


@dataclasses.dataclass(frozen=True)
class Status:
    """What ``import deep_ep`` gives."""

    path: Optional[pathlib.Path]  #: where Python finds it; None: nowhere
    ours: bool
    version: Optional[str]  #: of Crossdock when it was installed

    def __str__(self) -> str:
        if self.path is None:
            return "deep_ep: not installed"
        if not self.ours:
            return f"deep_ep: not ours, in {self.path}"
        note = "" if self.version == __version__ else f"; this is Crossdock {__version__}"
        return f"deep_ep: Crossdock {self.version}, in {self.path}{note}"


def status(name: str = "deep_ep") -> Status:
    _need_known(name)
    path = _found(name)
    if path is None or not _is_ours(path):
        return Status(path, False, None)
    return Status(path, True, json.loads((path / _MARKER).read_text()).get("crossdock"))
