"""The workload policy: its choices, and the reasons (`because`) that it gives."""

import math
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from costs import shipped
from costs.cost import costs_of
from costs.hardware import gpu_named
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet.view import FleetView
from router.predict.prefix_cache import PrefixCacheIndex
from router.predict.step_model import SURE, Make, make_of
from router.scheduler.flow_control.queue import FlowControlQueue
from router.scheduler.flow_control.saturation import AHEAD_MS, SaturationDetector
from router.scheduler.placements import Placement, Placements
from router.scheduler.scoring.budget import MISS
from router.scheduler.scoring.figures import ONE_STEP_TOKENS, slowest_over_quickest
from router.scheduler.scoring.prices import SHED_WEIGHT, Scoring, prices_of
from router.scheduler.scoring.workload import K, workload

MAKES = {
    gpu: make_of(costs_of(shipped.models()["meta-llama/Llama-3.1-8B"], gpu_named(gpu), profiles=shipped.profiles()))
    for gpu in ("H100", "A100")
}
P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH


def view(
    *roles: Role,
    gpus: Sequence[str] = (),
    credits_each: int | None = None,
    weights: str = "",
    nodes: str = "",
    pins: bool = True,
) -> FleetView:
    """Instances p0, d1, …, in this order. `weights` and `nodes`: one letter for each instance that announces them."""
    kinds = dict(enumerate(gpus))

    def make(instance: Instance) -> Make:
        return MAKES[kinds.get(int(instance.id[1:]), "H100")]

    made = FleetView(make)
    for at, role in enumerate(roles):
        name = InstanceId(f"{role.value[0]}{at}")
        told = {"weights": weights[at : at + 1], "node": nodes[at : at + 1]}
        made.add(Instance(id=name, role=role, url=f"http://{name}", pins=pins, **told))
        made.seen(name, ({"id": "m"},), Load())
        made.get(name).credits = credits_each
    return made


def asks(now: float = 0.0, **more: object) -> Wanted:
    told: dict[str, object] = {
        "prompt_tokens": 2000,
        "output_tokens": 200.0,
        "output_lengths": (20, 35, 50, 75, 100, 200, 400),
        **more,
    }
    return Wanted(model="m", hand_over=True, arrived=now, now=now, **told)  # type: ignore[arg-type]


def place(at: FleetView, wanted: Wanted, decode: str, prefill: str | None = None) -> Placement:
    """Place a request on these instances, without asking the policy."""
    expected = Placement()
    chosen = Chosen(None if prefill is None else InstanceId(prefill), InstanceId(decode), "")
    Placements(at.all()).placed(expected, wanted, chosen)
    if prefill is None:
        return expected
    at.all().inflight.prompt_over(expected.booking, wanted.now, done=False)  # type: ignore[arg-type]
    return expected


def test_an_idle_fleet_serves_a_request_aggregated() -> None:
    chosen = workload(view(B, B).all(), asks())
    assert chosen.prefill is None and chosen.decode == "b0"
    assert "whole on b0" in chosen.because and "; no pair costs less" in chosen.because


def test_the_reason_names_the_source_of_the_prices() -> None:
    assert workload(view(B).all(), asks()).because.endswith("; costs told, prefixes unknown")
    here = FleetView()
    here.all().prefixes = index = PrefixCacheIndex()
    here.add(Instance(id=InstanceId("b0"), role=B, url="u"))
    here.seen(InstanceId("b0"), ({"id": "m"},), Load())
    index.sent(here.get(InstanceId("b0")).row, (7,), 0.0)
    turn = asks(prompt_tokens=400, prefix=(7, 8), prefix_block_tokens=64.0)
    assert workload(here.all(), turn).because.endswith("; costs assumed, 64 of 400 prompt tokens cached")
    step_model = here.all().inflight.step_model
    for number in range(SURE):
        step_model.prompt_took(0, 100.0, 150.0 + number)
        step_model.steps_took(0, 10.0, 12.0)
    assert workload(here.all(), replace(turn, now=1.0)).because.endswith(
        "; costs learned, 64 of 400 prompt tokens cached"
    )


def test_a_prompt_goes_to_the_instance_with_fewer_decoding_requests() -> None:
    here = view(B, B)
    for _ in range(40):
        place(here, asks(ttft_ms=1000.0, tpot_ms=20.0), "b0", "b1")
    chosen = workload(here.all(), asks(prompt_tokens=8000, ttft_ms=1000.0, tpot_ms=20.0))
    assert chosen.prefill != "b0" and (chosen.prefill or chosen.decode) == "b1"


