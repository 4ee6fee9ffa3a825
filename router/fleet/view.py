"""The router's view of its fleet, made from probes, heartbeats and its own traffic, and read as a snapshot. Pure.

Probes, discovery, the prover and requests report events; this module keeps the state (`router.fleet.snapshot` is what
policies read).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from cluster.ids import InstanceId
from cluster.instance import Instance, Load
from router.core.journey import Lost
from router.core.values import ProofStanding, Reported
from router.fleet import events as d
from router.fleet.columns import InstanceView
from router.fleet.snapshot import FleetSnapshot
from router.predict.load_updates import LoadUpdates
from router.predict.peer_load import PeerLoad
from router.predict.prefix_cache import PrefixCacheIndex
from router.predict.step_model import Make

MET_MAX: Final = 4096
"""The number of producers remembered for a decode instance: four lives of each of a thousand. A forgotten one is met
again."""

FAILURES_UNTIL_DOWN = 2
"""The number of probes in a row that must fail before an instance is taken out: one lost probe on a busy machine is
noise."""


AWAY_MAX: Final = 4096
"""The models of so many instances are remembered after these have left or started anew; then the oldest are
forgotten."""


class ServedModels:
    """The models of all instances, ready or not. A tenant's are made when they are asked for, once for each change.

    A model is remembered while its last instance is *away*: it has left, or was started anew and has not named its
    models yet. The router answers requests for such a model with 503 instead of 404.
    """

    def __init__(self, fleet: FleetSnapshot) -> None:
        self._fleet: Final = fleet
        self._by_tenant: Final[dict[str, tuple[str, ...]]] = {}
        """By tenant that some instances are reserved for."""
        self._bases: Final[dict[str, str]] = {}
        """By name, the model that it means (`base`); empty: not made yet."""
        self._version = -1
        """The version of the columns for which these two are valid."""
        self._away: Final[dict[InstanceId, tuple[Instance, frozenset[str]]]] = {}
        """By an instance that ended: its former life, and the models that it was the last one to serve."""

    def names(self, tenant: str) -> tuple[str, ...]:
        """Names of all models that instances serve for this tenant, in order, once each."""
        whose = self._fleet.whose(tenant)
        self._refresh()
        found = self._by_tenant.get(whose)
        if found is None:
            serving = (view.models for view in self._fleet if view.instance.serves(whose))
            found = self._by_tenant[whose] = tuple(dict.fromkeys(name for models in serving for name in models))
        return found

    def base(self, name: str) -> str:
        """The model that a name means: an adapter's model, else the name itself. Empty: no instance serves it.

        An adapter's parent is any text that its user has given; else it is the name of the instance's model.
        """
        self._refresh()
        if not self._bases:
            for view in self._fleet:
                models = [str(entry.get("id")) for entry in view.models_json if not entry.get("parent")]
                for each in view.models:
                    self._bases.setdefault(each, each if each in models or not models else models[0])
        return self._bases.get(name, "")

    def _refresh(self) -> None:
        """Drop what was made before the last change."""
        version = self._fleet.columns.version
        if version != self._version:
            self._version = version
            self._by_tenant.clear()
            self._bases.clear()

    def lacks(self, model: str, tenant: str) -> bool:
        """Whether no instance serves this model to this tenant. False as long as no instance has named its models."""
        return model not in self.names(tenant) and any(view.models for view in self._fleet)

    def ends(self, ended: InstanceView) -> None:
        """This life of an instance is about to be removed: remember the models that no other one serves to all of its
        tenants.
        """
        if not ended.models:
            return  # what its former life served is still remembered
        last, tenants = set(ended.models), ended.instance.tenants
        for view in self._fleet:
            others = view.instance.tenants
            if view is not ended and (not others or (tenants and tenants <= others)):
                last.difference_update(view.models)
                if not last:
                    break
        self._away.pop(ended.id, None)
        if last:
            self._away[ended.id] = (ended.instance, frozenset(last))
            if len(self._away) > AWAY_MAX:
                del self._away[next(iter(self._away))]

    def away(self, model: str, tenant: str) -> bool:
        """Whether an instance that is away served this model to this tenant. Once an instance of its name has named its
        models, these count instead.
        """
        for name, (former, models) in self._away.items():
            now = self._fleet.by_id.get(name)
            if model in models and former.serves(tenant) and (now is None or not now.models):
                return True
        return False

    def hides(self, model: str, tenant: str) -> bool:
        """Whether this model does not exist for this tenant: no instance serves it, and none that is away did."""
        return self.lacks(model, tenant) and not self.away(model, tenant)


class FleetView:
    """The fleet, instance by instance, in the order in which they were added. Long, as it is one state machine: a short
    method for each event.
    """

    def __init__(self, makes: Callable[[Instance], Make | None] | None = None) -> None:
        self.makes: Final = makes
        """What is known about instances' speed beforehand."""
        self._fleet: Final = FleetSnapshot(makes)
        self._instances: Final = self._fleet.by_id
        self._met: Final[dict[InstanceId, dict[str, None]]] = {}
        """By decode instance, the producers that it has pulled from, the oldest first."""
        self._aside: Mapping[InstanceId, str] = {}
        self.served: Final = ServedModels(self._fleet)
        """Names of the models that instances serve."""
        self.routers = 1
        """The number of routers that share the fleet, this one included."""
        self.router_number = 0
        """This router's number among them, from 0, in the order of their names."""
        self.peer_load: Final = PeerLoad(self._fleet.inflight, self._fleet.row_of)
        """The requests of router peers."""

    # --- as a machine -------------------------------------------------------------------------------------------------

    def handle(self, event: d.FleetEvent, now: float) -> tuple[d.InstanceLost, ...]:
        """Apply one event; returns the instances that are lost by it. `now` is not used: no fact of the fleet depends
        on it.
        """
        return tuple(map(d.InstanceLost, _FOLD[type(event)](self, event)))

    def next_wakeup(self) -> float | None:
        """Never: a fleet changes by events alone."""
        return None

    # --- event by event -----------------------------------------------------------------------------------------------

    def add(self, instance: Instance) -> None:
        """Add a new instance, or a new incarnation of a known one."""
        known = self._instances.get(instance.id)
        columns = self._fleet.columns
        if known is None:
            self._fleet.put(InstanceView(instance, columns))
        elif replace(known.instance, role=instance.role) == instance:
            if known.instance.role is not instance.role:
                known.turn(instance)  # its legs run on, its cache stays, and its speed is the same
        else:
            self.served.ends(known)
            self._fleet.put(InstanceView(instance, columns, inflight=known.inflight, sent=known.sent))
            self._instances[instance.id].downs = known.downs
            self._forget_handshakes(instance.id)
        if instance.id in self._aside:
            self._instances[instance.id].aside = self._aside[instance.id]

    def set_aside(self, reasons: Mapping[InstanceId, str]) -> None:
        """Operators quarantine these names, and no others: they get no new legs, whichever instance has the name, now
        or later.
        """
        self._aside = dict(reasons)
        for view in self._fleet:
            view.aside = self._aside.get(view.id, "")

    @property
    def distrusted(self) -> Mapping[tuple[InstanceId, InstanceId], str]:
        """Pairs that failed their proof, and how."""
        return self._fleet.pairing.distrusted

    def distrust(self, pairs: Mapping[tuple[InstanceId, InstanceId], str]) -> None:
        """These pairs, and no others, have failed their proof: nothing is handed over between them."""
        self._fleet.pairing.distrust(pairs)

    def proven(self, standing: ProofStanding) -> None:
        """Take which instances are proven to be alike, and which pairs' first tokens differ (`Pairing.circles`)."""
        self._fleet.pairing.circles(standing)

    def not_exact(self, prefill: InstanceId, decode: InstanceId) -> str:
        """Why P's own first token may not stand for D's; empty: it may."""
        fleet = self._fleet
        if not fleet.pairing.proving:
            return ""
        p, d = self._instances.get(prefill), self._instances.get(decode)
        if p is None or d is None or not fleet.pairing.proven(p.row, d.row):
            return "the pair is not proven"
        return fleet.pairing.inexact.get((prefill, decode), "") if fleet.pairing.inexact else ""

    def adapter(self, instance: InstanceId, model: str | None) -> str | None:
        """The digest of the LoRA adapter that this name means on an instance (`InstanceView.adapter`); None also if the
        instance has left.
        """
        view = self._instances.get(instance)
        return None if view is None else view.adapter(model)

    def fold(self, reported: tuple[Reported, ...]) -> frozenset[InstanceId]:
        """Take the reports of the whole fleet; an instance without a report has left.

        Returns the instances on which this router's legs can no longer end well: gone, or restarted.
        """
        here = {each.instance.id for each in reported}
        lost = {name for name in self._instances if name not in here}
        for each in reported:
            known = self._instances.get(each.instance.id)
            if known is not None and replace(known.instance, role=each.instance.role) != each.instance:
                lost.add(each.instance.id)
            self._heard(each)
        for gone in sorted(lost - here):  # sorted, so that rows are freed and reused in the same order in every run
            view = self._instances[gone]
            view.accepting = False
            view.state = "gone"
            self._forget_handshakes(gone)
            if view.inflight == 0:
                self._remove(view)
        return frozenset(lost)

    def _heard(self, each: Reported) -> None:
        """Take one instance's report."""
        self.add(each.instance)
        view = self._instances[each.instance.id]
        if each.state != view.state and each.accepting:
            view.up, view.failures = True, 0  # its agent has just seen the engine answer
        if view.state != each.state or view.accepting != each.accepting:
            view.state, view.accepting = each.state, each.accepting
        if view.credits != each.credits:
            view.credits = each.credits
        if view.grant != each.grant:
            view.grant = each.grant
        if view.shuns != each.shuns:
            self._fleet.shuns(view, each.shuns)
        self._fleet.peers(view, each.peers)
        view.load = each.load
        self._fleet.holds(view, each.load.kv_tokens)
        self._fleet.keeps(view, each)
        if view.evicted != each.evicted:
            self._fleet.evicted(view, each.evicted)
        view.learn_models(each.models)
        view.adapters = each.adapters

    def all(self) -> FleetSnapshot:
        """Every instance."""
        return self._fleet

    def get(self, instance: InstanceId) -> InstanceView:
        """One instance.

        Raises:
            KeyError: the instance was never added, or has left.
        """
        return self._instances[instance]

    def knows(self, instance: InstanceId) -> bool:
        """Whether the instance is present."""
        return instance in self._instances

    def lost(self, instance: InstanceId) -> bool:
        """Whether the instance has left, or is down: nothing can be read from there."""
        view = self._instances.get(instance)
        return view is None or not view.up or view.state == "gone"

    def seen(self, instance: InstanceId, models: tuple[dict[str, object], ...] | None, load: Load | None) -> None:
        """A probe succeeded; its results replace the former ones."""
        view = self._instances[instance]
        view.failures = 0
        view.up = True
        if models is not None:
            view.learn_models(models)
        if load is not None:
            view.load = load
            self._fleet.holds(view, load.kv_tokens)

    def probe_failed(self, instance: InstanceId) -> bool:
        """A probe failed; returns whether the instance went down by it."""
        view = self._instances[instance]
        view.failures += 1
        return view.failures >= FAILURES_UNTIL_DOWN and self._down(view)

    def unreachable(self, instance: InstanceId) -> tuple[InstanceId, ...]:
        """A leg could not connect: take the instance out at once, until a probe succeeds, and the other ranks behind
        the same port with it. Returns those that went down by it.
        """
        down = []
        for name in self._fleet.beside(instance):
            view = self._instances[name]
            view.failures = max(view.failures, FAILURES_UNTIL_DOWN)
            if self._down(view):
                down.append(name)
        return tuple(down)

    def _down(self, view: InstanceView) -> bool:
        was_up, view.up = view.up, False
        view.downs += was_up
        if not view.instance.epoch:
            self._fleet.begins_anew(view)  # it may be another engine
        self._forget_handshakes(view.id)
        return was_up

    def _forget_handshakes(self, decode: InstanceId) -> None:
        self._met.pop(decode, None)  # a new engine has met no producer

    def pair_met(self, producer: str, decode: InstanceId) -> None:
        """A decode instance has pulled from a producer (named by its engine id, which is new at every start)."""
        met = self._met.setdefault(decode, {})
        met[producer] = None
        if len(met) > MET_MAX:  # restarted producers are never named again
            del met[next(iter(met))]

    def pair_warm(self, producer: str, decode: InstanceId) -> bool:
        """Whether this decode instance has pulled from this producer before, so that they need no handshake."""
        return producer in self._met.get(decode, ())

    def leg_started(self, instance: InstanceId) -> None:
        """A leg of this router goes to the instance."""
        view = self._instances[instance]
        view.inflight += 1
        view.sent += 1

    def leg_ended(self, instance: InstanceId) -> None:
        """The leg is over, however it ended."""
        view = self._instances[instance]
        assert view.inflight > 0, f"{instance}: a leg ended that never started"
        view.inflight -= 1
        if view.inflight == 0 and view.state == "gone":
            self._remove(view)

    def _remove(self, view: InstanceView) -> None:
        self.served.ends(view)
        self._fleet.remove(view.id)

    def cached(self, told: d.Cached) -> None:
        """An engine has reported with its answer how much of a prompt was in its prefix cache."""
        prefixes = self._fleet.prefixes
        if prefixes is not None:
            prefixes.reported(told.sent, told.each, told.tokens)

    def source_said(self, said: d.SourceSaid) -> None:
        """An instance has said how much of a prompt is in its KV cache."""
        prefixes, view = self._fleet.prefixes, self._fleet.by_id.get(said.source)
        if prefixes is not None and view is not None:
            prefixes.told(view.row, said.chunks, said.each, said.tokens, said.now)

    def tell_peers(self, router: str, *, shares_names: bool) -> LoadUpdates:
        """Collect what router peers are to know of this router's requests, from now on. `router`: its name."""
        updates = self._fleet.inflight.updates = LoadUpdates(router, self._fleet.name_of, shares_names=shares_names)
        return updates

    def load_noted(self, noted: d.LoadNoted) -> None:
        """Book what a router peer tells. If notes of a peer are missing, this router asks it for all bookings."""
        self.peer_load.hear(noted.note, noted.now, self._fleet.prefixes)
        updates = self._fleet.inflight.updates
        if updates is None:
            return
        for router in self.peer_load.to_ask(noted.now):
            updates.want(router)
        if updates.router in noted.note.wants:
            updates.tell_all()

    def index(self) -> None:
        """Keep the prefix-cache index from now on."""
        self._fleet.prefixes = PrefixCacheIndex()


