"""The splice of two streams, cut anywhere: the client reads one answer or an error, and never another text."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.eligibility import CHAT, COMPLETIONS
from router.request.splice import SaidSoFar, Seed, Splice, SpliceBroken, said_in, seed_of, stops_of

PATHS = st.sampled_from([COMPLETIONS, CHAT])
TEXTS = st.lists(st.text(max_size=4), min_size=1, max_size=8)


def event(path: str, text: str, *, finish: str | None = None, role: bool = False) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    if path == CHAT:
        choice["delta"] = {"role": "assistant", "content": ""} if role else {"content": text}
    else:
        choice["text"] = text
    return f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\n".encode()


def stream(path: str, texts: list[str]) -> bytes:
    first = event(path, "", role=True) if path == CHAT else b""
    events = [event(path, text) for text in texts[:-1]]
    return first + b"".join(events) + event(path, texts[-1], finish="length") + b"data: [DONE]\n\n"


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def read(path: str, data: bytes) -> tuple[str, str | None, bool]:
    """The text, the finish reason, and whether the stream has its last event."""
    text, finish, done = "", None, False
    for each in data.decode().split("\n\n"):
        if each == "data: [DONE]":
            done = True
        elif each:
            (choice,) = json.loads(each.removeprefix("data: "))["choices"]
            text += choice["delta"].get("content", "") if path == CHAT else choice["text"]
            finish = choice["finish_reason"] or finish
    return text, finish, done


@given(PATHS, TEXTS, st.integers(0, 40), st.lists(st.integers(0, 5000), max_size=6), st.booleans())
def test_text_that_was_sent_before_is_removed_exactly(
    path: str, texts: list[str], said: int, cuts: list[int], comments: bool
) -> None:
    whole = "".join(texts)
    said_text = whole[: said % (len(whole) + 1)]
    seam = Splice(path, SaidSoFar(said_text, role=path == CHAT))
    data = (b": ping\n\n" if comments else b"") + stream(path, texts)
    out = b"".join(seam.feed(piece) for piece in pieces(data, cuts)).replace(b": ping\n\n", b"")
    assert seam.closed
    text, finish, done = read(path, out)
    assert (said_text + text, finish, done) == (whole, "length", True)


@given(PATHS, TEXTS, st.text(min_size=1, max_size=6), st.lists(st.integers(0, 5000), max_size=6))
def test_another_answer_is_never_passed_on(path: str, texts: list[str], said: str, cuts: list[int]) -> None:
    whole = "".join(texts)
    seam = Splice(path, SaidSoFar(said, role=path == CHAT))
    out = b""
    try:
        for piece in pieces(stream(path, texts), cuts):
            out += seam.feed(piece)
    except SpliceBroken:
        assert not whole.startswith(said)
        assert out == b"", "no event of another answer is passed on"
    else:
        assert whole.startswith(said)
        assert said + read(path, out)[0] == whole


@given(PATHS, TEXTS)
def test_the_text_that_a_client_has_is_read_from_the_events(path: str, texts: list[str]) -> None:
    head = event(path, "", role=True) if path == CHAT else b""
    said = said_in(head + b"".join(event(path, text) for text in texts), path)
    assert said == SaidSoFar("".join(texts), role=path == CHAT)
    assert said_in(stream(path, texts), path) is None, "a stream that has ended is not continued"


ANSWER: dict[str, Any] = {"id": "cmpl-1", "created": 5, "model": "m"}


def leg_one(path: str, text: str | None, **more: Any) -> dict[str, Any]:
    said = {"message": {"role": "assistant", "content": text, **more}} if path == CHAT else {"text": text, **more}
    return {**ANSWER, "choices": [{"index": 0, **said, "finish_reason": "length", "token_ids": [9]}]}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("text", "stops", "words"),
    [
        ("", (), "character"),
        ("\ufffd", (), "character"),
        ("a\ufffd", (), "character"),
        ("ab", ("b",), "stop"),
        ("ab", ("abc",), "stop"),
        ("ab", ("xx", "bcd"), "stop"),
        (None, (), ""),
    ],
)
def test_no_seed_where_it_could_be_wrong(path: str, text: str | None, stops: tuple[str, ...], words: str) -> None:
    said = seed_of(leg_one(path, text), path, stops)
    assert isinstance(said, str)
    assert words in said


@pytest.mark.parametrize("more", [{"reasoning": "hm"}, {"tool_calls": [{}]}, {"refusal": "no"}])
def test_no_seed_behind_a_parser(more: dict[str, Any]) -> None:
    assert isinstance(seed_of(leg_one(CHAT, "a", **more), CHAT, ()), str)


def test_no_seed_where_the_engine_has_a_reasoning_parser() -> None:
    """For a lone token some parsers give content, where in a stream they give reasoning (`olmo3`, `granite`)."""
    details = {"completion_tokens_details": {"reasoning_tokens": 0}}
    said = seed_of({**leg_one(CHAT, "a"), "usage": details}, CHAT, ())
    assert isinstance(said, str)
    assert "reasoning parser" in said
    assert isinstance(seed_of({**leg_one(COMPLETIONS, "a"), "usage": details}, COMPLETIONS, ()), Seed)
    assert isinstance(seed_of({**leg_one(CHAT, "a"), "usage": dict.fromkeys(details)}, CHAT, ()), Seed)


@pytest.mark.parametrize("usage", [{}, {"usage": None}, {"usage": 3}])
def test_usage_of_any_form_is_read(usage: dict[str, Any]) -> None:
    assert isinstance(seed_of({**leg_one(CHAT, "a"), **usage}, CHAT, ()), Seed)


def chunks(seed: Seed | str) -> list[Any]:
    assert isinstance(seed, Seed)
    return [json.loads(each.removeprefix("data: ")) for each in seed.events.decode().strip().split("\n\n")]


@pytest.mark.parametrize(("told", "role"), [("user", "user"), (None, "assistant"), (7, "assistant")])
def test_a_seed_has_the_role_of_ps_answer(told: Any, role: str) -> None:
    """It may be `--response-role`, or that of the last message."""
    first, second = chunks(seed_of(leg_one(CHAT, "a", role=told), CHAT, ()))
    assert first["choices"][0]["delta"] == {"role": role, "content": ""}
    assert second["choices"][0]["delta"] == {"content": "a"}


@pytest.mark.parametrize("text", ["<|user|>hello", None])
def test_a_seeds_first_chunk_has_the_prompts_text_if_it_was_asked_for(text: str | None) -> None:
    first, second = chunks(seed_of({**leg_one(CHAT, "a"), "prompt_text": text}, CHAT, ()))
    assert first["prompt_text"] == text
    assert "prompt_text" not in second


@pytest.mark.parametrize(
    "answer", [{}, {"choices": []}, {"choices": [{"text": "a"}]}, {"choices": [{"text": "a", "token_ids": [1, 2]}]}]
)
def test_no_seed_without_its_token(answer: dict[str, Any]) -> None:
    assert isinstance(seed_of(answer, COMPLETIONS, ()), str)


@given(PATHS, st.text(min_size=1, max_size=5).filter(lambda text: not text.endswith("\ufffd")))
def test_a_seed_reads_as_its_text(path: str, text: str) -> None:
    seed = seed_of(leg_one(path, text), path, ())
    assert isinstance(seed, Seed)
    assert said_in(seed.events, path) == SaidSoFar(text, role=path == CHAT)
    assert read(path, seed.events) == (text, None, False)


def test_stop_strings_of_a_body() -> None:
    assert stops_of({"stop": "a"}) == ("a",)
    assert stops_of({"stop": ["a", "", 3]}) == ("a",)
    assert stops_of({"stop": None}) == stops_of({}) == stops_of({"stop": 7}) == ()
