"""`EngineProcess`, the shell around an engine, with a small fake server in vLLM's place."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from cluster.errors import EngineFailed
from cluster.ids import InstanceId
from cluster.instance import Role
from engine.vllm import canary, child, core_watch
from engine.vllm.child import EngineChange, EngineProcess, session_of
from engine.vllm.keeper import descendants
from engine.vllm.probe import Probe, Unwell
from engine.vllm.spec import EngineSpec
from engine.vllm.supervise import EngineState, SuperviseLimits
from engine.vllm.tier_folder import claim
from engine.vllm.tiers import Tiers
from engine.vllm.turns import StartTurns

pytestmark = pytest.mark.sockets

KEY = "of-the-environment"
RULES = SuperviseLimits(pause_first_s=0.05, start_max_s=20, dead_max_s=0.0)

# This server answers like vLLM, requires the API key, prints vLLM's log lines, and exits on SIGTERM. After POST /die,
# GET /health answers 503.
SERVER = """
import json, os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
alive = True
class Vllm(BaseHTTPRequestHandler):
    def answer(self, status, body=None):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def do_GET(self):
        if self.path == "/health":
            return self.answer(200 if alive else 503)
        if self.headers["Authorization"] != "Bearer " + os.environ["VLLM_API_KEY"]:
            return self.answer(401)
        if self.path == "/metrics":
            return self.answer(200, "vllm:num_requests_running 0")
        self.answer(200, {"data": [{"id": "fake"}]})
    def do_POST(self):
        global alive
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/die":
            alive = False
            print("  raise Broken", "RuntimeError: the kernel broke", sep="\\n", flush=True)
        self.answer(200 if body == {} or body["model"] == "fake" and body["max_tokens"] == 1 else 400)
    def log_message(self, *args):
        pass
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
print("INFO Starting to load model", flush=True)
server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Vllm)
print("INFO:     Application startup complete.", flush=True)
server.serve_forever()
"""


class Engine:
    """An `EngineProcess` with its history."""

    def __init__(
        self,
        folder: Path,
        source: str = SERVER,
        rules: SuperviseLimits = RULES,
        turns: StartTurns | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        spec = EngineSpec(
            instance=InstanceId("e-0"),
            role=Role.BOTH,
            model="m",
            python=sys.executable,
            device="gpu",
            port=self.port,
            side_channel_port=1,
            tiers=tiers,
        )
        self.changes: list[EngineChange] = []
        self.news = asyncio.Event()
        self.process = EngineProcess(
            spec,
            folder / "logs" / "e-0.log",
            on_change=self._told,
            rules=rules,
            environ={**os.environ, "VLLM_API_KEY": KEY},
            argv=[sys.executable, "-I", "-S", "-c", source, str(self.port)],
            turns=turns,
        )

    def _told(self, change: EngineChange) -> None:
        self.changes.append(change)
        self.news.set()

    async def wait_for(self, state: EngineState, epoch: int = 1) -> EngineChange:
        async with asyncio.timeout(20):
            while True:
                for change in self.changes:
                    if (change.state, change.epoch) == (state, epoch):
                        return change
                self.news.clear()
                await self.news.wait()

    async def waits_after(self, other: str, epoch: int = 1) -> None:
        """Wait until this start has said that it waits for another engine's."""
        async with asyncio.timeout(20):
            while not any(each.epoch == epoch and each.detail.startswith(f"after {other},") for each in self.changes):
                self.news.clear()
                await self.news.wait()

    @property
    def states(self) -> list[str]:
        """The states in order; the stages of one start count once."""
        seen = [str(change.state) for change in self.changes]
        return [state for at, state in enumerate(seen) if at == 0 or seen[at - 1] != state]


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(engine.process.run())
        try:
            yield
        finally:
            engine.process.stop(at_once=True)
            await task


def keeper_of(engine: Engine) -> int:
    keeper = engine.process._keeper
    assert keeper is not None
    return keeper.pid


