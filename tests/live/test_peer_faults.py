"""A prompt's beginning from a peer, on real engines with faults: reads, notices and checks of marks fail, sources die.
Answers equal one engine's, nothing stays held, and no engine ends.
"""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Iterator

import pytest
from support.cluster import within
from support.connector_fleet import BLOCK, PATH, FaultyFleet, faulty_fleet
from support.engine_pair import ask

from cluster import wire

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(600)]

FAULTS = {"cut": 0.2, "drop": 0.2, "blind": 0.2}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyFleet]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup")
    with faulty_fleet(tmp_path_factory.mktemp("peers"), digests=True) as running:
        yield running


def source(fleet: FaultyFleet, prompt: list[int], by: str) -> wire.TransferFields | None:
    fields = wire.source_fields(fleet.body(prompt), transfer=fleet.name())
    status, answer = ask(fleet.url(by), PATH, {**fleet.body(prompt), **fields})
    assert status == 200, answer
    return wire.read_transfer(answer)


def whole(fleet: FaultyFleet, prompt: list[int], by: str, held: wire.TransferFields | None) -> list[int]:
    """The tokens of a request that one instance serves alone, after it has pulled the prompt's beginning."""
    fields = {} if held is None else dict(held.untold().fields)
    return fleet.decode(prompt, fields, by) if fields else fleet.alone(prompt, by)


def turn(fleet: FaultyFleet, there: str, here: str, number: int) -> None:
    """Engine `there` has a beginning, and engine `here` computes a prompt with it: for an even `number` as a prefill
    leg, for an odd one as a whole request.
    """
    beginning = fleet.prompt(BLOCK * (2 + number % 4) + number % 5)
    fleet.alone(beginning, there, 1)  # under its own salt: the source cannot use it
    status, _ = ask(fleet.url(there), PATH, fleet.body(beginning, 1))
    assert status == 200
    prompt = beginning + fleet.prompt(1 + 37 * (number % 7))
    held = source(fleet, prompt, there)
    assert held is not None and held.is_from_cache
    assert held.tokens == min(len(beginning), len(prompt) - 1) // BLOCK * BLOCK
    if number % 2:
        assert whole(fleet, prompt, here, held) == fleet.alone(prompt, there)
        return
    status, answer = ask(
        fleet.url(here), PATH, wire.prefill_body(fleet.body(prompt), transfer=fleet.name(), source=held)
    )
    assert status == 200, answer
    told = wire.read_transfer(answer)
    assert told is not None and told.tokens == len(prompt) and not told.is_from_cache
    assert fleet.decode(prompt, told.fields, there) == fleet.alone(prompt, there)


def test_beginnings_are_right_whatever_fails(fleet: FaultyFleet) -> None:
    for number, name in enumerate("pd"):
        fleet.fault(name, chances=FAULTS, seed=number)
    for number in range(40):
        turn(fleet, *("dp" if number // 2 % 2 else "pd"), number)
    for name in "pd":
        fleet.fault(name, chances={})
    within(90, fleet.nothing_is_held)  # holds whose notices were lost end with their leases
    counts = {what: sum(fleet.counted(what, name) for name in "pd") for what in
              ("confirmed", "a read failed", "the slot could not be read", "asked as a source")}  # fmt: skip
    assert all(counts.values()) and counts["asked as a source"] == 40, counts


def test_a_hold_that_is_over_is_not_used(fleet: FaultyFleet) -> None:
    prompt = fleet.prompt(5 * BLOCK)
    fleet.decode(prompt, {}, "d", 1)
    name = fleet.name()
    fields = wire.source_fields(fleet.body(prompt), transfer=name)
    held = wire.read_transfer(ask(fleet.url("d"), PATH, {**fleet.body(prompt), **fields})[1])
    assert held is not None
    fleet.release(name, "d")
    within(10, fleet.nothing_is_held)
    for _ in range(4):
        fleet.alone(fleet.prompt(700), "d", 1)
    assert whole(fleet, prompt, "p", held) == fleet.alone(prompt, "p")
    within(10, fleet.nothing_is_held)


def test_a_source_that_is_killed_costs_a_cold_prefill(fleet: FaultyFleet) -> None:
    prompt = fleet.prompt(12 * BLOCK)
    fleet.decode(prompt, {}, "d", 1)
    held = source(fleet, prompt, "d")
    assert held is not None and held.tokens == 11 * BLOCK
    began = time.monotonic()
    alone = fleet.alone(prompt, "p")
    cold_s = time.monotonic() - began
    fleet.send("d", signal.SIGKILL)
    began = time.monotonic()
    assert whole(fleet, prompt, "p", held) == alone
    took_s = time.monotonic() - began
    print(f"cold {cold_s:.3f} s, with a source that was killed {took_s:.3f} s")
    assert took_s < cold_s + 2.0
    fleet.start_again("d")
    assert whole(fleet, prompt, "p", wire.TransferFields({**held.fields, "remote_request_id": "former"})) == alone
    within(30, fleet.nothing_is_held)
    turn(fleet, "d", "p", 2)
