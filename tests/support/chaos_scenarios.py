"""The scenarios of the chaos suite, as values: the fault, its place, the stage of the hand-over, and what must hold.

The fields of `fault` are those of `POST /mock/faults` (docs/mock.md). `sim` describes the same fault for `sim.faults`;
`not_in_sim` is the reason if the simulator has no such fault. Pure: `tests/chaos`, the simulator's tests and
`bench/chaos.py` read the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from cluster.instance import Role


class Stage(StrEnum):
    """How far a request has come when the fault strikes."""

    BEFORE = "before leg 1"
    LEG_1 = "during leg 1"
    EARLY = "while an early leg waits"
    BETWEEN = "between the legs"
    PULL = "during the pull"
    PULLED = "before D's first byte"
    STREAM = "mid-stream"
    END = "at the end"


class Side(StrEnum):
    """Which end of the hand-over is struck."""

    P = "prefill"
    D = "decode"


class Hurts(StrEnum):
    """What clients may notice of the fault."""

    NOBODY = "every client is served right"
    SOME = "served right, or told a true error in time"
    UNSEEN = "wrong words: these engines compare nothing of what they pull"


STRUCK_TOKENS = 4
"""The stage "mid-stream" is reached when D has generated so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One row of the suite."""

    name: str
    fault: Mapping[str, Any]
    """The body of `POST /mock/faults`. Empty: no engine fails; something else does (`drive`, `leave`)."""
    side: Side = Side.D
    stage: Stage = Stage.BEFORE
    """When the fault begins. Faults of requests are set before the load; their `leg` and `after_tokens` decide."""
    everywhere: bool = False
    """Whether the fault strikes every instance of that side, or one."""
    hurts: Hurts = Hurts.NOBODY
    leave: float = 0.0
    """Share of clients that disconnect before their answer is complete."""
    lease: str = ""
    """Why holds may stay until their lease ends. Empty: all holds have to be gone within two seconds."""
    digests: bool = False
    """Whether the engines compare what they pull with what was held, as Baton's connector can."""
    dp: int = 1
    """Data parallel ranks of each instance."""
    decode_dp: int = 0
    """The same of instances that only decode, where these have another number; 0: they have not."""
    sources: bool = False
    """Whether prompts begin alike, and a source is asked for each prompt's beginning."""
    aggregated: bool = False
    """With `sources`: each request is served by one instance, which pulls from the source."""
    drive: str = ""
    """What breaks instead of an engine: `partition`, `registry` or `router`."""
    sim: tuple[Mapping[str, Any], ...] = ()
    """The same fault for the simulator, without its time and its instance."""
    not_in_sim: str = ""
    """Why the simulator cannot have this fault."""

    @property
    def stands_still(self) -> bool:
        """Whether pulls stand still until the fault is removed: their blocks stay taken so long."""
        return self.fault.get("fault") == "hang_pull"

    def ranks(self, role: Role) -> int:
        """The data parallel ranks of an instance of this role."""
        return self.decode_dp or self.dp if role is Role.DECODE else self.dp

    @property
    def role(self) -> Role:
        """The role of the instances that are struck."""
        return Role.PREFILL if self.side is Side.P else Role.DECODE


DIES = {"fault": "die", "seconds": 0.3}
_LOST_ANSWER = "P's answer is lost, and with it the hold's name: no router can release the hold"
_DEAF_D = "D never tells P that it gave up"
_NO_NOTICE = "P is never told of the pull"
_NO_RANKS = "the fleets of these rows have no ranks there"
_ONE_REQUEST = "engines of the simulator fail as a whole, not request by request"


def _kills() -> list[Scenario]:
    stages = {
        Side.P: (Stage.BEFORE, Stage.LEG_1, Stage.BETWEEN, Stage.PULL, Stage.STREAM),
        Side.D: (Stage.BEFORE, Stage.BETWEEN, Stage.PULL, Stage.PULLED, Stage.STREAM, Stage.END),
    }
    return [
        Scenario(
            name=f"kill {side.name} {stage}", fault=DIES, side=side, stage=stage, sim=({"kind": "kill"},),
            lease=_DEAF_D if side is Side.D and stage in {Stage.PULL, Stage.PULLED, Stage.BETWEEN} else "",
        )
        for side, listed in stages.items()
        for stage in listed
    ]  # fmt: skip