async def test_a_look_that_fails_here_ends_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can be started in this process, say: that says nothing about the engine."""
    monkeypatch.setattr(child, "READY_EVERY_S", 0.01)
    engine, failed, looked = Engine(tmp_path), asyncio.Event(), asyncio.Event()
    health = Probe.health

    async def fails_once(probe: Probe) -> None:
        if failed.is_set():
            looked.set()
        elif EngineState.READY in engine.states:
            failed.set()
            raise RuntimeError("can't start new thread")
        await health(probe)

    monkeypatch.setattr(Probe, "health", fails_once)
    async with running(engine), asyncio.timeout(20):
        await looked.wait()
    assert engine.states == ["starting", "ready", "stopping", "stopped"]


async def test_a_watch_goes_on_after_a_cancellation_that_nobody_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library's time limit that came out wrong. The engine is dead afterwards, and must be started again."""
    monkeypatch.setattr(child, "READY_EVERY_S", 0.01)
    monkeypatch.setattr(child, "AGAIN_S", (0.01, 1.0))
    engine, health, strayed = Engine(tmp_path), Probe.health, asyncio.Event()

    async def strays_once(probe: Probe) -> None:
        if EngineState.READY not in engine.states or EngineState.RESTARTING in engine.states:
            return await health(probe)
        if not strayed.is_set():
            strayed.set()
            raise asyncio.CancelledError
        raise Unwell("503", dead=True)

    monkeypatch.setattr(Probe, "health", strays_once)
    async with running(engine), asyncio.timeout(20):
        await engine.wait_for(EngineState.RESTARTING)
        await engine.wait_for(EngineState.READY, epoch=2)
    assert "e-0: watch: a fault of Baton's; this work begins anew" in caplog.text


async def test_a_log_stays_bounded_after_a_cancellation_that_nobody_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "LOG_EVERY_S", 0.01)
    monkeypatch.setattr(child, "AGAIN_S", (0.01, 1.0))
    engine, to_thread, strayed, again = Engine(tmp_path), asyncio.to_thread, asyncio.Event(), asyncio.Event()

    async def strays_once(call: Callable[..., object], *args: object) -> object:
        if call == engine.process._log.bound:
            if not strayed.is_set():
                strayed.set()
                raise asyncio.CancelledError
            again.set()
        return await to_thread(call, *args)

    monkeypatch.setattr(child.asyncio, "to_thread", strays_once)
    async with running(engine), asyncio.timeout(20):
        await again.wait()
    assert engine.states[-1] == "stopped"


