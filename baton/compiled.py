"""Modules that decide, compiled to machine code (`make compile`) and taken instead of their sources.

Nothing needs them: what is compiled is the source itself, by mypyc. They are used only if every one of them was made
from the very source that is here; one edited line, and all are interpreted again. ``BATON_COMPILED=0`` leaves them out.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import msgspec

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "compiled"
MANIFEST = "manifest.json"
OFF = "BATON_COMPILED"


class Manifest(msgspec.Struct, frozen=True):
    """What was compiled, from what."""

    python: str
    """Suffix of extension modules: they fit this Python alone."""
    sources: dict[str, str]
    """By module: digest of its source."""
    shared: str
    """The module that all the code is in."""


def digest(source: bytes) -> str:
    """Of a source."""
    return hashlib.blake2b(source, digest_size=16).hexdigest()


def source_of(module: str, root: Path = ROOT) -> Path:
    """Where it is written."""
    return root / f"{module.replace('.', '/')}.py"


def use(folder: Path = FOLDER, root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> str:
    """Take compiled modules from now on; before anything of them is imported. Says why not; empty: they are taken."""
    if environ.get(OFF) == "0":
        return f"{OFF} is 0"
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return "nothing is compiled: make compile"
    except (OSError, msgspec.DecodeError) as error:
        return f"{folder / MANIFEST} cannot be read ({error}): make compile"
    if any(isinstance(each, _Finder) for each in sys.meta_path):
        return ""
    because = _unfit(manifest, root)
    if not because:
        sys.meta_path.insert(0, _Finder(folder, manifest))
    return because


def _unfit(manifest: Manifest, root: Path) -> str:
    if manifest.python != EXTENSION_SUFFIXES[0]:
        return f"compiled for another Python ({manifest.python}): make compile"
    for module, made_from in manifest.sources.items():
        try:
            source = source_of(module, root).read_bytes()
        except OSError:
            return f"{module} is not there any more: make compile"
        if digest(source) != made_from:
            return f"{module} was edited since: make compile"
        if module in sys.modules:
            return f"{module} is imported already"
    return ""


class _Finder:
    """Finds those modules, before Python's own finders look for sources."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._suffix = manifest.python
        self._names = {*manifest.sources, manifest.shared}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As `importlib.abc.MetaPathFinder` has it."""
        if fullname not in self._names:
            return None
        file = str(self._folder / f"{fullname.replace('.', '/')}{self._suffix}")
        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, file))
