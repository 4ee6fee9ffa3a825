"""Instances and routers of the fleet, the state of each, and whether it really answers.

Reads the registry, then asks every agent, engine and router that it names: their answers of this moment are shown. A
program that does not answer is shown as lost or unwell, with its last heartbeat. Agents on other machines answer
requests that the fleet's ticket keys signed. With these keys, a program whose heartbeats prove nothing is shown as
ignored and is not asked.

examples:
  baton status
  baton status --registry redis://10.0.0.9:6379 --registry-password-file keys/registry --json
  baton status --registry redis://10.0.0.9:6379 --registry-password-file keys/registry --ticket-keys-file keys/tickets
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from baton.output import emit
from baton.registry import UNIX_TIME, add_registry_arguments, cluster_of, fleet_proofs, open_registry
from baton.state import must_load
from baton.ticket_keys import add_ticket_keys_argument, named_file, open_fleet_keys
from cluster.callers import is_loopback
from cluster.errors import UsageError
from cluster.registry.membership import Heartbeat, MemberKind
from cluster.registry.registry import Registry, RegistryDown
from cluster.urls import parted
from kvtransfer.keys import instance_key
from kvtransfer.signed import NONCE_BYTES, Ask, signed_headers
from kvtransfer.ticket import SigningKey

ASK_S = 2.0
"""Longest wait for one answer. An agent that needs longer counts as lost: it has little else to do."""

_COLOURS = {
    "ready": "green",
    "failed": "red",
    "lost": "red",
    "unwell": "red",
    "draining": "yellow",
    "restarting": "yellow",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton status`."""
    add_ticket_keys_argument(parser, "the fleet's", "those of `baton up`")
    add_registry_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the fleet; 0 if all of it is ready, else 1."""
    ticket_keys = named_file(args, os.environ)
    if args.registry is None:
        running = must_load(cluster_of(args))
        args.registry = running.registry
        args.registry_password_file = Path(running.registry_password_file) if running.registry_password_file else None
        args.registry_ca_file = Path(running.registry_ca_file) if running.registry_ca_file else None
        ticket_keys = ticket_keys or (Path(running.ticket_keys_file) if running.ticket_keys_file else None)
    keys = open_fleet_keys(ticket_keys)
    registry = open_registry(args, fleet_proofs(keys))
    assert registry is not None
    told = asyncio.run(_ask_all(registry, args.registry, Asker(None if keys is None else keys.get)))
    if args.json:
        emit(told)
    else:
        _print(told)
    fine = told["registry"]["state"] == "answers" and told["instances"]
    return 0 if fine and all(each["state"] == "ready" for each in told["instances"] + told["routers"]) else 1


class Asker:
    """Signs requests to agents and routers, if there are keys."""

    def __init__(self, keys: Callable[[], tuple[SigningKey, ...]] | None) -> None:
        """`keys` gives the fleet's ticket keys, the signing one first; None: requests are not signed."""
        self._keys: Final = keys

    def headers(self, beat: Heartbeat, path: str) -> dict[str, str]:
        """Headers for a GET of `path` at the program that wrote this heartbeat."""
        key = None if self._keys is None else self._keys()[0]
        if key is not None and beat.kind is MemberKind.INSTANCE:
            key = instance_key(key, beat.id)
        ask = Ask(method="GET", path=path, by="status", to=str(beat.id))
        return signed_headers(ask, key, now=UNIX_TIME(), nonce=secrets.token_bytes(NONCE_BYTES))


