"""The fleet as policies read it: every instance, the same as columns, and which of them may hand over to which. Pure.

The compared values stand in columns (`router.fleet.columns`), so that a choice among a thousand instances takes
microseconds. `router.fleet.view` writes the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, overload

import numpy as np

from cluster.ids import RANK_MARK, InstanceId, engine_of
from cluster.instance import Instance, Role
from router.core.arrays import Ints
from router.core.values import ProofStanding
from router.fleet.columns import Columns, InstanceView
from router.predict.inflight_load import InflightLoad
from router.predict.prefix_cache import Match, PrefixCacheIndex
from router.predict.prefix_uses import PrefixUses
from router.predict.step_model import TIER_GB_S, Make

if TYPE_CHECKING:
    from router.core.values import Reported, Wanted

SOURCES_MAX: Final = 4
"""At most this many instances are compared as sources of a prompt's beginning: those that hold the most of it."""


class ReadyRows(NamedTuple):
    """Rows of the columns that may be chosen, by their roles. Rows of role both are in `prefills` and in `decodes`."""

    any: Ints
    prefills: Ints
    decodes: Ints
    of: dict[Role, Ints]
    alike: bool = True
    """Whether each prefill row may hand over to each decode row, as far as weights, proofs and adapters go."""
    adapters: Ints | None = None
    """By row, the number of the LoRA adapter that the model's name means there; -1: an unknown one; 0: none. None: the
    name is an adapter on no row."""
    context: int | None = None
    """The longest context of these rows for the model's name, in tokens (`InstanceView.context`); None: none reports
    one."""


_UNKNOWN: Final = -1
_NO_NAME: Final = -2


