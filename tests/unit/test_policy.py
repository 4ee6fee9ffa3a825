"""The policy `least_load`: which instances it chooses, which it never chooses, and its `because`."""

import pytest

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from router.core.values import Reported, Wanted
from router.fleet.view import AWAY_MAX, MET_MAX, FleetView
from router.scheduler.scoring.policies import POLICIES


def fleet(*specs: tuple[str, Role]) -> FleetView:
    view = FleetView()
    for name, role in specs:
        view.add(Instance(id=InstanceId(name), role=role, url=f"http://{name}"))
        view.seen(InstanceId(name), ({"id": "m"},), Load())
    return view


def choose(view: FleetView, **wanted: object) -> tuple[str | None, str | None]:
    chosen = POLICIES["least_load"](view.all(), Wanted(**{"model": "m", "hand_over": True, **wanted}))  # type: ignore[arg-type]
    assert chosen.because
    return chosen.prefill, chosen.decode


PD = (("p", Role.PREFILL), ("d", Role.DECODE))


def test_a_pair() -> None:
    assert choose(fleet(*PD)) == ("p", "d")


def test_aggregated_requests_go_to_decode_and_single_tokens_to_prefill() -> None:
    view = fleet(*PD)
    assert choose(view, hand_over=False) == (None, "d")
    assert choose(view, hand_over=False, prefill_only=True) == (None, "p")
    assert choose(fleet(*PD, ("b", Role.BOTH)), hand_over=False) == (None, "b")


def test_without_a_second_instance_a_request_is_served_aggregated() -> None:
    assert choose(fleet(("p", Role.PREFILL))) == (None, "p")
    assert choose(fleet(("b", Role.BOTH))) == (None, "b")
    assert choose(fleet(*PD), excluded=frozenset({InstanceId("p")})) == (None, "d")


def test_an_instance_of_both_roles_leaves_prefill_to_itself_only_with_another_decoder() -> None:
    assert choose(fleet(("b", Role.BOTH), ("d", Role.DECODE))) == ("b", "d")
    assert choose(fleet(("b", Role.BOTH), ("p", Role.PREFILL))) == ("p", "b")
    assert choose(fleet(("b0", Role.BOTH), ("b1", Role.BOTH))) == ("b1", "b0")


