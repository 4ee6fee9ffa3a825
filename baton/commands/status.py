"""Who is in the fleet, what each says of itself, and whether it really answers.

Reads the registry, then asks every agent, engine and router it names: what is shown is their own word of this moment,
and who does not answer is shown as lost or unwell, with the last thing it said.

examples:
  baton status
  baton status --registry redis://10.0.0.9:6379 --registry-password-file keys/registry --json
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp

from baton.output import emit
from baton.registry import add_registry_arguments, open_registry
from baton.state import must_load
from cluster.errors import UsageError
from cluster.registry.membership import Heartbeat, Kind
from cluster.registry.registry import Registry, RegistryDown

ASK_S = 2.0
"""An agent that does not answer within this is as good as lost: it does nothing but answer and count."""

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
    add_registry_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the fleet; 0 when all of it is ready, 1 when something is not."""
    if args.registry is None:
        running = must_load(args.cluster)
        args.registry = running.registry
        args.registry_password_file = Path(running.registry_password_file) if running.registry_password_file else None
        args.registry_ca_file = Path(running.registry_ca_file) if running.registry_ca_file else None
    registry = open_registry(args)
    assert registry is not None
    told = asyncio.run(_ask_all(registry, args.registry))
    if args.json:
        emit(told)
    else:
        _print(told)
    fine = told["registry"]["state"] == "answers" and told["instances"]
    return 0 if fine and all(each["state"] == "ready" for each in told["instances"] + told["routers"]) else 1


async def _ask_all(registry: Registry, url: str) -> dict[str, Any]:
    try:
        beats = await registry.read()
        routers = await registry.read(Kind.ROUTER)
    except RegistryDown as down:
        raise UsageError(f"--registry: {down}") from None
    finally:
        await registry.close()
    timeout = aiohttp.ClientTimeout(total=ASK_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
        agents = [group.create_task(_ask_agent(session, beat)) for beat in beats if beat.state != "gone"]
        fronts = [group.create_task(_ask_router(session, beat)) for beat in routers if beat.state != "gone"]
    return {
        "registry": {"url": url, "state": "answers"},
        "routers": [task.result() for task in fronts],
        "instances": sorted((task.result() for task in agents), key=lambda each: str(each["instance"])),
    }


async def _ask_agent(session: aiohttp.ClientSession, beat: Heartbeat) -> dict[str, Any]:
    try:
        async with session.get(f"{beat.agent_url}/state") as answer:
            told: dict[str, Any] = await answer.json()
        if told["state"] == "ready" and not await _healthy(session, beat.url):
            told |= {"state": "unwell", "detail": "its engine does not answer; its agent has not noticed yet"}
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
        ago = max(0.0, time.time() - beat.sent_at)  # noqa: TID251 - said to people
        detail = f"its agent does not answer; last word, {ago:.0f} s ago: {beat.state}"
        return {
            "instance": beat.id,
            "role": beat.role.value,
            "state": "lost",
            "detail": detail,
            "epoch": beat.epoch,
            "engine": beat.url,
            "agent": beat.agent_url,
            "credits": 0,
            "load": None,
        }
    return told


async def _healthy(session: aiohttp.ClientSession, engine: str) -> bool:
    try:
        async with session.get(f"{engine}/health") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _ask_router(session: aiohttp.ClientSession, beat: Heartbeat) -> dict[str, Any]:
    told: dict[str, Any] = {"router": beat.id, "endpoint": beat.url, "admin": beat.agent_url}
    try:
        async with session.get(f"{beat.agent_url}/ready") as answer:
            seen = await answer.json()
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
        return {**told, "state": "lost", "detail": "does not answer"}
    lacking = [each["id"] for each in seen["instances"] if each["state"] != "up"]
    state = "ready" if seen["ready"] else "incomplete"
    return {**told, "state": state, "detail": f"does not use {', '.join(lacking)}" if lacking else "", "sees": seen}


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
        table.add_row(Text(each["instance"], "bold"), each["role"], state, *counts, *more)
    console.print(table)
    console.print(Text(f"registry {told['registry']['url']}", "dim"))