def test_a_short_suffix_is_computed_where_it_decodes_and_a_long_prompt_is_handed_over() -> None:
    here = view(P, D)
    for _ in range(30):
        place(here, asks(ttft_ms=500.0, tpot_ms=12.0), "d1", "p0")
    short = workload(here.all(), asks(prompt_tokens=20, ttft_ms=500.0, tpot_ms=12.0))
    long = workload(here.all(), asks(prompt_tokens=6000, ttft_ms=500.0, tpot_ms=12.0))
    assert short.prefill is None and short.decode == "d1"
    assert long.prefill == "p0" and long.decode == "d1"


def test_the_second_turn_of_a_chat_stays_with_its_cached_prefix() -> None:
    here = view(P, D, D)
    here.all().prefixes = index = PrefixCacheIndex()
    for each in here.all():
        index.join(each.row, 400_000, 1)
    names = tuple(range(100, 116))
    index.sent(here.get(InstanceId("d2")).row, names, 0.0)
    for _ in range(10):
        for decode in ("d1", "d2"):
            place(here, asks(ttft_ms=500.0, tpot_ms=12.0), decode, "p0")
    turn = {"prompt_tokens": 16 * 256 + 30, "prefix_block_tokens": 256.0, "ttft_ms": 500.0, "tpot_ms": 12.0}
    assert workload(here.all(), asks(prefix=names, **turn)).decode == "d2"
    assert workload(here.all(), asks(prefix=names, **turn)).prefill is None
    assert workload(here.all(), asks(prefix=tuple(range(500, 516)), **turn)).prefill == "p0"


def test_without_a_seed_the_handoff_delays_the_first_token() -> None:
    """For an answer of 200 tokens a pause of 25 ms after the first token does not matter. Before the first token, the
    same pause is a third of the client's wait.
    """
    seeded, unpinned = view(P, D), view(P, D, pins=False)
    for here in (seeded, unpinned):
        for _ in range(8):
            place(here, asks(), "d1", "p0")
    assert workload(seeded.all(), asks()).prefill == "p0"
    for chosen in (workload(unpinned.all(), asks()), workload(seeded.all(), asks(unseeded=True))):
        assert (chosen.prefill, chosen.decode) == (None, "d1")
    prices = prices_of(unpinned.all(), asks())
    p, d = (unpinned.get(InstanceId(name)).row for name in ("p0", "d1"))
    assert prices.first_ms(p, d) == prices.ttft_at(p) + prices.pause_ms(p, d)
    assert prices.first_ms(d, d) == prices.ttft_at(d)
    assert prices_of(seeded.all(), asks()).first_ms(p, d) == prices.ttft_at(p)


@pytest.mark.parametrize("streamed", [True, False])
def test_answers_in_one_piece_do_not_count_as_pulls_under_way(streamed: bool) -> None:
    """The router does not see the end of their pulls. Before, each of them counted as a pull until its answer ended: 33
    at a time, so the network seemed 24 times slower than it was.
    """
    here = view(P, D)
    row, other = here.get(InstanceId("d1")).row, here.get(InstanceId("p0")).row
    usual = prices_of(here.all(), asks()).told_pause_ms(other, row)
    placements = Placements(here.all())
    for number in range(5):
        wanted = asks(float(number), streamed=streamed)
        expected = Placement()
        placements.placed(expected, wanted, Chosen(InstanceId("p0"), InstanceId("d1"), ""))
        placements.prompt_over(expected, wanted, number + 0.1, done=True)
    found = prices_of(here.all(), asks(5.0)).pause_ms(other, row)
    assert found > 1000.0 if streamed else found == pytest.approx(usual, rel=0.2)


def test_a_request_whose_instance_has_left_is_not_counted_at_the_next_one_in_its_row() -> None:
    here = view(P, D)
    here.index()
    fleet, left = here.all(), here.get(InstanceId("d1"))
    placements, expected, wanted = Placements(fleet), Placement(), asks(streamed=True)
    placements.placed(expected, wanted, Chosen(InstanceId("p0"), InstanceId("d1"), ""))
    assert expected.booking is not None and expected.booking.pull is not None
    fleet.remove(left.id)
    here.add(Instance(id=InstanceId("d2"), role=D, url="http://d2"))
    assert here.get(InstanceId("d2")).row == left.row
    placements.prompt_over(expected, wanted, 1.0, done=True)
    assert fleet.inflight.pulls(left.row).ends_ms(1.0) == -math.inf
    placements.ended(expected, wanted, 2.0, 5000)
    assert fleet.prefixes is not None and len(fleet.prefixes) == 0


