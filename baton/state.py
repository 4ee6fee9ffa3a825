"""The files that a running `baton up` keeps for `status`, `logs` and `down`: one small file a cluster.

Under ``$XDG_STATE_HOME/baton/`` (``~/.local/state/baton/`` where it is not set): ``clusters/NAME.json`` and ``logs/``
(of the cluster ``default``; ``logs/clusters/NAME/`` of others).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster.errors import UsageError
from cluster.registry.registry import DEFAULT_CLUSTER


def state_folder() -> Path:
    """The folder of Baton's state on this machine."""
    given = os.environ.get("XDG_STATE_HOME", "")
    home = Path(given) if given.startswith("/") else Path.home() / ".local" / "state"
    return home / "baton"


def log_folder(cluster: str = DEFAULT_CLUSTER) -> Path:
    """The folder of a cluster's logs. Each cluster has one of its own, as its programs have the names of others'."""
    folder = state_folder() / "logs"
    return folder if cluster == DEFAULT_CLUSTER else folder / "clusters" / cluster


def logged_clusters() -> list[str]:
    """The clusters that have logs, by name."""
    named = (each.name for each in (log_folder() / "clusters").glob("*/"))
    return sorted({*named, *([DEFAULT_CLUSTER] if any(log_folder().glob("*.log")) else [])})


@dataclass(slots=True, kw_only=True)
class Running:
    """One `baton up`."""

    cluster: str
    pid: int
    born: str
    """Start time of that process (`born`): distinguishes it from a later process with the same number."""
    endpoint: str = ""
    admin: str = ""
    registry: str = ""
    registry_password_file: str = ""
    registry_ca_file: str = ""
    ticket_keys_file: str = ""
    """The fleet's key file, for another router that is to join; empty if tickets are off."""
    scaling: str = ""
    """The controller's URL; empty: no controller resizes the cluster."""
    stop_s: float = 0.0
    """Longest time from the first signal to the end of that process."""
    logs: dict[str, str] = field(default_factory=dict)
    """Log files by name."""

    @property
    def alive(self) -> bool:
        """Whether that process still runs."""
        return born(self.pid) == self.born


def born(pid: int) -> str:
    """A process's start time in clock ticks since boot; empty if no such process runs (a zombie does not)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in {"Z", "X"} else fields[19]


def record_file(cluster: str) -> Path:
    """The file with the record of a cluster."""
    return state_folder() / "clusters" / f"{cluster}.json"


@contextmanager
def recorded(running: Running) -> Iterator[None]:
    """Keep the record for as long as the block runs.

    Raises:
        UsageError: a cluster of this name runs already.
    """
    with _locked():
        other = load(running.cluster)
        if other is not None and other.alive:
            where = f" at {other.endpoint}" if other.endpoint else ""
            raise UsageError(
                f"--cluster {running.cluster}: runs already (pid {other.pid}{where}); "
                f"stop it with `baton down`, or choose another name"
            )
        save(running)
    try:
        yield
    finally:
        with contextlib.suppress(OSError), _locked():
            last = load(running.cluster)
            if last is None or (last.pid, last.born) == (running.pid, running.born):
                record_file(running.cluster).unlink()


@contextmanager
def _locked() -> Iterator[None]:
    """Let no other `baton up` with this state folder look for a record, or begin or end one, meanwhile. A file system
    without locks keeps no cluster from its start.
    """
    folder = state_folder() / "clusters"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def save(running: Running) -> None:
    """Write the record, whole or not at all.

    Raises:
        OSError: it cannot be written: the disk is full.
    """
    path = record_file(running.cluster)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(asdict(running), indent=1))
    draft.replace(path)


def load(cluster: str) -> Running | None:
    """The record of a cluster, which may have died; None if there is no readable one."""
    try:
        fields: dict[str, Any] = json.loads(record_file(cluster).read_text())
        return Running(**fields)
    except (OSError, ValueError, TypeError):
        return None


def must_load(cluster: str) -> Running:
    """The record of a cluster that runs.

    Raises:
        UsageError: none runs under this name.
    """
    running = load(cluster)
    if running is None or not running.alive:
        named = ", ".join(f"--cluster {each.cluster}" for each in _alive())
        instead = f"name one that runs: {named}" if named else "start one with `baton up`, or name a --registry"
        raise UsageError(f"no cluster named `{cluster}` runs on this machine; {instead}")
    return running


def _alive() -> list[Running]:
    """All clusters that run, as far as this state folder has their records."""
    found = (load(path.stem) for path in sorted((state_folder() / "clusters").glob("*.json")))
    return [each for each in found if each is not None and each.alive]
