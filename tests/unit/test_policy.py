"""Least load: who is chosen, who is never chosen, and what is said of it."""

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from router.policy import POLICIES
from router.policy.candidates import Wanted
from router.view import View


def fleet(*specs: tuple[str, Role]) -> View:
    view = View()
    for name, role in specs:
        view.add(Instance(id=InstanceId(name), role=role, url=f"http://{name}"))
        view.seen(InstanceId(name), ({"id": "m"},), Load())
    return view


def choose(view: View, **wanted: object) -> tuple[str | None, str | None]:
    chosen = POLICIES["least_load"](view.all(), Wanted(**{"model": "m", "hand_over": True, **wanted}))  # type: ignore[arg-type]
    assert chosen.because
    return chosen.prefill, chosen.decode


PD = (("p", Role.PREFILL), ("d", Role.DECODE))


def test_a_pair() -> None:
    assert choose(fleet(*PD)) == ("p", "d")


def test_whole_requests_go_to_decode_and_single_tokens_to_prefill() -> None:
    view = fleet(*PD)
    assert choose(view, hand_over=False) == (None, "d")
    assert choose(view, hand_over=False, prefill_only=True) == (None, "p")
    assert choose(fleet(*PD, ("b", Role.BOTH)), hand_over=False) == (None, "b")


def test_no_second_instance_means_whole() -> None:
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
    view.get(InstanceId("p")).draining = True
    assert choose(view) == (None, None)


def test_one_lost_probe_is_noise() -> None:
    view = fleet(*PD)
    view.probe_failed(InstanceId("d"))
    assert view.get(InstanceId("d")).up
    view.probe_failed(InstanceId("d"))
    assert not view.get(InstanceId("d")).up
    view.seen(InstanceId("d"), None, None)
    assert view.get(InstanceId("d")).up


def test_a_decode_instance_that_went_down_has_met_nobody() -> None:
    view = fleet(*PD)
    view.pair_met("engine", InstanceId("d"))
    assert view.pair_warm("engine", InstanceId("d"))
    view.unreachable(InstanceId("d"))
    assert not view.pair_warm("engine", InstanceId("d"))


def test_models_of_ready_instances() -> None:
    view = fleet(*PD)
    assert view.models() == ("m",)
    view.unreachable(InstanceId("d"))
    view.unreachable(InstanceId("p"))
    assert view.models() == ()
