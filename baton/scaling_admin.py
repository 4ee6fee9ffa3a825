"""The controller's HTTP side, for programs on its machine: decisions, metrics, pauses, sizes that operators order.

    GET  /scaling                 the newest decisions, instances, orders
    GET  /metrics                 Prometheus text
    POST /pause, /resume
    POST /size {"role": "decode", "instances": 4, "model": ""}    null: as the controller decides

Orders are kept in a file, so that a controller follows them after a restart.
"""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from cluster.callers import from_another_site, from_here, names_this_machine
from cluster.errors import ApiError, bad_request
from cluster.instance import Role
from cluster.readable import object_in
from goodput.actuate.scaler import Scaler

SIZE_MAX: Final = 1024
"""Most instances that an order may ask for."""


class Wishes:
    """The operators' orders to a controller, kept in a file."""

    def __init__(self, path: Path, scaler: Scaler) -> None:
        self._path: Final = path
        self._scaler: Final = scaler

    async def take_up(self) -> None:
        """Give the orders in the file to the controller; nothing if the file is missing or cannot be read."""
        try:
            said = json.loads(self._path.read_text())
            sizes = [(str(model), Role(role), int(count)) for model, role, count in said["sizes"]]
            paused = said["paused"] is True
        except (OSError, ValueError, KeyError, TypeError):
            return
        for model, role, count in sizes:
            await self._scaler.resize(model, role, count, "an operator, before this start")
        if paused:
            await self._scaler.pause(paused=True, who="an operator, before this start")

    async def pause(self, *, paused: bool) -> None:
        """Let the controller pause, or go on; keep that in the file."""
        await self._scaler.pause(paused=paused, who=_operator())
        self._keep()

    async def resize(self, model: str, role: Role, count: int | None) -> None:
        """Order a size, or take the order back (`count` None); keep that in the file."""
        await self._scaler.resize(model, role, count, _operator())
        self._keep()

    def _keep(self) -> None:
        sizes = [[model, role.value, count] for (model, role), count in self._scaler.sizes.items()]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps({"paused": self._scaler.paused, "sizes": sizes}))
        draft.replace(self._path)


def _operator() -> str:
    """The operator, for reasons and logs: by the user that runs the controller."""
    try:
        return f"an operator ({getpass.getuser()})"
    except (KeyError, OSError):
        return "an operator"


def told(scaler: Scaler) -> dict[str, Any]:
    """The content of `GET /scaling`."""
    return {
        "leads": scaler.lease.held,
        "epoch": scaler.lease.epoch,
        "leader": scaler.lease.holder,
        "paused": scaler.paused,
        "sizes": [
            {"model": model, "role": role.value, "instances": count} for (model, role), count in scaler.sizes.items()
        ],
        "now": {model: msgspec.to_builtins(decision) for model, decision in scaler.last.items()},
        "instances": {
            model: [msgspec.to_builtins(each) for each in instances] for model, instances in scaler.seen.items()
        },
        "decisions": [
            {"at": each.at, "model": each.model, **msgspec.to_builtins(each.decision)} for each in scaler.decisions
        ],
    }


def metrics(scaler: Scaler) -> str:
    """The controller's metrics, in Prometheus' text format."""
    lines = [
        "# TYPE baton_controller_leads gauge",
        f"baton_controller_leads {int(scaler.lease.held)}",
        "# TYPE baton_controller_paused gauge",
        f"baton_controller_paused {int(scaler.paused)}",
        "# TYPE baton_controller_decisions_total counter",
    ]
    lines += [
        f'baton_controller_decisions_total{{what="{what.value}"}} {count}' for what, count in scaler.counts.items()
    ]
    lines.append("# TYPE baton_controller_instances_wanted gauge")
    for model, decision in scaler.last.items():
        for role, need in decision.needs.items():
            label = f'{{model="{model}",role="{role.value}"}}'
            lines.append(f"baton_controller_instances_wanted{label} {need.ahead}")
    lines.append("# TYPE baton_controller_instances gauge")
    for model, instances in scaler.seen.items():
        found: dict[tuple[str, str], int] = {}
        for each in instances:
            key = (each.role.value, each.phase.value)
            found[key] = found.get(key, 0) + 1
        for (role_name, phase), count in sorted(found.items()):
            lines.append(f'baton_controller_instances{{model="{model}",role="{role_name}",phase="{phase}"}} {count}')
    return "\n".join(lines) + "\n"


def admin_app(scaler: Scaler, wishes: Wishes) -> web.Application:
    """The application with the routes above. It answers programs on this machine alone."""

    async def scaling(_: web.Request) -> web.Response:
        return web.json_response(told(scaler))

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(text=metrics(scaler))

    async def pause(_: web.Request) -> web.Response:
        await wishes.pause(paused=True)
        return web.json_response(told(scaler))

    async def resume(_: web.Request) -> web.Response:
        await wishes.pause(paused=False)
        return web.json_response(told(scaler))

    async def size(http: web.Request) -> web.Response:
        said = object_in(await http.read(), ("model", "role", "instances"))
        model, role, count = _size(scaler, said)
        await wishes.resize(model, role, count)
        return web.json_response(told(scaler))

    app = web.Application(middlewares=[_guarded], client_max_size=65536)
    app.add_routes([web.get("/scaling", scaling), web.get("/metrics", exposition)])
    app.add_routes([web.post("/pause", pause), web.post("/resume", resume), web.post("/size", size)])
    return app


def _size(scaler: Scaler, said: dict[str, Any]) -> tuple[str, Role, int | None]:
    """The order in a body: model, role, and instances (None: take the order back).

    Raises:
        ApiError: 400, with the field, the value and what it must be.
    """
    role, count, model = said.get("role"), said.get("instances"), said.get("model", "")
    models = [fleet.model for fleet in scaler.fleets]
    if model not in models:
        raise bad_request(f"`model` is {model!r:.80}: it must be one of {', '.join(map(repr, models))}.", "model")
    roles = sorted({its.value for fleet in scaler.fleets if fleet.model == model for its, _ in fleet.pools.values()})
    if role not in roles:
        raise bad_request(f"`role` is {role!r:.40}: it must be one of {', '.join(roles)}.", "role")
    whole = isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= SIZE_MAX
    if count is not None and not whole:
        raise bad_request(
            f"`instances` is {count!r:.40}: it must be a number from 0 to {SIZE_MAX}, or null.", "instances"
        )
    return model, Role(role), count


def _admit(http: web.Request) -> None:
    """Check that a program on this machine asks.

    Raises:
        ApiError: 403, for other machines and pages of other sites.
    """
    if from_another_site(http.headers, http.host, changes=http.method != "GET"):
        raise ApiError(403, "PermissionDeniedError", "A page of another site asks for this: refused.")
    if not from_here(http.remote) or not names_this_machine(http.host):
        raise ApiError(403, "PermissionDeniedError", "Ask on the controller's own machine, as 127.0.0.1.")


@web.middleware
async def _guarded(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        _admit(request)
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.body(), status=error.status)
