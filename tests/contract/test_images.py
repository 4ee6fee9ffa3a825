"""The container images: buildah builds them as root on a base of Debian's packages; they run as their own user.

No image registry is needed: the base gets the name that the Dockerfiles ask for. Only `make test-long` runs these
tests; they take minutes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from support.first_token import tokens_of

from baton import __version__
from tools.wheel import beside_vllm, lock_of, needed_by, router_needs

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "k8s" / "images"
CACHE = ROOT / ".bench" / "images"
NOBODY = "65532:65532"
PACKAGES = "python3,python3-venv,ca-certificates"


@dataclass
class Buildah:
    """Images and containers in a folder of their own."""

    store: Path

    def words(self, *words: str) -> list[str]:
        place = ["--root", str(self.store / "root"), "--runroot", str(self.store / "run")]
        return ["buildah", *place, "--storage-driver", "vfs", *words]

    def __call__(self, *words: str, timeout_s: float = 1800) -> str:
        done = subprocess.run(self.words(*words), capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout.strip()

    def base(self, name: str, tar: Path, more: Path | None = None) -> None:
        """Make an image of this name from Debian's packages. `more` goes where Debian's Python looks for packages."""
        container = self("from", "scratch")
        self("add", container, str(tar), "/")
        self("run", "--isolation", "chroot", container, "--", "ln", "-s", "/usr/bin/python3", "/usr/local/bin/python")
        if more is not None:
            self("copy", container, str(more), "/usr/local/lib/python3.11/dist-packages")
        self("commit", container, name)
        self("rm", container)


def base_of(dockerfile: str) -> str:
    (name,) = set(re.findall(r"(?m)^FROM (\S+)", (FILES / dockerfile).read_text()))
    return f"docker.io/{name}" if "/" in name else f"docker.io/library/{name}"


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Buildah:
    if os.geteuid() != 0 or shutil.which("buildah") is None or shutil.which("mmdebstrap") is None:
        pytest.skip("images are built as root by buildah and mmdebstrap: apt install buildah mmdebstrap")
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the images are of Python 3.11, and the wheel is of this one's")
    return Buildah(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def tar(buildah: Buildah) -> Path:
    found = CACHE / "bookworm.tar"
    if not found.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        draft = found.with_suffix(".draft.tar")
        command = ["mmdebstrap", "--mode=root", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(draft)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            pytest.skip(f"Debian's packages cannot be fetched: {done.stderr[-300:]}")
        draft.rename(found)
    return found


@pytest.fixture(scope="module")
def dist() -> Path:
    command = [sys.executable, "-m", "tools.wheel"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    return ROOT / "dist"


@pytest.fixture(scope="module")
def wheels(dist: Path) -> Path:
    """The packages that the images install, fetched by this machine's pip: the build needs no package index."""
    folder = CACHE / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(folder)]
    subprocess.run([*pip, "-r", str(dist / "requirements.txt")], check=True, timeout=900)
    return folder


def build(buildah: Buildah, dockerfile: str, dist: Path, wheels: Path) -> str:
    name = f"localhost/baton/{dockerfile.partition('.')[0]}:test"
    given = ["--build-arg", "PIP_NO_INDEX=1", "--build-arg", "PIP_FIND_LINKS=/wheels", "-v", f"{wheels}:/wheels:ro"]
    words = ["bud", "--isolation", "chroot", "--pull-never", *given, "-f", str(FILES / dockerfile), "-t", name]
    buildah(*words, str(dist))
    return name


