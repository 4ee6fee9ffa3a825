"""Mock engines for the chaos suite: a fault strikes one of them when a request has reached the scenario's stage.

The mocks run in the caller's event loop. The caller starts the router, in this process or in another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from random import Random
from typing import Any, Self

from support.chaos_proxy import Proxy
from support.chaos_scenarios import STRUCK_TOKENS, Limits, Scenario, Shape, Side, Stage
from support.fleet import eventually
from support.mock import mock_settings

from cluster.ids import InstanceId, ranks_of
from cluster.wire import EARLY
from engine.mock.asked import read_body
from engine.mock.faults import FaultLeg
from engine.mock.fleet import MockFleet
from engine.mock.frontend import leg_of
from engine.mock.instance import MockInstance as Mock
from engine.twin.events import PullBlocks

PACE: dict[str, Any] = {"step_ms": 3.0, "transfer_ms": 5.0, "first_token_ms": 2.0, "num_blocks": 2048}
"""Slow enough that every stage lasts a few milliseconds, fast enough for dozens of runs a minute."""


class ChaosFleet:
    """The mocks of one scenario, and the fault that strikes them. `async with` opens and closes the mocks."""

    def __init__(self, scenario: Scenario, shape: Shape, limits: Limits, lease_s: float, seed: int) -> None:
        settings = [
            mock_settings(name, role, lease_s=lease_s, seed=seed, digests=scenario.digests, **PACE)
            for role, count in shape.counts.items()
            for number in range(count)
            for name in ranks_of(InstanceId(f"{role.value}-{number}"), scenario.ranks(role))
        ]
        self.scenario = scenario
        self.mocks = MockFleet(settings)
        self.proxies: dict[str, Proxy] = {}
        self.struck: list[str] = []
        """Names of the mocks that were struck, in order."""
        self._short_lease = lease_s <= limits.lease_s
        self._rng = Random(f"{scenario.name}/{seed}")
        self._patience = self._rng.randint(3, 9)
        """How many more requests have to reach the stage: the last of them triggers the strike."""
        self._armed: Callable[[Mock], None] | None = None

    async def __aenter__(self) -> Self:
        await self.mocks.__aenter__()
        for mock in self.mocks.instances.values():
            _Listener(self, mock).listen()
            if self._short_lease:  # a heartbeat extends a lease to 20 s; no test waits for so long
                mock.handoffs._keep_beating = lambda: None  # type: ignore[method-assign]
        if self.scenario.drive == "partition":
            for name, mock in self.mocks.instances.items():
                self.proxies[name] = await Proxy.open(mock.listener.port)
        return self

    async def __aexit__(self, *reason: object) -> None:
        for proxy in self.proxies.values():
            await proxy.close()
        await self.mocks.__aexit__(None, None, None)

    def url(self, name: str) -> str:
        """The URL at which the router reaches the mock `name`: its proxy's, if it has one."""
        proxy = self.proxies.get(name)
        return self.mocks.instances[name].url if proxy is None else f"http://127.0.0.1:{proxy.port}"

    # -- the strike --

    def arm(self, strike: Callable[[Mock], None] | None = None) -> None:
        """Set faults of requests now; from now on, let the instance's fault strike at the scenario's stage.

        `strike` replaces the scenario's own fault.
        """
        scenario = self.scenario
        self._armed = strike or self._default
        mine = [mock for mock in self.mocks.instances.values() if mock.settings.role is scenario.role]
        if scenario.fault and (scenario.everywhere or "leg" in scenario.fault):
            for mock in mine if scenario.everywhere else [self._rng.choice(mine)]:
                self._set(mock, dict(scenario.fault))
        elif scenario.stage is Stage.BEFORE and (scenario.fault or strike is not None):
            self._strike(self._rng.choice(mine))

    def _default(self, mock: Mock) -> None:
        if self.scenario.drive == "partition":
            self.proxies[mock.settings.name].cut()
        elif self.scenario.fault:
            self._set(mock, dict(self.scenario.fault))

    def _set(self, mock: Mock, fault: dict[str, Any]) -> None:
        mock.set_faults(json.dumps(fault).encode())

    def _strike(self, mock: Mock) -> None:
        strike, self._armed = self._armed, None
        if strike is not None:
            self.struck.append(mock.settings.name)
            strike(mock)

    def reached(self, stage: Stage, producer: Mock | None, consumer: Mock | None) -> None:
        """A request of these two instances has reached `stage`. The strike, if due, follows on the loop's next turn."""
        if self._armed is None or stage is not self.scenario.stage or not self._whole_instance:
            return
        victim = producer if self.scenario.side is Side.P else consumer
        if victim is None:
            return
        self._patience -= 1
        if self._patience == 0:
            asyncio.get_running_loop().call_soon(self._strike, victim)

    @property
    def _whole_instance(self) -> bool:
        return "leg" not in self.scenario.fault and not self.scenario.everywhere

    def another(self, than: Mock) -> Mock:
        """Any decode instance other than `than`, for a stage at which D is not chosen yet."""
        others = [mock for mock in self.mocks.instances.values() if mock is not than and mock.settings.role.decodes]
        return self._rng.choice(others)

    def of_engine(self, engine_id: str) -> Mock | None:
        """The mock that has this engine id."""
        return next((mock for mock in self.mocks.instances.values() if mock.handoffs.engine_id == engine_id), None)

    # -- what must hold --

    @property
    def strikes(self) -> int:
        """How many strikes there were: instances struck, and requests struck by faults that are still active."""
        return len(self.struck) + sum(
            each.struck for mock in self.mocks.instances.values() for each in mock.faults.active
        )

    def holds(self) -> dict[str, int]:
        """How many holds each running instance has; instances without holds are left out."""
        listed = {name: mock.handoffs.holds() for name, mock in self.mocks.instances.items() if mock.ready.is_set()}
        return {name: count for name, count in listed.items() if count}

    @property
    def free(self) -> bool:
        """Whether no running mock has a request, a hold or a used KV block."""
        up = [mock for mock in self.mocks.instances.values() if mock.ready.is_set()]
        return not self.holds() and all(not mock.serving.open_requests and mock.load().kv_usage == 0 for mock in up)

    def heal(self) -> None:
        """Reconnect the proxies and end all faults of the mocks."""
        for proxy in self.proxies.values():
            proxy.heal()
        for mock in self.mocks.instances.values():
            mock.clear_faults()

    async def released(self, within_s: float) -> None:
        """Wait until nothing is held, at most so many seconds."""
        with contextlib.suppress(TimeoutError):
            await eventually(lambda: not self.holds(), "nothing is held", within_s)

    async def settled(self, within_s: float) -> bool:
        """Whether the fleet becomes `free` within so many seconds."""
        try:
            await eventually(lambda: self.free, "nothing runs and nothing is held", within_s)
        except TimeoutError:
            return False
        return True


