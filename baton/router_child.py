"""The router of one `baton up`: its settings, its process, its addresses once it has them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from baton.board import Board
from baton.local import Event, Program, baton_words
from baton.state import Running, log_folder
from cluster.instance import Role

ANSWER_S = 5.0
"""Longest wait for the router's answer to one question."""


@dataclass(slots=True, kw_only=True)
class LocalRouter:
    """The settings of the router of `baton up`, and those of the command itself (`title`, `demo`, `as_json`)."""

    title: str
    host: str
    port: int
    admin_host: str
    admin_port: int
    policy: str | None = None
    config: str | None = None
    """The cluster file; its classes and tenants, with their key files, are the router's to read."""
    ticket_keys_file: str | None = None
    limits: dict[str, float] = field(default_factory=dict)
    demo: bool = False
    as_json: bool = False

    def words(self) -> list[str]:
        """The `baton router` command, up to the registry's flags."""
        words = ["router", "--host", self.host, "--port", str(self.port)]
        words += ["--admin-host", self.admin_host, "--admin-port", str(self.admin_port)]
        if self.config is not None:
            words += ["--config", self.config]
        if self.policy is not None:
            words += ["--policy", self.policy]
        if self.ticket_keys_file is not None:
            words += ["--ticket-keys-file", self.ticket_keys_file]
        for name, value in self.limits.items():
            words += [f"--{name.replace('_', '-')}", f"{value}"]
        return words


class RouterChild:
    """The router as a child of this command. After a restart it gets the ports that it had."""

    def __init__(
        self,
        settings: LocalRouter,
        registry: list[str],
        board: Board,
        running: Running,
        record: Callable[[], None],
    ) -> None:
        """`registry`: flags by which the router finds the registry; `running`: its addresses are noted there;
        `record`: writes them to the disk.
        """
        self.settings = settings
        self.program = Program(
            "router",
            baton_words(*settings.words(), *registry),
            self._heard,
            log_folder(running.cluster) / "router.log",
        )
        self.endpoint = self.admin = ""
        self.ready = asyncio.Event()
        self._registry = registry
        self._board = board
        self._running = running
        self._record = record

    async def routable(self, enough: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Wait until `enough` accepts the instances that the router lists (each rank is one), and, if there is one for
        each leg, until the router is ready: it proves a first pair of them before (`Prover.settled`).

        A router names them only to callers from a loopback address. If its admin side listens on another address, it
        lists none: then wait until it has an instance for every leg.
        """
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
                    async with session.get(f"{self.admin}/ready") as response:
                        told = await response.json()
                    seen = told["instances"]
                    ready = told["ready"] or (bool(seen) and not _serves(seen))
                    if ready and (not seen or enough(seen)):
                        return
                await asyncio.sleep(0.2)

    def _heard(self, _: str, event: Event) -> None:
        if event.get("event") != "ready":
            return
        self.endpoint, self.admin = str(event["endpoint"]), str(event["admin"])
        settings = self.settings
        settings.port, settings.admin_port = (int(url.rpartition(":")[2]) for url in (self.endpoint, self.admin))
        self.program.argv = baton_words(*settings.words(), *self._registry)  # the same ports after a restart
        self._running.endpoint, self._running.admin = self.endpoint, self.admin
        self._record()
        self._board.update("router", "ready")
        self.ready.set()


def _serves(seen: list[dict[str, Any]]) -> bool:
    """Whether there is an instance up for each leg."""
    roles = [Role(each["role"]) for each in seen if each["state"] == "up"]
    return any(role.prefills for role in roles) and any(role.decodes for role in roles)
