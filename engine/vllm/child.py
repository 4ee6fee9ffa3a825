"""One engine as a running process: drives `supervise` with a real keeper, real probes and a real clock. A shell.

process = EngineProcess(spec, log_path, on_change=print)
await process.run()            # until `process.stop()`; raises EngineFailed with the last lines of the log
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cluster.background import keep_running
from cluster.errors import EngineFailed, UsageError
from cluster.ids import InstanceId
from engine.vllm.canary import STUCK_CPU_S, STUCK_S
from engine.vllm.command import command, environment, printable
from engine.vllm.core_watch import watching
from engine.vllm.keeper import end_all, survived
from engine.vllm.listener import listens
from engine.vllm.logfile import LogFile
from engine.vllm.logtext import FIRST_STAGE, hangs, reason, stage_after, worth_showing
from engine.vllm.probe import DEAD_STATUS, NO_ACCESS, Probe, Unwell
from engine.vllm.scratch import in_thread, scratch
from engine.vllm.spec import EngineSpec
from engine.vllm.supervise import (
    START_MAX_S,
    Announce,
    Begin,
    ChildExited,
    Effect,
    EngineProbeFailed,
    EngineState,
    Event,
    GiveUpEngine,
    Healthy,
    KillChild,
    Reached,
    StartChild,
    StartHangs,
    StartRefused,
    StopChild,
    StopSupervised,
    SuperviseLimits,
    Supervisor,
    Tick,
    WaitsForTurn,
)
from engine.vllm.turns import StartTurns

logger = logging.getLogger("baton.engine")

FOLDER = Path(__file__).parent
KEEPER = FOLDER / "keeper.py"
CPU_SITE = FOLDER / "cpu_site"

STARTING_EVERY_S = 0.25
"""Seconds between two looks at a starting engine."""

READY_EVERY_S = 1.0
"""Seconds between two health checks of a serving engine."""

STOP_MARGIN_S = 10.0
"""Time that vLLM may take to end after its own drain time, to tear down its workers."""

LOG_EVERY_S = 1.0
"""Seconds between two checks of an engine's log: what the engine writes in between comes on top of the log's bound."""

AGAIN_S = (1.0, 10.0)
"""Seconds of the first and of the longest pause before a watch that broke off begins anew: meanwhile the
engine's death would not be seen."""

TURN_MARGIN_S = 60.0
"""A start that is waited for may take its own longest time and so many seconds more, to end."""

KEY_FIX = "give its key in VLLM_API_KEY or as --api-key after `--`, where Baton finds it, and in no --config file"

TAIL_LINES = 20
REASON_LINES = 400
"""Lines that are searched for the reason why a serving engine ended: an older error has nothing to do with it."""