def test_the_least_loaded() -> None:
    view = fleet(("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE))
    view.leg_started(InstanceId("p0"))
    view.seen(InstanceId("d0"), None, Load(waiting=3))
    assert choose(view) == ("p1", "d1")


def test_idle_twins_take_turns() -> None:
    """Dynamo issue 7836: two of five decode workers got no request at all."""
    view = fleet(("p", Role.PREFILL), *((f"d{n}", Role.DECODE) for n in range(5)))
    taken = []
    for _ in range(5):
        _, decode = choose(view)
        assert decode is not None
        view.leg_started(InstanceId(decode))
        view.leg_ended(InstanceId(decode))
        taken.append(decode)
    assert sorted(taken) == ["d0", "d1", "d2", "d3", "d4"]


def test_down_draining_and_other_models_are_no_candidates() -> None:
    view = fleet(*PD)
    assert choose(view, model="other") == (None, None)
    view.unreachable(InstanceId("d"))
    assert choose(view) == (None, "p")
    view.get(InstanceId("p")).accepting = False
    assert choose(view) == (None, None)


def test_one_lost_probe_is_noise() -> None:
    view = fleet(*PD)
    view.probe_failed(InstanceId("d"))
    assert view.get(InstanceId("d")).up
    view.probe_failed(InstanceId("d"))
    assert not view.get(InstanceId("d")).up
    view.seen(InstanceId("d"), None, None)
    assert view.get(InstanceId("d")).up


def test_a_decode_instance_that_went_down_has_met_no_engine() -> None:
    view = fleet(*PD)
    view.pair_met("engine", InstanceId("d"))
    assert view.pair_warm("engine", InstanceId("d"))
    view.unreachable(InstanceId("d"))
    assert not view.pair_warm("engine", InstanceId("d"))


@pytest.mark.parametrize(("epoch", "held"), [(0, 0), (7, 3)])
def test_an_engine_given_by_url_has_an_empty_cache_once_it_was_down(epoch: int, held: int) -> None:
    """Its lives have no numbers, and its restart left the prefixes of the engine before."""
    view = FleetView()
    view.index()
    view.add(Instance(id=InstanceId("d"), role=Role.DECODE, url="http://d", epoch=epoch))
    view.seen(InstanceId("d"), None, None)
    prefixes, d = view.all().prefixes, InstanceId("d")
    assert prefixes is not None
    prefixes.join(view.get(d).row, 10_000, view.get(d).life)
    prefixes.sent(view.get(d).row, (1, 2, 3), 0.0)
    view.probe_failed(d)
    assert prefixes.match((1, 2, 3)).chunks_of(view.get(d).row) == 3, "one failed probe says nothing"
    view.unreachable(d)
    view.seen(d, None, None)
    assert prefixes.match((1, 2, 3)).chunks_of(view.get(d).row) == held


def test_the_engines_that_a_decode_instance_has_met_are_bounded() -> None:
    """Prefill engines have a new name at every start: what is kept of the old ones must not grow for ever."""
    view = FleetView()
    d = InstanceId("d")
    view.fold((reported("d", Role.DECODE),))
    for life in range(MET_MAX + 10):
        view.pair_met(f"e{life}", d)
    assert len(view._met[d]) == MET_MAX
    assert not view.pair_warm("e9", d) and view.pair_warm("e10", d) and view.pair_warm(f"e{MET_MAX + 9}", d)
    view.fold(())
    assert not view._met, "d has left"


def test_models_stay_known_while_their_engines_are_away() -> None:
    """A request for one of them is then told 503, not 404."""
    view = fleet(*PD)
    assert view.served.names("") == ("m",)
    view.unreachable(InstanceId("d"))
    view.unreachable(InstanceId("p"))
    assert view.served.names("") == ("m",)


def serving(name: str, *models: str, epoch: int = 1, tenants: tuple[str, ...] = ()) -> Reported:
    instance = Instance(id=InstanceId(name), role=Role.BOTH, url="u", epoch=epoch, tenants=frozenset(tenants))
    listed = tuple({"id": model} for model in models)
    return Reported(instance=instance, state="ready", accepting=True, credits=9, load=Load(), models=listed)


def test_a_model_whose_last_instance_is_away_is_remembered_for_its_tenants() -> None:
    view, other = FleetView(), serving("a-0", "a")
    view.fold((other, serving("b-0", "b", "lora"), serving("b-1", "b"), serving("own", "secret", tenants=("ann",))))
    view.fold((other, serving("b-1", "b")))
    assert not view.served.lacks("b", "") and view.served.lacks("lora", "") and view.served.away("lora", "")
    assert view.served.away("secret", "ann") and not view.served.hides("secret", "ann")
    for tenant in ("", "eve"):
        assert view.served.lacks("secret", tenant) and not view.served.away("secret", tenant)
        assert view.served.hides("secret", tenant)
    view.fold((other,))
    assert view.served.lacks("b", "") and view.served.away("b", "") and not view.served.hides("b", "")
    assert not view.served.away("typo", "") and view.served.hides("typo", "")


def test_an_instance_that_starts_anew_serves_what_it_did_until_it_has_named_its_models() -> None:
    view, other = FleetView(), serving("a-0", "a")
    view.fold((other, serving("b-0", "b")))
    for epoch in (2, 3):
        view.fold((other, serving("b-0", epoch=epoch)))
        assert view.served.lacks("b", "") and view.served.away("b", "")
    view.fold((other, serving("b-0", "c", epoch=3)))
    assert view.served.lacks("b", "") and not view.served.away("b", ""), "it serves another model now"
    view.fold((other,))
    assert view.served.away("c", "") and not view.served.away("b", "")


def test_a_model_is_away_when_the_last_leg_of_its_gone_instance_ends() -> None:
    view, other, b = FleetView(), serving("a-0", "a"), InstanceId("b-0")
    view.fold((other, serving("b-0", "b")))
    view.leg_started(b)
    view.fold((other,))
    assert not view.served.lacks("b", ""), "it is still known"
    view.leg_ended(b)
    assert view.served.lacks("b", "") and view.served.away("b", "")


def test_models_of_so_many_instances_that_are_away_are_remembered() -> None:
    view, other = FleetView(), serving("a-0", "a")
    for number in range(AWAY_MAX + 1):
        view.fold((other, serving(f"x-{number}", f"m-{number}")))
    view.fold((other,))
    assert not view.served.away("m-0", "") and view.served.away("m-1", "") and view.served.away(f"m-{AWAY_MAX}", "")


def test_credits_bound_the_legs_of_all_routers_together() -> None:
    view = fleet(*PD)
    view.get(InstanceId("d")).credits = 4
    for _ in range(2):
        assert choose(view, routers=2) == ("p", "d")
        view.leg_started(InstanceId("d"))
    chosen = POLICIES["least_load"](view.all(), Wanted(model="m", hand_over=True, routers=2))
    assert (chosen.decode, chosen.wait) == (None, True)
    assert choose(view, routers=1) == ("p", "d")
    view.leg_ended(InstanceId("d"))
    assert choose(view, routers=2) == ("p", "d")


def test_a_request_waits_for_a_full_pair_rather_than_be_served_aggregated() -> None:
    view = fleet(*PD)
    view.get(InstanceId("p")).credits = 1
    view.leg_started(InstanceId("p"))
    assert POLICIES["least_load"](view.all(), Wanted(model="m", hand_over=True)).wait
    assert choose(view, hand_over=False) == (None, "d")


def reported(name: str, role: Role, *, epoch: int = 1, state: str = "ready") -> Reported:
    instance = Instance(id=InstanceId(name), role=role, url=f"http://{name}", epoch=epoch)
    models = ({"id": "m"},)
    return Reported(instance=instance, state=state, accepting=state == "ready", credits=9, load=Load(), models=models)


def test_the_fleet_as_heartbeats_tell_it() -> None:
    view = FleetView()
    p, d = reported("p", Role.PREFILL), reported("d", Role.DECODE)
    assert view.fold((p, d)) == frozenset()
    assert choose(view) == ("p", "d")
    assert view.fold((p, reported("d", Role.DECODE, state="draining"))) == frozenset()
    assert choose(view) == (None, "p"), "nothing is sent to a draining instance"
    assert view.fold((p,)) == {"d"}, "d has left"
    assert not view.knows(InstanceId("d"))


def test_a_new_epoch_is_a_new_engine() -> None:
    view = FleetView()
    view.fold((reported("p", Role.PREFILL), reported("d", Role.DECODE)))
    view.leg_started(InstanceId("p"))
    view.pair_met("e", InstanceId("d"))
    lost = view.fold((reported("p", Role.PREFILL, epoch=2, state="starting"), reported("d", Role.DECODE, epoch=2)))
    assert lost == {"p", "d"}
    assert choose(view) == (None, "d")
    assert not view.pair_warm("e", InstanceId("d"))
    view.leg_ended(InstanceId("p"))
    assert view.get(InstanceId("p")).inflight == 0


def test_another_role_is_the_same_engine() -> None:
    """A flip: legs that run there go on, and only later requests go elsewhere."""
    view = FleetView()
    p, d = reported("p", Role.PREFILL), reported("d", Role.DECODE)
    view.fold((p, d, reported("e", Role.DECODE)))
    view.leg_started(InstanceId("d"))
    view.pair_met("p", InstanceId("d"))
    before = view.get(InstanceId("d"))
    assert view.fold((p, reported("d", Role.PREFILL), reported("e", Role.DECODE))) == frozenset(), "nothing is lost"
    assert view.get(InstanceId("d")) is before
    assert (before.role, before.inflight) == (Role.PREFILL, 1)
    assert view.pair_warm("p", InstanceId("d"))
    assert choose(view) == ("p", "e")
    view.fold((reported("p", Role.DECODE), reported("d", Role.PREFILL), reported("e", Role.DECODE, state="draining")))
    assert choose(view) == ("d", "p")


def test_an_instance_that_left_is_forgotten_after_its_last_leg() -> None:
    view = FleetView()
    view.fold((reported("p", Role.PREFILL),))
    view.leg_started(InstanceId("p"))
    view.fold(())
    assert view.knows(InstanceId("p"))
    view.leg_ended(InstanceId("p"))
    assert not view.knows(InstanceId("p"))


def test_an_unreachable_instance_stays_out_until_a_probe_succeeds() -> None:
    """Its agent may report it as ready; what counts is whether this router reaches it."""
    view = FleetView()
    view.fold((reported("d", Role.DECODE),))
    assert view.unreachable(InstanceId("d"))
    view.fold((reported("d", Role.DECODE),))
    assert choose(view) == (None, None)
    view.seen(InstanceId("d"), None, None)
    assert choose(view) == (None, "d")


def hear(view: FleetView, shuns: dict[str, tuple[str, ...]]) -> None:
    """Fold heartbeats of all instances of a view; `shuns`: by instance, the instances that it cannot pull from."""
    told = [
        Reported(
            instance=seen.instance,
            state="ready",
            accepting=True,
            credits=100,
            load=Load(),
            models=({"id": "m"},),
            shuns=tuple(InstanceId(name) for name in shuns.get(seen.id, ())),
        )
        for seen in view.all()
    ]
    view.fold(tuple(told))


TWO_BY_TWO = (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE))


def test_a_new_instance_takes_turns_with_those_that_have_served_for_long() -> None:
    view = fleet(*TWO_BY_TWO)
    for name in ("d0", "d1"):
        for _ in range(1000):
            view.leg_started(InstanceId(name))
            view.leg_ended(InstanceId(name))
    view.add(Instance(id=InstanceId("down"), role=Role.DECODE, url="http://down"))
    for name, role in (("d2", Role.DECODE), ("p2", Role.PREFILL)):
        view.add(Instance(id=InstanceId(name), role=role, url=f"http://{name}"))
        view.seen(InstanceId(name), ({"id": "m"},), Load())
    taken = []
    for _ in range(9):
        prefill, decode = (InstanceId(name or "") for name in choose(view))
        for name in (prefill, decode):
            view.leg_started(name)
            view.leg_ended(name)
        taken += [prefill, decode]
    assert {name: taken.count(name) for name in set(taken)} == dict.fromkeys(("p0", "p1", "p2", "d0", "d1", "d2"), 3)


def legs(view: FleetView, name: str, count: int) -> None:
    for _ in range(count):
        view.leg_started(InstanceId(name))
        view.leg_ended(InstanceId(name))


def answered_by(view: FleetView, requests: int) -> dict[str, int]:
    """How many of these requests, one after another, each decode instance gets."""
    taken: list[str] = []
    for _ in range(requests):
        _, decode = choose(view, hand_over=False)
        assert decode is not None
        legs(view, decode, 1)
        taken.append(decode)
    return {name: taken.count(name) for name in sorted(set(taken))}


@pytest.mark.parametrize("before", ["starting", "started anew", "draining", "quarantined", "down"])
def test_an_instance_that_gets_ready_takes_turns_with_those_that_served_meanwhile(before: str) -> None:
    """An engine loads for minutes after it is first heard of, and the others are sent thousands of legs meanwhile."""
    view, late = FleetView(), InstanceId("c")
    others = (reported("a", Role.DECODE), reported("b", Role.DECODE))
    epoch = 2 if before == "started anew" else 1
    if before != "starting":
        view.fold((*others, reported("c", Role.DECODE)))
    if before in {"starting", "started anew", "draining"}:
        state = "draining" if before == "draining" else "starting"
        view.fold((*others, reported("c", Role.DECODE, epoch=epoch, state=state)))
    elif before == "quarantined":
        view.set_aside({late: "looked at"})
    else:
        view.unreachable(late)
    legs(view, "a", 1000)
    legs(view, "b", 1000)
    view.set_aside({})
    view.fold((*others, reported("c", Role.DECODE, epoch=epoch)))
    view.seen(late, None, None)
    assert answered_by(view, 9) == {"a": 3, "b": 3, "c": 3}


def test_an_instance_that_was_sent_more_than_the_others_keeps_its_count() -> None:
    view = fleet(("a", Role.DECODE), ("b", Role.DECODE))
    legs(view, "a", 5)
    view.unreachable(InstanceId("a"))
    view.seen(InstanceId("a"), None, None)
    assert answered_by(view, 5) == {"b": 5}


@pytest.mark.parametrize("before", [0, 5, 2000])
def test_an_instance_that_takes_another_role_takes_turns_with_those_that_have_it(before: int) -> None:
    """Legs that it was sent in its former role do not count among those that its new pool was sent. Its legs run on."""
    view, turned = FleetView(), InstanceId("c")
    others = (reported("a", Role.DECODE), reported("b", Role.DECODE))
    view.fold((*others, reported("c", Role.PREFILL)))
    for each in others:
        view.seen(each.instance.id, None, None)
        legs(view, each.instance.id, 1000)
    view.seen(turned, None, None)
    legs(view, "c", before)
    view.leg_started(turned)
    view.fold((*others, reported("c", Role.DECODE)))
    assert (view.get(turned).inflight, view.all().columns.inflight[view.get(turned).row]) == (1, 1)
    assert answered_by(view, 4) == {"a": 2, "b": 2}, "its prefill leg still runs there"
    view.leg_ended(turned)
    assert view.get(turned).inflight == 0
    taken = answered_by(view, 12)
    assert sorted(taken) == ["a", "b", "c"] and max(taken.values()) <= 6, taken


def test_an_instance_that_is_alone_in_its_new_role_keeps_its_count() -> None:
    view = fleet(("a", Role.PREFILL), ("b", Role.DECODE))
    legs(view, "b", 5)
    view.add(Instance(id=InstanceId("a"), role=Role.BOTH, url="http://a"))
    assert (view.get(InstanceId("a")).sent, view.get(InstanceId("b")).sent) == (0, 5)


def test_a_pair_that_does_not_work_is_not_chosen_and_both_its_instances_are() -> None:
    view = fleet(*TWO_BY_TWO)
    hear(view, {"d0": ("p0",)})
    assert choose(view) == ("p1", "d0")
    view.leg_started(InstanceId("d0"))
    assert choose(view) == ("p0", "d1")
    view.leg_ended(InstanceId("d0"))
    view.leg_started(InstanceId("p1"))
    assert choose(view) == ("p0", "d1"), "d0 has been sent one more"
    hear(view, {})
    assert not view.all().pairing.shunning and choose(view) == ("p0", "d1")


def test_a_decode_instance_that_can_pull_from_no_other_gets_no_handoff() -> None:
    view = fleet(*TWO_BY_TWO)
    hear(view, {"d0": ("p0", "p1")})
    view.leg_started(InstanceId("d1"))
    assert choose(view) == ("p0", "d1")
    assert choose(view, hand_over=False) == (None, "d0"), "d0 serves requests that are not handed over"
    hear(view, {"d0": ("p0", "p1"), "d1": ("p1", "p0")})
    chosen = POLICIES["least_load"](view.all(), Wanted(model="m", hand_over=True))
    assert (chosen.prefill, chosen.decode) == (None, "d0") and "pulls from another" in chosen.because


def test_the_shuns_of_an_instance_are_forgotten_with_it() -> None:
    view = fleet(*TWO_BY_TWO)
    hear(view, {"d0": ("p0",)})
    others = [each for each in view.all() if each.id != "d0"]
    view.fold(tuple(
        Reported(instance=each.instance, state="ready", accepting=True, credits=1, load=Load(), models=({"id": "m"},))
        for each in others
    ))  # fmt: skip
    assert not view.all().pairing.shunning and not view.knows(InstanceId("d0"))


def test_instances_kept_for_tenants_serve_no_other_tenant() -> None:
    view = FleetView()
    for name, role, tenants in (
        (*PD[0], ()),
        (*PD[1], ()),
        ("own", Role.DECODE, ("ann",)),
        ("two", Role.PREFILL, ("ann", "bob")),
    ):
        view.add(Instance(id=InstanceId(name), role=role, url="u", tenants=frozenset(tenants)))
        view.seen(InstanceId(name), ({"id": "m"}, {"id": f"of-{name}"}), Load())
    one = {tenant: set(view.served.names(tenant)) for tenant in ("", "eve", "ann", "bob")}
    assert one[""] == one["eve"] == {"m", "of-p", "of-d"}
    assert one["ann"] == {"m", "of-p", "of-d", "of-own", "of-two"} and one["bob"] == one[""] | {"of-two"}
    for tenant, model, expected in (
        ("eve", "m", {"p", "d"}),
        ("", "of-own", set()),
        ("bob", "m", {"p", "d", "two"}),
        ("ann", "of-own", {"own"}),
    ):
        found = view.all().ready_for(Wanted(model=model, hand_over=True, tenant=tenant))
        assert {view.all().at(row).id for row in found.any.tolist()} == expected, tenant
    assert len(view.all().ready("m").any) == 4, "the router's own prompts go to all"
    for name in ("own", "two"):
        view.all().remove(InstanceId(name))
    assert view.served.names("ann") == view.served.names("")


def test_requests_of_tenants_with_their_own_instances_are_a_kind_of_their_own() -> None:
    """Once a request in the queue finds no place, the others of its kind are not asked."""
    ann, eve = (
        Wanted(model="m", hand_over=True, tenant=name, whose=whose) for name, whose in (("ann", "ann"), ("eve", ""))
    )
    assert ann.kind != eve.kind == Wanted(model="m", hand_over=True, tenant="").kind
