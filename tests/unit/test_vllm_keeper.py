"""The keeper leaves no process, no shared memory and no folder: after the end of its command, its parent, or itself."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from engine.vllm import keeper as keeper_module
from engine.vllm.child import session_of, sweep_session
from engine.vllm.scratch import scratch

KEEPER = [sys.executable, "-I", "-S", str(Path(keeper_module.__file__))]
LIMIT_S = 20.0  # enough on a loaded machine; each step takes well under 3 s

# Three processes: the child, which exits with code 7 on SIGTERM; "plain", its own child; and "escaped", an orphan in a
# session of its own that ignores SIGTERM. Each writes its pid to a file of its name once its signal handlers are set.
TREE = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def stay(name):
    (folder / "new").mkdir(exist_ok=True)
    (folder / "new" / name).write_text(str(os.getpid()))
    (folder / "new" / name).rename(folder / name)
    while True:
        time.sleep(60)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stay("escaped")
if os.fork() == 0:
    stay("plain")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
stay("child")
"""

# A child and its own child share a segment and a semaphore of Python's multiprocessing. Both end only by SIGKILL.
SHARING = """
import multiprocessing, os, pathlib, signal, sys, time
from multiprocessing import shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
shared = shared_memory.SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()
pathlib.Path(sys.argv[1], "new").write_text(f"{os.getpid()} {shared.name} sem.{lock._semlock.name.lstrip('/')}")
pathlib.Path(sys.argv[1], "new").rename(pathlib.Path(sys.argv[1], "shared"))
os.fork()
while True:
    time.sleep(60)
"""

# This command starts a process with the arguments of a resource tracker of multiprocessing. Neither ends by itself.
STUCK = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[-1] != "multiprocessing.resource_tracker":
    subprocess.Popen([*sys.orig_argv, "multiprocessing.resource_tracker"])
else:
    pathlib.Path(sys.argv[1], "stuck").touch()
while True:
    time.sleep(60)
"""

PARENT = """
import subprocess, sys, time
kept = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
print(kept.pid, flush=True)
time.sleep(600)
"""


def wait_until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < limit, "took too long"
        time.sleep(0.005)


def shared_in(folder: Path) -> tuple[int, list[Path]]:
    """The child's pid, and the files in /dev/shm of the memory and the semaphore that it shares."""
    wait_until((folder / "shared").exists)
    pid, *names = (folder / "shared").read_text().split()
    found = [Path("/dev/shm") / name for name in names]
    assert all(each.exists() for each in found)
    return int(pid), found


def alive(pid: int) -> bool:
    return session_of(pid) is not None