def test_a_conversation_goes_back_to_the_decode_instance_that_has_it() -> None:
    """D pulls only what it lacks, so the next turn's hand-over to it is quicker than to another one."""
    here = view(P, D, D)
    prefixes = here.all().prefixes = PrefixCacheIndex()
    p, d1, d2 = (here.get(InstanceId(name)).row for name in ("p0", "d1", "d2"))
    for row in (p, d1, d2):
        prefixes.join(row, 100_000, 1)
    turn = tuple(range(1, 41))
    prefixes.sent(d2, turn[:38], 0.0, 250.0)
    wanted = asks(1.0, prompt_tokens=10_000, prefix=turn, prefix_block_tokens=250.0)
    prices = prices_of(here.all(), wanted)
    assert prices.told_ms(p, d2) == pytest.approx(prices.told_ms(p, d1) / 20, rel=0.05)
    assert prices.handoff_told(p, d2) < prices.handoff_told(p, d1)
    prefixes.keeps(d2, [(1e6, 0.9)])
    prefixes.sent(d2, range(1000, 1400), 1.0, 250.0)
    here.all().inflight.turn += 1
    lower = prices_of(here.all(), wanted)
    assert lower.cached_at(d2) > 8000 and lower.told_ms(p, d2) == lower.told_ms(p, d1), "its tier has it, its cache not"


@pytest.mark.parametrize("done", [True, False], ids=["told", "presumed"])
def test_an_instance_that_pulls_a_prompt_has_all_of_it(done: bool) -> None:
    """Its chunks have this prompt's tokens, and the end of the prompt takes space, too."""
    here = view(P, D)
    prefixes = here.all().prefixes = PrefixCacheIndex()
    for name in ("p0", "d1"):
        prefixes.join(here.get(InstanceId(name)).row, 100_000, 1)
    wanted = asks(prompt_tokens=2118, prefix=tuple(range(1, 5)), prefix_block_tokens=353.0)
    placements, expected = Placements(here.all()), Placement()
    placements.placed(expected, wanted, Chosen(InstanceId("p0"), InstanceId("d1"), ""))
    placements.prompt_over(expected, wanted, 1.0, done=done, presumed=not done)
    for name in ("p0", "d1"):
        held = prefixes._held[here.get(InstanceId(name)).row]
        assert [held.sizes[chunk] for chunk in wanted.prefix] == [353.0] * 4
        assert held.tokens == pytest.approx(2118, abs=held.tokens_each)
        assert held.tokens_each > 256


def test_prompts_too_short_for_a_name_take_space() -> None:
    here = view(P, D)
    prefixes = here.all().prefixes = PrefixCacheIndex()
    rows = [here.get(InstanceId(name)).row for name in ("p0", "d1")]
    for row in rows:
        prefixes.join(row, 100_000, 1)
    for now in range(100):
        place(here, asks(float(now), prompt_tokens=200), "d1", "p0")
    for row in rows:
        assert prefixes._held[row].tokens == pytest.approx(20_000, abs=256)


def test_a_prompt_on_a_decode_instance_delays_its_pulls() -> None:
    here = view(P, D, D)
    d1, d2 = (here.get(InstanceId(name)).row for name in ("d1", "d2"))
    placements, expected = Placements(here.all()), Placement()
    wanted = asks(prompt_tokens=16_000)
    placements.placed(expected, wanted, Chosen(None, InstanceId("d1"), ""))
    prices = prices_of(here.all(), asks(prompt_tokens=100))
    p = here.get(InstanceId("p0")).row
    assert prices.pause_ms(p, d1) > prices.pause_ms(p, d2) + 300
    assert not prices.learns(d1), "a pull behind that prompt shows nothing about the network"
    placements.prompt_over(expected, wanted, 1.0, done=True)
    assert prices_of(here.all(), asks(1.0, prompt_tokens=100)).learns(d1)


