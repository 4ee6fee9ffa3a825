"""Notes of router peers with the least and the largest numbers that are allowed: each is booked, and taken back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from router.core.load_notes import BookingState, LoadNote, PromptState, note_bytes, note_of
from router.predict.inflight_load import REBASE_S, InflightLoad
from router.predict.inflight_request import InflightRequest
from router.predict.peer_load import PeerLoad
from router.predict.stall_limits import StallLimits

NOW = 10_000.0
STATE = BookingState(
    number=1, prefill="a", prompt=PromptState.WAITS, plain_ms=20.0, prompt_ms=20.0, stall_ms=10.0, placed_ago_ms=1.0,
    ended_ago_ms=1.0, decode="a", opened=True, prompt_tokens=100, mean_tokens=9.0, short_tokens=2.0, middle_tokens=8.0,
    variance=1.0, tpot_ms=50.0, pause_ms=1.0, chunks=(7, 8, 7, 9), chunk_tokens=20.0,
)  # fmt: skip
LENGTHS = ("short_tokens", "middle_tokens")
AMOUNTS = (
    "plain_ms", "prompt_ms", "stall_ms", "placed_ago_ms", "ended_ago_ms", "prompt_tokens", "mean_tokens",
    "variance", "tpot_ms", "pause_ms", "chunk_tokens", *LENGTHS,
)  # fmt: skip


def peers() -> tuple[InflightLoad, PeerLoad]:
    """The load of one instance, whose times are counted from `NOW` on; and what peers tell of it."""
    load = InflightLoad()
    load.know(0, None)
    own = InflightRequest(prompt_tokens=10, mean_tokens=1.0, short_tokens=1.0, middle_tokens=1.0, variance=0.0)
    load.prompt_placed(own, 0, 10.0, 10.0, NOW)
    load.prompt_over(own, NOW, done=False)
    return load, PeerLoad(load, {"a": 0})


def read(number: int, *states: BookingState, over: tuple[int, ...] = ()) -> LoadNote:
    note = note_of(note_bytes(LoadNote("b", number, states, over)))
    assert isinstance(note, LoadNote), note
    return note


def test_the_number_of_answers_is_told_and_an_older_router_s_is_one() -> None:
    load, peer = peers()
    peer.hear(read(1, replace(STATE, answers=16)), NOW)
    assert load.rows[0].decoding == load.answers == 16
    peer.hear(read(2, over=(1,)), NOW + 1.0)
    assert load.rows[0].decoding == load.answers == 0
    of_today: list[Any] = msgspec.msgpack.decode(note_bytes(LoadNote("b", 3, (replace(STATE, answers=16),))))
    for answers, fields in ((1, of_today[2][0][:-1]), (16, [*of_today[2][0], "of a later version"])):
        note = note_of(msgspec.msgpack.encode([*of_today[:2], [fields], *of_today[3:]]))
        assert isinstance(note, LoadNote) and note.states[0].answers == answers
    assert isinstance(note_of(note_bytes(LoadNote("b", 3, (replace(STATE, answers=0),)))), str)


def ends(**changed: Any) -> None:
    """A peer tells of a request with these values, and later of its end: nothing of it is left."""
    load, peer = peers()
    peer.hear(read(1, replace(STATE, **changed)), NOW)
    at = load.rows[0]
    assert at.decoding == 1
    load.harmed(0, 100.0, 2.0, 8.0, NOW + 1.0)
    peer.hear(read(2, over=(1,)), NOW + 100.0)
    assert (at.prompts, at.peers_prompts, at.decoding, at.backlog) == (0, 0, 0, 0.0)
    assert not at.targets and at.limits.by_length == ([], [])
    assert load.waits_ms(NOW + 100.0)[0] == 0.0


@pytest.mark.parametrize("prompt", PromptState)
@pytest.mark.parametrize("field", AMOUNTS)
def test_a_booking_with_the_least_or_the_largest_amount_ends(field: str, prompt: PromptState) -> None:
    whole = isinstance(getattr(STATE, field), int)
    for value in (1.0 if field in LENGTHS else 0, 2**53 if whole else 1e12):
        ends(**{field: value}, prompt=prompt)


@pytest.mark.parametrize("prompt", PromptState)
@pytest.mark.parametrize("placed_ago_ms", [0.0, 1e12])
def test_a_booking_with_all_amounts_at_their_ends_ends(prompt: PromptState, placed_ago_ms: float) -> None:
    least = {field: 1.0 if field in LENGTHS else 0 for field in AMOUNTS}
    largest = {field: 2**53 if field == "prompt_tokens" else 1e12 for field in AMOUNTS}
    for amounts in (least, largest):
        ends(**{**amounts, "tpot_ms": 50.0, "placed_ago_ms": placed_ago_ms}, prompt=prompt)


@pytest.mark.parametrize("field", LENGTHS)
@pytest.mark.parametrize("tokens", [0.0, 0.5, 1e-300])
def test_no_answer_is_shorter_than_a_token(field: str, tokens: float) -> None:
    """Twice a length of 0 is 0: a router that looked for the length that the answer has now never came to an end."""
    found = note_of(note_bytes(LoadNote("b", 1, (replace(STATE, **{field: tokens}),))))
    assert isinstance(found, str) and ">= 1" in found


def test_limits_of_an_answer_without_tokens_are_looked_through_in_the_end() -> None:
    limits = StallLimits()
    for limit in limits.begin((0.0, 0.0), 0.0, 5.0, 50.0, 0.0):
        limits.expect_longer(limit, 0.0, limit.tokens, 5.0)
    limits.outlive(1000.0, 5.0)
    assert [limit.tokens for _, _, limit in limits.outlived] == [256, 256], "200 tokens are made, in steps of 5 ms"


@pytest.mark.parametrize("ago_s", [4_000.0, 1e6, 1e9])
def test_a_prompt_that_was_placed_long_ago_is_booked(ago_s: float) -> None:
    load, peer = peers()
    peer.hear(read(1, replace(STATE, placed_ago_ms=ago_s * 1000.0)), NOW + 0.1)
    assert load.rows[0].prompts == 1
    assert load.rows[0].recent * load.faded(NOW + 0.1) < 1e-3
    assert load.waits_ms(NOW + 0.1)[0] == pytest.approx(REBASE_S * 1000.0, rel=1e-3), "it is overdue"


def test_a_prompt_without_a_time_is_not_booked() -> None:
    load, peer = peers()
    peer.hear(read(1, replace(STATE, prompt_ms=0.0)), NOW)
    assert (load.rows[0].prompts, load.rows[0].peers_prompts, load.rows[0].decoding) == (0, 0, 1)
