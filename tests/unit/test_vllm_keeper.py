"""Nothing is left behind: the keeper's tree after the death of its command, its parent, or itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.vllm import keeper as keeper_module
from engine.vllm.child import session_of, sweep_session

KEEPER = [sys.executable, "-I", "-S", str(Path(keeper_module.__file__))]
LIMIT_S = 20.0  # a loaded machine; each takes well under 3 s

# A child, an orphaned grandchild in a session of its own that ignores SIGTERM, and a plain grandchild; each writes its
# pid once its signals are set. The child ends with code 7 on SIGTERM.
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


def alive(pid: int) -> bool:
    return session_of(pid) is not None


def tree_in(folder: Path) -> dict[str, int]:
    names = ("child", "plain", "escaped")
    wait_until(lambda: all((folder / name).exists() for name in names))
    return {name: int((folder / name).read_text()) for name in names}


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a keeper over a command; whatever a failed test leaves is ended."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        log = (tmp_path / "log").open("wb")
        process = subprocess.Popen(
            [*KEEPER, *words], stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
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
def test_it_exits_with_its_commands_code(keep: Callable[..., subprocess.Popen[bytes]], source: str, code: int) -> None:
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


def test_it_cannot_be_killed_by_the_words_that_hit_its_parent(
    keep: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    process = keep(*python(TREE, str(tmp_path)))
    tree_in(tmp_path)
    proc = Path(f"/proc/{process.pid}")
    wait_until(lambda: (proc / "cmdline").read_bytes().strip(b"\0") == b"keeper")
    assert (proc / "comm").read_text() == "keeper\n"


def test_what_a_dead_command_left_is_killed(keep: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
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


def test_the_end_of_its_input_ends_the_tree(keep: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    process = keep(*python(TREE, str(tmp_path)))
    tree = tree_in(tmp_path)
    assert process.stdin is not None
    process.stdin.close()
    process.wait(LIMIT_S)
    assert not any(alive(pid) for pid in tree.values())


def test_a_killed_parent_leaves_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        python(PARENT, *KEEPER, *python(TREE, str(tmp_path))), stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        keeper = int(parent.stdout.readline())
        everybody = [keeper, *tree_in(tmp_path).values()]
        parent.kill()
    wait_until(lambda: not any(alive(pid) for pid in everybody))


def test_a_killed_keeper_takes_its_command_along_and_the_rest_is_swept_by_session(tmp_path: Path) -> None:
    process = subprocess.Popen([*KEEPER, *python(TREE, str(tmp_path))], stdin=subprocess.PIPE, start_new_session=True)
    tree = tree_in(tmp_path)
    process.kill()
    process.communicate()
    wait_until(lambda: not alive(tree["child"]))  # the kernel does that
    asyncio.run(sweep_session(process.pid))
    assert not alive(tree["plain"])
    os.kill(tree["escaped"], signal.SIGKILL)  # the one gap: it went to a session of its own, as vLLM's never do
    wait_until(lambda: not alive(tree["escaped"]))
