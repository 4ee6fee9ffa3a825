"""Predictors: a prompt's tokens and prefix names, an answer's length, and what they learn from engines' counts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from cluster.errors import ApiError
from router.core.unread import Sort, Unread
from router.core.values import Wanted
from router.predict.answer_lengths import Predictor, room_after
from router.predict.chunks import CHUNK_BYTES
from router.predict.predictors import ANSWERS_MAX, RequestPredictor, answer_tokens, cached_in, chunk_key
from router.request.heavy import read

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WANTED = Wanted(model="m", hand_over=True, tenant="acme", slo_class="fast")
TEXT = "The harbour master wrote down which ships had come. " * 100


def predictor(key: bytes = b"k" * 32) -> RequestPredictor:
    return RequestPredictor(Predictor(), key)


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)], **more}


def test_a_prompt_has_a_size_and_names() -> None:
    taken = predictor().take(WANTED, CHAT, chat(TEXT), scope="acme")
    wanted = taken.wanted
    assert 900 < wanted.prompt_tokens < 1600
    assert len(wanted.prefix) == taken.text_bytes // CHUNK_BYTES == 5
    assert wanted.prefix_block_tokens * taken.text_bytes / CHUNK_BYTES == pytest.approx(wanted.prompt_tokens)
    assert (wanted.tenant, wanted.slo_class, wanted.model) == ("acme", "fast", "m")
    assert wanted.output_tokens > 1


def test_the_next_turn_begins_with_the_same_names() -> None:
    here = predictor()
    one = here.take(WANTED, CHAT, chat(TEXT), scope="acme").wanted.prefix
    two = here.take(WANTED, CHAT, chat(TEXT, "Indeed.", TEXT), scope="acme").wanted.prefix
    assert len(two) > len(one)
    assert two[: len(one)] == one


@pytest.mark.parametrize("large", [False, True], ids=["parsed", "large"])
def test_a_prompt_with_a_picture_begins_at_no_other_instance(large: bool) -> None:
    """A source's hold ends before the first picture, so its size does not say what the source has of the prompt."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBO" * (50_000 if large else 9)}}
    text = {"type": "text", "text": TEXT}
    asked = replace(WANTED, one_prompt=True)
    for content, shares in ([text], True), ([picture, text], False), ([text, picture], False):
        messages: Any = [{"role": "user", "content": content}]
        if large:
            messages = Unread(memoryview(json.dumps(messages).encode()), Sort.LIST, 100)
        body = {"messages": messages}
        assert predictor().take(asked, CHAT, body, scope="acme").wanted.one_prompt == shares
        assert not predictor().take(WANTED, CHAT, body, scope="acme").wanted.one_prompt


@pytest.mark.parametrize(
    ("scope", "body", "key"),
    [
        ("other", {}, b"k" * 32),
        (None, {}, b"k" * 32),
        ("acme", {"cache_salt": "s"}, b"k" * 32),
        ("acme", {}, b"j" * 32),
    ],
    ids=["tenant", "shared", "salt", "key"],
)
def test_nothing_is_alike_across_tenants_salts_and_keys(scope: str | None, body: dict[str, Any], key: bytes) -> None:
    one = predictor().take(WANTED, CHAT, chat(TEXT), scope="acme").wanted.prefix
    other = predictor(key).take(WANTED, CHAT, chat(TEXT, **body), scope=scope).wanted.prefix
    assert len(one) == len(other)
    assert not set(one) & set(other)


def test_what_engines_count_takes_the_place_of_the_estimate_and_teaches() -> None:
    here = predictor()
    taken = here.take(WANTED, CHAT, chat(TEXT), scope="acme")
    for _ in range(60):
        told = here.told(taken.wanted, taken, {"prompt_tokens": 2000})
    assert told.prompt_tokens == 2000
    assert told.prefix_block_tokens == pytest.approx(CHUNK_BYTES * 2000 / taken.text_bytes)
    again = here.take(WANTED, CHAT, chat(TEXT), scope="acme").wanted
    assert 1900 < again.prompt_tokens < 2100


@pytest.mark.parametrize("usage", [{}, {"prompt_tokens": None}, {"prompt_tokens": True}, {"prompt_tokens": -3}])
def test_nonsense_teaches_nothing(usage: dict[str, Any]) -> None:
    taken = predictor().take(WANTED, CHAT, chat(TEXT), scope=None)
    assert predictor().told(taken.wanted, taken, usage) is taken.wanted


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        (COMPLETIONS, {"prompt": "x"}, 16),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 3}, 3),
        (CHAT, chat("x", max_tokens=900, max_completion_tokens=7), 7),
        (CHAT, chat("x", max_tokens=5, ignore_eos=True), 5),
        (CHAT, chat("x", max_tokens=5, ignore_eos="yes"), 5),
    ],
)
def test_no_prediction_is_beyond_the_limit(path: str, body: dict[str, Any], limit: int) -> None:
    taken = predictor().take(WANTED, path, body, scope=None)
    assert taken.wanted.output_tokens <= limit
    assert taken.lengths.served[-1] <= limit
    assert not body.get("ignore_eos") or taken.wanted.output_tokens == limit