def test_the_faster_gpu_computes_the_long_prompt() -> None:
    here = view(P, P, D, gpus=("A100", "H100", "H100"))
    for _ in range(20):
        place(here, asks(), "d2", "p0")
    assert workload(here.all(), asks(prompt_tokens=8000)).prefill == "p1"
    for _ in range(6):
        here.all().inflight.prompt_placed(  # it is busy
            place(here, asks(), "d2", "p0").booking,  # type: ignore[arg-type]
            here.get(InstanceId("p1")).row,
            400.0,
            400.0,
            0.0,
        )
    assert workload(here.all(), asks(prompt_tokens=8000)).prefill == "p0"


def test_a_target_is_not_missed_to_save_time_for_others() -> None:
    here = view(B, B)
    for _ in range(30):
        place(here, asks(tpot_ms=50.0, ttft_ms=500.0), "b0", "b1")
    for _ in range(8):
        expected = place(here, asks(), "b0", "b1")
        here.all().inflight.prompt_placed(expected.booking, here.get(InstanceId("b1")).row, 60.0, 60.0, 0.0)  # type: ignore[arg-type]
    tight = workload(here.all(), asks(ttft_ms=150.0, tpot_ms=50.0))
    assert (tight.prefill or tight.decode) == "b0", "on b1 the prompt would wait for half a second"


