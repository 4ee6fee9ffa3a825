"""What a router reports of its pools: means, the legs that waiting requests lack, pulls, tokens a second."""

from __future__ import annotations

import pytest

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from router.admin.pools import Looks, lacks, together_pools
from router.core.journey import Choose
from router.core.values import Wanted
from router.fleet.view import FleetView
from router.scheduler.placements import SchedulingContext
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import POLICIES

P, D = InstanceId("p"), InstanceId("d")
ASK = Choose(frozenset(), hand_over=True)


@pytest.fixture
def scheduler() -> Scheduler:
    view = FleetView()
    for name, role in ((P, Role.PREFILL), (D, Role.DECODE)):
        view.add(Instance(id=name, role=role, url=f"http://{name}"))
        view.seen(name, ({"id": "m"},), Load())
        view.get(name).credits = 2
    return Scheduler(view, POLICIES["least_load"])


def wait(scheduler: Scheduler, legs: dict[InstanceId, int], count: int) -> None:
    """Start `legs` on each instance; then `count` requests ask, and wait."""
    for name, each in legs.items():
        for _ in range(each):
            scheduler.view.leg_started(name)
    for _ in range(count):
        chosen, _ = scheduler.choose(SchedulingContext(Wanted(model="m", hand_over=True)), ASK, 0.0)
        assert chosen.wait


@pytest.mark.parametrize(
    ("legs", "lacking"),
    [({P: 2}, {"prefill": 3}), ({D: 2}, {"decode": 3}), ({P: 2, D: 2}, {"prefill": 1.5, "decode": 1.5})],
)
def test_which_leg_requests_lack(scheduler: Scheduler, legs: dict[InstanceId, int], lacking: dict[str, float]) -> None:
    wait(scheduler, legs, 3)
    assert lacks(scheduler, 0.0) == pytest.approx(lacking)


def test_an_empty_queue_lacks_nothing(scheduler: Scheduler) -> None:
    assert lacks(scheduler, 0.0) == {}


def test_a_leg_that_no_instance_can_run_is_lacked(scheduler: Scheduler) -> None:
    wait(scheduler, {D: 2}, 1)
    scheduler.view.get(P).accepting = False
    assert lacks(scheduler, 0.0) == {"prefill": 1}


def test_means_and_places(scheduler: Scheduler) -> None:
    looks = Looks()
    for second, waiting in enumerate((0, 4)):
        scheduler.view.seen(D, None, Load(running=6, waiting=waiting, kv_usage=0.5))
        scheduler.view.leg_started(D)
        looks.look(scheduler, float(second))
    told = looks.told(scheduler.view.all())
    assert told["decode"] == {
        "instances": 1, "running": 6.0, "waiting": 2.0, "pulling": 0.0, "kv_usage": 0.5, "limit": 2, "in_line": 0.0,
        "places": 1.5,
    }  # fmt: skip
    both = together_pools(told, [told])
    assert (both["decode"].places, both["decode"].waiting) == (3.0, 2.0), "legs add up, engines' figures do not"
    assert looks.history(1.0)[-1]["decode"] == 2.0


def test_a_pull_counts_as_one_only_while_the_batch_has_room(scheduler: Scheduler) -> None:
    """Engines count a finished pull as a pull until its request joins a batch."""
    looks = Looks()
    for second, running in enumerate((8, 8, 3)):
        scheduler.view.seen(D, None, Load(running=running, waiting=5, deferred=4))
        looks.look(scheduler, float(second))
    told = looks.told(scheduler.view.all())["decode"]
    assert (told["waiting"], told["pulling"]) == pytest.approx((11 / 3, 4 / 3))


def test_the_mean_delay_of_looks(scheduler: Scheduler) -> None:
    looks = Looks()
    for at in (0.0, 1.0, 2.5):
        looks.look(scheduler, at)
    assert looks.late_s == pytest.approx(0.25)


def test_tokens_a_second_begin_anew_with_an_engine(scheduler: Scheduler) -> None:
    looks = Looks()
    for second in range(5):
        made = Load(prompt_tokens=1000 * second, external_kv_tokens=400 * second, generation_tokens=50 * second)
        scheduler.view.seen(D, None, made)
        looks.look(scheduler, float(second))
    assert looks.rates(D, 4.0) == (600.0, 50.0)
    assert looks.rates(D, 4.0 + 6.0) == (0.0, 0.0), "the engine has reported nothing for 6 s"
    scheduler.view.seen(D, None, Load(generation_tokens=3))
    looks.look(scheduler, 5.0)
    assert looks.rates(D, 5.0) == (0.0, 0.0)
    assert looks.rates(InstanceId("nobody"), 5.0) == (0.0, 0.0)