async def _ask_all(registry: Registry, url: str, asker: Asker) -> dict[str, Any]:
    try:
        beats = await registry.read()
        routers = await registry.read(MemberKind.ROUTER)
    except RegistryDown as down:
        raise UsageError(f"--registry: {down}") from None
    finally:
        await registry.close()
    unproven = {name: because for kind in MemberKind for name, because in registry.unproven(kind).items()}
    timeout = aiohttp.ClientTimeout(total=ASK_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
        agents = [group.create_task(_ask_agent(session, beat, asker)) for beat in beats if beat.state != "gone"]
        fronts = [group.create_task(_ask_router(session, beat, asker)) for beat in routers if beat.state != "gone"]
    return {
        "registry": {"url": parted(url)[0], "state": "answers"},
        "routers": [task.result() for task in fronts],
        "instances": sorted((task.result() for task in agents), key=lambda each: str(each["instance"])),
        **({"ignored": unproven} if unproven else {}),
    }


async def _ask_agent(session: aiohttp.ClientSession, beat: Heartbeat, asker: Asker) -> dict[str, Any]:
    try:
        headers = asker.headers(beat, "/state")
        async with session.get(f"{beat.agent_url}/state", headers=headers, allow_redirects=False) as answer:
            if answer.status in {401, 421}:
                return await _unasked(session, beat, _why_not(answer.status))
            told = _state_of(await answer.json(), beat)
        if told["state"] == "ready" and not await _healthy(session, beat.url):
            told |= {"state": "unwell", "detail": "its engine does not answer; its agent has not noticed yet"}
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
        if _is_elsewhere(beat):
            return await _unasked(session, beat, _why_not(421))
        return _by_heartbeat(beat, f"its agent does not answer; {_last_word(beat)}", "lost")
    return told


async def _unasked(session: aiohttp.ClientSession, beat: Heartbeat, why: str) -> dict[str, Any]:
    """An instance whose agent does not answer this machine: its state by its heartbeat; `unwell` if the heartbeat says
    ready and the engine does not answer.
    """
    well = beat.state.value != "ready" or await _healthy(session, beat.url)
    return _by_heartbeat(beat, f"{_last_word(beat)}; {why}", beat.state.value if well else "unwell")


def _last_word(beat: Heartbeat) -> str:
    return f"last heartbeat, {max(0.0, UNIX_TIME() - beat.sent_at):.0f} s ago: {beat.state}"


def _why_not(status: int) -> str:
    if status == 401:
        return "its agent answers only requests that the fleet's --ticket-keys-file signed"
    return "its agent listens on its own machine only: give it --ticket-keys-file"


def _is_elsewhere(beat: Heartbeat) -> bool:
    """Whether the agent listens only on the loopback address of another machine."""
    host = urlsplit(beat.agent_url or "").hostname or ""
    return is_loopback(host) and beat.where.rpartition(":")[0] != socket.gethostname()


def _by_heartbeat(beat: Heartbeat, detail: str, state: str) -> dict[str, Any]:
    return {
        "instance": beat.id,
        "role": beat.role.value,
        "state": state,
        "detail": detail,
        "epoch": beat.epoch,
        "engine": beat.url,
        "agent": beat.agent_url,
        "credits": 0,
        "load": None,
    }


def _state_of(told: Any, beat: Heartbeat) -> dict[str, Any]:
    """The state in an agent's answer.

    Raises:
        ValueError: the answer is not that of the agent of `beat`.
    """
    if isinstance(told, dict) and isinstance(told.get("ranks"), list):
        mine = [each for each in told.pop("ranks") if isinstance(each, dict) and each.get("instance") == beat.id]
        told |= mine[0] if mine else {}
    load = told.get("load") if isinstance(told, dict) else None
    if not isinstance(load, dict) or told.get("instance") != beat.id:
        raise ValueError("no agent of that name")
    numbers = (load.get("running"), load.get("waiting"), load.get("kv_usage"), told.get("credits"), told.get("epoch"))
    texts = (told.get("role"), told.get("state"), told.get("engine"), told.get("detail"))
    if not all(isinstance(each, int | float) for each in numbers) or not all(isinstance(each, str) for each in texts):
        raise ValueError("not an agent's answer")
    return dict(told)


async def _healthy(session: aiohttp.ClientSession, engine: str) -> bool:
    try:
        async with session.get(f"{engine}/health") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _ask_router(session: aiohttp.ClientSession, beat: Heartbeat, asker: Asker) -> dict[str, Any]:
    told: dict[str, Any] = {"router": beat.id, "endpoint": beat.url, "admin": beat.agent_url}
    try:
        headers = asker.headers(beat, "/ready")
        async with session.get(f"{beat.agent_url}/ready", headers=headers, allow_redirects=False) as answer:
            seen = await answer.json()
        listed = seen["instances"]
        lacking = [str(each["id"]) for each in listed if each["state"] != "up"]
        ready = bool(seen["ready"])
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
        return {**told, "state": "lost", "detail": "does not answer"}
    except (KeyError, TypeError):
        return {**told, "state": "lost", "detail": "what answers at its address is no router"}
    detail = f"does not use {', '.join(lacking)}" if lacking else ""
    return {**told, "state": "ready" if ready else "incomplete", "detail": detail, "sees": seen}


def _print(told: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # a file has no edge to fold at
    for each in told["routers"]:
        colour = _COLOURS.get(each["state"], "yellow")
        console.print(
            Text.assemble("router ", (each["endpoint"], "bold"), " ", (each["state"], colour), " ", each["detail"])
        )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("instance", "role", "state", "running", "waiting", "KV", "credits", "epoch", "engine", ""):
        table.add_column(
            column, justify="right" if column in {"running", "waiting", "KV", "credits", "epoch"} else "left"
        )
    for each in told["instances"]:
        load = each["load"] or {}
        counts = [str(load.get(key, "–")) for key in ("running", "waiting")]
        usage = f"{load['kv_usage']:.0%}" if load else "–"
        state = Text(each["state"], _COLOURS.get(each["state"], "cyan"))
        more = [usage, str(each["credits"]), str(each["epoch"]), each["engine"].removeprefix("http://"), each["detail"]]
        cells = map(Text, (*counts, *more))  # brackets of addresses and details would be markup
        table.add_row(Text(each["instance"], "bold"), Text(each["role"]), state, *cells)
    console.print(table)
    for name, because in told.get("ignored", {}).items():
        console.print(Text(f"ignored: {name}: {because}", "red"))
    console.print(Text(f"registry {told['registry']['url']}", "dim"))