class Pairing:
    """Which instances may hand over to which: what their weights, proofs and adapters say, and which producers a
    consumer sets aside.
    """

    def __init__(
        self, columns: Columns, by_id: Mapping[InstanceId, InstanceView], by_row: Mapping[int, InstanceView]
    ) -> None:
        """`by_id`, `by_row`: the instances; `FleetSnapshot` adds and removes them."""
        self._columns: Final = columns
        self._by_id: Final = by_id
        self._by_row: Final = by_row
        self.shunning: Final[dict[int, frozenset[InstanceId]]] = {}
        """By row of a decode instance, the producers that must not hand over to it: those that it sets aside, and those
        that failed their proof with it. Mostly empty."""
        self.distrusted: Mapping[tuple[InstanceId, InstanceId], str] = {}
        """Pairs of prefill and decode instances that failed their proof (`router.fleet.pair_proofs`), and how."""
        self.proving = False
        """Whether only proven pairs hand over."""
        self.inexact: Mapping[tuple[InstanceId, InstanceId], str] = {}
        """Pairs that hand over and whose first tokens differ, or cannot be compared, and why."""
        self.doubts: Mapping[tuple[InstanceId, InstanceId], str] = {}
        """Pairs that could not be tried, and why."""
        self._merged: Mapping[int, int] = {}
        """By former number of a circle, its number now, where it has become part of another one."""
        self._weights: tuple[int, ...] = ()
        """Numbers of all weights that instances report to serve."""

    def look(self) -> None:
        """Read again which weights the instances report: some have come, left, or changed."""
        named = {self._columns.weights.item(row) for row in self._by_row} - {0}
        self._weights = tuple(sorted(named))

    def left(self, row: int) -> None:
        """The instance of this row has left: forget which producers it sets aside."""
        self.shunning.pop(row, None)

    def part(self, view: InstanceView) -> None:
        """Note the producers that must not hand over to this instance: those that it sets aside for now, and those that
        failed their proof with it.
        """
        apart = frozenset(view.shuns) | {prefill for prefill, decode in self.distrusted if decode == view.id}
        if apart:
            self.shunning[view.row] = apart
        else:
            self.shunning.pop(view.row, None)

    def distrust(self, pairs: Mapping[tuple[InstanceId, InstanceId], str]) -> None:
        """These pairs, and no others, have failed their proof."""
        former, self.distrusted = self.distrusted, dict(pairs)
        for _, decode in {*former, *pairs}:
            if decode in self._by_id:
                self.part(self._by_id[decode])

    def circles(self, standing: ProofStanding) -> None:
        """Take the proven circles (`router.fleet.pair_proofs`): each instance's circle number, as producer and as
        consumer. From now on only proven pairs hand over.
        """
        columns = self._columns
        for view in self._by_id.values():
            columns.gives[view.row] = standing.gives.get(view.id, 0)
            columns.takes[view.row] = standing.takes.get(view.id, 0)
        self.proving, self.inexact, self.doubts = True, dict(standing.inexact), dict(standing.doubts)
        self._merged = dict(standing.merged)
        columns.changed()

    def unproven(self, view: InstanceView) -> None:
        """Drop the instance's proofs: they were about another life."""
        if self._columns.gives[view.row] or self._columns.takes[view.row]:
            self._columns.gives[view.row] = self._columns.takes[view.row] = 0
            self._columns.changed()

    def parted_pairs(self) -> set[tuple[InstanceId, InstanceId]]:
        """Producers and consumers between which nothing is handed over now. Instances that are set aside only as
        sources of prompts' beginnings are not among them.
        """
        found = set()
        for row, producers in self.shunning.items():
            here = self._by_row[row]
            for producer in producers if here.role.decodes else ():
                there = self._by_id.get(producer)
                if there is None or there.role.prefills:
                    found.add((producer, here.id))
        return found

    @property
    def parted(self) -> bool:
        """Whether any row has producers that must not hand over to it (`shunning`)."""
        return bool(self.shunning)

    def apart(self, prefill: int, decode: int) -> bool:
        """Whether these rows must not hand over: their weights differ, the consumer sets the producer aside, or a proof
        is needed and missing.
        """
        return self.shunned(prefill, decode) or self.strangers(prefill, decode) or not self.proven(prefill, decode)

    def shunned(self, prefill: int, decode: int) -> bool:
        """Whether the decode row's instance takes nothing from this producer for now."""
        return decode in self.shunning and self._by_row[prefill].id in self.shunning[decode]

    def strangers(self, prefill: int, decode: int) -> bool:
        """Whether these rows are known to serve different weights."""
        weights = self._columns.weights.item(prefill)
        return weights != 0 and self._columns.weights.item(decode) not in (weights, 0)

    def proven(self, prefill: int, decode: int) -> bool:
        """Whether these rows are proven to hand over, if proofs are needed."""
        if not self.proving:
            return True
        circle: int = self._columns.gives.item(prefill)
        return circle != 0 and circle == self._columns.takes.item(decode)

    def pairs(self, prefill: InstanceId, decode: InstanceId, model: str | None) -> bool:
        """Whether a producer's blocks for this model are good for that consumer."""
        p, d = self._by_id.get(prefill), self._by_id.get(decode)
        if p is None or d is None or self.apart(p.row, d.row):
            return False
        return p.meaning(model) == d.meaning(model)

    def circle(self, instance: InstanceId) -> int:
        """The circle that an instance is proven to belong to; 0: none, or no proof is needed."""
        view = self._by_id.get(instance)
        if view is None or not self.proving:
            return 0
        columns = self._columns
        found: int = columns.takes.item(view.row) or columns.gives.item(view.row)
        return found

    def circles_of(self, row: int) -> dict[str, int]:
        """The row's circle numbers, as producer (`gives`) and as consumer (`takes`); 0: not proven. Empty: no proof is
        needed.
        """
        columns = self._columns
        return {"gives": columns.gives.item(row), "takes": columns.takes.item(row)} if self.proving else {}

    def continues(self, row: int, wanted: Wanted) -> bool:
        """Whether this row may continue what the client already has: by the same weights or by proof."""
        columns, view = self._columns, self._by_row[row]
        if wanted.meaning and view.meaning(wanted.model) != wanted.meaning:
            return False
        own, its = columns.number(wanted.weights), columns.weights.item(row)
        if not self.proving or (own and own == its):
            return its in (0, own) or own == 0
        circle = self._merged.get(wanted.circle, wanted.circle)
        return circle != 0 and circle in (columns.takes.item(row), columns.gives.item(row))

    def alike(self, found: ReadyRows) -> bool:
        """Whether `kinships` would find one kind that contains every instance."""
        columns, adapters = self._columns, found.adapters
        if len(self._weights) > 1:
            return False
        if self.proving:
            circles = {*columns.gives[found.prefills].tolist(), *columns.takes[found.decodes].tolist()}
            if len(circles) > 1 or 0 in circles:
                return False
        return adapters is None or (len({*adapters[found.any].tolist()}) < 2 and int(adapters[found.any].min()) >= 0)

    def kinships(self, found: ReadyRows) -> list[tuple[Ints, Ints]]:
        """Prefill rows and decode rows of each kind: one proven circle, the same weights and the same adapter. While a
        model is being replaced there are two kinds. Instances with unknown weights belong to every kind.
        """
        kinds = [(found.prefills, found.decodes)]
        if found.alike:
            return kinds
        columns, adapters = self._columns, found.adapters
        if len(self._weights) > 1:
            kinds = _split(kinds, columns.weights, columns.weights, self._weights, others=0)
        if self.proving:
            circles = np.unique(columns.gives[found.prefills]).tolist()
            kinds = _split(kinds, columns.gives, columns.takes, [each for each in circles if each])
        if adapters is not None:
            names = np.unique(adapters[found.prefills]).tolist()
            kinds = _split(kinds, adapters, adapters, [each for each in names if each != _UNKNOWN])
        return kinds

    def because_aggregated(self, found: ReadyRows) -> str:
        """Why these rows hand nothing over; empty: they may, as far as `kinships` goes."""
        if found.alike or any(len(p) and len(d) for p, d in self.kinships(found)):
            return ""
        adapters = found.adapters
        if adapters is not None and int(adapters[found.any].min()) == _UNKNOWN:
            return "it is not known which adapter this name is on every instance (their agents would tell)"
        if adapters is not None and len({*adapters[found.any].tolist()}) > 1:
            return "this name is not one adapter everywhere"
        names = {self._by_row[row].id for row in found.any.tolist()}
        if not self.proving:
            return "their weights differ"
        told = [*self.distrusted.items(), *((pair, f"not proven yet: {why}") for pair, why in self.doubts.items())]
        because = next((because for pair, because in told if names.issuperset(pair)), "")
        return because or "no pair of instances is proven to hand over yet"


