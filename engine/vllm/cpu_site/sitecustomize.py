"""Start-up patch for vLLM on CPU cores that it shares with others. Python imports this file by its name.

`command.environment` puts this folder first on the PYTHONPATH of engines that run on CPU, never of those on GPUs. So
every process of such an engine runs this file before anything else. It changes two busy loops into short sleeps, keeps
models on the cores they were given, and makes starts shorter: vLLM is imported once and forked. Then it runs the
`sitecustomize` that would have run without it. It imports nothing heavy: each vLLM process pays for it.
"""

from __future__ import annotations

import functools
import gc
import importlib.machinery
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

SPIN_PAUSE_S = 0.0002
"""Sleep in place of `os.sched_yield()`. vLLM's shared-memory reader spins on that call. If cores are scarcer than
spinning threads, the yield returns at once and starves the others: 40 hand-overs between two engines on two cores took
23 to 143 s with it and 4 to 8 s with this sleep."""

PROGRESS_PAUSE_US = 1000
"""Delay between two rounds of NIXL's progress thread, in microseconds. NIXL's Python API sets 0, which burns a whole
core in an idle engine; 1,000 costs about 2 % of one. The thread must stay on: without it an idle prefill engine learns
that its blocks were pulled only when it next has work (up to 21 s later). `paced.PROGRESS_US` of Baton's connector is
the same: this file imports nothing of Baton, and a test compares the two."""

IMPORT_OBJECTS = 200_000
"""New objects after which Python looks for cycles while vLLM is imported, in place of 700: the import makes 620,000,
none of them garbage, and all looks together took 2.5 of its 17 s of CPU."""

FORKS = "BATON_CPU_FORKS"
"""The variable that says whether vLLM's processes may be forked (`engine.vllm.command.FORKS`)."""

_THRESHOLDS = gc.get_threshold()
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_CORES = "GOMP_CPU_AFFINITY"
"""The cores of a worker, as vLLM's multiprocessing executor tells the OpenMP library of a spawned process."""

_INSPECTS = "_run_in_subprocess"
_MODELS = frozenset({"vllm.model_executor.models.registry"})
_PLATFORMS = frozenset({"vllm.platforms.cpu"})
_SERVER = "vllm.entrypoints.openai.api_server"
_LAST = frozenset({"vllm.entrypoints.launchers.api_server.entry"})
"""The last module that vLLM's server imports."""

_NIXL_WORKERS = frozenset({"vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"})
_NIXL_APIS = frozenset({"nixl_cu12._api", "nixl_cu13._api", "nixl_rocm._api"})
_HERE = os.path.dirname(os.path.abspath(__file__))


def pause_instead_of_spinning() -> None:
    """Make `os.sched_yield` give the core away for a moment."""

    def sched_yield() -> None:
        time.sleep(SPIN_PAUSE_S)

    os.sched_yield = sched_yield


def pace_progress_thread(api: ModuleType) -> None:
    """Make agents built by NIXL's `_api` module ask for a paced progress thread instead of a spinning one.

    The module writes ``pthrDelay = 0`` into a config object of its bindings just before it builds the agent, and
    offers no option for it; so the config class is replaced by one that turns that 0 into our delay.
    """
    bindings: Any = getattr(api, "nixlBind", None)
    plain: Any = getattr(bindings, "nixlAgentConfig", None)
    delay: Any = getattr(plain, "pthrDelay", None)
    if delay is None or not hasattr(delay, "__set__"):
        return  # another NIXL than the one that this was written for: change nothing

    class PacedAgentConfig(plain):  # type: ignore[misc]
        """NIXL's agent config, with a pause in the progress thread."""

        @property
        def pthrDelay(self) -> Any:  # noqa: N802  (NIXL's own name)
            return delay.__get__(self)

        @pthrDelay.setter
        def pthrDelay(self, value: int) -> None:  # noqa: N802
            delay.__set__(self, value or PROGRESS_PAUSE_US)

    bindings.nixlAgentConfig = PacedAgentConfig