def speaks_for(view: FleetView, holder: InstanceId, *not_: InstanceId) -> InstanceId | None:
    """Another instance that can tell `holder` to free a hold: a D if there is one, else a P. None: no ready one."""
    others = [seen for seen in view.all() if seen.ready and seen.id not in {holder, *not_}]
    found = max(others, key=lambda seen: seen.role.decodes, default=None)
    return None if found is None else found.id


def can_pin(view: FleetView, decode: InstanceId | None) -> bool:
    """Whether D's engine can be told which token its answer begins with. None: no D is chosen."""
    return decode is not None and view.knows(decode) and view.get(decode).instance.pins


def turned_away(view: FleetView, instance: InstanceId, holder: InstanceId | None = None) -> Lost | None:
    """The loss that an answering leg gets if its instance takes no more legs, or must not use the blocks that the leg
    pulls; None: send the leg. `holder`: the instance that has these blocks; None: the leg pulls none.
    """
    if not view.knows(instance) or not view.get(instance).ready:
        return Lost("it went away while the prompt was prefilled", untouched=True)  # draining, or down
    if holder is None or not view.knows(holder):
        return None
    pairing, p, d = view.all().pairing, view.get(holder), view.get(instance)
    if p is d:
        return None
    # The two were a pair when they were chosen. Another life under one of their names may have other weights.
    if pairing.strangers(p.row, d.row) or not pairing.proven(p.row, d.row):
        return Lost(f"it, or {holder}, was started anew while the prompt was prefilled", untouched=True)
    if (holder, instance) in pairing.distrusted:
        return Lost(f"its proof with {holder} failed while the prompt was prefilled", untouched=True)
    return None