def tree_in(folder: Path) -> dict[str, int]:
    names = ("child", "plain", "escaped")
    wait_until(lambda: all((folder / name).exists() for name in names))
    return {name: int((folder / name).read_text()) for name in names}


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """A function that starts a keeper with a command. Every keeper is ended after the test, also after a failure."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str, **env: str) -> subprocess.Popen[bytes]:
        log = (tmp_path / "log").open("wb")
        process = subprocess.Popen(
            [*KEEPER, *words],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **env},
        )
        log.close()
        started.append(process)
        return process

    yield start
    for process in started:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(LIMIT_S)


def python(source: str, *words: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", source, *words]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("pass", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 143),
    ],
)
def test_the_keeper_exits_with_its_commands_code(
    keep: Callable[..., subprocess.Popen[bytes]], source: str, code: int
) -> None:
    assert keep(*python(source)).wait(LIMIT_S) == code


def test_a_command_that_does_not_exist(keep: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    assert keep("/nowhere/python").wait(LIMIT_S) == 127
    assert "cannot start /nowhere/python: No such file" in (tmp_path / "log").read_text()


def test_the_command_gets_an_empty_input_and_its_own_group(
    keep: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    source = "import os, sys; print(repr(sys.stdin.read()), os.getpgid(0) == os.getpid(), os.getsid(0) == os.getppid())"
    keep(*python(source)).wait(LIMIT_S)
    assert (tmp_path / "log").read_text() == "'' True True\n"


def test_a_kill_by_command_line_does_not_match_the_keeper(
    keep: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = keep(*python(TREE, str(tmp_path)))
    tree_in(tmp_path)
    proc = Path(f"/proc/{process.pid}")
    wait_until(lambda: (proc / "cmdline").read_bytes().strip(b"\0") == b"keeper")
    assert (proc / "comm").read_text() == "keeper\n"


def test_processes_that_a_dead_command_left_are_killed(
    keep: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = keep(*python(TREE, str(tmp_path)))
    tree = tree_in(tmp_path)
    os.kill(tree["child"], signal.SIGKILL)
    assert process.wait(LIMIT_S) == 137
    assert not any(alive(pid) for pid in tree.values())


def test_sigterm_is_passed_on_and_sigint_is_not(keep: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    process = keep(*python(TREE, str(tmp_path)))
    tree = tree_in(tmp_path)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 7, "the child ends with 7 on SIGTERM; SIGINT would have ended the keeper"
    assert not any(alive(pid) for pid in tree.values())


def test_the_end_of_the_keepers_input_ends_the_tree(
    keep: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = keep(*python(TREE, str(tmp_path)))
    tree = tree_in(tmp_path)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(LIMIT_S)
    assert not any(alive(pid) for pid in tree.values())


def test_a_killed_parent_leaves_no_process(tmp_path: Path) -> None:
    with subprocess.Popen(
        python(PARENT, *KEEPER, *python(TREE, str(tmp_path))), stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        keeper = int(parent.stdout.readline())
        everybody = [keeper, *tree_in(tmp_path).values()]
        parent.kill()
    wait_until(lambda: not any(alive(pid) for pid in everybody))


def test_a_killed_keepers_command_dies_too_and_the_rest_is_swept_by_session(tmp_path: Path) -> None:
    process = subprocess.Popen([*KEEPER, *python(TREE, str(tmp_path))], stdin=subprocess.PIPE, start_new_session=True)
    tree = tree_in(tmp_path)
    process.kill()
    process.communicate()
    wait_until(lambda: not alive(tree["child"]))  # the kernel kills it at its parent's death
    asyncio.run(sweep_session(process.pid))
    assert not alive(tree["plain"])
    os.kill(tree["escaped"], signal.SIGKILL)  # the one gap: a process in a session of its own; vLLM has none
    wait_until(lambda: not alive(tree["escaped"]))


def test_a_process_that_does_not_end_is_named(tmp_path: Path) -> None:
    """One that hangs in the kernel, in the GPU's driver say."""
    powerless = "import sys; sys.path.insert(0, sys.argv[1]); import keeper; keeper.send = lambda *_: None"
    powerless += "; keeper.SWEEP_MAX_S = 0.3; sys.exit(keeper.main(sys.argv[2:]))"
    leaves = "import os, time; pid = os.fork(); print(pid, flush=True) if pid else time.sleep(20)"
    words = python(powerless, str(Path(keeper_module.__file__).parent), *python(leaves))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        process.wait(LIMIT_S)
        pid, told = (tmp_path / "log").read_text().splitlines()
    finally:
        process.kill()
        process.communicate()
    assert alive(int(pid))
    os.kill(int(pid), signal.SIGKILL)
    assert re.fullmatch(rf"pid {pid} \(python[0-9.]*\) did not end in 0.3 s and may still hold the GPU", told)


async def test_a_session_is_swept_where_no_thread_can_be_started_and_what_does_not_end_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "to_thread", none_left)
    process = subprocess.Popen(python("import time; time.sleep(20)"), start_new_session=True)  # noqa: ASYNC220
    try:
        with monkeypatch.context() as powerless:
            powerless.setattr(keeper_module, "send", lambda *_: None)
            powerless.setattr(keeper_module, "SWEEP_MAX_S", 0.1)
            await sweep_session(process.pid)
        assert f"pid {process.pid} (python" in caplog.text and alive(process.pid)
        await sweep_session(process.pid)
        assert not alive(process.pid)
    finally:
        process.kill()
        process.communicate()


