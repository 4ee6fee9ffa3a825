"""Compile the modules that decide to machine code, beside their sources: what `make compile` does.

mypyc turns these strictly typed modules into C, and the C compiler turns the C into build/compiled/, which `baton` and
benchmarks load (`baton.compiled`). Does nothing if build/compiled/ was made from these sources: docs/compiled.md.
Object files are kept by what they were made from (build/objects/), so that an edit compiles only the C that it changed.
With ``--beside`` it runs behind another program at the lowest priority, and ends with it: `make serve` does that.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from mypyc.build import mypycify

from baton import compiled
from tools.compiled_modules import MODULES

FLAGS = ("-O2", "-w", "-fPIC", "-ffp-contract=off")
"""-O3 takes three times as long, and is no faster here. Contracted, a product and a sum would be rounded once on some
processors, and no number would be the interpreter's to the last bit."""

OBJECTS = compiled.ROOT / "build" / "objects"
"""Object files by the digest of all that went into each; those that the last run did not use are removed."""


LOG = compiled.ROOT / "build" / "compile.log"
"""What a run behind another program prints."""

DRAFT = "compiling-"
"""Prefix of the names of folders that are not complete."""

PR_SET_PDEATHSIG = 1
"""`prctl(2)`: the signal that a process gets when the one that started it ends."""


def main() -> None:
    """Compile, unless it is done."""
    parser = argparse.ArgumentParser(prog="compile", description=__doc__)
    parser.add_argument("--beside", action="store_true", help="behind the program that this process is to become")
    beside: bool = parser.parse_args().beside
    os.chdir(compiled.ROOT)
    if up_to_date():
        return
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        because = f"compile: no C compiler ({compiler[0]}): apt install gcc, or CC=clang. Without, Baton is only slower"
        if not beside:
            sys.exit(because)
        print(because, flush=True)
        return
    compiled.FOLDER.parent.mkdir(parents=True, exist_ok=True)
    if beside:
        _go_behind()
    with _alone(waits=not beside) as mine:
        if mine and not up_to_date():
            if beside:
                os.ftruncate(1, 0)  # the log is this run's now
            compile_to(compiler)


def _go_behind() -> None:
    """Compute only when no other process wants to, print to a file, and end with the process that started this one.
    Object files are kept, so that the next run goes on where this one ends.
    """
    print(
        "compile: in the background, for the next start to be faster (build/compile.log; docs/compiled.md)", flush=True
    )
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    os.setpgid(0, 0)  # Ctrl-C is for the program in front
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    out = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)


@contextmanager
def _alone(*, waits: bool) -> Iterator[bool]:
    """Only one run may compile at a time; yields whether this is the one."""
    with (compiled.FOLDER.parent / "compile.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError:
            yield False
        else:
            yield True


def compile_to(compiler: list[str]) -> None:
    """Compile all modules, and put the result where it is loaded from."""
    began = time.monotonic()
    print(f"compile: {len(MODULES)} modules, about two minutes the first time", flush=True)
    for old in compiled.FOLDER.parent.glob(f"{DRAFT}*"):  # of a run that was killed
        shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=compiled.FOLDER.parent, prefix=DRAFT) as temporary:
        folder = Path(temporary) / "compiled"
        build(folder, Path(temporary), compiler)
        shutil.rmtree(compiled.FOLDER, ignore_errors=True)
        folder.rename(compiled.FOLDER)
    print(f"compile: done in {time.monotonic() - began:.0f} s", flush=True)


def up_to_date() -> bool:
    """Whether all modules are compiled from the present sources."""
    try:
        manifest = msgspec.json.decode((compiled.FOLDER / compiled.MANIFEST).read_bytes(), type=compiled.Manifest)
    except (OSError, msgspec.DecodeError):
        return False
    return manifest.python == EXTENSION_SUFFIXES[0] and manifest.sources == sources()


def sources() -> dict[str, str]:
    """By module: digest of its source."""
    return {name: compiled.digest(compiled.source_of(name).read_bytes()) for name in MODULES}


def build(folder: Path, temporary: Path, compiler: list[str]) -> None:
    """Compile all modules into `folder`, with the manifest of the sources that they were made from."""
    made_from = sources()
    paths = [str(compiled.source_of(name).relative_to(compiled.ROOT)) for name in MODULES]
    extensions: list[Any] = mypycify(
        ["--config-file", "pyproject.toml", *paths],
        multi_file=True,  # else one source of 20 MB, and one compiler at work on it
        target_dir=str(temporary / "c"),
    )
    if sources() != made_from:
        sys.exit("compile: a source was edited meanwhile; run it again")
    compile_all(extensions, folder, temporary, compiler)
    shared = next(each.name for each in extensions if each.name.endswith("__mypyc"))
    manifest = compiled.Manifest(python=EXTENSION_SUFFIXES[0], sources=made_from, shared=shared)
    (folder / compiled.MANIFEST).write_bytes(msgspec.json.encode(manifest))


def compile_all(extensions: list[Any], folder: Path, temporary: Path, compiler: list[str]) -> None:
    """Compile as many files at once as there are processors, the long ones first; kept object files are used again."""
    includes = {sysconfig.get_path("include"), *(path for each in extensions for path in each.include_dirs)}
    words = [*compiler, *FLAGS, *(f"-I{path}" for path in sorted(includes))]
    files = sorted({source for each in extensions for source in each.sources}, key=_size, reverse=True)
    common = _common(temporary, compiler)
    objects = {file: OBJECTS / f"{_key(file, common)}.o" for file in files}
    todo = [file for file in files if not objects[file].exists()]
    print(f"compile: {len(todo)} of {len(files)} C files have changed", flush=True)
    OBJECTS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        done = pool.map(lambda file: _object(words, file, objects[file]), todo)
        for number, _ in enumerate(done, 1):
            if number % max(1, len(todo) // 10) == 0:
                print(f"compile: {number} of {len(todo)} C files", flush=True)
    for each in extensions:
        target = folder / f"{each.name.replace('.', '/')}{EXTENSION_SUFFIXES[0]}"
        target.parent.mkdir(parents=True, exist_ok=True)
        run([*compiler, *_shared_flags(), *(str(objects[file]) for file in each.sources), "-o", str(target)])
    for old in set(OBJECTS.glob("*.o")) - set(objects.values()):
        old.unlink()


def _common(temporary: Path, compiler: list[str]) -> bytes:
    """What every object file depends on: the headers, the flags, the compiler, Python and mypyc."""
    told = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    parts = [" ".join(FLAGS), platform.platform(), EXTENSION_SUFFIXES[0], platform.python_version(), version("mypy")]
    headers = sorted((temporary / "c").rglob("*.h"))
    return b"\0".join([told, *(each.encode() for each in parts), *(path.read_bytes() for path in headers)])


def _key(file: str, common: bytes) -> str:
    return hashlib.sha256(common + b"\0" + Path(file).read_bytes()).hexdigest()[:32]


def _object(words: list[str], file: str, target: Path) -> None:
    """Whole or not at all: a run that was stopped leaves no half of one."""
    draft = target.with_suffix(f".{os.getpid()}")
    run([*words, "-c", file, "-o", str(draft)])
    draft.rename(target)


def _size(file: str) -> int:
    return Path(file).stat().st_size


def _shared_flags() -> Iterable[str]:
    return ("-bundle", "-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-shared",)


def run(words: list[str]) -> None:
    """One command of the compiler's."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"compile: {shlex.join(words)}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    main()