_NONE: Final[tuple[InstanceId, ...]] = ()


def _add(view: FleetView, event: Any) -> Iterable[InstanceId]:
    view.add(event.instance)
    return _NONE


def _fold(view: FleetView, event: Any) -> Iterable[InstanceId]:
    return sorted(view.fold(event.reported))


def _seen(view: FleetView, event: Any) -> Iterable[InstanceId]:
    view.seen(event.instance, event.models, event.load)
    return _NONE


def _probe_failed(view: FleetView, event: Any) -> Iterable[InstanceId]:
    return (event.instance,) if view.probe_failed(event.instance) else _NONE


def _unreachable(view: FleetView, event: Any) -> Iterable[InstanceId]:
    return view.unreachable(event.instance)


def _set_aside(view: FleetView, event: Any) -> Iterable[InstanceId]:
    view.set_aside(event.reasons)
    return _NONE


def _distrust(view: FleetView, event: Any) -> Iterable[InstanceId]:
    view.distrust({(prefill, decode): because for prefill, decode, because in event.pairs})
    return _NONE


def _proven(view: FleetView, event: Any) -> Iterable[InstanceId]:
    inexact = {(prefill, decode): because for prefill, decode, because in event.inexact}
    doubts = {(prefill, decode): because for prefill, decode, because in event.doubts}
    view.proven(ProofStanding(event.gives, event.takes, inexact, doubts, dict(event.merged)))
    return _NONE