def keep_placement(module: ModuleType) -> None:
    """Keep the thread that makes vLLM's NIXL connector on the cores it was on.

    On CPU the connector binds that thread to the last core of each NUMA node, whatever core the engine was given, and
    the thread goes on to run the model. Two engines on two cores computed on one of them. Measured with thirty prompts
    of 450 tokens, 2.2 a second: the median time to the first token was 177 ms so bound, 80 ms unbound (one run each).
    """
    worker: Any = getattr(module, "NixlBaseConnectorWorker", None)
    if worker is None or not hasattr(os, "sched_getaffinity"):
        return
    begin = worker.__init__

    @functools.wraps(begin)
    def begin_here(self: Any, *args: Any, **more: Any) -> None:
        cores = os.sched_getaffinity(0)
        begin(self, *args, **more)
        os.sched_setaffinity(0, cores)

    worker.__init__ = begin_here


def look_for_cycles_as_before(_: ModuleType) -> None:
    """Undo `IMPORT_OBJECTS`: vLLM's server is imported."""
    gc.set_threshold(*_THRESHOLDS)


def fork_processes(module: ModuleType) -> None:
    """Let vLLM fork the engine core and its workers from the process that has imported vLLM.

    On CPU vLLM spawns them, so that OpenMP reads a worker's threads and cores anew: three processes of an engine import
    vLLM one after the other, 8 to 19 s each. Baton sets the threads before the first one starts (`FORKS` says so), and
    `enter_fork` sets the cores. OpenMP's threads would not survive a fork, but the two parents have none: they compute
    nothing. vLLM forks by default on GPUs, for the same reason.
    """
    platform: Any = getattr(module, "CpuPlatform", None)
    decide: Any = getattr(platform, "check_and_update_config", None)
    if decide is None:
        return

    def check_and_update_config(_: Any, *args: Any, **more: Any) -> None:
        decide(*args, **more)
        os.environ[_METHOD] = "fork"

    platform.check_and_update_config = classmethod(check_and_update_config)
    os.register_at_fork(after_in_child=enter_fork)


def inspect_here(module: ModuleType) -> None:
    """Let vLLM look at a model's class in the process that asks. vLLM starts another one, which imports vLLM once more
    (15 s, for each class once on a machine), so that the one that asks does not initialize CUDA. There is none here.
    """
    if _INSPECTS in vars(module):
        vars(module)[_INSPECTS] = lambda look: look()


def enter_fork() -> None:
    """What a spawned process would have from the start: its cores, and no listening socket of its parent's. (With the
    server's own socket, a killed server's port would stay open.)
    """
    cores = os.environ.get(_CORES, "").split()
    if cores and all(map(str.isdecimal, cores)):
        os.sched_setaffinity(0, set(map(int, cores)))
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        if _listens(int(name)):
            os.dup2(nothing, int(name), inheritable=False)  # not closed: an object of the parent's owns the number
    os.close(nothing)


def _listens(descriptor: int) -> bool:
    """Whether this is a listening socket. No copy of the descriptor may stay: a process that has the writing end of its
    own parent's pipe never reads that the parent has died.
    """
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:
        return False
    try:
        return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False
    finally:
        found.detach()  # the number stays its owner's


class AfterImport:
    """Meta-path finder that lets a module load as usual and then shows it to `act`.

    NIXL takes a second to import and most of an engine's processes never need it, so it is patched when it comes.
    """

    def __init__(self, names: frozenset[str], act: Callable[[ModuleType], None]) -> None:
        self.names = names
        self.act = act

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec with a loader that calls `act` at the end; None for every other module."""
        if name not in self.names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            load(module)
            self.act(module)

        spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec


def hand_on() -> None:
    """Run the next `sitecustomize` on the path, as Python would have done without this folder."""
    others = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    pause_instead_of_spinning()
    sys.meta_path.insert(0, AfterImport(_NIXL_APIS, pace_progress_thread))
    sys.meta_path.insert(0, AfterImport(_NIXL_WORKERS, keep_placement))
    sys.meta_path.insert(0, AfterImport(_MODELS, inspect_here))
    if os.environ.get(FORKS) == "1":
        sys.meta_path.insert(0, AfterImport(_PLATFORMS, fork_processes))
    if _SERVER in sys.orig_argv:
        sys.meta_path.insert(0, AfterImport(_LAST, look_for_cycles_as_before))
        gc.set_threshold(IMPORT_OBJECTS, *_THRESHOLDS[1:])
    hand_on()