@contextmanager
def running(buildah: Buildah, container: str, state: Path, *words: str) -> Iterator[list[dict[str, Any]]]:
    """Run a program in a container as the image's own user. Gives its `ready` events."""
    state.mkdir(mode=0o777)
    state.chmod(0o777)
    places = ["-v", f"{state}:/state", "--env", "XDG_STATE_HOME=/state", "--env", "HOME=/state"]
    command = buildah.words("run", "--isolation", "chroot", "--user", NOBODY, *places, container, "--", *words)
    with (state / "log").open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
    assert process.stdout is not None
    try:
        count = 2 if words[1] == "mock" else 1  # a line for each instance
        ready: list[dict[str, Any]] = []
        while len(ready) < count:
            line = process.stdout.readline()
            assert line, (state / "log").read_text()[-2000:]
            said = json.loads(line)
            ready += [said] if said["event"] == "ready" else []
        yield ready
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def written(place: Path, since: float) -> list[str]:
    """Files written in a container's own file system since then. With a read-only file system each is an error."""
    found = []
    for folder, _, files in os.walk(place):
        found += [str(path) for name in files if (path := Path(folder) / name).lstat().st_ctime > since]
    return [each for each in found if not each.startswith((f"{place}/etc/", f"{place}/run/", f"{place}/state"))]


def test_the_routers_image_runs_compiled_as_nobody_and_serves_mocks(
    buildah: Buildah, tar: Path, dist: Path, wheels: Path, tmp_path: Path
) -> None:
    buildah.base(base_of("router.Dockerfile"), tar)
    image = build(buildah, "router.Dockerfile", dist, wheels)
    said = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["config"]
    assert said["User"] == NOBODY
    assert said["Cmd"] == ["baton", "router", "--help"]
    container = buildah("from", "--pull-never", image)
    run = ["run", "--isolation", "chroot", "--user", NOBODY, container, "--"]
    assert buildah(*run, "baton", "--version") == f"baton {__version__}, compiled"
    assert buildah(*run, "id", "-u") == "65532"
    asked = "import importlib.util as u; print([n for n in ('torch', 'vllm', 'pip', 'ray') if u.find_spec(n)])"
    assert buildah(*run, "python", "-c", asked) == "[]"
    assert buildah(*run, "sh", "-c", "command -v cc gcc || echo none") == "none"
    assert "--dry-run" in buildah(*run, "baton", "operator", "--help")
    place, since = Path(buildah("mount", container)), time.time()
    mock = ["baton", "mock", "--instances", "prefill=1,decode=1", "--port", "0", "--json"]
    with running(buildah, container, tmp_path / "mocks", *mock) as mocks:
        urls = {each["role"]: each["endpoint"] for each in mocks}
        words = ["baton", "router", "--port", "0", "--admin-port", "0", "--json"]
        words += ["--prefill-url", urls["prefill"], "--decode-url", urls["decode"]]
        with running(buildah, container, tmp_path / "router", *words) as (ready,):
            assert f"baton {__version__}, compiled" in (tmp_path / "router" / "log").read_text().splitlines()[0]
            assert tokens_of(ready, mocks[0]["model"]) == 4
    assert written(place, since) == []


def test_the_engines_image_shadows_nothing_of_vllms(
    buildah: Buildah, tar: Path, dist: Path, wheels: Path, tmp_path: Path
) -> None:
    """The same base with the locked packages that vLLM brings stands for vLLM's image. An agent with a mock starts."""
    brought = tmp_path / "brought"
    lock = tmp_path / "lock.txt"
    lock.write_text(lock_of(needed_by(router_needs()) - beside_vllm()))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--find-links", str(wheels)]
    subprocess.run([*pip, "--target", str(brought), "-r", str(lock)], check=True, timeout=300)
    buildah.base(base_of("engine.Dockerfile"), tar, brought)
    container = buildah("from", "--pull-never", build(buildah, "engine.Dockerfile", dist, wheels))
    run = ["run", "--isolation", "chroot", "--user", NOBODY, container, "--"]
    assert buildah(*run, "baton", "--version") == f"baton {__version__}, compiled"
    ours = buildah(*run, "sh", "-c", "ls /opt/baton/lib/python3.11/site-packages").split()
    assert "redis" in ours
    assert not {"numpy", "aiohttp", "msgspec", "uvloop"} & {*ours}
    model = "meta-llama/Llama-3.1-8B"
    words = ["baton", "engine", model, "--engine", "mock", "--name", "a", "--port", "0", "--agent-port", "0", "--json"]
    with (
        running(buildah, container, tmp_path / "engine", *words) as (ready,),
        urlopen(f"{ready['endpoint']}/health", timeout=30) as answer,
    ):
        assert answer.status == 200