def _leg_started(view: FleetView, event: Any) -> Iterable[InstanceId]:
    view.leg_started(event.instance)
    return _NONE


def _index(view: FleetView, _: Any) -> Iterable[InstanceId]:
    view.index()
    return _NONE


def _cached(view: FleetView, event: Any) -> Iterable[InstanceId]:
    view.cached(event)
    return _NONE


def _sourced(view: FleetView, event: Any) -> Iterable[InstanceId]:
    view.all().inflight.source_delay.took(event.late_ms, event.now)
    return _NONE


def _source_said(view: FleetView, event: Any) -> Iterable[InstanceId]:
    view.source_said(event)
    return _NONE


def _load_noted(view: FleetView, event: Any) -> Iterable[InstanceId]:
    view.load_noted(event)
    return _NONE


def _peer_lost(view: FleetView, event: Any) -> Iterable[InstanceId]:
    view.peer_load.lost(event.router, event.now)
    return _NONE


_FOLD: Final[Mapping[type, Callable[[FleetView, Any], Iterable[InstanceId]]]] = {
    d.Added: _add,
    d.Folded: _fold,
    d.ProbeSucceeded: _seen,
    d.ProbeFailed: _probe_failed,
    d.Unreachable: _unreachable,
    d.SetAside: _set_aside,
    d.Distrusted: _distrust,
    d.Proven: _proven,
    d.LegStarted: _leg_started,
    d.Indexed: _index,
    d.Cached: _cached,
    d.Sourced: _sourced,
    d.SourceSaid: _source_said,
    d.LoadNoted: _load_noted,
    d.RouterPeerLost: _peer_lost,
}
"""The handler of each event; it returns the instances that are lost by the event."""