class FleetSnapshot(Sequence[InstanceView]):
    """Every instance, in the order in which they were added, and the same as columns. Policies read this."""

    def __init__(self, makes: Callable[[Instance], Make | None] | None = None) -> None:
        self.columns: Final = Columns()
        self.inflight: Final = InflightLoad()
        self.inflight.reach(len(self.columns.ready))
        self.prefixes: PrefixCacheIndex | None = None
        """The prefix-cache index: which instance holds which beginning of a prompt; None if it is not kept."""
        self.prefix_uses: Final = PrefixUses()
        """How often beginnings of prompts are shared."""
        self._makes: Final = makes
        self.by_id: Final[dict[InstanceId, InstanceView]] = {}
        self.row_of: Final[dict[str, int]] = {}
        """The row of each instance, by name."""
        self.sharing = 0
        """The rows whose engines share prompts' beginnings with others, as bits."""
        self._rows: Final[dict[int, InstanceView]] = {}
        self.pairing: Final = Pairing(self.columns, self.by_id, self._rows)
        self._ready: dict[tuple[str | None, str | None], ReadyRows] = {}
        self._version = -1
        self._ranked = False
        self._tenants: frozenset[str] = frozenset()
        """All tenants that some instances are reserved for."""

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[InstanceView]:
        return iter(self.by_id.values())

    @overload
    def __getitem__(self, at: int) -> InstanceView: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[InstanceView, ...]: ...
    def __getitem__(self, at: int | slice) -> InstanceView | tuple[InstanceView, ...]:
        return tuple(self.by_id.values())[at]

    def beside(self, instance: InstanceId) -> tuple[InstanceId, ...]:
        """The instance, if it is known, and the other ranks of its engine: all behind one port."""
        if RANK_MARK not in instance:
            return (instance,) if instance in self.by_id else ()
        engine = engine_of(instance)
        return tuple(name for name in self.by_id if engine_of(name) == engine)

    def at(self, row: int) -> InstanceView:
        """The instance of a row."""
        return self._rows[row]

    def name_of(self, row: int, life: int) -> str:
        """The instance that a row had in this life (`RowLoad.life`); empty: it has left."""
        return self._rows[row].id if row in self._rows and self.inflight.rows[row].life == life else ""

    def ready_for(self, wanted: Wanted) -> ReadyRows:
        """The rows that are ready for such a request."""
        return self.ready(wanted.model, wanted.tenant)

    def ready(self, model: str | None, tenant: str | None = None) -> ReadyRows:
        """The rows that are ready and serve this model (None: any) and this tenant (None: any), ascending. Cached until
        the set of instances that may be chosen changes; an empty result is not cached.
        """
        self._refresh()
        if tenant is not None:
            tenant = self.whose(tenant) if self._tenants else None
        found = self._ready.get((model, tenant))
        if found is None:
            columns = self.columns
            able = [view for view in self if view.ready and view.instance.serves(tenant)]
            rows = [view.row for view in able if model is None or model in view.models]
            some = np.array(sorted(rows), dtype=np.int64)
            prefills, decodes = some[columns.prefills[some]], some[columns.decodes[some]]
            of = {role: some[[self._rows[row].role is role for row in some.tolist()]] for role in Role} if rows else {}
            adapters = self._adapters_of(able, model)
            told = [view.context(model or "") for view in able if model is None or model in view.models]
            context = max([length for length in told if length is not None], default=None)
            found = ReadyRows(some, prefills, decodes, of, adapters=adapters, context=context)
            found = found._replace(alike=self.pairing.alike(found))
            if rows:  # do not cache names that no instance serves: clients may send as many as they like
                self._ready[model, tenant] = found
        return found

    def _adapters_of(self, views: list[InstanceView], model: str | None) -> Ints | None:
        """`ReadyRows.adapters` for this name."""
        told = [(view.row, view.adapter(model)) for view in views if model is not None and model in view.models]
        if all(digest is None for _, digest in told):
            return None
        found = np.zeros(len(self.columns.ready), dtype=np.int64)
        for row, digest in told:
            found[row] = 0 if digest is None else self.columns.number(f"adapter {digest}") if digest else _UNKNOWN
        return found

    def whose(self, tenant: str) -> str:
        """The tenant, if some instances are reserved for it; all others count as the tenant without a name."""
        self._refresh()
        return tenant if tenant in self._tenants else ""

    def _refresh(self) -> None:
        """Drop what was derived before the last change of the set that may be chosen."""
        if self._version == self.columns.version:
            return
        self._ready.clear()
        self._version = self.columns.version
        self.pairing.look()
        self._tenants = frozenset().union(*(view.instance.tenants for view in self))
        if not self._ranked:
            self._ranked = True
            for rank, name in enumerate(sorted(self.by_id)):
                self.columns.order[self.by_id[name].row] = rank
            self.inflight.step_model.look(np.array([view.row for view in self], dtype=np.int64))

    def put(self, view: InstanceView) -> None:
        """Add a new instance, or another incarnation in its old place."""
        former = self.by_id.get(view.id)
        if former is not None:
            self._forget(former)
        self.by_id[view.id] = view
        self.row_of[view.id] = view.row
        self._rows[view.row] = view
        self._ranked = False
        inflight = self.inflight
        inflight.reach(len(self.columns.ready))
        inflight.know(view.row, None if self._makes is None else self._makes(view.instance))
        if self.prefixes is not None:
            self.prefixes.join(view.row, int(inflight.step_model.rows[view.row].capacity), view.life)
        self.pairing.part(view)

    def begins_anew(self, view: InstanceView) -> None:
        """The instance's lives have no numbers, and it went down: once it is up again, its KV cache is empty."""
        self.pairing.unproven(view)
        if self.prefixes is not None:
            self.prefixes.join(view.row, int(self.inflight.step_model.rows[view.row].capacity), view.life)

    def holds(self, view: InstanceView, kv_tokens: int) -> None:
        """The instance's engine has reported the size of its KV cache in tokens; 0: it does not report it."""
        if kv_tokens <= 0 or self.inflight.step_model.rows[view.row].capacity == kv_tokens:
            return
        self.inflight.holds(view.row, kv_tokens)
        if self.prefixes is not None:
            self.prefixes.join(view.row, kv_tokens, view.life)

    def keeps(self, view: InstanceView, told: Reported) -> None:
        """The instance has reported how many tokens each tier below its KV cache has now, and how fast it loads from
        them. A token that is found there saves most of its prefill time, not all.
        """
        kept = told.kept
        if not kept:
            return
        speed = self.inflight.step_model.rows[view.row]
        speed.tiers = {name: told.kept_gb_s.get(name, 0.0) for name in TIER_GB_S if name in kept}
        speed.token_bytes = told.kv_token_bytes
        if self.prefixes is not None:
            tiers = [(kept[name], speed.tier_worth(name)) for name in TIER_GB_S if kept.get(name)]
            self.prefixes.keeps(view.row, tiers)

    def evicted(self, view: InstanceView, now: tuple[int, int]) -> None:
        """The instance's agent has reported how much its engine has evicted. The first report is only a
        starting point.
        """
        former, view.evicted = view.evicted, now
        if former is None or self.prefixes is None:
            return
        if now[1] > former[1]:
            self.prefixes.cleared(view.row)
        if now[0] > former[0]:
            self.prefixes.removed(view.row, now[0] - former[0])

    def shuns(self, view: InstanceView, producers: tuple[InstanceId, ...]) -> None:
        """The instance's agent has reported the producers that its engine pulls nothing from for now."""
        view.shuns = producers
        self.pairing.part(view)

    def peers(self, view: InstanceView, takes_part: bool) -> None:  # noqa: FBT001
        """The instance's agent has reported whether its engine shares prompts' beginnings with others."""
        bit = 1 << view.row
        self.sharing = self.sharing | bit if takes_part else self.sharing & ~bit

    def sources(self, match: Match, wanted: Wanted) -> list[tuple[int, int, float]]:
        """At most `SOURCES_MAX` rows that share, have free places for legs, and hold a beginning of the prompt, the
        most chunks first. Each as the number of chunks that it holds, the row, and the time to load those that are in a
        tier below its KV cache, in times to compute a chunk.
        """
        found: list[tuple[int, int, float]] = []
        columns = self.columns
        for chunks, bits in match.levels:
            left = bits & self.sharing
            while left and len(found) < SOURCES_MAX:
                row = (left & -left).bit_length() - 1
                left &= left - 1
                limit = columns.limits(wanted.routers).item(row)
                # Two places must be free: the source may be the decode instance of the pair, too.
                if columns.inflight.item(row) + 1 < limit and self._rows[row].id not in wanted.excluded:
                    held, loads = chunks, 0.0
                    if self.prefixes is not None:
                        held, loads = self.prefixes.held_by(row, wanted.prefix, chunks)
                    found.append((held, row, loads))
        return sorted(found, reverse=True)

    def shares(self, source: int, row: int, wanted: Wanted) -> bool:
        """Whether a row can pull a prompt's beginning from another row's KV cache now. Both must share, with equal
        weights, one meaning of the model's name and, where proofs are needed, one proven circle. The source must be
        ready and serve the tenant, and the row must not set it aside.
        """
        if source == row or not self.sharing >> source & self.sharing >> row & 1:
            return False
        columns, pairing, there, here = self.columns, self.pairing, self._rows[source], self._rows[row]
        if not there.instance.serves(wanted.whose) or not there.ready:
            return False
        if pairing.shunned(source, row):
            return False
        if pairing.strangers(source, row) or there.meaning(wanted.model) != here.meaning(wanted.model):
            return False
        if not pairing.proving:
            return True
        circles = {columns.gives.item(source), columns.takes.item(source)} - {0}
        return columns.gives.item(row) in circles or columns.takes.item(row) in circles

    def unproven_pairs(self, most: int) -> set[tuple[InstanceId, InstanceId]]:
        """Pairs of ready instances that lack only the proof to hand over: at most `most`."""
        found: set[tuple[InstanceId, InstanceId]] = set()
        models = {view.models[0] for view in self if view.ready and view.models} if self.pairing.proving else set()
        for ready in (self.ready(model) for model in sorted(models)):
            for prefill in ready.prefills.tolist() if not ready.alike else ():
                for decode in ready.decodes.tolist():
                    if prefill != decode and not self.pairing.proven(prefill, decode):
                        found.add((self.at(prefill).id, self.at(decode).id))
                        if len(found) >= most:
                            return found
        return found

    def near(self, prefill: int, decode: int) -> bool:
        """Whether both rows are known to be on one machine."""
        node = self.columns.node.item(prefill)
        return node != 0 and node == self.columns.node.item(decode)

    def remove(self, instance: InstanceId) -> None:
        """The instance has left."""
        self._forget(self.by_id.pop(instance))
        del self.row_of[instance]
        self._ranked = False

    def _forget(self, view: InstanceView) -> None:
        del self._rows[view.row]
        self.pairing.left(view.row)
        self.sharing &= ~(1 << view.row)
        if self.prefixes is not None:
            self.prefixes.leave(view.row)
        view.forget()


def _split(
    kinds: list[tuple[Ints, Ints]], firsts: Ints, seconds: Ints, names: Sequence[int], others: int = _NO_NAME
) -> list[tuple[Ints, Ints]]:
    """Split each kind by the names of its prefill (`firsts`) and decode instances (`seconds`); instances with the name
    `others` belong to each.
    """
    found = []
    for prefills, decodes in kinds:
        p, d = firsts[prefills], seconds[decodes]
        for name in names:
            one, other = prefills[(p == name) | (p == others)], decodes[(d == name) | (d == others)]
            if len(one) and len(other):
                found.append((one, other))
    return found