def rules_for(spec: EngineSpec, *, start_max_s: float = START_MAX_S) -> SuperviseLimits:
    """The usual rules, with as much patience at a stop as this engine's own drain time needs."""
    return SuperviseLimits(start_max_s=start_max_s, stop_s=spec.stop_s + STOP_MARGIN_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChange:
    """A change of an engine. While it starts, `detail` says how far it is; if it fails, why."""

    instance: InstanceId
    state: EngineState
    detail: str
    epoch: int


class EngineProcess:
    """A supervised vLLM server. `model` is the name that it serves under, known once it is ready.

    It has many attributes: the machine that decides, what it drives (log, keeper, timer, tasks), and how a run ended.
    It is long, as each effect of the machine is a short method here.
    """

    def __init__(
        self,
        spec: EngineSpec,
        log_path: Path,
        *,
        on_change: Callable[[EngineChange], None],
        rules: SuperviseLimits | None = None,
        environ: Mapping[str, str] | None = None,
        argv: list[str] | None = None,
        turns: StartTurns | None = None,
        first_stage: str = FIRST_STAGE,
    ) -> None:
        """`turns`: the locks that each start takes first; None: it shares its GPUs with no other engine. `first_stage`:
        what a start does before its log says more, in words.
        """
        self.spec = spec
        self.model = ""
        self._environ = os.environ if environ is None else environ
        self._argv = command(spec) if argv is None else argv
        self._log = LogFile(log_path)
        self._on_change = on_change
        self._stuck_max_s = STUCK_CPU_S if spec.device == "cpu" else STUCK_S
        self._machine = Supervisor(rules or rules_for(spec))
        self._turns = turns
        self._first_stage = first_stage
        self._keeper: asyncio.subprocess.Process | None = None
        self._ending: signal.Signals | None = None  # a signal that came before the keeper ran
        self._timer: asyncio.TimerHandle | None = None
        self._failure: EngineFailed | None = None
        self._done = asyncio.Event()

    @property
    def epoch(self) -> int:
        """The number of starts so far."""
        return self._machine.epoch

    @property
    def log_path(self) -> Path:
        return self._log.path

    def log_tail(self, count: int = TAIL_LINES) -> list[str]:
        """The last lines of the current start."""
        return worth_showing(self._log.this_start(), count)

    async def run(self) -> None:
        """Start the engine and keep it alive until a stop.

        Raises:
            EngineFailed: the engine cannot be kept alive; carries its last log lines.
        """
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._feed(Begin())
            try:
                await self._done.wait()
            finally:
                self._disarm()
        if self._failure is not None:
            raise self._failure

    def stop(self, *, at_once: bool = False) -> None:
        """Drain and end; `at_once`, or when called a second time, without draining."""
        asyncio.get_running_loop().call_soon(self._feed, StopSupervised(at_once=at_once))

    # -- the machine --

    def _feed(self, event: Event) -> None:
        for effect in self._machine.handle(event, self._loop.time()):
            self._do(effect)
        self._disarm()
        due = self._machine.next_wakeup()
        if due is not None and not self._done.is_set():
            self._timer = self._loop.call_at(due, self._feed, Tick())

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _do(self, effect: Effect) -> None:
        match effect:
            case StartChild(epoch):
                self._ending = None
                self._group.create_task(self._live(epoch), name=f"{self.spec.instance}-{epoch}")
            case StopChild():
                self._end(signal.SIGTERM)
            case KillChild():
                self._end(signal.SIGKILL)
            case Announce(state, because, again_in_s):
                self._announce(state, because, again_in_s)
            case GiveUpEngine(because):
                self._failure = EngineFailed(self._explain(because), tuple(self.log_tail()))
                self._done.set()

    def _announce(self, state: EngineState, because: str, again_in_s: float | None) -> None:
        detail = because or (self._first_stage if state is EngineState.STARTING else "")
        if state in {EngineState.RESTARTING, EngineState.FAILED}:
            detail = self._explain(because)
        if again_in_s is not None:
            detail += f"; starting again in {again_in_s:g} s"
        self._tell(state, detail)
        if state is EngineState.STOPPED:
            self._done.set()

    def _explain(self, because: str) -> str:
        """The machine's reason, followed by the reason that the log gives, if any."""
        why = reason(self._log.this_start()[-REASON_LINES:])
        return because if why is None else f"{because}: {why}"

    def _end(self, how: signal.Signals) -> None:
        """Signal the keeper: SIGTERM drains; the end of its standard input ends everything below it now."""
        if self._keeper is None:
            self._ending = how
        elif how is signal.SIGTERM:
            with contextlib.suppress(ProcessLookupError):
                self._keeper.send_signal(how)
        elif self._keeper.stdin is not None:
            self._keeper.stdin.close()

    # -- one start --

    async def _live(self, epoch: int) -> None:
        """Run one process from start to end; no process below it is left when this returns, however it returns."""
        env = environment(self.spec, self._environ, str(CPU_SITE))
        kept = "" if self.spec.tiers is None else self.spec.tiers.folder
        code, because = 0, ""
        try:
            if await self._turn_comes(epoch):
                async with (folders := scratch(env, kept)) as own:
                    code = await self._kept(epoch, own, folders.descriptors)
        except OSError as error:
            code = 1
            said = error.strerror or str(error)
            because = f"it cannot be started: {f'{error.filename}: ' if error.filename else ''}{said}"
        except UsageError as error:
            code, because = 1, str(error)
        finally:
            self._end_turn()
        self._feed(ChildExited(epoch, code if code >= 0 else 128 - code, because))

    async def _turn_comes(self, epoch: int) -> bool:
        """Wait until no other engine starts on this engine's GPUs. False: it was told to stop meanwhile."""
        if self._turns is None:
            return True

        def waits(detail: str) -> None:
            self._feed(WaitsForTurn(epoch))
            if detail:
                self._tell(EngineState.STARTING, detail)

        wait_max_s = self._machine.rules.start_max_s + TURN_MARGIN_S
        return await self._turns.comes(wait_max_s, lambda: self._ending is not None, waits)

    def _end_turn(self) -> None:
        if self._turns is not None:
            self._turns.release()

    async def _kept(self, epoch: int, env: Mapping[str, str], folders: tuple[int, ...]) -> int:
        """Run the engine under a keeper; the keeper's exit code, below 0 if the keeper was killed. `folders`: what
        holds the folders that the keeper removes.
        """
        keeper = self._keeper = await self._spawn(epoch, env, folders)
        if self._ending is not None:
            self._end(self._ending)
        try:
            async with asyncio.TaskGroup() as group:
                watch = self._beside(partial(self._watch, epoch), "watch")
                tasks = [group.create_task(each) for each in (watch, self._beside(self._bound_log, "log's bound"))]
                await keeper.wait()
                for task in tasks:
                    task.cancel()
        finally:
            self._end(signal.SIGKILL)
            code = await keeper.wait()
            if code < 0:  # the keeper itself was killed
                await sweep_session(keeper.pid)
            self._keeper = None
        return code

    async def _beside(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        """Do this while the engine runs, and anew after a fault."""
        told = f"{self.spec.instance}: {name}"
        await keep_running(work, told, logger, pauses_s=AGAIN_S)

    async def _spawn(self, epoch: int, env: Mapping[str, str], folders: tuple[int, ...]) -> asyncio.subprocess.Process:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            output = self._log.open(f"{when} {self.spec.instance} start {epoch}: {shlex.join(printable(self._argv))}")
        except OSError as error:
            said = f"{error.strerror}; it would be the engine's log, and --log-file names another"
            raise OSError(error.errno, said, str(self._log.path)) from None
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(KEEPER),
                *self._argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=env,
                pass_fds=(*folders, *(() if self._turns is None else self._turns.descriptors)),
                start_new_session=True,  # Ctrl-C does not reach the keeper, and its leftovers can be found
            )
        finally:
            os.close(output)

    async def _watch(self, epoch: int) -> None:
        async with Probe(self.spec.url, self.spec.api_key(self._environ)) as probe:
            if self._machine.state is EngineState.STARTING:  # a watch that begins anew has an engine that serves
                await self._wait_until_ready(probe, epoch)
                self._feed(Healthy(epoch))
                self._end_turn()
            async with watching(probe, self.model, len(self.spec.instances), self._stuck_max_s) as cores:
                while True:
                    await asyncio.sleep(READY_EVERY_S)
                    try:
                        await probe.health()
                        await cores.look()
                    except Unwell as unwell:
                        if not unwell.ours:
                            self._feed(EngineProbeFailed(epoch, str(unwell), unwell.dead))
                    except (RuntimeError, OSError):  # no thread or no descriptor is left here: not its fault
                        pass
                    else:
                        self._feed(Healthy(epoch))

    async def _bound_log(self) -> None:
        while True:
            await asyncio.sleep(LOG_EVERY_S)
            with contextlib.suppress(RuntimeError):  # no thread can be started now: no reason to end the engine
                await asyncio.to_thread(self._log.bound)

    async def _wait_until_ready(self, probe: Probe, epoch: int) -> None:
        """Wait until the engine has made a token; reports meanwhile how far the start is, from the log. Another program
        that answers on the engine's port is never taken for the engine.
        """
        told, drafts = FIRST_STAGE, False
        while True:
            lines = self._log.new_lines()
            reached, drafts = stage_after(lines, told, drafts=drafts)
            if reached != told:
                self._feed(Reached(epoch, told := reached))
            if (because := hangs(lines)) is not None:
                self._feed(StartHangs(epoch, because))
            # RuntimeError: no thread can be started now; OSError: no descriptor is left. The next look tries again.
            with contextlib.suppress(RuntimeError, OSError):
                try:
                    await probe.health()
                    if await asyncio.to_thread(self._is_ours):
                        self.model = await self._model(probe, epoch)
                        await probe.first_token(self.model)
                        return
                except Unwell as unwell:
                    if unwell.status not in {0, DEAD_STATUS}:
                        self._feed(StartRefused(epoch, " ".join(str(unwell).split())))
            await asyncio.sleep(STARTING_EVERY_S)

    async def _model(self, probe: Probe, epoch: int) -> str:
        """The name of the engine's model. An engine that wants another key wants it for ever, so its start ends."""
        try:
            return await probe.model()
        except Unwell as unwell:
            if unwell.status in NO_ACCESS:
                self._feed(StartHangs(epoch, f"it refuses Baton's questions (HTTP {unwell.status}): {KEY_FIX}"))
            raise

    def _is_ours(self) -> bool:
        """Whether a process of this start listens on the engine's port."""
        keeper = self._keeper
        return keeper is not None and listens(self.spec.port, _session(keeper.pid))

    def _tell(self, state: EngineState, detail: str) -> None:
        self._on_change(EngineChange(instance=self.spec.instance, state=state, detail=detail, epoch=self.epoch))


async def sweep_session(session: int) -> None:
    """Run `end_session` without blocking the loop, where a thread can be started; log which processes did not end."""
    for pid in await in_thread(partial(end_session, session)):
        logger.warning("%s", survived(pid))


def end_session(session: int) -> list[int]:
    """Kill every process of a session until none is left. `session` is the pid of its leader, a child of this process.
    Returns those that did not end.

    vLLM's processes stay in the session of the server that they belong to.
    """
    return end_all(lambda: _session(session))


def _session(leader: int) -> list[int]:
    return [pid for pid in _pids() if session_of(pid) == leader]


def _pids() -> list[int]:
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]


def session_of(pid: int) -> int | None:
    """The session of a running process; None for one that has ended, waited for or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {b"Z", b"X"} else int(fields[3])
