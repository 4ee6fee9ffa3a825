"""Choices by columns equal choices by loops; no waiting request is forgotten; the invariants hold under any faults."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated import members, simulate

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from loadgen.arrival import Arrival
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet.columns import InstanceView
from router.fleet.view import FleetView
from router.scheduler.flow_control.queue import FlowControlQueue
from router.scheduler.scoring.least_load import _say, least_load
from sim.faults import KINDS, Fault

ROLES = st.sampled_from(list(Role))


# --- the same decisions as the loops that the columns replaced --------------------------------------------------------


def by_loops(instances: tuple[InstanceView, ...], wanted: Wanted) -> Chosen:
    """`least_load` as a loop over the instances."""
    candidates = tuple(
        view
        for view in instances
        if view.ready and view.id not in wanted.excluded and (wanted.model is None or wanted.model in view.models)
    )
    if not candidates:
        return Chosen(None, None, "no ready instance serves this model")
    placed = tuple(view for view in candidates if view.has_place(wanted.routers))
    if wanted.hand_over and _pair(candidates) is not None:
        pair = _pair(placed)
        if pair is None:
            return Chosen(None, None, "every prefill or every decode instance is full", wait=True)
        return Chosen(pair[0].id, pair[1].id, f"least load: {_say(pair[0])}, {_say(pair[1])}")
    if not placed:
        return Chosen(None, None, "every instance is full", wait=True)
    fits = (Role.PREFILL, Role.BOTH, Role.DECODE) if wanted.prefill_only else (Role.BOTH, Role.DECODE, Role.PREFILL)
    alone = next(best for role in fits if (best := _least([v for v in placed if v.role is role])) is not None)
    missing = "from" if not any(view.role.prefills for view in candidates) else "to"
    why = "not handed over" if not wanted.hand_over else f"no second instance to hand over {missing}"
    return Chosen(None, alone.id, f"{why}: whole on {_say(alone)}")


def _pair(candidates: tuple[InstanceView, ...]) -> tuple[InstanceView, InstanceView] | None:
    for decode in sorted((view for view in candidates if view.role.decodes), key=_key):
        prefill = _least([view for view in candidates if view.role.prefills and view is not decode])
        if prefill is not None:
            return prefill, decode
    return None


def _least(views: list[InstanceView]) -> InstanceView | None:
    return min(views, key=_key) if views else None


def _key(view: InstanceView) -> tuple[int, int, float, int, str]:
    return (view.inflight, view.load.waiting, view.load.kv_usage, view.sent, view.id)


LOADS = st.builds(
    Load, running=st.integers(0, 2), waiting=st.integers(0, 2), kv_usage=st.sampled_from([0.0, 0.25, 0.5])
)
MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "remove", "seen", "down", "drain", "start", "end", "credits", "grant", "model", "renew"]
        ),
        st.integers(0, 5),
        ROLES,
        LOADS,
        st.one_of(st.none(), st.integers(0, 3)),
    ),
    max_size=40,
)
ASKS = st.builds(
    Wanted,
    model=st.sampled_from([None, "m", "other"]),
    hand_over=st.booleans(),
    prefill_only=st.booleans(),
    excluded=st.frozensets(st.integers(0, 5).map(lambda n: InstanceId(f"i{n}")), max_size=2),
    routers=st.integers(1, 3),
)


def move(view: FleetView, what: str, name: InstanceId, role: Role, load: Load, legs: int | None) -> None:
    """Apply one event to one instance."""
    if what == "add":
        if not view.knows(name):
            view.add(Instance(id=name, role=role, url="u"))
        return
    if not view.knows(name):
        return
    seen = view.get(name)
    if what == "remove" and seen.inflight == 0:
        seen.state = "gone"
        view.leg_started(name)
        view.leg_ended(name)
    elif what == "renew":
        view.add(Instance(id=name, role=role, url="u", epoch=seen.instance.epoch + 1))
    elif what in {"seen", "model"}:
        view.seen(name, ({"id": "m" if what == "seen" else "other"},), load)
    elif what == "down":
        view.unreachable(name)
    elif what == "drain":
        seen.accepting = not seen.accepting
    elif what == "start":
        view.leg_started(name)
    elif what == "end" and seen.inflight:
        view.leg_ended(name)
    elif what == "credits":
        seen.credits = legs
    elif what == "grant":
        seen.grant = legs


@given(MOVES, st.lists(ASKS, min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_columns_choose_as_loops_did(moves: list, asks: list[Wanted]) -> None:
    view = FleetView()
    for number in range(4):
        move(view, "add", InstanceId(f"i{number}"), list(Role)[number % 3], Load(), None)
        move(view, "seen", InstanceId(f"i{number}"), Role.BOTH, Load(), None)
    for what, number, role, load, legs in moves:
        move(view, what, InstanceId(f"i{number}"), role, load, legs)
        for wanted in asks:
            assert least_load(view.all(), wanted) == by_loops(tuple(view.all()), wanted)


# --- the flow-control queue -------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from("xyz"), min_size=1, max_size=8),
    st.lists(st.tuples(st.sampled_from(["free", "all", "leave"]), st.sampled_from("xyz"), st.integers(0, 7))),
)
def test_no_place_stays_free_while_a_request_waits_for_it(kinds: list[str], happens: list) -> None:
    """Places have kinds. A called request asks at once, and leaves if it gets a place. After that, no free place has a
    request that waits for it.
    """
    waiting, free = FlowControlQueue(), dict.fromkeys("xyz", 0)
    wants = dict(enumerate(kinds))
    for who, kind in wants.items():
        waiting.enter(who, Wanted(model=kind, hand_over=True))
    served: list[int] = []

    def ask(called: tuple) -> None:
        queue = list(called)
        while queue:
            who = queue.pop(0)
            if free[wants[who]]:
                free[wants[who]] -= 1
                served.append(who)
                queue += waiting.leave(who, placed=True)
                del wants[who]
            else:
                queue += waiting.found_none(who)

    for what, kind, who in happens:
        if what == "leave":
            if who in wants:
                del wants[who]
                ask(waiting.leave(who, placed=False))
            continue
        free[kind] += 1 if what == "free" else 2
        ask(waiting.call_first() if what == "free" else waiting.call_all())
        assert not any(free[wanted] for wanted in wants.values()), "a place is free, and a request waits for it"
    for kind in "xyz":
        order = [who for who in served if kinds[who] == kind]
        assert order == sorted(order), "first come, first served"


# --- whole runs with faults -------------------------------------------------------------------------------------------

ARRIVALS = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 500), st.sampled_from([0, 1, 2, 5, 40]), st.integers(0, 2)),
    min_size=1,
    max_size=12,
)
FAULTS = st.lists(
    st.tuples(
        st.integers(0, 600), st.sampled_from(sorted(KINDS)), st.integers(0, 3), st.integers(20, 3000), st.integers(1, 8)
    ),
    max_size=6,
)


@given(ARRIVALS, FAULTS, st.sampled_from([(0, 1), (0, 0, 1, 1), (2,), (2, 2), (0, 1, 2)]), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_request_ends_once_and_no_blocks_stay_held(
    rows: list, wrong: list, roles: tuple[int, ...], greedy: bool, seeding: bool
) -> None:
    """The checks inside a run assert the rest: blocks, places, deadlines, and the end of every hold."""
    fleet = members(*(list(Role)[number] for number in roles), config={"lease_s": 2.0})
    arrivals = [
        Arrival(at_s=at / 1000, input_tokens=tokens, output_tokens=answer, prefix=(7, 8)[:shared], block_tokens=16)
        for at, tokens, answer, shared in sorted(rows)
    ]
    faults = [
        Fault(
            at_s=at / 1000,
            kind=kind,
            instance=None if kind == "leave" else fleet[where % len(fleet)].name,
            duration_s=lasts / 1000,
            factor=factor,
        )
        for at, kind, where, lasts, factor in wrong
    ]
    world, result = simulate(
        fleet, arrivals, faults=faults, greedy=greedy, seeding=seeding, stall_s=1.0, first_token_s=5.0
    )
    assert len(result.columns) == len(arrivals)
    assert (result.columns["outcome"] > 0).all()
    served = result.columns[result.good()]
    assert (served["made_tokens"] >= 1).all()
    assert (served["first_ns"] <= served["last_ns"]).all()
    assert all(not at.ready or world.kv_usage(at) == 0 for at in world.instances)
