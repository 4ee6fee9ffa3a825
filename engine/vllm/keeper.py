"""The small process between Baton and vLLM. Its one duty: when it or its parent ends, nothing of the engine is left.

    python -I -S keeper.py COMMAND...        run by `child`; standard library only, as it must start at once

vLLM is a tree of processes: the API server starts the engine core, and the core its workers. A killed parent leaves the
rest behind with gigabytes of memory and the GPU. The keeper makes itself the reaper of the whole tree (a subreaper of
prctl(2)), so orphans become its children:

* stdin is a pipe that the parent holds. At its end of file (the parent died, even by SIGKILL, or closed it) the tree
  ends at once.
* SIGTERM is passed on to the command, which drains in its own time. SIGINT is ignored: only the parent decides.
* When the command ends, what it left behind is killed, and the keeper exits with its code (128 + n for signal n).
* Python's resource trackers, and keepers below this one, may live until the others are gone: each then cleans up after
  its own tree, and ends. Killed with the rest, trackers would leave shared memory and semaphores in /dev/shm (240 MiB
  and more an engine), and keepers their `BATON_SCRATCH`.
* The folders that `BATON_SCRATCH` names are removed at the end.
* If the keeper itself is killed, the kernel kills the command, and the parent sweeps the rest by session
  (`child`; the keeper leads a session of its own).
* Parent and keeper killed at once is the one gap. `pkill -9 python` or `pkill -9 -f baton` would do that, and miss
  vLLM's cores and workers, which rename themselves; so the keeper renames itself as well, survives, and cleans up.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable

GRACE_S = 1.0
"""Between SIGTERM and SIGKILL when the tree must end now."""

SWEEP_MAX_S = 10.0
"""A process that SIGKILL has not ended by then hangs in the kernel; waiting longer does not help."""

TRACKER_S = 2.0
"""Time for a resource tracker or another keeper to clean up, once it is alone."""

POLL_S = 0.02
SCRATCH = "BATON_SCRATCH"
"""Name of the environment variable for folders that are removed with the tree: a JSON object (a path may hold any sign)
with the file descriptor of each folder's lock, or null. The keeper holds the lock until it has removed the folder."""
OURS = ("baton-engine-", "baton-kv-", "baton-ray-")
"""The folders' names begin with one of these. No other folder is ever removed."""

TRACKER = b"multiprocessing.resource_tracker"
"""Part of the command line of Python's resource trackers, and of no other process of vLLM."""

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
NAME = b"keeper"
ARG_START, ARG_END = 45, 46  # in /proc/PID/stat, counted from the state: proc(5) says 48 and 49, counted from one


def main(argv: list[str]) -> int:
    """Run `argv` until it ends or the parent does; return the exit code."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    scratch = folders(os.environ.pop(SCRATCH, ""))
    wakeups = listen_to_signals()
    child = start(argv)
    rename()
    code = Keeper(child, wakeups).run()
    for folder, lock in scratch.items():
        remove(folder, lock)
    return code


def folders(told: str) -> dict[str, int | None]:
    """The folders of Baton's that `SCRATCH` names, with their locks. The command does not inherit these."""
    if not told:
        return {}
    import json  # noqa: PLC0415 - only an engine's keeper has folders

    try:
        named = json.loads(told)
    except ValueError:
        named = None
    if not isinstance(named, dict):
        os.write(2, f"{SCRATCH}={told}: no JSON object of folders, so none is removed\n".encode())
        return {}
    ours = {folder: lock for folder, lock in named.items() if os.path.basename(folder).startswith(OURS)}  # noqa: PTH119
    for lock in filter(None, ours.values()):
        os.set_inheritable(lock, False)
    return ours


def rename() -> None:
    """Show up as `keeper` in process lists, without the path and words that a broad kill command would match.

    The memory that holds the arguments may be overwritten; Python has read it long ago.
    """
    prctl(PR_SET_NAME, ctypes.create_string_buffer(NAME))
    fields = stat_of(os.getpid())
    if fields is None or len(fields) <= ARG_END:
        return
    begin, end = int(fields[ARG_START]), int(fields[ARG_END])
    if 0 < begin < end - len(NAME):
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, NAME, len(NAME))


def prctl(option: int, value: int | ctypes.Array[ctypes.c_char]) -> None:
    """Linux's prctl(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def listen_to_signals() -> int:
    """Turn SIGTERM and SIGCHLD into bytes on a pipe; return its reading end."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return reader