def _of_requests() -> list[Scenario]:
    """Faults that strike a share of the requests, each at its own stage."""
    some = {"share": 0.25}
    p, first = {"leg": "prefill", **some}, {"leg": "decode", **some}
    middle, last = {**first, "after_tokens": STRUCK_TOKENS}, {**first, "after_tokens": 5}

    def hang(which: dict[str, Any]) -> dict[str, Any]:
        return {"fault": "hang", **which, "share": 0.5}

    def row(name: str, side: Side, fault: dict[str, Any], **more: Any) -> Scenario:
        fields = {"everywhere": True, "not_in_sim": _ONE_REQUEST, **more}
        return Scenario(name=name, side=side, fault=fault, **fields)

    one = {"everywhere": False}
    return [
        row("hang P during leg 1", Side.P, {"fault": "hang", "leg": "prefill"}, **one),
        row("every P hangs during leg 1", Side.P, {"fault": "hang", **p}, hurts=Hurts.SOME),
        row("hang D before its first byte", Side.D, hang(first), **one, lease=_DEAF_D, hurts=Hurts.SOME),
        row("hang D mid-stream", Side.D, hang(middle), **one, hurts=Hurts.SOME),
        row("hang D at the end", Side.D, hang(last), **one, hurts=Hurts.SOME),
        row("every D hangs mid-stream", Side.D, hang(middle), hurts=Hurts.SOME),
        row("break P before its work", Side.P, {"fault": "break", **p}, **one),
        row("break P after its work", Side.P, {"fault": "break", **p, "after_tokens": 1}, **one, lease=_LOST_ANSWER),
        row("break D before its first byte", Side.D, {"fault": "break", **first}, **one, lease=_DEAF_D),
        row("break D mid-stream", Side.D, {"fault": "break", **middle}, **one),
        row("break D at the end", Side.D, {"fault": "break", **last}, **one),
        row("error P", Side.P, {"fault": "error", **p}, **one, lease=_LOST_ANSWER),
        row("error D before its first byte", Side.D, {"fault": "error", **first}, **one),
        row("error D mid-stream", Side.D, {"fault": "error", **middle}, **one),
        row("refuse P", Side.P, {"fault": "refuse", "status": 503, **p}, **one),
        row("refuse D", Side.D, {"fault": "refuse", "status": 503, **first}, **one),
        row("every D breaks mid-stream", Side.D, {"fault": "break", **middle}, hurts=Hurts.SOME),
        row("pulls fail: P and D apart", Side.D, {"fault": "fail_pull", "share": 0.5}, lease=_NO_NOTICE),
        row("lost notices", Side.D, {"fault": "drop_notice", "share": 0.5}, lease=_NO_NOTICE,
            sim=({"kind": "notices", "share": 0.5},), not_in_sim=""),
        row("corrupt blocks, digests", Side.D, {"fault": "corrupt", "share": 0.5}, digests=True,
            sim=({"kind": "corrupt", "share": 0.5},), not_in_sim=""),
        row("stale blocks, digests", Side.D, {"fault": "stale", "share": 0.5}, digests=True,
            not_in_sim="as corrupt blocks: what is read is another content"),
    ]  # fmt: skip


def _of_instances() -> list[Scenario]:
    port = "the simulator has no ports that are shut while an engine runs"
    return [
        Scenario(name="slow P during leg 1", side=Side.P, stage=Stage.LEG_1,
                 fault={"fault": "slow", "factor": 20, "seconds": 0.5}, sim=({"kind": "slow", "factor": 20},)),
        Scenario(name="slow D mid-stream", stage=Stage.STREAM,
                 fault={"fault": "slow", "factor": 20, "seconds": 0.5}, sim=({"kind": "slow", "factor": 20},)),
        Scenario(name="P shuts its port during leg 1", side=Side.P, stage=Stage.LEG_1,
                 fault={"fault": "close", "seconds": 0.5}, not_in_sim=port),
        Scenario(name="D shuts its port between the legs", stage=Stage.BETWEEN,
                 fault={"fault": "close", "seconds": 0.5}, not_in_sim=port),
        Scenario(name="D is unwell", stage=Stage.STREAM, fault={"fault": "unwell", "seconds": 1.0},
                 not_in_sim="a simulated engine's health is whether it is there"),
    ]  # fmt: skip