def test_shared_memory_of_a_killed_command_is_removed(
    keep: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = keep(*python(SHARING, str(tmp_path)))
    pid, shared = shared_in(tmp_path)
    os.kill(pid, signal.SIGKILL)
    assert process.wait(LIMIT_S) == 137
    assert not any(each.exists() for each in shared)


def test_shared_memory_is_removed_when_the_tree_is_ended_at_once(
    keep: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = keep(*python(SHARING, str(tmp_path)))
    _, shared = shared_in(tmp_path)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(LIMIT_S)
    assert not any(each.exists() for each in shared)


def test_shared_memory_of_a_killed_keepers_tree_is_removed(tmp_path: Path) -> None:
    words = [*KEEPER, *python(SHARING, str(tmp_path))]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    _, shared = shared_in(tmp_path)
    process.kill()
    process.communicate()
    asyncio.run(sweep_session(process.pid))
    assert not any(each.exists() for each in shared)


def test_a_tracker_that_never_ends_is_killed(keep: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    process = keep(*python(STUCK, str(tmp_path)))
    wait_until((tmp_path / "stuck").exists)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(LIMIT_S)
    left = [each.name for each in Path("/proc").iterdir() if each.name.isdigit()]
    assert not [pid for pid in left if session_of(int(pid)) == process.pid]


@pytest.mark.parametrize("how", ["it ends", "it is killed"])
def test_the_scratch_folder_is_removed_after_the_command(
    keep: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "baton-engine-scratch"
    (folder / "deep").mkdir(parents=True)
    source = "import os; print(os.environ.get('BATON_SCRATCH'), flush=True)"
    source += "; open(os.environ['TMPDIR'] + '/deep/file', 'w')"
    source += "; os.kill(os.getpid(), 9)" if how == "it is killed" else ""
    keep(*python(source), BATON_SCRATCH=json.dumps({str(folder): None}), TMPDIR=str(folder)).wait(LIMIT_S)
    assert (tmp_path / "log").read_text() == "None\n", "the keeper removes the variable from its command's environment"
    assert not folder.exists()


@pytest.mark.parametrize("sign", [":", "\n", '"', ",", "ü"])
def test_of_a_path_with_any_sign_nothing_else_is_removed(
    keep: Callable[..., subprocess.Popen[bytes]], sign: str
) -> None:
    """`TMPDIR=/tmp/job:7` made keepers remove `/tmp/job`."""
    with TemporaryDirectory(dir="/tmp") as base:  # pytest's own is too deep for sockets
        other = Path(base, "job")
        other.mkdir()
        (other / "file").touch()
        below = Path(base, f"job{sign}7")
        below.mkdir()
        with scratch({"TMPDIR": str(below)}) as env:
            keep("/bin/true", **env).wait(LIMIT_S)
            assert (other / "file").exists()
            assert list(below.iterdir()) == [], "its own folder is gone"


@pytest.mark.parametrize("told", ["/tmp/ours", '{"FOLDER/home": null}', '["FOLDER/baton-engine-x"]', "7", "{"])
def test_no_folder_is_removed_that_is_not_batons(
    keep: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, told: str
) -> None:
    named = [tmp_path / name for name in ("home", "baton-engine-x")]
    for each in named:
        each.mkdir()
    assert keep("/bin/true", BATON_SCRATCH=told.replace("FOLDER", str(tmp_path))).wait(LIMIT_S) == 0
    assert all(each.exists() for each in named)


# A parent that starts a keeper, as `baton engine` does, and ends only by SIGKILL.
NESTED = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(
    [sys.executable, "-I", "-S", sys.argv[1], *sys.argv[2:]],
    stdin=subprocess.PIPE, env={**os.environ, "BATON_SCRATCH": os.environ["SCRATCH_BELOW"]},
)
while True:
    time.sleep(60)
"""


def test_a_nested_keeper_removes_its_own_scratch_folder(
    keep: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """On Ray, the actor's keeper runs `baton engine`, and `baton engine` runs the keeper of the engine."""
    below = tmp_path / "baton-engine-below"
    below.mkdir()
    words = [*python(NESTED), str(Path(keeper_module.__file__)), *python(SHARING, str(tmp_path))]
    process = keep(*words, SCRATCH_BELOW=json.dumps({str(below): None}))
    pid, shared = shared_in(tmp_path)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(LIMIT_S)
    assert not alive(pid)
    assert not any(each.exists() for each in (below, *shared))
