"""The start-up patch of CPU engines (`sitecustomize`), tested in an interpreter of its own."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from engine.vllm.child import CPU_SITE
from engine.vllm.command import FORKS
from engine.vllm.connector.paced import PROGRESS_US

FAKE_BINDINGS = """
class Config:  # as pybind11 makes them: attributes are properties of the class
    _delay = 0
    @property
    def pthrDelay(self): return self._delay
    @pthrDelay.setter
    def pthrDelay(self, value): self._delay = value
nixlAgentConfig = Config
"""
FAKE_API = """
from . import _bindings as nixlBind
def delay_for(asked):
    config = nixlBind.nixlAgentConfig()
    config.pthrDelay = asked
    return config.pthrDelay, isinstance(config, nixlBind.Config)
"""


def python(source: str, *path: Path, **more: str) -> str:
    environ = {**os.environ, "PYTHONPATH": ":".join(map(str, path)), **more}
    done = subprocess.run([sys.executable, "-c", source], env=environ, capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.strip()


def test_sched_yield_sleeps_for_a_moment() -> None:
    source = "import os, time; t = time.monotonic(); os.sched_yield(); print(time.monotonic() - t >= 0.0002)"
    assert python(source, CPU_SITE) == "True"


def test_nixls_thread_gets_a_pause_and_a_delay_that_was_chosen_stays(tmp_path: Path) -> None:
    nixl = tmp_path / "nixl_cu13"
    nixl.mkdir()
    (nixl / "__init__.py").write_text("")
    (nixl / "_bindings.py").write_text(FAKE_BINDINGS)
    (nixl / "_api.py").write_text(FAKE_API)
    source = "import nixl_cu13._api as api; print(api.delay_for(0), api.delay_for(7))"
    assert python(source, CPU_SITE, tmp_path) == "(1000, True) (7, True)"


FAKE_PLATFORM = """
import os
class CpuPlatform:
    @classmethod
    def check_and_update_config(cls, config):
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        config.append(cls.__name__)
"""


def platform(folder: Path) -> Path:
    """A folder with a `vllm.platforms.cpu` that decides as vLLM's does."""
    (folder / "vllm/platforms").mkdir(parents=True)
    (folder / "vllm/__init__.py").write_text("")
    (folder / "vllm/platforms/__init__.py").write_text("")
    (folder / "vllm/platforms/cpu.py").write_text(FAKE_PLATFORM)
    return folder


def test_vllms_processes_are_forked_where_the_environment_says_so(tmp_path: Path) -> None:
    source = (
        "import os; from vllm.platforms.cpu import CpuPlatform; config = []; "
        "CpuPlatform.check_and_update_config(config); print(config, os.environ['VLLM_WORKER_MULTIPROC_METHOD'])"
    )
    path = CPU_SITE, platform(tmp_path)
    assert python(source, *path, **{FORKS: "1"}) == "['CpuPlatform'] fork"
    assert python(source, *path, **{FORKS: "0"}) == "['CpuPlatform'] spawn"
    assert python(source, *path) == "['CpuPlatform'] spawn"


def test_a_forked_process_has_its_own_cores_and_none_of_its_parents_ports(tmp_path: Path) -> None:
    """A core that outlives its server by a moment would hold the server's port, and connections to it would hang."""
    source = """
import os, socket
from vllm.platforms.cpu import CpuPlatform
core = max(os.sched_getaffinity(0))
os.environ["GOMP_CPU_AFFINITY"] = str(core)
listening, pair = socket.create_server(("127.0.0.1", 0)), socket.socketpair()
address, (reader, writer) = listening.getsockname(), os.pipe()
if os.fork() == 0:
    os.read(reader, 1)  # its parent has closed its own
    try:
        socket.create_connection(address).close()
        answers = True
    except ConnectionRefusedError:
        answers = False
    listening.close()
    pair[1].sendall(repr((answers, os.sched_getaffinity(0) == {core})).encode())
    os._exit(0)
listening.close()
os.write(writer, b".")
print(pair[0].recv(100).decode())
"""
    assert python(source, CPU_SITE, platform(tmp_path), **{FORKS: "1"}) == "(False, True)"