def _of_others() -> list[Scenario]:
    return [
        Scenario(name="30 % abort storm", fault={}, leave=0.3, sim=({"kind": "leave", "share": 0.3},)),
        Scenario(name="abort storm, notices lost", fault={"fault": "drop_notice", "share": 0.5}, everywhere=True,
                 leave=0.3, lease=_NO_NOTICE, sim=({"kind": "leave", "share": 0.3}, {"kind": "notices", "share": 0.5})),
        Scenario(name="abort storm, a D dead", fault={"fault": "die"}, stage=Stage.BETWEEN, leave=0.3,
                 sim=({"kind": "leave", "share": 0.3}, {"kind": "kill"})),
        Scenario(name="abort storm, a P refuses releases", side=Side.P, leave=0.6, not_in_sim=_ONE_REQUEST,
                 fault={"fault": "refuse", "leg": "release", "status": 503}),
        Scenario(name="abort storm, a P hears no releases", side=Side.P, leave=0.6, not_in_sim=_ONE_REQUEST,
                 fault={"fault": "hang", "leg": "release"}),
        Scenario(name="every P dead", fault={"fault": "die"}, side=Side.P, everywhere=True, sim=({"kind": "kill"},)),
        Scenario(name="every D dead", fault={"fault": "die"}, everywhere=True, sim=({"kind": "kill"},)),
        Scenario(name="partition of P from the router", fault={}, side=Side.P, stage=Stage.LEG_1, drive="partition",
                 hurts=Hurts.SOME, lease="P cannot be told anything", sim=({"kind": "partition"},)),
        Scenario(name="partition of D from the router", fault={}, stage=Stage.STREAM, drive="partition",
                 hurts=Hurts.SOME, lease="D cannot be told anything", sim=({"kind": "partition"},)),
        Scenario(name="Redis gone and back", fault={}, side=Side.P, stage=Stage.LEG_1, drive="registry",
                 not_in_sim="the simulated registry is never away"),
        Scenario(name="router killed", fault={}, stage=Stage.STREAM, drive="router", hurts=Hurts.SOME,
                 lease="no other process knows the holds that D had not pulled", not_in_sim="one router, which lives"),
    ]  # fmt: skip


def _of_ranks() -> list[Scenario]:
    """A data parallel rank dies, and with it the other ranks of its engine, which share its port. Or the ranks of one
    side meet instances without ranks, and one of these dies.
    """
    stages = {Side.P: (Stage.LEG_1, Stage.BETWEEN), Side.D: (Stage.PULL, Stage.STREAM)}
    both = [
        Scenario(
            name=f"kill a rank of {side.name} {stage}", fault=DIES, side=side, stage=stage, dp=2,
            lease=_DEAF_D if side is Side.D and stage is Stage.PULL else "", not_in_sim=_NO_RANKS,
        )
        for side, listed in stages.items()
        for stage in listed
    ]  # fmt: skip
    sizes = {"P has two ranks": (2, 1), "D has two ranks": (1, 2)}
    return both + [
        replace(each, name=f"kill {each.side.name} {each.stage}, {name}", dp=dp, decode_dp=decode_dp)
        for name, (dp, decode_dp) in sizes.items()
        for each in both
        if each.stage in {Stage.LEG_1, Stage.STREAM}
    ]


def _of_early_legs() -> list[Scenario]:
    """What may happen while a decode leg waits at D, and P computes."""
    fields = {"stage": Stage.EARLY, "not_in_sim": "tests/sim/test_early_legs_sim.py"}
    return [
        Scenario(name=f"kill P {Stage.EARLY}", fault=DIES, side=Side.P, **fields),
        Scenario(name=f"kill D {Stage.EARLY}", fault=DIES, **fields, lease=_DEAF_D),
        Scenario(name=f"kill a rank of P {Stage.EARLY}", fault=DIES, side=Side.P, dp=2, **fields),
        Scenario(name=f"D shuts its port {Stage.EARLY}", fault={"fault": "close", "seconds": 0.5}, **fields),
        Scenario(name=f"slow P {Stage.EARLY}", fault={"fault": "slow", "factor": 20, "seconds": 0.5}, side=Side.P,
                 **fields),
    ]  # fmt: skip