def test_token_ids_are_counted_and_not_estimated() -> None:
    for prompt in ([5] * 700, [[5] * 700]):
        assert predictor().take(WANTED, COMPLETIONS, {"prompt": prompt}, scope=None).wanted.prompt_tokens == 700


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        ({"prompt": TEXT}, 1), ({"prompt": TEXT, "n": 16}, 16), ({"prompt": [TEXT] * 50}, 50),
        ({"prompt": [TEXT] * 3, "n": 4}, 12), ({"prompt": TEXT, "n": True}, 1), ({"prompt": TEXT, "n": None}, 1),
        ({"prompt": TEXT, "n": -1}, 1), ({"prompt": TEXT, "n": 10**30}, 1), ({"prompt": TEXT, "n": 10**6}, ANSWERS_MAX),
    ],
)  # fmt: skip
def test_answers_are_n_to_each_prompt(body: dict[str, Any], answers: int) -> None:
    taken = predictor().take(WANTED, COMPLETIONS, body, scope=None)
    assert taken.wanted.answers == answers


def test_several_prompts_are_measured_together_and_an_engine_s_counts_are_of_all() -> None:
    here, one = predictor(), {"prompt": TEXT}
    before = here.take(WANTED, COMPLETIONS, one, scope=None).wanted.prompt_tokens
    for _ in range(100):
        taken = here.take(WANTED, COMPLETIONS, {"prompt": [TEXT] * 32}, scope=None)
        assert (taken.prompts, taken.text_bytes) == (32, 32 * len(TEXT))
        here.told(taken.wanted, taken, {"prompt_tokens": 32 * before})
    assert here.take(WANTED, COMPLETIONS, one, scope=None).wanted.prompt_tokens == pytest.approx(before, rel=0.05)
    assert here.take(WANTED, COMPLETIONS, {"prompt": [[1, 2], [3], "x", 5, None]}, scope=None).prompts == 5


LONG_CUT = b"a" * 70_000 + b"\\ud83d" + b"b" * 70_000


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"m","prompt":"' + LONG_CUT + b'","user":"' + b"x" * (1 << 20) + b'"}',
        b'{"model":"m","messages":[{"role":"user","content":"' + LONG_CUT + b'"},{"role":"user","content":"'
        + b"x" * (2 << 20) + b'"}]}',
    ],
    ids=["prompt", "messages"],
)  # fmt: skip
def test_half_a_surrogate_pair_in_a_large_body_is_the_client_s_error(raw: bytes) -> None:
    steps = read(raw)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            body = stop.value.body
            break
    with pytest.raises(ApiError) as error:
        predictor().take(WANTED, COMPLETIONS if "prompt" in body else CHAT, body, scope=None)
    assert error.value.status == 400


@pytest.mark.parametrize(
    "body",
    [{}, {"messages": []}, {"messages": "x"}, {"prompt": [[]]}, {"prompt": {"a": 1}}, {"messages": [None], "n": "x"}],
)
def test_any_body_is_taken(body: dict[str, Any]) -> None:
    taken = predictor().take(
        WANTED, CHAT, {**body, "max_tokens": "many", "min_tokens": [], "cache_salt": 5}, scope=None
    )
    assert taken.wanted.prompt_tokens >= 1
    assert taken.wanted.prefix == ()


def test_usage_is_read_with_care() -> None:
    assert cached_in({"prompt_tokens_details": {"cached_tokens": 0}}) == 0
    assert cached_in({"prompt_tokens_details": {"cached_tokens": 48}}) == 48
    for nothing in ({}, {"prompt_tokens_details": None}, {"prompt_tokens_details": {"cached_tokens": "48"}}):
        assert cached_in(nothing) is None
    assert (answer_tokens({"completion_tokens": 9}), answer_tokens({"completion_tokens": 0})) == (9, None)


def test_the_key_for_names_is_not_the_secret_it_comes_from() -> None:
    one, other = chunk_key(b"a" * 32), chunk_key(b"b" * 32)
    assert len(one) == 32
    assert one == chunk_key(b"a" * 32)
    assert len({one, other, b"a" * 32}) == 3


@pytest.mark.parametrize(
    "more", [{"ignore_eos": True}, {"min_tokens": 100_000}, {"max_tokens": 100_000, "ignore_eos": True}]
)
def test_no_answer_is_longer_than_the_models_context_leaves(more: dict[str, Any]) -> None:
    """131,072 tokens were foretold, more than an instance's memory: it got no other request until the answer's end."""
    wanted = predictor().take(WANTED, CHAT, chat(TEXT, **more), scope="acme", context=8192).wanted
    room = 8192 - wanted.prompt_tokens
    assert 0.96 * room < wanted.output_tokens <= room
    assert max(wanted.output_lengths) <= room
    without = predictor().take(WANTED, CHAT, chat(TEXT, **more), scope="acme").wanted
    assert without.output_tokens >= 100_000, "the context is not known"


def test_a_context_changes_nothing_for_shorter_answers() -> None:
    here = predictor()
    plain, bound = (
        here.take(WANTED, CHAT, chat(TEXT, max_tokens=300), scope="acme", context=context).wanted
        for context in (None, 8192)
    )
    assert plain.output_tokens == bound.output_tokens and plain.output_lengths == bound.output_lengths
    full = here.take(WANTED, CHAT, chat(TEXT), scope="acme", context=100).wanted
    assert full.output_tokens == 1.0, "the prompt is longer than the context"


def test_prompts_of_nearly_one_size_share_a_prediction() -> None:
    rooms = {room_after(tokens, 131_072) for tokens in range(1000, 1200)}
    assert len(rooms) <= 2
