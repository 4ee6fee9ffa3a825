"""Pulled blocks that differ from the held ones, in real engines: with digests D finds them and computes them again."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from support.cluster import within
from support.connector_fleet import BLOCK, FaultyFleet, faulty_fleet

from decode.peers import NOT_ITS_OWN

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyFleet]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup")
    with faulty_fleet(tmp_path_factory.mktemp("f"), digests=True) as running:
        yield running


@pytest.fixture
def fleet(started: FaultyFleet) -> Iterator[FaultyFleet]:
    """Before each test D pulls from P; after it both engines live, and nothing is held."""

    def pulls() -> bool:
        before = started.pulled()
        started.hand_over(started.prompt(10))
        return started.pulled() > before

    within(60, pulls)  # a wrong block counts against P, and three in a row set it aside
    yield started
    for name in "pd":
        assert started.engines.running[name].alive(), started.engines.running[name].tail()
    within(10, started.nothing_is_held)


@pytest.mark.parametrize("tokens", [2, BLOCK - 1, BLOCK, BLOCK + 1, 700, 1900])
def test_held_blocks_are_used(fleet: FaultyFleet, tokens: int) -> None:
    prompt, before, wrong = fleet.prompt(tokens), fleet.pulled(), fleet.counted(NOT_ITS_OWN)
    assert fleet.hand_over(prompt) == fleet.alone(prompt)
    within(5, lambda: fleet.pulled() - before == tokens)
    longer = prompt + fleet.prompt(50)
    assert fleet.hand_over(longer) == fleet.alone(longer), "a prefix that both have"
    held = fleet.leg(longer)
    more = [*longer, 99, 98]
    assert fleet.decode(more, held) == fleet.alone(more), "a prompt longer than what is held"
    assert fleet.counted(NOT_ITS_OWN) == wrong


def wrongly(fleet: FaultyFleet, prompt: list[int], fields: dict[str, Any]) -> None:
    """D finds the wrong block, counts it and computes the prompt. D tells P, and so P ends the hold."""
    before = fleet.counted(NOT_ITS_OWN)
    assert fleet.decode(prompt, fields) == fleet.alone(prompt)
    within(5, lambda: fleet.counted(NOT_ITS_OWN) == before + 1)
    within(5, fleet.nothing_is_held)


@pytest.mark.parametrize(("place", "byte"), [(0, 0), (2, 12_345), (5, 77)])
def test_a_bit_that_was_flipped_between_hold_and_read(fleet: FaultyFleet, place: int, byte: int) -> None:
    prompt = fleet.prompt(700)
    fields = fleet.leg(prompt)
    fleet.fault("p", flip=[fields["remote_block_ids"][0][place], byte])
    wrongly(fleet, prompt, fields)


def test_two_blocks_that_changed_places_in_the_list(fleet: FaultyFleet) -> None:
    prompt = fleet.prompt(700)
    fields = fleet.leg(prompt)
    blocks = fields["remote_block_ids"][0]
    wrongly(fleet, prompt, {**fields, "remote_block_ids": [[blocks[1], blocks[0], *blocks[2:]]]})


def test_two_blocks_that_changed_places_in_memory(fleet: FaultyFleet) -> None:
    prompt = fleet.prompt(700)
    fields = fleet.leg(prompt)
    fleet.fault("p", exchange=fields["remote_block_ids"][0][3:5])
    wrongly(fleet, prompt, fields)


def test_blocks_of_another_hold(fleet: FaultyFleet) -> None:
    """The blocks are unchanged and their hold is confirmed, but they are another prompt's, in the same places: only
    digests show that.
    """
    prompt, other = fleet.prompt(700), fleet.prompt(700)
    mine, name = fleet.leg(prompt), fleet.name()
    theirs = fleet.leg(other, name=name)
    fields = {**mine, "remote_block_ids": theirs["remote_block_ids"]}
    before = fleet.counted(NOT_ITS_OWN)
    assert fleet.decode(prompt, fields) == fleet.alone(prompt)
    within(5, lambda: fleet.counted(NOT_ITS_OWN) == before + 1)
    fleet.release(name)


def test_a_hold_that_is_shorter_than_it_says(fleet: FaultyFleet) -> None:
    prompt = fleet.prompt(700)
    fields = fleet.leg(prompt[:650])
    wrongly(fleet, prompt, {**fields, "remote_num_tokens": 700})


def test_of_a_longer_hold_the_last_block_is_not_used(fleet: FaultyFleet) -> None:
    """D computes the last block again: its digest covers tokens that this prompt does not have."""
    prompt = fleet.prompt(700)
    wrongly(fleet, prompt[:650], fleet.leg(prompt))
    before, fields = fleet.counted(NOT_ITS_OWN), fleet.leg(prompt)
    assert fleet.decode(prompt[: 4 * BLOCK], fields) == fleet.alone(prompt[: 4 * BLOCK])
    assert fleet.counted(NOT_ITS_OWN) == before, "a prompt that ends at a block's end is not affected"


def test_a_hold_that_is_gone_is_refused_also_with_digests(fleet: FaultyFleet) -> None:
    name, prompt = fleet.name(), fleet.prompt(700)
    fields = fleet.leg(prompt, name=name)
    fleet.release(name)
    within(1, lambda: fleet.state("p")["holds"] == 0)
    for _ in range(4):
        fleet.alone(fleet.prompt(1800))  # other prompts now have the hold's blocks
    before = fleet.counted("the hold did not outlive the read")
    assert fleet.decode(prompt, fields) == fleet.alone(prompt)
    within(5, lambda: fleet.counted("the hold did not outlive the read") == before + 1)


def test_blocks_without_digests_are_not_used(fleet: FaultyFleet) -> None:
    """The fields name block 0, for which P has no digest, in place of the hold's first: D uses nothing of the hold."""
    prompt = fleet.prompt(300)
    fields = fleet.leg(prompt)
    wrongly(fleet, prompt, {**fields, "remote_block_ids": [[0, *fields["remote_block_ids"][0][1:]]]})