class _Listener:
    """Wraps methods of one mock to report to the fleet which stage each request has reached."""

    def __init__(self, fleet: ChaosFleet, mock: Mock) -> None:
        self._fleet, self._mock = fleet, mock

    def listen(self) -> None:
        frontend, serving, handoffs = self._mock.frontend, self._mock.serving, self._mock.handoffs
        self._before(frontend, "generate", self._asked)
        self._before(serving, "made", self._made)
        self._before(handoffs, "held", self._held)
        self._before(handoffs, "pull", self._pull)
        self._before(handoffs, "_landed", self._landed)

    @staticmethod
    def _before(where: Any, name: str, hear: Callable[..., None]) -> None:
        own = getattr(where, name)

        def both(*args: Any, **named: Any) -> Any:
            hear(*args)
            return own(*args, **named)

        setattr(where, name, both)

    def _asked(self, request: Any, exchange: Any) -> None:
        body = read_body(request.body, "application/json")
        fields = body.get("kv_transfer_params") or {}
        if leg_of(body, fields) is FaultLeg.PREFILL:
            self._fleet.reached(Stage.LEG_1, self._mock, None)
        elif EARLY in fields:
            self._fleet.reached(Stage.EARLY, self._fleet.mocks.instances.get(fields[EARLY]), self._mock)

    def _held(self, hold: Any) -> None:
        self._fleet.reached(Stage.BETWEEN, self._mock, self._fleet.another(self._mock))

    def _pull(self, order: PullBlocks) -> None:
        self._fleet.reached(Stage.PULL, self._fleet.of_engine(order.source.producer), self._mock)

    def _landed(self, order: PullBlocks, *_: Any) -> None:
        self._fleet.reached(Stage.PULLED, self._fleet.of_engine(order.source.producer), self._mock)

    def _made(self, request: Any, key: int, first: int, count: int) -> None:
        part = self._mock.serving._parts.get(request)
        if part is None or part.reference is None:
            return
        producer = self._fleet.of_engine(part.reference.producer.engine_id)
        if first <= STRUCK_TOKENS < first + count:
            self._fleet.reached(Stage.STREAM, producer, self._mock)
        last = (part.answer.asked.max_tokens or 0) - 1
        if first < last <= first + count:
            self._fleet.reached(Stage.END, producer, self._mock)