def test_an_instance_with_full_memory_is_not_chosen() -> None:
    here = view(D, D, P)
    capacity = MAKES["H100"].capacity_tokens
    for _ in range(9):
        place(here, asks(prompt_tokens=capacity // 10, output_tokens=2000.0), "d0", "p2")
    assert workload(here.all(), asks(prompt_tokens=capacity // 10, output_tokens=2000.0)).decode == "d1"


def test_each_of_several_answers_takes_memory_and_time() -> None:
    here, capacity = view(P, D), MAKES["H100"].capacity_tokens
    place(here, asks(prompt_tokens=capacity // 2, output_tokens=10.0), "d1", "p0")
    one = asks(output_tokens=capacity * 0.6 / 16)
    sixteen = replace(one, answers=16)
    assert workload(here.all(), one).decode == "d1"
    assert workload(here.all(), sixteen).wait, "together they take 0.6 of the memory, and half is free"

    fleet = here.all()
    row, speed = here.get(InstanceId("d1")).row, fleet.inflight.step_model.rows[here.get(InstanceId("d1")).row]
    longer_ms = [prices_of(fleet, asks(answers=answers)).longer_at(row) for answers in (1, 16)]
    assert longer_ms[1] - longer_ms[0] == pytest.approx(15 * (speed.request + speed.context * 100.0))


def test_full_instances_are_worth_waiting_for() -> None:
    here = view(P, D, credits_each=1)
    here.leg_started(InstanceId("d1"))
    chosen = workload(here.all(), asks())
    assert chosen.wait and chosen.decode is None
    assert workload(here.all(), Wanted(model="other", hand_over=True)).because == "no ready instance serves this model"


def test_an_engine_gets_no_prompt_that_would_only_wait_there() -> None:
    here, scoring = view(P, D), Scoring(SaturationDetector(FlowControlQueue()))
    row = here.get(InstanceId("p0")).row
    wanted = asks(prompt_tokens=4000, ttft_ms=1000.0, tpot_ms=12.0, scoring=scoring)
    for _ in range(30):
        place(here, asks(ttft_ms=1000.0, tpot_ms=12.0, scoring=scoring), "d1", "p0")
    for _ in range(2):
        expected = place(here, wanted, "d1", "p0")
        here.all().inflight.prompt_placed(expected.booking, row, 300.0, 300.0, 0.0)  # type: ignore[arg-type]
    chosen = workload(here.all(), wanted)
    assert chosen.wait and "worth waiting for" in chosen.because
    late_s = 0.6 - AHEAD_MS / 1000
    assert prices_of(here.all(), asks(now=late_s, ttft_ms=1000.0, scoring=scoring)).open_at(row), (
        "the row opens shortly before its queue is empty"
    )


def test_prompts_that_one_step_computes_wait_in_the_engine() -> None:
    """Before, an engine got two prompts at a time, however short."""
    here, scoring = view(B), Scoring(SaturationDetector(FlowControlQueue()))
    row = here.get(InstanceId("b0")).row
    short, long = (asks(prompt_tokens=count, ttft_ms=1000.0, scoring=scoring) for count in (100, 500))
    for placed in range(ONE_STEP_TOKENS // 100):
        assert prices_of(here.all(), replace(short)).open_at(row), f"beside {placed} prompts"
        fits = 100 * placed + 500 <= ONE_STEP_TOKENS
        assert prices_of(here.all(), replace(long)).open_at(row) == fits, f"beside {placed} prompts"
        expected = place(here, replace(short), "b0")
    assert not prices_of(here.all(), replace(short)).open_at(row)
    assert expected.booking is not None
    here.all().inflight.prompt_over(expected.booking, 0.0, done=False)
    assert prices_of(here.all(), replace(short)).open_at(row)


@pytest.mark.parametrize(
    ("role", "known", "sheds", "opens"),
    [(B, True, False, True), (D, True, False, False), (B, False, False, False), (B, True, True, False)],
    ids=["", "it only decodes", "its costs are unknown", "the class refuses"],
)
def test_where_short_prompts_have_room_together(role: Role, known: bool, sheds: bool, opens: bool) -> None:
    """A queued request is asked as soon as there is such room: before, newcomers took it."""
    line = FlowControlQueue()
    saturation = SaturationDetector(line)
    here = FleetView(lambda _: MAKES["H100"] if known else None)
    name = InstanceId("it")
    here.add(Instance(id=name, role=role, url="http://it", pins=True))
    here.seen(name, ({"id": "m"},), Load())
    short = asks(prompt_tokens=100, ttft_ms=1000.0, sheds=sheds, scoring=Scoring(saturation))
    for _ in range(3):
        place(here, replace(short), "it")
    here.all().inflight.rows[here.get(name).row].opens = 500.0
    assert prices_of(here.all(), replace(short)).open_at(here.get(name).row) == opens
    line.enter("queued", replace(short), 5.0, 0.0)
    at_s = saturation.opens_at(here.all(), 0.1)
    assert at_s == (0.1 if known and role is B else pytest.approx(0.5 - AHEAD_MS / 1000))


def test_an_engine_is_not_filled_beyond_its_strictest_target() -> None:
    here, scoring = view(P, D, D), Scoring(SaturationDetector(FlowControlQueue()))
    made = here.all().inflight
    row = here.get(InstanceId("d1")).row
    while made.rows[row].step < 11.0:
        place(here, asks(ttft_ms=1000.0, tpot_ms=12.0, scoring=scoring), "d1", "p0")
    loose = workload(here.all(), asks(ttft_ms=1000.0, tpot_ms=100.0, scoring=scoring))
    assert loose.decode == "d2", "the new request could wait; the requests on d1 could not"


def test_a_prompt_that_may_be_refused_spares_the_answers_that_were_let_in() -> None:
    """It counts each answer that it is expected to make late `SHED_WEIGHT` times. Without answers there it costs
    nothing.
    """
    here, scoring = view(B, B), Scoring(SaturationDetector(FlowControlQueue()))
    targets = {"ttft_ms": 2000.0, "tpot_ms": 12.0, "scoring": scoring}
    for _ in range(20):
        place(here, asks(**targets), "b0", "b0")
    long = asks(prompt_tokens=8000, **targets)
    row, idle = (here.get(InstanceId(name)).row for name in ("b0", "b1"))
    once = prices_of(here.all(), long).harm(row)
    assert once > 0
    refusable = prices_of(here.all(), replace(long, sheds=True))
    assert refusable.harm(row) == pytest.approx(SHED_WEIGHT * once)
    assert refusable.harm(idle) == 0


def test_an_excluded_instance_is_not_chosen() -> None:
    here = view(P, P, D)
    crowded(here, "d2", by="p0")
    for excluded, prefill in ((), "p0"), (("p0",), "p1"), (("p0", "p1"), None):
        wanted = asks(**LONG, excluded=frozenset(InstanceId(name) for name in excluded))
        chosen = workload(here.all(), wanted)
        assert (chosen.prefill, chosen.decode) == (prefill, "d2"), excluded


@pytest.mark.parametrize("roles", [(P,), (D,), (B,)])
def test_one_instance_serves_everything(roles: tuple[Role, ...]) -> None:
    chosen = workload(view(*roles).all(), asks())
    assert chosen.prefill is None and chosen.decode is not None


def test_a_single_token_is_a_prefill_instances_work() -> None:
    here = view(P, D)
    for _ in range(30):
        place(here, asks(ttft_ms=500.0, tpot_ms=12.0), "d1", "p0")
    one = Wanted(model="m", hand_over=False, prefill_only=True, prompt_tokens=3000, ttft_ms=500.0, tpot_ms=12.0)
    assert workload(here.all(), one).decode == "p0"


def test_a_pair_whose_pulls_failed_is_not_chosen() -> None:
    here = view(P, D, D)
    for decode in ("d1", "d2"):
        for _ in range(30):
            place(here, asks(ttft_ms=500.0, tpot_ms=12.0), decode, "p0")
    long = asks(prompt_tokens=6000, ttft_ms=500.0, tpot_ms=12.0)
    first = workload(here.all(), long)
    assert first.prefill == "p0" and first.decode is not None
    here.all().shuns(here.get(first.decode), (InstanceId("p0"),))
    other = workload(here.all(), long)
    assert other.prefill == "p0" and other.decode not in (None, first.decode)
    here.all().shuns(here.get(InstanceId(other.decode or "")), (InstanceId("p0"),))
    assert workload(here.all(), long).prefill is None


def crowded(here: FleetView, *decodes: str, by: str) -> None:
    for decode in decodes:
        for _ in range(30):
            place(here, asks(ttft_ms=500.0, tpot_ms=12.0), decode, by)


LONG = {"prompt_tokens": 6000, "ttft_ms": 500.0, "tpot_ms": 12.0}


def test_during_a_rollout_requests_are_handed_over_between_equal_weights_only() -> None:
    """This holds even if the best `K` prefill instances and the best `K` decode instances have different weights."""
    here = view(*[P] * 6, *[D] * 6, weights="ooooon" + "nnnnno")
    crowded(here, *(f"d{number}" for number in range(6, 12)), by="p0")
    crowded(here, *["d11"] * 8, by="p0")
    for number in range(5):
        assert here.all().pairing.apart(number, 6) and not here.all().pairing.apart(number, 11)
    here.all().inflight.prompt_placed(place(here, asks(), "d11", "p0").booking, 5, 20.0, 20.0, 0.0)  # type: ignore[arg-type]
    prices = prices_of(here.all(), asks(**LONG))
    found = here.all().ready("m")
    best = [{row for _, row in prices.best_prefills(found.prefills, K)}]
    best += [{row for _, row in prices.best_decodes(found.decodes, K)}]
    assert 5 not in best[0] and 11 not in best[1], "no pair of the best instances has the same weights"
    chosen = workload(here.all(), asks(**LONG))
    assert (chosen.prefill, chosen.decode) in {("p5", f"d{number}") for number in range(6, 11)}


def test_an_instance_without_announced_weights_may_hand_over_to_any_other() -> None:
    here = view(P, D, weights="o")
    crowded(here, "d1", by="p0")
    assert workload(here.all(), asks(**LONG)).prefill == "p0"
    here = view(P, D, weights="on")
    crowded(here, "d1", by="p0")
    assert workload(here.all(), asks(**LONG)).prefill is None


def test_an_answer_that_has_begun_continues_on_equal_weights_only() -> None:
    here = view(P, D, D, weights="oon")
    crowded(here, "d1", by="p0")
    assert workload(here.all(), asks(prompt_tokens=10)).decode == "d2"
    assert workload(here.all(), asks(prompt_tokens=10, weights="o")).decode == "d1"
    chosen = workload(here.all(), asks(prompt_tokens=10, weights="n", excluded=frozenset({InstanceId("d2")})))
    assert (chosen.prefill, chosen.decode, chosen.wait) == (None, None, False)


def test_of_two_equal_decode_instances_the_one_on_the_same_node_is_chosen() -> None:
    for nodes, decode in (("xyx", "d2"), ("xxy", "d1"), ("xyz", "d1"), ("  ", "d1")):
        here = view(P, D, D, nodes=nodes)
        crowded(here, "d1", "d2", by="p0")
        assert workload(here.all(), asks(**LONG)).decode == decode, nodes


def test_a_full_prefill_instance_costs_more_for_its_holds() -> None:
    here = view(P, P, D)
    crowded(here, "d2", by="p1")
    assert workload(here.all(), asks(**LONG)).prefill == "p0"
    here.seen(InstanceId("p0"), None, Load(kv_usage=0.95, waiting=60))
    assert workload(here.all(), asks(**LONG)).prefill == "p1"
    prices = prices_of(here.all(), asks(now=1.0, **LONG))
    assert prices.hold(0, 2) > 0 == prices.hold(1, 2)
    here.seen(InstanceId("p0"), None, Load(kv_usage=0.5, waiting=8))
    assert prices_of(here.all(), asks(now=2.0, **LONG)).hold(0, 2) == 0


def test_requests_that_wait_make_a_prompt_dear_where_it_takes_longer() -> None:
    """By its time beyond the quickest instance's, for those that would wait for this one. Answers cost no more."""
    here = view(B, B, D, gpus=("H100", "A100", "A100")).all()
    calm, pressed = (asks(ttft_ms=1000.0, tpot_ms=50.0, urgency=each) for each in (0.0, 0.01))
    before, after = prices_of(here, calm), prices_of(here, pressed)
    per_ms = MISS * 0.01 / 2  # two instances compute prompts
    quick, *slow = range(3)
    assert after.prefill_at(quick) == before.prefill_at(quick)
    for row in slow:
        longer_ms = before.prompt_at(row) - before.prompt_at(quick)
        assert longer_ms > 50
        assert after.prefill_at(row) == pytest.approx(before.prefill_at(row) + per_ms * longer_ms)
    assert [after.decode_at(row) for row in range(3)] == [before.decode_at(row) for row in range(3)]
    bounded = prices_of(here, replace(pressed, lengths_within=0.05))
    assert [bounded.prefill_at(row) for row in range(3)] == [before.prefill_at(row) for row in range(3)]


def test_while_requests_wait_a_slow_prefill_instance_is_no_dearer_than_a_quick_decode_instance() -> None:
    """What a prompt takes at a decode instance counts as many times more as prefill instances differ."""
    here = view(P, P, D, gpus=("H100", "A100", "H100")).all()
    calm, pressed = (asks(ttft_ms=1000.0, tpot_ms=50.0, urgency=each) for each in (0.0, 0.01))
    before, after = prices_of(here, calm), prices_of(here, pressed)
    added = [after.prefill_at(row) - before.prefill_at(row) for row in range(3)]
    longer_ms = before.prompt_at(1) - before.prompt_at(0)
    assert longer_ms > 50
    assert added == pytest.approx([0.0] + [MISS * 0.01 / 2 * longer_ms] * 2)


def test_an_engine_that_is_not_well_makes_no_decode_instance_dear() -> None:
    assert slowest_over_quickest([100.0, 300.0, 250.0]) == 3.0
    assert slowest_over_quickest([100.0, 300.0, 900.0]) == 3.0
    assert slowest_over_quickest([100.0, 400.0]) == 1.0
    assert slowest_over_quickest([100.0, 145.0]) == 1.0, "noise"
    assert slowest_over_quickest([100.0]) == slowest_over_quickest([]) == 1.0


def test_a_queue_keeps_prompts_from_an_instance_that_is_slow_at_them() -> None:
    """Seen on Azure's conversations: in an overload two A100 of role decode computed prompts, slowly."""
    here = view(B, D, gpus=("H100", "A100"))
    for _ in range(12):  # prompts that H100 has to compute first
        place(here, asks(ttft_ms=1000.0, tpot_ms=50.0), "b0")
    calm, pressed = (asks(ttft_ms=1000.0, tpot_ms=50.0, urgency=each) for each in (0.0, 0.02))
    assert workload(here.all(), calm).decode == "d1"
    assert workload(here.all(), calm).prefill is None
    assert (workload(here.all(), pressed).prefill or workload(here.all(), pressed).decode) == "b0"


def test_a_large_fleet_lists_what_is_cheap_for_those_that_wait() -> None:
    """Above `FEW` rows a shortlist is priced: its ranks count the queue as the prices do."""
    roles = [B] * 70
    made = view(*roles, gpus=["A100"] * 68 + ["H100"] * 2)
    here = made.all()
    for at in (68, 69) * 4:  # prompts before it: the other 68 would be quicker for this request
        place(made, asks(ttft_ms=1000.0, tpot_ms=50.0), f"b{at}")
    calm, pressed = (asks(ttft_ms=1000.0, tpot_ms=50.0, urgency=each) for each in (0.0, 2.0))
    at_rest, in_need = workload(here, calm), workload(here, pressed)
    assert (at_rest.prefill or at_rest.decode) not in {"b68", "b69"}
    assert (in_need.prefill or in_need.decode) in {"b68", "b69"}