def start(argv: list[str]) -> int:
    """Fork and execute; return the pid. The child leads its own process group and dies with the keeper."""
    keeper = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(128 + signal.SIGKILL)  # the keeper died before the line above
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot start {argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


class Keeper:
    """Waits for the child, the parent and signals; ends the tree."""

    def __init__(self, child: int, wakeups: int) -> None:
        self.child = child
        self.wakeups = wakeups
        self.code: int | None = None  # of the child, once it has ended

    def run(self) -> int:
        """Wait until the child ended by itself or the parent is gone, then end the tree. Returns the exit code."""
        watched = [0, self.wakeups]
        while self.code is None:
            readable, _, _ = select.select(watched, [], [])
            if 0 in readable and not os.read(0, 4096):
                self.end_tree(GRACE_S)
                break
            if self.wakeups in readable and signal.SIGTERM in os.read(self.wakeups, 4096):
                self.signal_child(signal.SIGTERM)
            self.reap()
        for pid in self.end_tree(0.0):
            os.write(2, f"{survived(pid)}\n".encode())
        return 128 + signal.SIGKILL if self.code is None else self.code

    def signal_child(self, number: int) -> None:
        """Signal the command alone; it tells its own processes."""
        if self.code is None:
            os.kill(self.child, number)  # not reaped yet, so the pid is still its own

    def reap(self) -> None:
        """Collect all processes that have ended, orphans too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                code = os.waitstatus_to_exitcode(status)
                self.code = code if code >= 0 else 128 - code

    def end_tree(self, grace_s: float) -> list[int]:
        """SIGTERM to every descendant, SIGKILL after `grace_s`, until none is left. Returns those that did not end."""
        return end_all(self.left, grace_s)

    def left(self) -> list[int]:
        """Descendants that have not ended."""
        self.reap()
        return descendants(os.getpid())


def end_all(left: Callable[[], list[int]], grace_s: float = 0.0) -> list[int]:
    """SIGTERM to all processes that `left` gives, SIGKILL after `grace_s`, until none is left, at most `SWEEP_MAX_S`.
    Resource trackers and keepers come last, and end by themselves if they can. Returns those that did not end.
    """
    begun = time.monotonic()
    asked: set[int] = set()
    alone: float | None = None  # since when there are only those that clean up
    while pids := left():
        now = time.monotonic()
        if now - begun >= SWEEP_MAX_S:
            return [pid for pid in pids if lives(pid)]
        others = [pid for pid in pids if not (is_tracker(pid) or is_keeper(pid))]
        alone = None if others else alone or now
        if alone is not None and now - alone >= TRACKER_S:
            others = pids
        kill = now - begun >= grace_s
        for pid in others:
            if kill or pid not in asked:
                send(pid, signal.SIGKILL if kill else signal.SIGTERM)
        asked.update(others)
        time.sleep(POLL_S)
    return []


def lives(pid: int) -> bool:
    """Whether the process has not ended: one that has may still wait for its parent."""
    fields = stat_of(pid)
    return fields is not None and fields[0] not in {b"Z", b"X"}


def survived(pid: int) -> str:
    """What to tell people about a process that did not end."""
    return f"pid {pid} ({name_of(pid)}) did not end in {SWEEP_MAX_S:g} s and may still hold the GPU"


def name_of(pid: int) -> str:
    """The process' name as process lists show it; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as name:  # noqa: PTH123
            return name.read().strip().decode(errors="replace")
    except OSError:
        return ""


def remove(folder: str, lock: int | None = None) -> None:
    """Remove the folder, as far as that is possible. `lock`: what the path must lead to; None: anything."""
    import shutil  # noqa: PLC0415 - it would double the keeper's start-up

    if lock is None:
        shutil.rmtree(folder, ignore_errors=True)
    elif leads_to(folder, lock):
        empty(lock)
        with contextlib.suppress(OSError):
            os.rmdir(folder)  # noqa: PTH106


def leads_to(path: str, folder: int) -> bool:
    """Whether the path leads to this open folder: another process may have removed it, and made a new one."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.lstat(path), os.fstat(folder))
    return False


def empty(folder: int) -> None:
    """Remove what is in an open folder, as far as that is possible."""
    import shutil  # noqa: PLC0415 - it would double the keeper's start-up

    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for each in list(found):
            if each.is_dir(follow_symlinks=False):
                shutil.rmtree(each.name, ignore_errors=True, dir_fd=folder)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(each.name, dir_fd=folder)


def is_tracker(pid: int) -> bool:
    """Whether the process is Python's resource tracker, which ends by itself after all processes that report to it."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as words:  # noqa: PTH123
            return TRACKER in words.read()
    except OSError:
        return False


def is_keeper(pid: int) -> bool:
    """Whether the process is a keeper, which ends by itself after its tree."""
    return name_of(pid) == NAME.decode()


def send(pid: int, number: int) -> None:
    """Signal a process that may just have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def descendants(root: int) -> list[int]:
    """Every living process below `root`, whatever session or group it went to."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib would double the keeper's start-up
        if name.isdigit():
            parent = parent_of(int(name))
            if parent is not None:
                children.setdefault(parent, []).append(int(name))
    found = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def parent_of(pid: int) -> int | None:
    """The parent's pid; None for a process that has ended."""
    fields = stat_of(pid)
    return None if fields is None else int(fields[1])


def stat_of(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the state on; None for a process that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123
            return stat.read().rpartition(b")")[2].split()  # the name in brackets may hold anything
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
