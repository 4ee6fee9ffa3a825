"""A fleet that is changed while it serves, with any faults: each request ends once, and no budget is exceeded."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated import one

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput import actions as do
from goodput.budget import Budget, Footprint, Usage
from loadgen.arrival import Arrival
from sim.faults import KINDS, Fault, Faults
from sim.provisioning import Provisioning, Site, Timed
from sim.settings import SimSettings
from sim.startup import StartUp
from sim.world import World

NAMES = ("p0", "d0", "b0", "n1", "n2", "n3")
POOLS = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
AT = st.integers(0, 9000)
"""Milliseconds. The range is long enough that instances asked for early have started before the last action."""
ACTIONS = st.lists(
    st.tuples(
        AT,
        st.sampled_from(["start", "drain", "pause", "resume", "flip", "stop"]),
        st.sampled_from(NAMES),
        st.sampled_from(sorted(POOLS)),
        st.sampled_from([0.05, 1.0, 30.0]),
    ),
    max_size=10,
)
ARRIVALS = st.lists(st.tuples(AT, st.integers(1, 500), st.sampled_from([1, 2, 40, 400])), min_size=1, max_size=12)
FAULTS = st.lists(
    st.tuples(AT, st.sampled_from(sorted(KINDS)), st.sampled_from(NAMES), st.integers(20, 3000)), max_size=4
)


def _action(kind: str, name: str, pool: str, deadline_s: float) -> do.ScriptedAction:
    instance = InstanceId(name)
    match kind:
        case "start":
            return do.Start(instance=instance, pool=pool)
        case "drain" | "pause":
            return do.Drain(instance=instance, deadline_s=deadline_s, leave=kind == "drain")
        case "resume":
            return do.Resume(instance=instance)
        case "flip":
            return do.Flip(instance=instance, role=POOLS[pool])
        case _:
            return do.Stop(instance=instance)


def _world(bound: int, gpus: int, *, greedy: bool, fails: float) -> World:
    rest = {"config": {"lease_s": 2.0}, "gpu": "G", "flips": True}
    startup = StartUp(median_s=1.0, p95_s=3.0, fails=fails)
    pools = {name: one(name, role, startup=startup, **rest) for name, role in POOLS.items()}
    members = [one(f"{name}0", role, startup=startup, **rest) for name, role in POOLS.items()]
    around = Site(pools=pools, budget=Budget(gpus={"G": bound}), gpus={"G": gpus})
    return World(members, SimSettings(greedy=greedy, stall_s=1.0, first_token_s=5.0, exit_s=0.2), site=around)


@given(ARRIVALS, ACTIONS, FAULTS, st.integers(3, 6), st.integers(3, 6), st.booleans(), st.sampled_from([0.0, 0.3]))
@settings(max_examples=60, deadline=None)
def test_no_request_is_lost_and_no_budget_exceeded(
    rows: list, asked: list, wrong: list, bound: int, gpus: int, greedy: bool, fails: float
) -> None:
    """The checks inside a run assert the rest: blocks, places, deadlines, the budget, and the end of every hold."""
    world = _world(bound, gpus, greedy=greedy, fails=fails)
    provisioning: Provisioning = world.provisioning
    provisioning.schedule(Timed(at / 1000, _action(*what)) for at, *what in asked)
    faults = [
        Fault(
            at_s=at / 1000, kind=kind, instance=None if kind == "leave" else InstanceId(name), duration_s=lasts / 1000
        )
        for at, kind, name, lasts in wrong
    ]
    Faults(world, faults, 0)
    result = world.run(
        Arrival(at_s=at / 1000, input_tokens=tokens, output_tokens=answer) for at, tokens, answer in sorted(rows)
    )
    assert len(result.columns) == len(rows)
    assert (result.columns["outcome"] > 0).all()
    assert result.gpus <= gpus
    used = sum(1 for at in world.instances if not at.gone) + len(provisioning.pending)
    assert provisioning.usage.gpus["G"] == used <= bound
    assert provisioning.busy is False
    assert {each.instance for each in result.fleet_events if each.what == "asked"} <= set(map(InstanceId, NAMES))


FOOTPRINTS = st.builds(
    Footprint,
    gpu=st.sampled_from(["A", "B"]),
    gpus=st.integers(1, 8),
    price_per_hour=st.integers(0, 400).map(lambda cents: cents / 100),
    power_w=st.integers(0, 700).map(float),
)


@given(
    st.lists(st.tuples(st.integers(0, 5), FOOTPRINTS), max_size=30),
    st.builds(
        Budget,
        gpus=st.dictionaries(st.sampled_from(["A", "B"]), st.integers(0, 16)),
        price_per_hour=st.none() | st.integers(0, 1000).map(lambda cents: cents / 100),
        power_w=st.none() | st.integers(0, 2000).map(float),
    ),
)
def test_usage_accepts_exactly_what_fits_the_budget(steps: list, budget: Budget) -> None:
    """`Usage` is compared with sums over all footprints."""
    usage, held = Usage(), dict[InstanceId, Footprint]()
    for number, more in steps:
        name = InstanceId(str(number))
        if name in held:
            assert usage.remove(name) == held.pop(name)
            continue
        after = [*held.values(), more]
        fits = (
            sum(each.gpus for each in after if each.gpu == more.gpu) <= budget.gpus.get(more.gpu, 1 << 30)
            and (
                budget.price_per_hour is None
                or sum(each.price_per_hour for each in after) <= budget.price_per_hour + 1e-6
            )
            and (budget.power_w is None or sum(each.power_w for each in after) <= budget.power_w + 1e-6)
        )
        assert (usage.lacks(budget, more) == "") == fits
        if fits:
            usage.add(name, more)
            held[name] = more
        assert usage.within(budget) == ""
