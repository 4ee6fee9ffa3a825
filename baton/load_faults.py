"""`baton load --fault`: finds the named instances, checks before the load that each can be reached, and acts on them.

The registry of a `baton up` on this machine has the address of an instance, or `--target NAME=URL` gives it: a mock's
own port, else its agent's.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from baton.output import say
from baton.registry import fleet_proofs, open_registry
from baton.state import born, must_load
from baton.ticket_keys import open_fleet_keys
from cluster.errors import UsageError
from cluster.registry.registry import DEFAULT_CLUSTER, RegistryDown
from cluster.text_file import text_in
from loadgen.faults import Action, Applied, Asks, BadAction, FaultTimeline, in_order, read, read_lines

ASK_S = 10.0
"""Longest wait for the answer of an agent or a mock."""


@dataclass(slots=True)
class Target:
    """The addresses of an instance."""

    name: str
    engine: str
    """The engine's URL. A mock takes its faults there."""
    agent: str
    """The agent's URL."""
    pid: int = 0
    """The agent's process, the engine's parent; 0: unknown, or not on this machine."""
    born: str = ""
    """When that process was started (`baton.state.born`): a later process with the same number is not killed."""


NOT_DUE = "the load ended before it was due"


class LoadFaults:
    """The actions of a load, and their results."""

    def __init__(self, actions: Sequence[Action] = ()) -> None:
        self.actions = in_order(actions)
        self.applied: list[Applied] = []
        self._timeline = FaultTimeline(self.actions)
        self._targets: dict[str, Target] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @staticmethod
    def of(args: argparse.Namespace) -> LoadFaults:
        """The actions of --fault and --faults.

        Raises:
            UsageError: an action or the file cannot be read.
        """
        actions: list[Action] = []
        try:
            actions += [read(text) for text in args.fault]
        except BadAction as error:
            raise UsageError(f"--fault: {error}") from None
        if args.faults is not None:
            try:
                actions += read_lines(text_in(args.faults, "--faults", "give a file of faults").splitlines())
            except BadAction as error:
                raise UsageError(f"--faults {args.faults}: {error}") from None
        return LoadFaults(actions)

    async def check(self, args: argparse.Namespace, span_s: float) -> None:
        """Check that every action can be done: it is due before the load's end, and its instance is there and answers.

        Raises:
            UsageError: one cannot be done.
        """
        if not self.actions:
            return
        late = [each for each in self.actions if each.at_s > span_s]
        if late:
            raise UsageError(f"--fault {late[0]}: the last request is sent at {span_s:.1f} s; give an earlier time")
        given = {name: Target(name, url, url) for name, url in args.target}
        wanted = {each.target for each in self.actions}
        self._targets = given if wanted <= set(given) else {**await _fleet(args.cluster or DEFAULT_CLUSTER), **given}
        for action in self.actions:
            target = self._targets.get(action.target)
            if target is None:
                known = ", ".join(sorted(self._targets)) or "none"
                raise UsageError(f"--fault {action}: no instance of this name; there are: {known}")
            why = await _unreachable(action, target)
            if why:
                raise UsageError(f"--fault {action}: {why}")

    def tick(self, elapsed_s: float) -> None:
        """Start the actions that are due by now."""
        for action in self._timeline.handle(elapsed_s):
            task = asyncio.get_running_loop().create_task(self._do(action, elapsed_s))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def ended(self) -> None:
        """After the load: wait for actions under way, and report those that were not due yet."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        for action in self._timeline.handle(math.inf):
            what = f"{action.do} {action.target}"
            self.applied.append(Applied(at_s=action.at_s, done_s=action.at_s, what=what, error=NOT_DUE))
            say(f"{action.at_s:.1f} s: {what} was not done: {NOT_DUE}")

    async def _do(self, action: Action, elapsed_s: float) -> None:
        """Do one action, `elapsed_s` seconds after the start of the load."""
        began = asyncio.get_running_loop().time()
        error = await _done(action, self._targets[action.target])
        done_s = elapsed_s + asyncio.get_running_loop().time() - began
        what = f"{action.do} {action.target}"
        self.applied.append(Applied(at_s=action.at_s, done_s=round(done_s, 3), what=what, error=error))
        say(f"{done_s:.1f} s: {what}" + (f" could not be done: {error}" if error else ""))


async def _fleet(cluster: str) -> dict[str, Target]:
    """The instances of a `baton up` on this machine."""
    running = must_load(cluster)
    keys = open_fleet_keys(Path(running.ticket_keys_file) if running.ticket_keys_file else None)
    named = argparse.Namespace(
        registry=running.registry,
        cluster=cluster,
        registry_password_file=Path(running.registry_password_file) if running.registry_password_file else None,
        registry_ca_file=Path(running.registry_ca_file) if running.registry_ca_file else None,
    )
    registry = open_registry(named, fleet_proofs(keys))
    assert registry is not None
    try:
        beats = await registry.read()
    except RegistryDown as down:
        raise UsageError(f"the registry of `{cluster}`: {down}") from None
    finally:
        await registry.close()
    found = {}
    for beat in beats:
        if beat.state != "gone":
            told = await _asked("GET", f"{beat.agent_url}/state")
            pid = told.get("pid") if isinstance(told, dict) else None
            pid = pid if isinstance(pid, int) else 0
            found[str(beat.id)] = Target(
                str(beat.id), beat.url, beat.agent_url or beat.url, pid, born(pid) if pid else ""
            )
    return found


async def _unreachable(action: Action, target: Target) -> str:
    """Why an action cannot be done on its target; empty if it can."""
    if action.asks is Asks.KERNEL:
        return "" if target.born else "only an instance of a `baton up` on this machine can be killed (a mock: `die`)"
    if action.asks is Asks.AGENT:
        told = await _asked("GET", f"{target.agent}/state")
        return told if isinstance(told, str) else ""
    told = await _asked("GET", f"{target.engine}/mock/faults")
    return f"{told} (only mock engines take this fault)" if isinstance(told, str) else ""


async def _done(action: Action, target: Target) -> str | None:
    """Do the action; why it failed, or None."""
    if action.asks is Asks.KERNEL:
        if born(target.pid) != target.born:
            return "it is gone already"
        try:
            os.kill(target.pid, signal.SIGKILL)
        except OSError as error:
            return str(error.strerror)
        return None
    if action.asks is Asks.AGENT:
        told = await _asked("POST", f"{target.agent}/{action.do}", action.body)
    elif action.do == "clear":
        told = await _asked("DELETE", f"{target.engine}/mock/faults")
    else:
        told = await _asked("POST", f"{target.engine}/mock/faults", action.body)
    return told if isinstance(told, str) else None


async def _asked(method: str, url: str, body: Mapping[str, Any] | None = None) -> Any:
    """The JSON of the target's answer; a text that says what is wrong if it does not answer, or refuses."""
    try:
        async with (
            asyncio.timeout(ASK_S),
            aiohttp.ClientSession() as session,
            session.request(method, url, json=body or None, allow_redirects=False) as answer,
        ):
            if answer.status >= 300:
                return f"{url} answers {answer.status}: {(await answer.text())[:200].strip()}"
            told = await answer.json(content_type=None)
            return {} if isinstance(told, str) else told
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError) as error:
        return f"{url} does not answer: {str(error) or type(error).__name__}"