def test_a_forked_process_reads_that_its_parent_has_died(tmp_path: Path) -> None:
    """vLLM's workers watch a pipe whose writing end their parent has, and close their own end of it by its number. With
    a copy of that end a worker outlived its killed engine core, and the server did not notice for ten minutes.
    """
    source = """
import os, signal
from vllm.platforms.cpu import CpuPlatform
signal.alarm(5)  # it holds for this process; a child sets its own
told, say = os.pipe()
death_reader, death_writer = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        signal.alarm(5)
        os.close(death_writer)
        os.write(say, b"the parent died" if os.read(death_reader, 1) == b"" else b"?")
        os._exit(0)
    os._exit(0)
os.close(death_writer)
os.wait()
os.close(say)
print(os.read(told, 100).decode() or "nothing was told")
"""
    assert python(source, CPU_SITE, platform(tmp_path), **{FORKS: "1"}) == "the parent died"


def test_a_models_class_is_looked_at_in_the_process_that_asks(tmp_path: Path) -> None:
    models = tmp_path / "vllm/model_executor/models"
    models.mkdir(parents=True)
    for folder in (models, models.parent, models.parent.parent):
        (folder / "__init__.py").write_text("")
    looks = "def _run_in_subprocess(look): raise RuntimeError('a process that imports vLLM')\n"
    (models / "registry.py").write_text(f"{looks}def inspect(): return _run_in_subprocess(lambda: 'seen')")
    assert (
        python("from vllm.model_executor.models import registry; print(registry.inspect())", CPU_SITE, tmp_path)
        == "seen"
    )


def test_python_looks_for_cycles_less_while_vllms_server_is_imported(tmp_path: Path) -> None:
    for at, name in enumerate(("vllm", "entrypoints", "launchers", "api_server")):
        package = tmp_path / "/".join(("vllm", "entrypoints", "launchers", "api_server")[: at + 1])
        package.mkdir()
        (package / "__init__.py").write_text(f"name = {name!r}")
    (tmp_path / "vllm/entrypoints/launchers/api_server/entry.py").write_text("")
    server = tmp_path / "vllm/entrypoints/openai"
    server.mkdir()
    (server / "__init__.py").write_text("")
    seen = "import gc; before = gc.get_threshold(); import vllm.entrypoints.launchers.api_server.entry; "
    (server / "api_server.py").write_text(f"{seen}print(before[0], gc.get_threshold())")
    environ = {**os.environ, "PYTHONPATH": f"{CPU_SITE}:{tmp_path}"}
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    said = subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout
    assert said.strip() == f"200000 {gc.get_threshold()}"
    assert python("import gc; print(gc.get_threshold())", CPU_SITE) == str(gc.get_threshold())


def test_the_connectors_own_agents_have_the_same_pause() -> None:
    """The start-up patch imports no module of Baton, so the same number stands in two files."""
    spec = importlib.util.spec_from_file_location("cpu_site", CPU_SITE / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    patch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(patch)  # under another name it patches nothing
    assert patch.PROGRESS_PAUSE_US == PROGRESS_US


def test_an_unknown_nixl_module_is_left_unchanged(tmp_path: Path) -> None:
    nixl = tmp_path / "nixl_cu13"
    nixl.mkdir()
    (nixl / "__init__.py").write_text("")
    (nixl / "_api.py").write_text("nixlBind = object()")
    assert python("import nixl_cu13._api as api; print(type(api.nixlBind))", CPU_SITE, tmp_path) == "<class 'object'>"


def test_the_users_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = __name__")
    assert python("print(mine)", CPU_SITE, tmp_path) == "sitecustomize"


def test_the_patch_imports_no_heavy_module() -> None:
    source = "import sys; print(sorted({'asyncio', 'nixl', 'numpy', 'torch', 'typing_extensions'} & set(sys.modules)))"
    assert python(source, CPU_SITE) == "[]"


FAKE_WORKER = """
import os
class NixlBaseConnectorWorker:
    def __init__(self, one, *, two):
        self.given = one, two
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
"""


def test_a_thread_that_makes_a_connector_keeps_its_cores(tmp_path: Path) -> None:
    """Without the patch, vLLM's constructor pins the calling thread to one core. On a machine with one core the test
    cannot see the difference.
    """
    package = tmp_path
    for name in "vllm.distributed.kv_transfer.kv_connector.v1.nixl".split("."):
        package /= name
        package.mkdir()
        (package / "__init__.py").write_text("")
    (package / "base_worker.py").write_text(FAKE_WORKER)
    source = (
        "import os; from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import *; "
        "was = os.sched_getaffinity(0); made = NixlBaseConnectorWorker(1, two=2); "
        "print(made.given, os.sched_getaffinity(0) == was)"
    )
    assert python(source, CPU_SITE, tmp_path) == "(1, 2) True"
    assert python(source, tmp_path) == f"(1, 2) {len(os.sched_getaffinity(0)) == 1}"
