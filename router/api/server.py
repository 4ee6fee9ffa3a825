"""One router process: its parts, their start and their end. A shell: clocks, randomness, tasks."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from cluster.ids import InstanceId
from cluster.registry.registry import Registry
from cluster.telemetry import tracing
from router.admin.operators import Operators
from router.admin.scrape import Scrape
from router.api import reference_cycles
from router.api.aliases import Aliases
from router.api.config import Renewed, RouterConfig
from router.api.endpoints import Endpoints
from router.api.generation import Generation
from router.api.passthrough import Passthrough
from router.core.clients import Clients, OpenBodies
from router.core.slo import promises_of
from router.core.values import Reported
from router.fleet import events
from router.fleet.discovery import Discovery
from router.fleet.engine_paths import Catalogue
from router.fleet.load_sharing import LoadSharing
from router.fleet.probes import Prober, Probing
from router.fleet.prover import Prover
from router.fleet.view import FleetView
from router.http.credentials import Credentials
from router.http.doors import CLIENTS_MAX, Doors
from router.http.engines import Engines
from router.http.tasks import GIVE_UP, RELEASE, Tasks
from router.http.tickets import Tickets
from router.http.uploads import Uploads
from router.http.upstream import Upstream
from router.predict.predictors import KEY_BYTES, RequestPredictor, chunk_key
from router.request.parts import Parts, RequestLimits, Telling
from router.request.slices import Slices
from router.scheduler.decision_log import DecisionLog, Fleet, fleet_of, scheduler_of
from router.scheduler.demand import OwnWord
from router.scheduler.dispatch import Dispatch
from router.scheduler.log_writer import FLUSH_S, LogWriter
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import FORESEEING, POLICIES
from router.telemetry.explain_store import ExplainStore
from router.telemetry.metrics import RouterMetrics

logger = logging.getLogger("baton.router")

CLOSE_S = 2.0
"""How long pending releases of holds may take once the server is closed."""

TASKS_END_S = 1.0
"""How long cancelled tasks may take to end before what they use is closed."""

RENEW_EVERY_S = 2.0
"""The time between two checks whether the cluster file was edited."""


class Router:
    """Makes the parts of one router and holds them together: `start` opens it, `close` ends it. No request passes here:
    the parts know each other, and none knows this class.
    """

    def __init__(self, config: RouterConfig, registry: Registry | None = None, doors: Doors | None = None) -> None:
        """`doors`: counts clients' connections."""
        self.config: Final = config
        self.watch: Final = None if registry is None else Discovery(registry, self._fleet_told)
        meters, write = RouterMetrics(), config.decision_log
        self._log_writer: Final = None if write is None else LogWriter(write, meters.log_dropped.inc)
        log = None if self._log_writer is None else DecisionLog(self._log_writer.add, config.policy)
        self.parts: Final = _parts(config, log, meters, trusts=registry is None or registry.all_proven)
        parts = self.parts
        if self.watch is not None:
            self.watch.own = OwnWord(parts.scheduler, meters.flow)
        self.sharing: Final = _sharing(parts, self.watch, registry, config)
        catalogue = Catalogue()
        # With agents, load comes with their heartbeats, and probes only check whether engines answer.
        prober = Prober(
            parts.view,
            parts.engines.ask,
            self._probed,
            read_metrics=registry is None,
            catalogue=catalogue,
            fold=parts.dispatch.fleet.handle,
        )
        self.probing: Final = Probing(parts.view, prober, parts.tasks, catalogue)
        self.uploads: Final = Uploads(config.uploads_bytes)
        slices, names = Slices(self.uploads), Aliases(config.aliases)
        self.generation: Final = Generation(parts, config, names, slices, promises_of(config.classes))
        self._prover: Final = _prover(parts) if config.proves else None
        scrape = Scrape(parts, self.watch, doors or Doors(CLIENTS_MAX), self.uploads)
        self._operators: Final = Operators(
            parts,
            scrape,
            self.watch,
            classes=config.classes,
            ticket_keys=config.ticket_keys,
            admin_keys=config.admin_keys,
            body_timeout_s=config.body_timeout_s,
        )
        self.endpoints: Final = Endpoints(
            parts,
            config,
            generation=self.generation,
            passthrough=Passthrough(parts, names, slices, catalogue, wait_s=config.first_token_s),
            operators=self._operators,
            scrape=scrape,
            names=names,
            uploads=self.uploads,
            watch=self.watch,
            prover=self._prover,
        )

    async def start(self) -> None:
        """Open connections and begin probing."""
        parts = self.parts
        if not parts.engines.tickets.signs:
            logger.info("tickets are off: programs that reach an engine may start transfers there (--ticket-keys-file)")
        if not parts.engines.credentials.trusts:
            logger.warning(
                "instances and routers need not prove themselves: holders of the registry's password can put in false "
                "ones, which get prompts. No API key goes to engines, neither clients' nor VLLM_API_KEY "
                "(give --ticket-keys-file, and leave --accept-unproven out)"
            )
        await parts.engines.start()
        self.probing.follow()
        keep = parts.tasks.keep
        keep(self._operators.look_forever, "operators")
        keep(partial(reference_cycles.look_forever, lambda: not parts.open), "reference cycles")
        if self._log_writer is not None:
            keep(partial(self._flush_forever, self._log_writer), "log")
        if self.config.renewed is not None:
            keep(partial(self._renew_forever, self.config.renewed), "config")
        if self._prover is not None:
            keep(self._prover.run, "pairs")
        if self.watch is not None:
            await self.watch.read()
            keep(self.watch.read_forever, "registry")
        if self.sharing is not None:
            keep(self.sharing.tell_forever, "tell")
            keep(self.sharing.hear_forever, "hear")

    async def _renew_forever(self, renewed: Callable[[], Renewed | str | None]) -> None:
        """Apply classes and tenants of an edited cluster file, without a restart. After a bad file they stay as they
        are.
        """
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            found = await asyncio.to_thread(renewed)
            if isinstance(found, Renewed):
                found = self.renew(found)
            if found:
                logger.warning("%s", found)

    def renew(self, to: Renewed) -> str:
        """Use these classes and tenants from now on; returns why not, or an empty text."""
        started_with = self.config
        for what, had, has in (
            ("slo", bool(started_with.classes), bool(to.classes)),
            ("tenants", bool(started_with.tenants), bool(to.tenants)),
        ):
            if had != has:
                change = "has become empty" if had else "was empty at the start"
                return f"the cluster file's `{what}` {change}: that takes a restart; the old classes and tenants hold"
        clients = self.parts.clients
        clients.renew(to.classes, to.tenants, to.tenant_keys)
        self.generation.promises = promises_of(to.classes)
        self.parts.scheduler.shares = clients.shares
        self.parts.meters.attainment.retarget(to.classes)
        self._operators.retarget(to.classes)
        logger.info("classes and tenants are those of the edited cluster file from now on")
        return ""

    async def _flush_forever(self, log: LogWriter) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            log.flush()

    def announce(self, endpoint: str, admin_url: str) -> None:
        """Both ports are open: tell other routers and agents."""
        if self.watch is not None:
            self.parts.tasks.keep(partial(self.watch.announce_forever, endpoint, admin_url), "announce")

    def _fleet_told(self, reported: tuple[Reported, ...], routers: int) -> None:
        view, scheduler = self.parts.view, self.parts.scheduler
        view.routers = routers
        if self.watch is not None:
            view.router_number = self.watch.number
            if self.parts.clients.closed:
                scheduler.local_shares = self.watch.local_shares()
        for lost in self.parts.dispatch.fleet.handle(events.Folded(reported), time.monotonic()):
            self.parts.losses.announce(lost.instance)
        self.probing.follow()
        self._look_for_proofs()
        self.parts.dispatch.fleet_changed()

    def _probed(self, instance: InstanceId, *, up: bool) -> None:
        if up:
            self._look_for_proofs()
            self.parts.dispatch.fleet_changed()
        else:
            self.parts.losses.announce(instance)

    def _look_for_proofs(self) -> None:
        if self._prover is not None:
            self._prover.news.set()

    async def close(self) -> None:
        """Stop probing, let pending releases finish for a moment, and close every connection."""
        parts = self.parts
        if self.watch is not None:
            self.watch.stop()
        if self.sharing is not None:
            self.sharing.stop()
        give_up = time.monotonic() + CLOSE_S
        while (ending := parts.tasks.ending()) or parts.open:
            left_s = give_up - time.monotonic()
            if left_s <= 0:
                break
            if ending:
                await asyncio.wait(ending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(min(left_s, 0.02))
        parts.tasks.cancel(RELEASE, GIVE_UP)
        for each in list(parts.open):
            each.stop()
        await parts.tasks.end(TASKS_END_S)
        if self._log_writer is not None:
            self._log_writer.flush()
        await parts.engines.close()
        await self._operators.close()
        if self.watch is not None:
            await self.watch.close()
        if parts.telling.tracing is not None:
            await asyncio.to_thread(parts.telling.tracing.close)


def _parts(config: RouterConfig, log: DecisionLog | None, meters: RouterMetrics, *, trusts: bool) -> Parts:
    """What all requests share. `trusts`: see `Credentials`."""
    view = FleetView(config.makes)
    fleet = fleet_of(log, view)
    policy = POLICIES[config.policy]
    scheduler, scheduling = scheduler_of(
        log, view, policy, admission=bool(config.classes), foresees=policy in FORESEEING
    )
    meters.handoffs_off.guard, meters.early_costs.costs = scheduler.guard, scheduler.legs.early
    meters.flow.base = view.served.base
    clients = Clients(config.classes, config.tenants, config.tenant_keys)
    scheduler.shares = clients.shares
    predictor = _predictor(config, fleet, scheduler)
    for instance in config.instances:
        fleet.handle(events.Added(instance), 0.0)
    credentials = Credentials(clients, config.engine_key, trusts=trusts)
    return Parts(
        limits=RequestLimits(
            answer_bytes_max=config.answer_bytes_max,
            stall_s=config.stall_s,
            client_stall_s=config.client_stall_s,
            seeding=config.seeding,
        ),
        bodies=OpenBodies(config.open_bytes),
        clients=clients,
        engines=Engines(Upstream(), credentials, Tickets(config.ticket_keys)),
        dispatch=Dispatch(view, scheduler, fleet, scheduling),
        predictor=predictor,
        telling=Telling(meters, ExplainStore(config.explain_last), tracing("baton-router")),
        tasks=Tasks(),
    )


def _sharing(
    parts: Parts, watch: Discovery | None, registry: Registry | None, config: RouterConfig
) -> LoadSharing | None:
    """Notes to router peers and from them; None: this router can have no peers, or keeps no predictions to tell."""
    if watch is None or registry is None or parts.scheduler.placements is None:
        return None
    dispatch = parts.dispatch
    return LoadSharing(
        watch.name,
        registry,
        parts.view,
        peers=lambda: watch.peer_names,
        keys=config.ticket_keys,
        handle=lambda event: dispatch.fleet.handle(event, time.monotonic()),
        freed=lambda: dispatch.tell(events.Roomy(), time.monotonic()),
        lost=parts.meters.note_lost,
    )


def _predictor(config: RouterConfig, fleet: Fleet, scheduler: Scheduler) -> RequestPredictor | None:
    """A predictor, if predictions are needed. Routers of a fleet with ticket keys give prompts the same names;
    otherwise each router has names of its own, which no other router reads.
    """
    if scheduler.placements is None:
        return None
    keys = config.ticket_keys
    secret = secrets.token_bytes(KEY_BYTES) if keys is None else keys()[0].secret
    fleet.handle(events.Indexed(), 0.0)
    return RequestPredictor(scheduler.placements.lengths, chunk_key(secret))


def _prover(parts: Parts) -> Prover:
    return Prover(
        parts.view,
        parts.engines,
        fold=parts.dispatch.fleet.handle,
        leg_ended=parts.dispatch.leg_ended,
        counted=lambda result: parts.meters.proofs.labels(result).inc(),
        changed=parts.dispatch.fleet_changed,
    )
