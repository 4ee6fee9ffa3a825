"""Rollouts, resizes and reverts from any state reach the wanted fleet, and never go below the floor."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from support.k8s_world import World

from cluster.instance import Role
from k8s.crd.names import WORKLOAD_CHARS_MAX
from k8s.plan.fleet import counting, instance_name, moves
from k8s.plan.values import PlanLimits, PlannedObject, Remove, Resume, Start, WantedModel, WantedPool

chances = st.integers(0, 1 << 30).map(random.Random)
REVISIONS = ("a", "b", "c")
ROLES = (Role.PREFILL, Role.DECODE, Role.BOTH)


@st.composite
def pools(draw: st.DrawFn, revision: str | None = None) -> WantedModel:
    roles = draw(st.sampled_from([ROLES[:2], ROLES[:2], ROLES[2:], ROLES]))
    rev = revision or draw(st.sampled_from(REVISIONS))
    made = []
    for role in roles:
        count = draw(st.integers(1, 4))
        floor = draw(st.integers(1, count))
        made.append(WantedPool(stem=role.value, role=role, count=count, floor=floor, revision=rev, family=rev))
    return WantedModel(key="m", pools=tuple(made))


def changed(model: WantedModel, revision: str, *, family: str | None = None) -> WantedModel:
    return dataclasses.replace(
        model,
        pools=tuple(dataclasses.replace(pool, revision=revision, family=family or revision) for pool in model.pools),
    )


def done(world: World) -> bool:
    there = list(world.instances.values())
    return len(there) == sum(pool.count for pool in world.model.pools) and all(
        sum(each.pool == pool.stem and each.revision == pool.revision and each.serving for each in there) == pool.count
        for pool in world.model.pools
    )


def lacking(world: World) -> int:
    serving = [each.pool for each in world.instances.values() if each.ready and not each.deleting and not each.leaving]
    return sum(max(0, pool.floor - serving.count(pool.stem)) for pool in world.model.pools)


def serving_whole(world: World) -> int:
    return sum(each.serving for each in world.instances.values())


def keep(world: World, most: int = 400, *, floor: bool, crash: bool = False) -> None:
    """Run until the fleet is as wanted, and check the floor at every step."""
    for _ in range(most):
        world.run(crash=crash)
        if floor:
            for pool in world.model.pools:
                assert counting(world.model, list(world.instances.values()), pool.stem) >= pool.floor
        else:
            assert lacking(world) <= 1
            assert serving_whole(world) >= 1
        if done(world) and not world.plan():
            return
    raise AssertionError(f"not done after {most} steps: {world.plan()} {world.instances}")


def gpus_of(model: WantedModel) -> int:
    return sum(pool.count * pool.gpus for pool in model.pools)


@settings(max_examples=20, deadline=None)
@given(pools(), chances, st.booleans())
def test_an_empty_cluster_becomes_the_wanted_fleet(model: WantedModel, chance: random.Random, crash: bool) -> None:
    world = World(model, chance=chance)
    world.settle(crash=crash)
    assert done(world)
    assert world.plan() == ()


@settings(max_examples=20, deadline=None)
@given(pools("a"), chances, st.booleans())
def test_a_rollout_with_room_keeps_pairs_at_the_floor(model: WantedModel, chance: random.Random, crash: bool) -> None:
    world = World(model, chance=chance)
    world.settle()
    world.model = changed(model, "b")
    keep(world, floor=True, crash=crash)


@settings(max_examples=20, deadline=None)
@given(pools("a"), chances, st.booleans(), st.booleans())
def test_a_rollout_without_a_free_gpu_ends_and_keeps_serving(
    model: WantedModel, chance: random.Random, tell: bool, crash: bool
) -> None:
    """This holds also if the number of free GPUs is unknown (`tell` is False): the new pod finds no node, and an old
    instance is removed.
    """
    world = World(model, gpus=gpus_of(model), tell_free=tell, chance=chance)
    world.settle()
    alone = gpus_of(model) == 1
    world.model = changed(model, "b")
    if alone:  # the only instance has the only GPU and a floor of one: it cannot be replaced without a gap
        world.run(60)
        assert serving_whole(world) == 1
        return
    keep(world, floor=False, crash=crash)


@settings(max_examples=20, deadline=None)
@given(pools("a"), chances, st.floats(0.0, 900.0), st.integers(1, 90))
def test_a_revert_while_drains_take_longer_than_they_may(
    model: WantedModel, chance: random.Random, longest_s: float, steps: int
) -> None:
    """`World.plan` asserts that no instance has two moves in one plan. An instance that is both resumed and deleted
    would lose the requests that it accepted in between.
    """
    world = World(model, chance=chance, longest_drain_s=max(30.0, longest_s))
    world.settle()
    world.model = changed(model, "b")
    world.run(steps)
    world.model = changed(model, "a")
    keep(world, floor=True)


@settings(max_examples=20, deadline=None)
@given(pools(), chances, st.integers(1, 8), st.floats(500.0, 700.0))
def test_no_instance_has_two_moves_in_one_plan(
    model: WantedModel, chance: random.Random, number: int, drained_for_s: float
) -> None:
    there = [random_instance(chance, at) for at in range(number)]
    todo = moves("c", model, there, PlanLimits(), 950.0 + drained_for_s)
    assert sorted({each.name for each in todo}) == sorted(each.name for each in todo)


def test_an_instance_that_stays_draining_after_a_resume_is_replaced() -> None:
    pool = WantedPool(stem="both", role=Role.BOTH, count=1, floor=1, revision="a", family="a")
    stuck = PlannedObject(
        name="c-both-0",
        model="m",
        pool="both",
        role=Role.BOTH,
        revision="a",
        family="a",
        scheduled=True,
        started=True,
        draining_since=1000.0,
    )
    model, limits = WantedModel(key="m", pools=(pool,)), PlanLimits(drain_s=600.0)
    assert [type(each) for each in moves("c", model, [stuck], limits, 1630.0)] == [Resume]
    assert [type(each) for each in moves("c", model, [stuck], limits, 1660.0)] == [Remove, Start]


@settings(max_examples=20, deadline=None)
@given(pools("a"), chances, st.integers(1, 12), st.sampled_from(["a", "c"]), st.booleans())
def test_a_revert_or_a_second_change_in_the_middle(
    model: WantedModel, chance: random.Random, steps: int, then: str, tight: bool
) -> None:
    world = World(model, gpus=gpus_of(model) if tight else None, chance=chance)
    world.settle()
    if tight and gpus_of(model) == 1:
        return
    world.model = changed(model, "b")
    for _ in range(steps):
        world.run()
        assert serving_whole(world) >= 1
    world.model = changed(model, then)
    keep(world, floor=not tight)


@settings(max_examples=20, deadline=None)
@given(pools("a"), chances, st.integers(1, 40))
def test_a_revision_that_never_comes_up_takes_nothing_down(
    model: WantedModel, chance: random.Random, steps: int
) -> None:
    world = World(model, chance=chance, broken=frozenset({"b"}))
    world.settle()
    world.model = changed(model, "b")
    for _ in range(steps):
        world.run()
        for pool in model.pools:
            assert counting(world.model, list(world.instances.values()), pool.stem) >= pool.count
    world.model = changed(model, "a")
    keep(world, floor=True)


@settings(max_examples=20, deadline=None)
@given(pools("a"), chances, st.lists(st.tuples(*[st.integers(1, 6)] * 3), min_size=1, max_size=6))
def test_resizes_in_quick_succession(
    model: WantedModel, chance: random.Random, sizes: list[tuple[int, int, int]]
) -> None:
    low = dataclasses.replace(model, pools=tuple(dataclasses.replace(pool, count=1, floor=1) for pool in model.pools))
    world = World(low, chance=chance)
    world.settle()
    for size in sizes:
        resized = (dataclasses.replace(pool, count=count) for pool, count in zip(low.pools, size, strict=False))
        world.model = dataclasses.replace(low, pools=tuple(resized))
        for _ in range(chance.randint(0, 4)):
            world.run()
            assert all(counting(world.model, list(world.instances.values()), pool.stem) >= 1 for pool in low.pools)
    keep(world, floor=True)


def random_instance(chance: random.Random, number: int) -> PlannedObject:
    revision = chance.choice(REVISIONS)
    scheduled, started = chance.random() < 0.8, chance.random() < 0.7
    role = chance.choice(ROLES)
    draining = chance.random() < 0.3
    return PlannedObject(
        name=f"c-{role.value}-{number}",
        model="m",
        pool=role.value,
        role=role,
        revision=revision,
        family=revision,
        scheduled=scheduled,
        unschedulable_since=None if scheduled else 900.0,
        started=scheduled and started,
        healthy=scheduled and started and not draining,
        ready=scheduled and started and not draining and chance.random() < 0.8,
        draining_since=950.0 if draining else None,
        deleting=chance.random() < 0.1,
        parked=not scheduled and chance.random() < 0.3,
    )


@settings(max_examples=20, deadline=None)
@given(pools(), chances, st.integers(0, 8), st.booleans())
def test_any_partial_state_converges(model: WantedModel, chance: random.Random, number: int, crash: bool) -> None:
    world = World(model, chance=chance)
    for at in range(number):
        each = random_instance(chance, at)
        world.instances[each.name] = each
        world.age[each.name] = 3 if each.started else 0
    world.settle(crash=crash)
    assert done(world), world.instances


@settings(max_examples=20, deadline=None)
@given(pools(), chances, st.integers(0, 8))
def test_a_plan_does_not_depend_on_the_order_of_the_instances(
    model: WantedModel, chance: random.Random, number: int
) -> None:
    there = [random_instance(chance, at) for at in range(number)]
    shuffled = chance.sample(there, len(there))
    assert moves("c", model, there, PlanLimits(), 1000.0) == moves("c", model, shuffled, PlanLimits(), 1000.0)


@settings(max_examples=20, deadline=None)
@given(pools("a"), chances)
def test_no_serving_instance_is_deleted(model: WantedModel, chance: random.Random) -> None:
    world = World(model, chance=chance)
    world.settle()
    world.model = changed(model, "b")
    for _ in range(60):
        for move in world.plan():
            if isinstance(move, Remove):
                gone = world.instances[move.name]
                assert gone.drained or not gone.started
        world.run()


def test_half_of_a_pair_gives_its_gpus_back() -> None:
    prefill = WantedPool(stem="prefill", role=Role.PREFILL, count=1, floor=1, revision="a", family="a", gpus=2)
    decode = dataclasses.replace(prefill, stem="decode", role=Role.DECODE, gpus=4)
    world = World(WantedModel(key="m", pools=(prefill, decode)), gpus=4, chance=random.Random(3))
    alone: dict[str, int] = {}
    for _ in range(60):
        world.run()
        placed = [name for name, each in world.instances.items() if each.scheduled]
        alone = {name: alone.get(name, 0) + 1 for name in placed} if len(placed) < 2 else {}
        assert all(steps <= 10 for steps in alone.values()), (
            "gang_s is 60 s: six steps, and the steps until a plan notices it"
        )
    world.gpus = 6
    world.settle()
    assert done(world)


@given(st.text("abc-Z/.", min_size=1, max_size=80), st.text("abc-", min_size=1, max_size=80), st.integers(0, 9999))
def test_names_leave_room_for_pods(cluster: str, stem: str, number: int) -> None:
    name = instance_name(cluster, stem, number)
    assert len(name) <= WORKLOAD_CHARS_MAX
    assert name != instance_name(cluster, stem, number + 1)
    assert name == name.lower()
