"""Modules that decide, compiled to machine code (`make compile`, `make wheel`) and taken instead of their sources.

Nothing needs them: mypyc compiles the sources themselves. They are used only if each was compiled from exactly the
source that is here; after one edited line all are interpreted again. ``BATON_COMPILED=0`` leaves them out.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import msgspec

from baton import __version__

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "compiled"
"""Folder of the compiled modules of `make compile`, beside the sources of a checkout."""
SHIPPED = Path(__file__).resolve().parent / "machine"
"""Their folder in a wheel of `make wheel`."""
FOLDER = SHIPPED if SHIPPED.is_dir() else BUILT
MANIFEST = "manifest.json"
OFF = "BATON_COMPILED"
"""Environment variable: ``0`` leaves compiled modules out, ``1`` makes it an error if they cannot be used."""


class Manifest(msgspec.Struct, frozen=True):
    """The compiled modules and their sources."""

    python: str
    """File suffix of extension modules for the Python that they were compiled for."""
    sources: dict[str, str]
    """By module: the `digest` of its source."""
    shared: str
    """Name of the extension module that holds the code of all modules."""


def digest(source: bytes) -> str:
    """BLAKE2b of a module's source: 16 bytes, in hexadecimal."""
    return hashlib.blake2b(source, digest_size=16).hexdigest()


def source_of(module: str, root: Path = ROOT) -> Path:
    """The path of a module's source."""
    return root / f"{module.replace('.', '/')}.py"


def use(folder: Path = FOLDER, root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> str:
    """Import compiled modules from now on. Call this before any of them is imported.

    Returns the reason why they cannot be used; empty: they are used.
    """
    if in_use():
        return ""
    manifest, because = _read(folder, root, environ)
    if manifest is None:
        return because
    for module in manifest.sources:
        if module in sys.modules:
            return f"{module} is imported already"
    sys.meta_path.insert(0, _Finder(folder, manifest))
    return ""


def why_not(folder: Path = FOLDER, root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> str:
    """Why `use` would use no compiled modules; empty: it would use them."""
    return _read(folder, root, environ)[1]


def in_use() -> bool:
    """Whether this process imports compiled modules (`use`)."""
    return any(isinstance(each, _Finder) for each in sys.meta_path)


def told() -> str:
    """``compiled``, or ``interpreted`` and why."""
    return (
        "compiled"
        if in_use()
        else f"interpreted ({why_not() or 'compiled modules are there, and this process did not ask for them'})"
    )


def log_it() -> None:
    """The first line of a server's log: which Baton it is, and whether it runs compiled."""
    logging.getLogger("baton").info("baton %s, %s", __version__, told())


def _read(folder: Path, root: Path, environ: Mapping[str, str]) -> tuple[Manifest | None, str]:
    if environ.get(OFF) == "0":
        return None, f"{OFF} is 0"
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None, "nothing is compiled"
    except (OSError, msgspec.DecodeError) as error:
        return None, f"{folder / MANIFEST} cannot be read: {error}"
    if manifest.python != EXTENSION_SUFFIXES[0]:
        return None, f"compiled for another Python: {manifest.python}"
    for module, made_from in manifest.sources.items():
        try:
            source = source_of(module, root).read_bytes()
        except OSError:
            return None, f"{module} is not there any more"
        if digest(source) != made_from:
            return None, f"{module} was edited since"
    return manifest, ""


class _Finder:
    """Finds the compiled modules, before Python's own finders look for sources."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._suffix = manifest.python
        self._names = {*manifest.sources, manifest.shared}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if fullname not in self._names:
            return None
        file = str(self._folder / f"{fullname.replace('.', '/')}{self._suffix}")
        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, file))
