"""One engine on Ray: an actor that starts `baton engine` behind a keeper, tells it to drain, and watches it end.

No request passes through the actor, and it supervises nothing: `baton engine` restarts its engine, the controller
replaces an instance. The actor only shows Ray which GPUs are in use, and gives them back once no process of the engine
is left: then it removes its own placement group, and ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

SCRATCH: Final = "BATON_SCRATCH"
"""Environment variable that names the folders which the keeper removes at the end, as `engine.vllm.keeper` has it."""
LAUNCH: Final = Path(__file__).with_name("ray_launch.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What an actor starts."""

    instance: str
    pool: str
    words: tuple[str, ...]
    """Arguments of `baton engine`, without those that depend on the node."""
    vllm_args: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """Secrets, by file name. The files are written on the node, readable by their owner alone."""
    file_flags: Mapping[str, str] = field(default_factory=dict)
    """By flag of `baton engine`, which of `files` it names."""
    env: Mapping[str, str] = field(default_factory=dict)
    keeper: str = ""
    """Path of the keeper; empty: the one of this installation."""
    takes_gpus: bool = True


class EngineActor:
    """See the module. Ray calls one method at a time."""

    def __init__(self, launch: Launch) -> None:
        self._launch: Final = launch
        self._leaving = False
        self._group: Final = _group()
        self.log: Final = _log_path(launch.instance)
        keeper, host = launch.keeper or _keeper(), _node_ip()
        self._folder: Final = Path(tempfile.mkdtemp(prefix="baton-ray-"))  # late: the keeper runs a moment later
        """Removed by the keeper once its tree has ended, however this actor ends; by `_watch` where it was killed."""
        lifeline, self._lifeline = os.pipe()
        over, self._inherited = os.pipe()
        try:
            self._pid = self._begin(lifeline, keeper, host)
        except BaseException:  # an interrupt too: the folder holds secrets
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            os.close(lifeline)
            os.close(self._inherited)
        threading.Thread(target=self._watch, args=(over,), name="tree-end", daemon=True).start()

    def state(self) -> dict[str, Any]:
        """Process ids of the keeper (`pid`) and of this actor, whether it was told to leave, its log and its node."""
        told = {"pid": self._pid, "worker": os.getpid(), "leaving": self._leaving, "log": str(self.log)}
        return {**told, "node": _node_ip()}

    def drain(self) -> None:
        """Let the agent drain and leave. A second signal would end it at once, so a repeated call sends none."""
        if not self._leaving:
            self._leaving = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)

    def _begin(self, lifeline: int, keeper: str, host: str) -> int:
        launch = self._launch
        command = [sys.executable, "-m", "baton", *self._words(host), "--", *launch.vllm_args]
        environ = {**os.environ, **launch.env, SCRATCH: json.dumps({str(self._folder): None})}
        if launch.takes_gpus:
            environ.pop("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", None)
        started = subprocess.run(
            [sys.executable, "-I", "-S", str(LAUNCH), str(self.log), keeper, *command],
            stdin=lifeline,
            stdout=subprocess.PIPE,
            pass_fds=(self._inherited,),
            env=environ,
            check=True,
        )
        return int(started.stdout)

    def _words(self, host: str) -> list[str]:
        """Write the secrets; the command with what depends on the node: its address, its GPUs, paths of secrets."""
        words = ["engine", *self._launch.words, "--host", host, "--json"]
        folder = self._folder
        for name, text in self._launch.files.items():
            _private(folder / name, text)
        for flag, name in self._launch.file_flags.items():
            words += [flag, str(folder / name)]
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if self._launch.takes_gpus and gpus and not gpus.startswith("-"):
            words += ["--gpu", gpus]
        return words

    def _watch(self, over: int) -> None:
        """Wait until no process of the tree is left, then give the GPUs back. `over`: readable from then on."""
        with contextlib.suppress(OSError):
            os.read(over, 1)
        shutil.rmtree(self._folder, ignore_errors=True)
        from ray.util import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)  # ends this actor
        os._exit(0)


def _group() -> Any:
    from ray.util import get_current_placement_group

    return get_current_placement_group()


def _node_ip() -> str:
    import ray

    address = str(ray.util.get_node_ip_address())
    return "127.0.0.1" if address.startswith("127.") else address


def _log_path(instance: str) -> Path:
    """The engine's log file, in the folder of this node's Ray logs, so that Ray's own tools show it."""
    import ray

    session = ray._private.worker._global_node.get_logs_dir_path()  # noqa: SLF001
    return Path(session) / f"baton-{instance}.log"


def _keeper() -> str:
    from engine.vllm.child import KEEPER

    return str(KEEPER)


def _private(path: Path, text: str) -> Path:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return path
