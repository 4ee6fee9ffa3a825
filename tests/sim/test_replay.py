"""The replay of a simulated router's decision log makes the same choices again.

Logs of real routers are replayed in tests/contract/test_sim_replay*.py.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from support.simulated import every, members

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from costs.step import StepCost
from loadgen.arrival import Arrival
from router.core.journey import Choose
from router.core.load_notes import BookingState, LoadNote, PromptState
from router.core.values import Promise, Reported, Sent, Wanted
from router.fleet import events as d
from router.fleet.view import FleetView
from router.predict.step_model import Make
from router.scheduler.decision_log import DecisionLog, Fleet, Scheduling, fleet_of, scheduler_of
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import POLICIES
from sim.faults import Faults, preset
from sim.replay import replay
from sim.settings import SimSettings
from sim.world import World

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH
PROMISES = {
    "": Promise(ttft_ms=60.0, tpot_ms=6.0),
    "best effort": Promise(),
    "sheds": Promise(ttft_ms=40.0, tpot_ms=6.0, sheds=True),
    "degrades": Promise(ttft_ms=40.0, tpot_ms=6.0, degraded=Promise(ttft_ms=2000.0, tpot_ms=50.0)),
}
COST = StepCost(floor_ms=1.0, start_ms=1.0, token_ms=0.01, area_ms=0.0, decode_ms=1.0, context_ms=1e-4, request_ms=0.02)


def load(count: int, gap_s: float) -> list[Arrival]:
    """Random requests of all classes; half of them share the beginning of a prefix with others."""
    rng, found, at_s = Random(1), [], 0.0
    for number in range(count):
        at_s += rng.expovariate(1 / gap_s)
        prefix = (rng.randrange(8), 1000 + number) if rng.random() < 0.5 else ()
        found.append(
            Arrival(
                at_s=round(at_s, 9),
                input_tokens=rng.randrange(40, 700),
                output_tokens=rng.randrange(1, 80),
                slo_class=rng.choice(tuple(PROMISES)),
                prefix=prefix,
                block_tokens=16 if prefix else 0,
            )
        )
    return found


MAKE = Make(prefill=COST, decode=COST, capacity_tokens=400 * 16, budget_tokens=2048)
"""What a router knows of engines with the costs `support.simulated.COSTS`."""


def entries_of(policy: str, *, faults: str = "", count: int = 100, known: bool = False) -> list[d.Entry]:
    """The decision log of a simulated router, read back from its lines. `known`: the router knows the costs of steps;
    otherwise it learns them.
    """
    lines: list[bytes] = []
    log = DecisionLog(lines.append, policy)
    instances = members(
        *(P, P, D, D), start_up_ns=2_000_000_000, config={"lease_s": 3.0, "num_blocks": 400, "prefix_caching": True}
    )
    arrivals = load(count, 0.0015)
    world = World(
        instances,
        SimSettings(first_token_s=20.0, stall_s=2.0, greedy=True),
        policy=POLICIES[policy],
        promises=PROMISES if policy == "workload" else None,
        log=log,
        view=FleetView(lambda _: MAKE if known else None),
    )
    Faults(world, preset(faults, 3, [each.name for each in instances], arrivals[-1].at_s) if faults else (), 3)
    world.run(arrivals)
    return [d.entry_of(line) for line in lines]


def kinds(entries: list[d.Entry]) -> Counter[type]:
    return Counter(type(entry) for entry in entries)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_simulated_routers_log_replays_to_the_same_choices(policy: str) -> None:
    lines: list[bytes] = []
    log = DecisionLog(lines.append, policy)
    world = World(members(P, P, D, D), SimSettings(), policy=POLICIES[policy], log=log)
    world.run(every(0.005, 60))
    replayed = replay(map(d.entry_of, lines))
    assert (replayed.choices, replayed.differences) == (60, ())


@pytest.mark.parametrize(("known", "faults"), [(True, ""), (False, ""), (False, "chaos")])
def test_load_step_model_queue_saturation_and_prefixes_follow_from_the_log(known: bool, faults: str) -> None:
    """The runs have requests that wait, are late, degraded, refused and woken, prefix caches, and engines that die."""
    entries = entries_of("workload", faults=faults, known=known)
    count = kinds(entries)
    came = [entry for entry in entries if isinstance(entry, d.Came)]
    assert any(entry.called for entry in came)
    refused = [entry for entry in came if entry.chosen is not None and entry.chosen.shed_s]
    timed = [at for at, entry in enumerate(entries) if isinstance(entry, d.PromptOver)]
    if known:
        assert refused and any(isinstance(entry, d.Decided) and entry.wanted.late for entry in entries)
    else:  # nothing is refused before twenty prompts are timed
        assert all(entries.index(entry) > timed[19] for entry in refused)
    assert count[d.Unreachable if faults else d.Came if known else d.Looked]
    replayed = replay(entries)
    assert replayed.choices == count[d.Decided] > 100
    assert replayed.differences == ()
    assert replayed.entries == len(entries)


@pytest.mark.parametrize(
    "forgotten",
    [d.PromptOver, d.AnswerOpened, d.Roomy, d.Looked, d.Counted, d.Indexed, d.Shared, d.Folded],
    ids=lambda kind: kind.__name__,
)
def test_what_is_left_out_is_missed(forgotten: type) -> None:
    """Without the entries of one of these kinds, a replay chooses otherwise or wakes other requests: all are needed."""
    if forgotten is d.Shared:
        entries = _two_tenants()
    elif forgotten is d.Counted:
        entries = _counted()
    else:
        entries = entries_of("workload", count=60, faults="chaos" if forgotten is d.Folded else "")
    assert replay(entries).differences == ()
    first = next(number for number, entry in enumerate(entries) if isinstance(entry, forgotten))
    kept = [
        entry
        for number, entry in enumerate(entries)
        if not isinstance(entry, forgotten) or (forgotten is d.Folded and number == first)
    ]
    assert kinds(entries)[forgotten]
    assert replay(kept).differences != ()


def _two_tenants() -> list[d.Entry]:
    """The log of two tenants with very different shares, whose requests wait for the places of one instance."""
    lines: list[bytes] = []
    here, machine = _scheduler(lines, promised=True)
    here.shares = {"a": 1.0, "b": 1e-6}
    contexts = [_context(tenant) for tenant in "abab" * 3]
    ask = Choose(frozenset(), hand_over=False)
    for number, context in enumerate(contexts):
        machine.handle(d.Asked(context, ask, 0.001 * number), 0.001 * number)
        if context.decode is None:
            machine.handle(d.FoundNone(context), 0.001 * number)
    for number, context in enumerate(contexts):
        now, calls = 1.0 + number, [*machine.handle(d.Finished(context, 1.0 + number, 10, cut_off=False), 1.0 + number)]
        while calls:
            each = calls.pop()
            assert isinstance(each, SchedulingContext)
            calls += machine.handle(d.Asked(each, ask, now), now)[1:]
            if each.decode is None:
                calls += machine.handle(d.FoundNone(each), now)
    return [d.entry_of(line) for line in lines]


def _counted() -> list[d.Entry]:
    """The log of a request whose prompt proves to be ten times as long as estimated; the request then asks again."""
    lines: list[bytes] = []
    (_, machine), context = _scheduler(lines), _context()
    machine.handle(d.Asked(context, Choose(frozenset(), hand_over=False), 0.0), 0.0)
    context.wanted = Wanted(model="m", hand_over=False, prompt_tokens=3000, output_tokens=20.0)
    machine.handle(d.PromptOver(context, 1.0, True, None), 1.0)
    machine.handle(d.Asked(context, Choose(frozenset(), hand_over=False), 2.0), 2.0)
    return [d.entry_of(line) for line in lines]


def _context(tenant: str = "") -> SchedulingContext:
    promise = Promise(ttft_ms=900.0, tpot_ms=50.0) if tenant else Promise()
    return SchedulingContext(
        Wanted(model="m", hand_over=False, prompt_tokens=300, output_tokens=20.0, tenant=tenant), promise
    )


def _scheduler(lines: list[bytes], *, promised: bool = False) -> tuple[Scheduler, Scheduling]:
    log = DecisionLog(lines.append, "workload")
    view = FleetView(lambda _: Make(prefill=COST, decode=COST))
    fleet = fleet_of(log, view)
    made = scheduler_of(log, view, POLICIES["workload"], admission=promised, foresees=True)
    instance = Instance(id=InstanceId("b"), role=B, url="u")
    report = Reported(instance=instance, state="ready", accepting=True, credits=2, load=Load(), models=({"id": "m"},))
    fleet.handle(d.Folded((report,)), 0.0)
    return made


def _every_event_of_a_fleet(fleet: Fleet, report: Reported) -> None:
    name, p, q = report.instance.id, InstanceId("p"), InstanceId("q")
    models = ({"id": "m", "max_model_len": 9},)
    for event in (
        d.Indexed(),
        d.Added(Instance(id=p, role=P, url="http://p")),
        d.Folded((report,)),
        d.ProbeSucceeded(name, models, Load(running=1, kv_usage=0.5)),
        d.ProbeFailed(name),
        d.Unreachable(name),
        d.SetAside({InstanceId("x"): "a fan is loud"}),
        d.Distrusted([(p, name, "it answers otherwise")]),
        d.Proven({p: 1}, {name: 1}, [(q, name, "it is busy")], [(p, name, "a tie")], [(2, 1)]),
        d.ProbeSucceeded(name, None, None),
        d.LegStarted(name),
    ):
        fleet.handle(event, 0.0)


def booked_at(name: InstanceId) -> BookingState:
    """A request of a router peer that is prefilled at this instance."""
    return BookingState(
        number=3, prefill=name, prompt=PromptState.WAITS, plain_ms=20.0, prompt_ms=25.0, stall_ms=5.0,
        placed_ago_ms=2.5, ended_ago_ms=0.0, decode=name, opened=False, prompt_tokens=800, mean_tokens=60.0,
        short_tokens=10.0, middle_tokens=50.0, variance=9.0, tpot_ms=30.0, pause_ms=0.0,
    )  # fmt: skip


def test_every_kind_of_entry_comes_back_as_it_was() -> None:
    lines: list[bytes] = []
    log = DecisionLog(lines.append, "least_load")
    view = FleetView(lambda _: Make(prefill=COST, decode=COST))
    fleet = fleet_of(log, view)
    _, machine = scheduler_of(log, view, POLICIES["least_load"], admission=False, foresees=True)
    name = InstanceId("d")
    instance = Instance(id=name, role=D, url="http://d", epoch=2, pins=True)
    report = Reported(instance=instance, state="ready", accepting=True, credits=1, load=Load(), models=({"id": "m"},))
    _every_event_of_a_fleet(fleet, report)
    machine.handle(d.LegEnded(name), 0.1)
    ask = Choose(frozenset({InstanceId("x")}), hand_over=True)
    one, two = (SchedulingContext(Wanted(model="m", hand_over=True, prefix=(2**64 - 1, number))) for number in range(2))
    (told,) = machine.handle(d.Asked(one, ask, 0.5), 0.5)
    assert told.decode == name
    (told,) = machine.handle(d.Asked(two, ask, 0.5), 0.5)
    assert told.wait
    machine.handle(d.FoundNone(two), 0.5)
    machine.handle(d.Picked(Wanted(model=None, hand_over=False)), 0.5)
    one.wanted = Wanted(model="m", hand_over=True, prompt_tokens=7, prefix_block_tokens=1.5, prefix=one.wanted.prefix)
    machine.handle(d.PromptOver(one, 0.6, True, 3), 0.6)
    machine.handle(d.AnswerOpened(one, 0.7), 0.7)
    assert machine.handle(d.Occupied(one, None), 0.7) == (two,)
    machine.handle(d.FleetMoved(), 0.7)
    machine.handle(d.Looked(0.75), 0.75)
    fleet.handle(d.Cached(Sent(0, 1, (2**64 - 1,), (0.1,)), 256.0, 5), 0.75)
    fleet.handle(d.Sourced(-3.5, 0.75), 0.75)
    fleet.handle(d.SourceSaid(name, (2**64 - 1,), 256.0, 5, 0.75), 0.75)
    fleet.handle(d.LoadNoted(LoadNote("router-2", 0, (booked_at(name),), over=(4,), part=1, parts=1), 0.76), 0.76)
    fleet.handle(d.RouterPeerLost("router-2", 0.77), 0.77)
    machine.handle(d.Finished(one, 0.8, 4, cut_off=True), 0.8)
    machine.handle(d.Finished(two, 0.9, None, cut_off=False), 0.9)
    machine.handle(d.Finished(two, 1.0, None, cut_off=False), 1.0)
    entries = [d.entry_of(line) for line in lines]
    assert [d.entry_of(d.line_of(entry)) for entry in entries] == entries
    written = {type(entry) for entry in entries}
    assert set(d.Entry.__args__) - written == {d.Roomy, d.Missing}, (
        "admission writes `Roomy`, in the runs above; the log's writer makes `Missing`"
    )
    assert replay(entries).differences == ()


def test_a_log_that_was_tampered_with_is_found_out() -> None:
    entries = entries_of("least_load", count=10)
    without = [entry for entry in entries if not isinstance(entry, d.LegStarted)]
    with pytest.raises(AssertionError, match="a leg ended that never started"):
        replay(without)
    other = replay(
        entries, {"least_load": lambda fleet, _: POLICIES["least_load"](fleet, Wanted(model="x", hand_over=True))}
    )
    assert len(other.differences) == other.choices >= 10
    begun = next(number for number, entry in enumerate(entries) if isinstance(entry, d.Began))
    with pytest.raises(ValueError, match="no scheduler has begun"):
        replay(entries[:begun] + entries[begun + 1 :])
    with pytest.raises(ValueError, match="there is no policy `least_load` here"):
        replay(entries, {})
    asked = next(number for number, entry in enumerate(entries) if isinstance(entry, d.Decided))
    assert len(replay(entries[:asked] + entries[asked + 1 :]).differences) == 1
    assert len(replay([*entries, entries[asked]]).differences) == 1


def test_a_log_that_is_still_written_may_end_between_an_event_and_what_came_of_it() -> None:
    """A log is written in batches, and a batch may end between two entries of one event."""
    entries = entries_of("least_load", count=10)
    ends = [number for number, entry in enumerate(entries) if isinstance(entry, d.Asked)]
    for end in ends:
        for more in (1, 2):
            assert replay(entries[: end + more]).differences == ()
