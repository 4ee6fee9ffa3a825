"""What an evaluated fleet is said to lack: the class and target that bind, and the share of the class worst off."""

from __future__ import annotations

from sim.evaluate import Attained, Evaluation


def attained(share: float, promised: float, low: float | None = None, **missed: int) -> Attained:
    low = share if low is None else low
    keeps = share >= promised
    return Attained(share=share, low=low, high=1.0, requests=100, missed=missed, promised=promised, keeps=keeps)


def evaluation(**classes: Attained) -> Evaluation:
    return Evaluation(classes=classes, seconds=1, gpu_seconds={}, energy_j=0, output_tokens=0, prompt_tokens=0)


def test_the_class_that_breaks_its_promise_binds_though_another_attains_less() -> None:
    seen = evaluation(interactive=attained(0.97, 0.99, TTFT=3, TPOT=1), batch=attained(0.85, 0.8, TPOT=15))
    assert (seen.holds, seen.binds, seen.attained) == (False, "interactive TTFT", 0.97)


def test_of_classes_that_break_their_promise_the_one_furthest_below_it_binds() -> None:
    seen = evaluation(a=attained(0.97, 0.99, TTFT=3), b=attained(0.7, 0.8, TPOT=30), c=attained(0.6, 0.5, E2E=40))
    assert (seen.binds, seen.attained) == ("b TPOT", 0.7)


def test_a_kept_promise_with_a_wide_interval_does_not_bind_beside_a_broken_one() -> None:
    seen = evaluation(few=attained(0.82, 0.8, low=0.6, TTFT=18), many=attained(0.985, 0.99, low=0.984, TTFT=15))
    assert (seen.binds, seen.attained) == ("many TTFT", 0.985)


def test_if_all_promises_are_kept_the_one_with_the_least_room_binds() -> None:
    seen = evaluation(interactive=attained(0.995, 0.99, TTFT=5), batch=attained(0.9, 0.8, TPOT=10))
    assert (seen.holds, seen.binds) == (True, "interactive TTFT")
    assert seen.attained == 0.9, "the lowest share of all: fleets that hold are compared by it"


def test_without_misses_or_classes_nothing_binds() -> None:
    assert evaluation(chat=attained(1.0, 0.99, TTFT=0)).binds == ""
    assert (evaluation().binds, evaluation().attained) == ("", 0.0)
