"""What predictions rest on: told, learned or assumed, by instance, by fleet and of all requests."""

from __future__ import annotations

from typing import Any

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from costs.step import StepCost
from router.admin import basis
from router.core.values import Reported, Wanted
from router.fleet.view import FleetView
from router.predict.answer_lengths import Predictor
from router.predict.predictors import KEY_BYTES, RequestPredictor
from router.predict.step_model import ASSUMED, FEW, LEARNED, SURE, TOLD, UNKNOWN, Make

P, D = InstanceId("p"), InstanceId("d")
STEP = StepCost(floor_ms=1.0, start_ms=1.0, token_ms=0.1, area_ms=0.0, decode_ms=1.0, context_ms=0.0, request_ms=0.0)
KNOWN = Make(prefill=STEP, decode=STEP)


def view(*told: InstanceId, kv_tokens: int = 0) -> FleetView:
    """A fleet of P and D. The costs of the instances in `told` are known."""
    here = FleetView(lambda instance: KNOWN if instance.id in told else None)
    for name, role in ((P, Role.PREFILL), (D, Role.DECODE)):
        here.add(Instance(id=name, role=role, url=f"http://{name}"))
        here.seen(name, ({"id": "m"},), Load(kv_tokens=kv_tokens))
    return here


def origins(here: FleetView, name: InstanceId) -> dict[str, str]:
    fleet = here.all()
    return {kind: each.origin for kind, each in basis.of_instance(fleet, fleet.by_id[name]).items()}


def test_without_costs_an_instance_has_assumptions_for_its_role_alone() -> None:
    here = view()
    assert origins(here, P) == {"prompts": ASSUMED, "memory": ASSUMED}
    assert origins(here, D) == {"steps": ASSUMED, "transfers": ASSUMED, "memory": ASSUMED}


def test_what_the_cluster_file_or_the_engine_says_is_told() -> None:
    assert set(origins(view(P, D), D).values()) == {TOLD}
    assert origins(view(kv_tokens=1000), P) == {"prompts": ASSUMED, "memory": TOLD}


def test_rates_of_tiers_are_told_once_all_were_measured() -> None:
    here = view(P)
    instance = Instance(id=P, role=Role.PREFILL, url=f"http://{P}")

    def hears(**gb_s: float) -> str | None:
        told = Reported(instance=instance, state="ready", accepting=True, credits=1, load=Load(), models=({"id": "m"},),
                        kept={"host": 5, "disk": 5} if gb_s else {}, kept_gb_s=gb_s, kv_token_bytes=2048)  # fmt: skip
        here.fold((told,))
        return origins(here, P).get("tiers")

    assert hears() is None, "it has no tiers"
    assert hears(host=1.0) == ASSUMED
    assert hears(host=1.0, disk=1.0) == TOLD


def test_timed_legs_are_learned_once_there_are_enough() -> None:
    here = view()
    fleet = here.all()
    model, p, d = fleet.inflight.step_model, fleet.by_id[P].row, fleet.by_id[D].row
    for at in range(SURE):
        assert model.rows[p].prompts_from() == ASSUMED, f"after {at}"
        tokens = 100 + 37 * (at % 9)
        model.prompt_took(p, UNKNOWN.prompt_ms(tokens), 5 * UNKNOWN.prompt_ms(tokens))
    for _ in range(FEW):
        assert model.known(p, d) == ASSUMED, "the less certain of the two"
        model.steps_took(d, 10.0, 10.0 * 3)
    assert model.known(p, d) == LEARNED
    prompts = basis.of_instance(fleet, fleet.by_id[P])["prompts"]
    assert prompts[:2] == (LEARNED, SURE)
    assert prompts.factor == model.rows[p].prefill_factor > 1.5
    assert prompts.as_json()["from"] == "learned"


def test_a_pair_of_one_told_and_one_learned_is_learned() -> None:
    here = view(P)
    fleet = here.all()
    model, p, d = fleet.inflight.step_model, fleet.by_id[P].row, fleet.by_id[D].row
    assert model.known(p, p) == TOLD
    assert model.known(p, d) == ASSUMED
    for _ in range(FEW):
        model.steps_took(d, 10.0, 30.0)
    assert model.known(p, d) == LEARNED


def test_the_fleet_is_counted_and_says_what_it_assumes() -> None:
    here = view(P)
    fleet = here.all()
    found = {each["name"]: each for each in basis.of_fleet(fleet, list(fleet))}
    assert (found["prompts"]["told"], found["prompts"]["assumed"], found["prompts"]["assumes"]) == (1, 0, "")
    assert (found["steps"]["told"], found["steps"]["assumed"]) == (0, 1)
    assert "H100" in found["steps"]["assumes"]
    assert (found["memory"]["told"], found["memory"]["assumed"]) == (1, 1)


def test_lengths_and_tokens_are_assumed_until_an_answer_has_ended() -> None:
    lengths = Predictor()
    predictor = RequestPredictor(lengths, bytes(KEY_BYTES))
    assert basis.of_requests(None) == []
    assert [each["assumed"] for each in basis.of_requests(predictor)] == [1, 1]
    body: dict[str, Any] = {"prompt": "lantern " * 50}
    taken = predictor.take(Wanted(model="m", hand_over=True), "/v1/completions", body, scope=None)
    predictor.told(taken.wanted, taken, {"prompt_tokens": 80})
    lengths.learn(taken.lengths, 12)
    assert [(each["learned"], each["seen"], each["assumes"]) for each in basis.of_requests(predictor)] == [
        (1, 1, "")
    ] * 2