async def test_a_stop_before_the_engine_has_begun_is_not_lost(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    asyncio.get_running_loop().call_soon(partial(engine.process.stop, at_once=True))
    async with asyncio.timeout(20):
        await engine.process.run()
    assert engine.states[-1:] in ([], ["stopped"])


async def test_an_engine_starts_reports_its_progress_and_stops(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    async with running(engine):
        await engine.wait_for(EngineState.READY)
        assert engine.process.model == "fake"
        keeper = keeper_of(engine)
        engine.process.stop()
        await engine.wait_for(EngineState.STOPPED)
    assert engine.states == ["starting", "ready", "stopping", "stopped"]
    assert engine.changes[0].detail == "importing vLLM"
    assert session_of(keeper) is None


async def test_an_engine_that_dies_is_started_again(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    async with running(engine):
        await engine.wait_for(EngineState.READY)
        os.kill(keeper_of(engine), signal.SIGKILL)
        again = await engine.wait_for(EngineState.RESTARTING)
        assert again.detail == "the process ended with exit code 137; starting again in 0.05 s"
        await engine.wait_for(EngineState.READY, epoch=2)
    assert engine.states == ["starting", "ready", "restarting", "starting", "ready", "stopping", "stopped"]
    log = engine.process.log_path.read_text()
    assert log.count("--- ") == 2, "a header for each start"


NO_PATH = {"error": {"message": "Not Found", "type": "Not Found", "param": None, "code": 404}}
NO_MODEL = {"error": {"message": f"The model `{'m' * 300}` does not exist.", "type": "NotFoundError", "code": 404}}


@pytest.mark.parametrize(("answer", "ready"), [(NO_PATH, True), ({"detail": "Not Found"}, True), (NO_MODEL, False)])
async def test_an_engine_whose_model_only_embeds_is_ready_without_a_token(
    tmp_path: Path, answer: dict[str, object], ready: bool
) -> None:
    source = SERVER.replace("alive = False", f"return self.answer(404, {answer!r})").replace('"/die"', "self.path")
    engine = Engine(tmp_path, source, SuperviseLimits(start_max_s=20 if ready else 1.0))
    if not ready:
        with pytest.raises(EngineFailed, match="no first token"):
            await engine.process.run()
        return
    async with running(engine):
        await engine.wait_for(EngineState.READY)
    assert engine.states == ["starting", "ready", "stopping", "stopped"]


async def test_another_program_on_the_port_does_not_count_as_the_engine(tmp_path: Path) -> None:
    """Another cluster's engine may take the port while ours imports vLLM, and answer the same as ours."""
    engine = Engine(tmp_path)
    source = SERVER.replace("Application startup complete.", "ready")
    stranger = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", source, str(engine.port),
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "VLLM_API_KEY": KEY},
    )  # fmt: skip
    try:
        assert stranger.stdout is not None
        while b"ready" not in await stranger.stdout.readline():
            pass
        with pytest.raises(EngineFailed, match="Address already in use"):
            await engine.process.run()
        assert engine.states == ["starting", "failed"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            stranger.kill()
        await stranger.wait()


async def test_an_engine_that_reports_503_is_killed_and_its_last_error_is_reported(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    async with running(engine):
        await engine.wait_for(EngineState.READY)
        async with Probe(engine.process.spec.url, KEY) as probe:
            await probe._ask("POST", "/die", 5, {})
        first = await engine.wait_for(EngineState.RESTARTING)
        assert "HTTP 503" in first.detail and first.detail.endswith("RuntimeError: the kernel broke")
        await engine.wait_for(EngineState.STARTING, epoch=2)
    again = [each.detail for each in engine.changes if each.state is EngineState.RESTARTING]
    assert again == [first.detail, f"{first.detail}; starting again in 0.05 s"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise ValueError('no such model')", "exit code 1: ValueError: no such model"),
        ("import sys; sys.exit('x.py: error: unrecognized arguments: --bad')", "exit code 1: unrecognized arguments"),
    ],
)
async def test_a_start_that_fails_says_why(tmp_path: Path, source: str, why: str) -> None:
    engine = Engine(tmp_path, f"def start():\n    {source}\nstart()")
    with pytest.raises(EngineFailed, match=why) as failure:
        await engine.process.run()
    assert failure.value.log_tail[-1] in {"ValueError: no such model", "x.py: error: unrecognized arguments: --bad"}
    assert engine.states == ["starting", "failed"]


async def test_a_log_that_cannot_be_opened_is_a_start_that_fails(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    engine = Engine(tmp_path)
    with pytest.raises(EngineFailed, match=r"^it cannot be started: .*/logs/e-0\.log: .*--log-file") as failure:
        await engine.process.run()
    assert failure.value.log_tail == ()
    assert engine.states == ["starting", "failed"]


async def test_an_engine_that_cannot_be_started_again_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_fork(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    engine = Engine(tmp_path)
    async with running(engine):
        await engine.wait_for(EngineState.READY)
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "create_subprocess_exec", no_fork)
            os.kill(keeper_of(engine), signal.SIGKILL)
            again = await engine.wait_for(EngineState.RESTARTING, epoch=2)
        assert again.detail.startswith("it cannot be started: Resource temporarily unavailable; starting again in")
        await engine.wait_for(EngineState.READY, epoch=3)


async def test_an_engine_that_never_answers_is_given_up(tmp_path: Path) -> None:
    engine = Engine(tmp_path, "import time; time.sleep(600)", SuperviseLimits(start_max_s=0.3))
    with pytest.raises(EngineFailed, match="no first token after"):
        await engine.process.run()


async def test_a_start_whose_key_baton_does_not_know_ends_at_once_and_says_so(tmp_path: Path) -> None:
    """The key stands in vLLM's `--config` file, say."""
    source = SERVER.replace('os.environ["VLLM_API_KEY"]', '"another"')
    engine = Engine(tmp_path, source, SuperviseLimits(start_max_s=600))
    with pytest.raises(
        EngineFailed, match=r"^it refuses Baton's questions \(HTTP 401\): give its key in VLLM_API_KEY or"
    ):
        await engine.process.run()
    assert engine.states == ["starting", "failed"]


async def test_a_start_that_gets_no_token_says_what_the_engine_answered(tmp_path: Path) -> None:
    source = SERVER.replace('body["max_tokens"] == 1 else 400)', 'body["max_tokens"] == 2 else 400, {"no": "prompt"})')
    engine = Engine(tmp_path, source, SuperviseLimits(start_max_s=1.5))
    told = r'^no first token after 2 s; .*; its last answer: POST /v1/completions: HTTP 400 {"no": "prompt"}$'
    with pytest.raises(EngineFailed, match=told):
        await engine.process.run()


async def test_an_engine_whose_connector_cannot_listen_is_given_up_at_once(tmp_path: Path) -> None:
    """vLLM's engine core waits for that thread for ever, and the HTTP server for the core."""
    source = """
        import threading, time
        def listen():
            raise OSError("Address already in use (addr='tcp://127.0.0.1:5600')")
        threading.Thread(target=listen, name="nixl_handshake_listener").start()
        time.sleep(600)
    """
    engine = Engine(tmp_path, textwrap.dedent(source), SuperviseLimits(start_max_s=600))
    with pytest.raises(EngineFailed, match=r"does not listen \(--side-channel-port\): OSError: Address already in use"):
        await engine.process.run()
    assert engine.states == ["starting", "failed"]


async def test_a_cancelled_run_leaves_no_process(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(engine.process.run())
        await engine.wait_for(EngineState.READY)
        keeper = keeper_of(engine)
        task.cancel()
    assert session_of(keeper) is None


@pytest.mark.parametrize("at_once", [False, True])
async def test_an_engine_can_be_stopped_before_it_is_ready(tmp_path: Path, at_once: bool) -> None:
    engine = Engine(tmp_path)
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.process.run())
        await engine.wait_for(EngineState.STARTING)
        engine.process.stop(at_once=at_once)
    assert engine.states == ["starting", "stopping", "stopped"]


@pytest.mark.parametrize(
    ("ask", "because", "dead"),
    [
        (Probe.health, "GET /health: nothing listens there", True),
        (Probe.loads, "GET /metrics: nothing listens there", True),
    ],
)
async def test_a_closed_port_counts_as_a_dead_engine(ask: Callable[[Probe], object], because: str, dead: bool) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        async with Probe(url, None) as probe:
            with pytest.raises(Unwell, match=because) as unwell:
                await ask(probe)  # type: ignore[misc]
    assert unwell.value.dead is dead


async def test_a_name_that_is_not_found_says_nothing_of_the_engine() -> None:
    async with Probe("http://engine.invalid:1", None) as probe:
        with pytest.raises(Unwell) as unwell:
            await probe.health()
    assert not unwell.value.dead and "nothing listens" not in str(unwell.value)


async def test_an_engine_is_not_killed_because_its_agent_has_no_file_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = asyncio.Queue[None]()

    async def none_left(*_: object, **__: object) -> None:
        tried.put_nowait(None)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(child, "READY_EVERY_S", 0.01)
    engine = Engine(tmp_path)
    async with running(engine):
        await engine.wait_for(EngineState.READY)
        with monkeypatch.context() as limited:
            limited.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", none_left)
            async with asyncio.timeout(20):
                for _ in range(3):
                    await tried.get()
            async with Probe(engine.process.spec.url, KEY) as probe:
                with pytest.raises(Unwell, match="no file descriptor is left here") as unwell:
                    await probe.health()
        assert unwell.value.ours and not unwell.value.dead
        assert engine.states == ["starting", "ready"]


# The same server, whose API answers on while its core hangs after the first token.
HANGING = (
    SERVER.replace("HTTPServer((", "ThreadingHTTPServer((")
    .replace("import BaseHTTPRequestHandler, HTTPServer", "import BaseHTTPRequestHandler, ThreadingHTTPServer")
    .replace(
        "        self.answer(200 if body == {}",
        """        if body and alive == "hangs":
            import threading
            threading.Event().wait()
        alive = "hangs"
        self.answer(200 if body == {}""",
    )
)


async def test_an_engine_whose_core_hangs_behind_a_healthy_api_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kernel that never ends looks from outside: /health answers, and the counters say that nothing is to do."""
    monkeypatch.setattr(child, "READY_EVERY_S", 0.01)
    monkeypatch.setattr(core_watch, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(child, "STUCK_S", 0.05)
    monkeypatch.setattr(canary, "STILL_S", 0.05)
    engine = Engine(tmp_path, HANGING)
    async with running(engine):
        await engine.wait_for(EngineState.READY)
        told = await engine.wait_for(EngineState.RESTARTING)
        assert "its core has made no token and changed no counter" in told.detail
        await engine.wait_for(EngineState.READY, epoch=2)


async def test_an_engine_that_someone_has_paused_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests wait, and nothing else says so."""
    asked, is_paused = asyncio.Queue[bool](), Probe.paused

    async def seen(self: Probe) -> bool:
        asked.put_nowait(await is_paused(self))
        return await is_paused(self)

    monkeypatch.setattr(Probe, "paused", seen)
    monkeypatch.setattr(child, "READY_EVERY_S", 0.01)
    monkeypatch.setattr(core_watch, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(child, "STUCK_S", 0.05)
    monkeypatch.setattr(canary, "STILL_S", 0.05)
    pausing = '        if self.path == "/is_paused":\n            return self.answer(200, {"is_paused": True})\n'
    engine = Engine(
        tmp_path, HANGING.replace('        if self.path == "/metrics"', f'{pausing}        if self.path == "/metrics"')
    )
    async with running(engine), asyncio.timeout(20):
        for _ in range(3):
            assert await asked.get() is True
        assert engine.states == ["starting", "ready"]


async def test_an_idle_engine_that_answers_its_canary_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Queue[int | None]()
    first_token = Probe.first_token

    async def counted(self: Probe, model: str, rank: int | None = None, *more: float) -> None:
        await first_token(self, model, rank, *more)
        asked.put_nowait(rank)

    monkeypatch.setattr(Probe, "first_token", counted)
    monkeypatch.setattr(child, "READY_EVERY_S", 0.01)
    monkeypatch.setattr(core_watch, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(canary, "STILL_S", 0.05)
    engine = Engine(tmp_path)
    async with running(engine), asyncio.timeout(20):
        for _ in range(4):  # the first one is the start's
            assert await asked.get() is None
        assert engine.states == ["starting", "ready"]


async def test_an_engine_outlives_a_moment_without_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = asyncio.Queue[None]()

    async def none_left(*_: object) -> None:
        tried.put_nowait(None)
        raise RuntimeError("can't start new thread")

    engine = Engine(tmp_path)
    async with running(engine):
        await engine.wait_for(EngineState.READY)
        with monkeypatch.context() as limited:
            limited.setattr(child, "LOG_EVERY_S", 0.01)
            limited.setattr(child.asyncio, "to_thread", none_left)
            async with asyncio.timeout(20):
                for _ in range(2):
                    await tried.get()
        assert engine.states == ["starting", "ready"]


async def test_an_engine_whose_agent_has_no_thread_for_a_moment_becomes_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, failed, to_thread = Engine(tmp_path), 0, asyncio.to_thread

    async def none_left_twice(call: Callable[..., object], *args: object) -> object:
        nonlocal failed
        if call == engine.process._is_ours and failed < 2:
            failed += 1
            raise RuntimeError("can't start new thread")
        return await to_thread(call, *args)

    monkeypatch.setattr(child, "STARTING_EVERY_S", 0.01)
    monkeypatch.setattr(child.asyncio, "to_thread", none_left_twice)
    async with running(engine):
        await engine.wait_for(EngineState.READY)
    assert (failed, engine.states[:2]) == (2, ["starting", "ready"])


def open_files(pid: int) -> set[str]:
    return {os.path.realpath(each) for each in Path(f"/proc/{pid}/fd").iterdir()}


async def test_the_keeper_holds_the_folder_of_a_tier_and_its_command_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "kv" / "baton-kv-e-0"
    engine = Engine(tmp_path, tiers=Tiers(host_bytes=1, disk_bytes=1, folder=str(folder)))
    async with running(engine):
        await engine.wait_for(EngineState.READY)
        pid = keeper_of(engine)
        assert str(folder) in open_files(pid)
        (command,) = descendants(pid)
        assert open_files(command) and str(folder) not in open_files(command)
    assert not folder.exists()


async def test_an_engine_whose_folder_another_one_has_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.vllm.tier_folder.WAIT_MAX_S", 0.1)
    folder = tmp_path / "kv" / "baton-kv-e-0"
    held = claim(str(folder))
    (folder / "a.bin").touch()
    engine = Engine(tmp_path, tiers=Tiers(host_bytes=1, disk_bytes=1, folder=str(folder)))
    with pytest.raises(EngineFailed, match=f"^--kv-disk-folder {tmp_path}/kv: another engine has {folder}: name ano"):
        await engine.process.run()
    assert (folder / "a.bin").exists()
    os.close(held)


def turns(folder: Path, name: str) -> StartTurns:
    return StartTurns(folder / "gpus", name, ["0"], measures=True)


async def test_a_start_and_a_restart_wait_for_another_engine_that_starts_on_the_gpu(tmp_path: Path) -> None:
    other, engine = turns(tmp_path, "other-0"), Engine(tmp_path, turns=turns(tmp_path, "e-0"))
    assert other.take() == ""
    async with running(engine):
        await engine.waits_after("other-0")
        assert not engine.process.log_path.exists(), "its process is not started yet"
        other.release()
        await engine.wait_for(EngineState.READY)
        await eventually_taken(other)  # an engine that is ready holds no lock
        os.kill(keeper_of(engine), signal.SIGKILL)
        await engine.wait_for(EngineState.RESTARTING)
        await engine.waits_after("other-0", epoch=2)
        other.release()
        await engine.wait_for(EngineState.READY, epoch=2)
    assert [each.detail for each in engine.changes if each.detail == "its turn has come"] == ["its turn has come"] * 2


async def eventually_taken(other: StartTurns) -> None:
    async with asyncio.timeout(20):
        while other.take():
            await asyncio.sleep(0)


async def test_an_engine_that_waits_for_its_turn_can_be_stopped(tmp_path: Path) -> None:
    other, engine = turns(tmp_path, "other-0"), Engine(tmp_path, turns=turns(tmp_path, "e-0"))
    assert other.take() == ""
    async with running(engine):
        await engine.waits_after("other-0")
    assert engine.states[-1] == "stopped" and not engine.process.log_path.exists()
    other.release()


async def test_no_engine_waits_longer_than_one_start_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent that holds the lock hangs. Its start never ends."""
    monkeypatch.setattr(child, "TURN_MARGIN_S", -RULES.start_max_s)
    other, engine = turns(tmp_path, "other-0"), Engine(tmp_path, turns=turns(tmp_path, "e-0"))
    assert other.take() == ""
    async with running(engine):
        await engine.wait_for(EngineState.READY)
    assert "s for other-0, and starts beside it" in caplog.text
    other.release()