SOURCED = (
    *("kill P during leg 1", "kill P during the pull", "kill D between the legs", "kill D during the pull"),
    *("hang P during leg 1", "break P before its work", "break P after its work", "error P", "refuse P"),
    *("pulls fail: P and D apart", "lost notices", "corrupt blocks, digests", "stale blocks, digests"),
    *("P shuts its port during leg 1", "30 % abort storm", "abort storm, a P hears no releases"),
    *("partition of P from the router", "every D dead"),
    *(f"kill a rank of P {Stage.LEG_1}", f"kill a rank of D {Stage.PULL}", f"kill P {Stage.LEG_1}, D has two ranks"),
    f"kill D {Stage.EARLY}",
)
"""Faults of these rows also strike the legs and the pulls of sources."""


def _of_sources() -> list[Scenario]:
    """The same with a source for each prompt: a fault of P during leg 1, or of its answer, is one of sources, too. Any
    instance may be a source, a D as well: where instances die, a D that was to pull may die.
    """
    fields = {"sources": True, "sim": (), "not_in_sim": "tests/sim/test_peers_sim.py"}
    return [
        replace(each, name=f"{each.name}, sources", lease=each.lease or _source_lease(each.fault), **fields)
        for each in (*SCENARIOS, *RANKED, *EARLY_LEGS)
        if each.name in SOURCED
    ]


def _of_still_sources() -> list[Scenario]:
    """A source stands still while its hold is pulled: by prefill legs (prefill instances pull nothing else), or by legs
    of requests that are served whole.
    """
    fields = {"sources": True, "everywhere": True, "not_in_sim": "tests/sim/test_peers_sim.py"}
    fault = {"fault": "hang_pull", "share": 0.5}
    return [
        Scenario(name="prefill legs' pulls stand still, sources", side=Side.P, fault=fault, **fields),
        Scenario(
            name="aggregated legs' pulls stand still, sources", side=Side.D, fault=fault, aggregated=True, **fields
        ),
    ]


def _source_lease(fault: Mapping[str, Any]) -> str:
    """Why holds may stay with sources, where they may not without."""
    return _DEAF_D if fault == DIES else ""


def _unseen() -> list[Scenario]:
    """The digest scenarios without digests. Wrong text is expected of them: it shows that the judge detects it."""
    return [
        replace(each, name=each.name.removesuffix(", digests") + ", no digests", digests=False, hurts=Hurts.UNSEEN)
        for each in _of_requests()
        if each.digests
    ]


SCENARIOS: tuple[Scenario, ...] = (*_kills(), *_of_requests(), *_of_instances(), *_of_others())
"""Every row, in the order of the table in docs/benchmarks.md."""

UNSEEN: tuple[Scenario, ...] = tuple(_unseen())
"""Rows without a promise: they are in the table to show what digests prevent."""

RANKED: tuple[Scenario, ...] = tuple(_of_ranks())
"""Rows with data parallel ranks. They are not in the table, since no other router chooses ranks."""

EARLY_LEGS: tuple[Scenario, ...] = tuple(_of_early_legs())
"""Rows that strike while an early leg waits. They are not in the table: no other router sends early legs."""

WITH_SOURCES: tuple[Scenario, ...] = (*_of_sources(), *_of_still_sources())
"""Rows with prefixes that are pulled from peers. They are not in the table: no other router here has sources."""

BY_NAME: dict[str, Scenario] = {each.name: each for each in SCENARIOS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Time limits in seconds. A longer wait counts as hung (clients) or as leaked (holds)."""

    first_token_s: float = 2.5
    stall_s: float = 1.2
    whole_s: float = 3.0
    """For an answer that is not streamed."""
    grace_s: float = 1.0
    """How much a limit may be exceeded: timers are late on a busy machine."""
    released_s: float = 2.0
    """From the last client's end until all holds are gone, but for those that `Scenario.lease` excuses."""
    lease_s: float = 1.0
    """The mocks' lease of holds, where the scenario allows holds to stay until their lease ends."""


LIMITS = Limits()

LONG_LEASE_S = 30.0
"""vLLM's lease of holds. It is so long that a hold which only its lease would end counts as leaked."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How many instances of each role a fleet has."""

    prefill: int = 2
    decode: int = 2
    both: int = 1

    @property
    def counts(self) -> dict[Role, int]:
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.BOTH: self.both}
