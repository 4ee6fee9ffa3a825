"""Instances as the router sees them, and the values of them that policies compare, in numpy columns that are updated in
place. Pure.

One row per instance; a row that is free has `ready` false. Python loops over a thousand instances would cost each
choice a millisecond, a column a few microseconds. `InstanceView` writes its row, policies read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from router.core.arrays import Bools, Floats, Ints, grow

NO_LIMIT: Final = 1 << 62
"""The credits of an instance without an agent, which has no limit."""

NO_GRANT: Final = -1
"""The grant of an instance whose agent does not grant credits to routers by name."""

_FIRST_ROWS = 16

_NO_LOAD: Final = Load()


_WAITING_BITS = 32
_WAITING_MAX = (1 << _WAITING_BITS) - 1


class Columns:
    """The rows, with one attribute for each value that policies compare: so there are many.

    `version` counts changes of the set of instances that may be chosen; changes of load and legs do not count.
    """

    inflight: Ints
    """This router's legs that run at the instance."""
    busy: Ints
    """`inflight` with `waiting` as tie-break, in one number, to save a second comparison."""
    sent: Ints
    """All legs ever sent to the instance (`InstanceView.sent`)."""
    running: Ints
    waiting: Ints
    kv_usage: Floats
    """`running`, `waiting`, `kv_usage`: the load that the engine reports (`cluster.instance.Load`)."""
    credits: Ints
    """Legs that all routers together may have at the instance; `NO_LIMIT` if unknown."""
    grants: Ints
    """Legs of those credits that the instance's agent has granted to this router; `NO_GRANT` if it grants none
    by name."""
    order: Ints
    """Rank of the instance's id among all ids: the last tie-break."""
    weights: Ints
    """Number of the weights that the instance serves (`number`); 0: unknown."""
    node: Ints
    """Number of the machine that the instance is on (`number`); 0: unknown."""
    gives: Ints
    """Number of the circle in which the instance is proven as a producer; 0: none."""
    takes: Ints
    """Number of the circle in which it is proven as a consumer (`router.fleet.pair_proofs`); 0: none."""
    pins: Bools
    """Whether its engine can be told its first token (`cluster.instance.Instance.pins`)."""
    ready: Bools
    prefills: Bools
    decodes: Bools
    """Whether new legs may be sent to the instance (`ready`), and whether its role runs prefill and decode legs."""

    _KINDS: Final = {
        "inflight": np.int64,
        "busy": np.int64,
        "sent": np.int64,
        "running": np.int64,
        "waiting": np.int64,
        "kv_usage": np.float64,
        "credits": np.int64,
        "grants": np.int64,
        "order": np.int64,
        "weights": np.int64,
        "node": np.int64,
        "gives": np.int64,
        "takes": np.int64,
        "pins": np.bool_,
        "ready": np.bool_,
        "prefills": np.bool_,
        "decodes": np.bool_,
    }

    def __init__(self) -> None:
        for name, kind in self._KINDS.items():
            setattr(self, name, np.zeros(_FIRST_ROWS, dtype=kind))
        self.version = 0
        self.top = 0
        """Rows from here on were never used: returned rows are reused first."""
        self._free = list(range(_FIRST_ROWS - 1, -1, -1))
        self._limits: dict[int, Ints] = {}
        self._numbers: Final[dict[str, int]] = {"": 0}

    def number(self, name: str) -> int:
        """The number of a name; numbers are compared for equality only. 0: no name."""
        return self._numbers.setdefault(name, len(self._numbers))

    def take(self) -> int:
        """A free row, all zero."""
        if not self._free:
            rows = len(self.ready)
            grow(self, self._KINDS, 2 * rows)
            self._free = list(range(2 * rows - 1, rows - 1, -1))
            self._limits.clear()
        row = self._free.pop()
        self.top = max(self.top, row + 1)
        return row

    def give_back(self, row: int) -> None:
        """The instance is removed: free its row."""
        for name in self._KINDS:
            getattr(self, name)[row] = 0
        self._free.append(row)
        self.changed()

    def changed(self) -> None:
        """The set of instances that may be chosen has changed: drop what was derived from it."""
        self.version += 1

    def least_sent(self, role: Role, alone: int = 0) -> int:
        """The fewest legs that a ready instance of this role was ever sent. `alone`: the result if there is none."""
        alike = self.ready & (self.prefills == role.prefills) & (self.decodes == role.decodes)
        return int(self.sent[alike].min()) if alike.any() else alone

    def set_inflight(self, row: int, legs: int) -> None:
        """Set the legs in flight, and `busy`, which is derived from them."""
        self.inflight[row] = legs
        self.busy[row] = legs << _WAITING_BITS | int(self.waiting[row])

    def set_load(self, row: int, load: Load) -> None:
        """Set the load that the engine reports."""
        waiting = min(max(load.waiting, 0), _WAITING_MAX)
        self.running[row], self.waiting[row], self.kv_usage[row] = load.running, waiting, load.kv_usage
        self.busy[row] = int(self.inflight[row]) << _WAITING_BITS | waiting

    def set_credits(self, row: int, legs: int | None) -> None:
        """Set the credits, and drop limits derived from them."""
        value = NO_LIMIT if legs is None else legs
        if self.credits[row] != value:
            self.credits[row] = value
            self._limits.clear()

    def set_grant(self, row: int, legs: int | None) -> None:
        """Set the grant, as `set_credits` does the credits."""
        value = NO_GRANT if legs is None else legs
        if self.grants[row] != value:
            self.grants[row] = value
            self._limits.clear()

    def limits(self, routers: int) -> Ints:
        """The number of legs that this router may have at each instance: its grant.

        Without a grant it is an equal part of the credits, as one of `routers`, at least one.
        """
        found = self._limits.get(routers)
        if found is None:
            share = max(1, routers)
            found = np.maximum(1, -(-self.credits // share))
            found[self.credits >= NO_LIMIT] = NO_LIMIT
            found = np.where(self.grants >= 0, self.grants, found)
            self._limits[routers] = found
        return found


class InstanceView:
    """One instance as the router sees it. Compared values are written through to its row of the columns.

    It has many attributes: one for each thing that heartbeats, probes, operators and this router's own legs tell of it.
    """

    __slots__ = (
        "_accepting",
        "_adapters",
        "_aside",
        "_columns",
        "_credits",
        "_grant",
        "_inflight",
        "_load",
        "_models",
        "_sent",
        "_up",
        "downs",
        "evicted",
        "failures",
        "instance",
        "models_json",
        "row",
        "shuns",
        "state",
    )

    def __init__(self, instance: Instance, columns: Columns, *, inflight: int = 0, sent: int = 0) -> None:
        self.instance = instance
        self.row: Final = columns.take()
        self._columns: Final = columns
        self.state = ""
        """The state that its agent reports; empty without an agent."""
        self.failures = 0
        """The number of failed probes in a row."""
        self.models_json: tuple[dict[str, object], ...] = ()
        """The engine's own ``/v1/models`` entries."""
        self.shuns: tuple[InstanceId, ...] = ()
        """Producers that its engine pulls nothing from for now, by its agent's report (peer health)."""
        self.evicted: tuple[int, int] | None = None
        """The agent's last report on what its engine has evicted (`Reported.evicted`); None: no report yet."""
        self.downs = 0
        """How often the instance was found to be down."""
        self._models: tuple[str, ...] = ()
        self._adapters: Mapping[str, str] = {}
        self._up, self._accepting, self._aside = False, True, ""
        self._load = _NO_LOAD
        self.inflight, self.sent, self.credits, self.grant = inflight, sent, None, None
        self.turn(instance)

    def turn(self, instance: Instance) -> None:
        """Take the same incarnation, perhaps in another role. Its legs run on; how many it was ever sent says nothing
        in another pool, so it begins with the fewest that were sent to an instance there.
        """
        if instance.role is not self.instance.role:
            self.sent = self._columns.least_sent(instance.role, self._sent)
        self.instance, columns = instance, self._columns
        columns.prefills[self.row], columns.decodes[self.row] = instance.role.prefills, instance.role.decodes
        columns.weights[self.row] = columns.number(instance.weights)
        columns.node[self.row] = columns.number(instance.node)
        columns.pins[self.row] = instance.pins
        columns.changed()

    def forget(self) -> None:
        """Free the row; the object must not be used after this."""
        self._columns.give_back(self.row)

    def context(self, model: str) -> int | None:
        """A model's ``max_model_len`` in tokens, as the engine reports it; an empty name means its only model.

        vLLM reports none for an adapter: the adapter has its parent's.
        """
        entries = [entry for entry in self.models_json if entry.get("id") == model or not model]
        parents = [entry.get("parent") for entry in entries if entry.get("parent")]
        if parents:
            entries += [entry for entry in self.models_json if entry.get("id") in parents]
        lengths = (entry.get("max_model_len") for entry in entries)
        return next((length for length in lengths if isinstance(length, int)), None)

    @property
    def id(self) -> InstanceId:
        """The instance's name in the fleet."""
        return self.instance.id

    @property
    def role(self) -> Role:
        """The legs that the instance runs."""
        return self.instance.role

    @property
    def life(self) -> int:
        """A number for this life of the instance: its epoch, or without epochs how often it was down (below 0)."""
        return self.instance.epoch or -self.downs

    @property
    def adapters(self) -> Mapping[str, str]:
        """Digests of its loaded LoRA adapters, by name, as its agent reports them."""
        return self._adapters

    @adapters.setter
    def adapters(self, value: Mapping[str, str]) -> None:
        if value != self._adapters:
            self._adapters = dict(value)
            self._columns.changed()

    def adapter(self, model: str | None) -> str | None:
        """The digest of the LoRA adapter that this name means on this instance; empty: unknown. None: no adapter."""
        for entry in self.models_json:
            if entry.get("id") == model:
                return self._adapters.get(str(model), "") if entry.get("parent") else None
        return None

    def meaning(self, model: str | None) -> str:
        """What this name means on this instance; compared for equality only. An unknown adapter equals no other."""
        digest = self.adapter(model)
        return "model" if digest is None else f"adapter {digest or f'of {self.id}'}"

    def learn_models(self, models: tuple[dict[str, object], ...]) -> None:
        """Take the engine's list of models."""
        if models is self.models_json or models == self.models_json:
            return
        before, self.models_json = self.models_json, models
        self.models = tuple(str(entry["id"]) for entry in models if "id" in entry)
        if _told(before) != _told(models):
            self._columns.changed()  # a name may mean an adapter now, or have another context

    @property
    def ready(self) -> bool:
        """Whether new legs may be sent to the instance."""
        return self._up and self._accepting and not self._aside

    @property
    def said_state(self) -> str:
        """The instance's state in a word, for people: up, or why not."""
        if self.ready:
            return "up"
        if self._aside and self._up:
            return "quarantined"
        return self.state if self._up and self.state else "down"

    @property
    def aside(self) -> str:
        """Why an operator has quarantined the instance: it gets no new legs. Empty: it is not quarantined."""
        return self._aside

    @aside.setter
    def aside(self, value: str) -> None:
        self._aside = value
        self._set_ready()

    @property
    def up(self) -> bool:
        """Whether the instance answers this router."""
        return self._up

    @up.setter
    def up(self, value: bool) -> None:
        self._up = value
        self._set_ready()

    @property
    def accepting(self) -> bool:
        """Whether the instance reports that it is ready and not draining. Always true for engines without an agent."""
        return self._accepting

    @accepting.setter
    def accepting(self, value: bool) -> None:
        self._accepting = value
        self._set_ready()

    def _set_ready(self) -> None:
        ready = self.ready
        if self._columns.ready[self.row] != ready:
            if ready:  # with fewer legs than the others have had by now, it would get every request
                self.sent = max(self._sent, self._columns.least_sent(self.instance.role))
            self._columns.ready[self.row] = ready
            self._columns.changed()

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that the instance serves."""
        return self._models

    @models.setter
    def models(self, value: tuple[str, ...]) -> None:
        if value != self._models:
            self._models = value
            self._columns.changed()

    @property
    def credits(self) -> int | None:
        """The legs that the instance admits from all routers together; None: unknown."""
        return self._credits

    @credits.setter  # noqa: A003 - the fleet's own word
    def credits(self, value: int | None) -> None:
        self._credits: int | None = value
        self._columns.set_credits(self.row, value)

    @property
    def grant(self) -> int | None:
        """The part of `credits` that the agent has granted to this router, in legs; None: it grants none by name."""
        return self._grant

    @grant.setter
    def grant(self, value: int | None) -> None:
        self._grant: int | None = value
        self._columns.set_grant(self.row, value)

    @property
    def load(self) -> Load:
        """How busy the engine reports to be."""
        return self._load

    @load.setter
    def load(self, value: Load) -> None:
        if value is self._load:
            return
        self._load = value
        self._columns.set_load(self.row, value)

    @property
    def inflight(self) -> int:
        """This router's legs that run on the instance now."""
        return self._inflight

    @inflight.setter
    def inflight(self, value: int) -> None:
        self._inflight: int = value
        self._columns.set_inflight(self.row, value)

    @property
    def sent(self) -> int:
        """All legs ever sent to the instance, and what others of its role got before it joined them: it breaks ties."""
        return self._sent

    @sent.setter
    def sent(self, value: int) -> None:
        self._sent = self._columns.sent[self.row] = value

    def has_place(self, routers: int) -> bool:
        """Whether this router's share of its credits has room: its grant, or an equal part of `routers`, at least one
        leg.
        """
        if self._grant is not None:
            return self._inflight < self._grant
        return self._credits is None or self._inflight < max(1, math.ceil(self._credits / max(1, routers)))


def _told(models: tuple[dict[str, object], ...]) -> list[tuple[object, object]]:
    """What models' names mean, by an engine's list of them: parents of adapters, and lengths of contexts."""
    return [(entry.get("parent"), entry.get("max_model_len")) for entry in models]
