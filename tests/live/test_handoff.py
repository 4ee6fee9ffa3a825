"""Exactness, with real engines: answers through prefill and decode equal one engine's answers, token for token."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from support.cluster import Cluster, within
from support.pairs_front import as_it_starts

STORY = (
    "Once upon a time a small robot found a bright red lantern near the river. Café Zoë was open — the kettle sang 🙂. "
    "Every morning the fox carried a baton to the old mill, and every evening the owl carried it back. "
)
ANSWER_TOKENS = 24

LENGTHS = [2, 3, 5, 16, 31, 64, 100, 126, 127, 128, 129, 130, 200, 254, 255, 256, 257, 512, 640, 700, 1000, 1023,
           1024, 1025, 1500, 1792, 1899, 1900]  # fmt: skip
MORE_EDGES = [383, 384, 385, 511, 513, 767, 768, 769, 895, 896, 897, 1151, 1152, 1153, 1279, 1280, 1281, 1663, 1664,
              1665, 1791, 1793]  # fmt: skip
"""Fifty prompt lengths in tokens (one byte each), the latter for `make test-long`; the CPU engine's blocks hold 128."""


def post(url: str, body: dict[str, Any], *, timeout: float = 60) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def stream(url: str, body: dict[str, Any]) -> tuple[str, str | None, list[int]]:
    """Text, finish reason and token ids of a streamed answer."""
    request = urllib.request.Request(
        url, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
    )
    text, reason, ids = "", None, []
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = answer.read().decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    for event in events[:-1]:
        choice = json.loads(event.removeprefix("data: "))["choices"][0]
        text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        reason = choice["finish_reason"] or reason
        ids += choice.get("token_ids") or []
    return text, reason, ids


def prompt_of(length: int) -> list[int]:
    """Token ids of a prompt of exactly this many tokens, different from every other prompt's first block."""
    text = f"[{length}] {STORY * 20}".encode()
    return list(text[:length])


@pytest.mark.parametrize("length", [*LENGTHS, *(pytest.param(each, marks=pytest.mark.long) for each in MORE_EDGES)])
def test_tokens_equal_one_engines(cluster: Cluster, length: int) -> None:
    """Prefill and decode together give the ids of one engine alone, streamed and not, and D pulls the whole prompt.

    Some of these prompts end inside a UTF-8 character, because their ids are cut at a byte.
    """
    body = {"model": cluster.model, "prompt": prompt_of(length), "max_tokens": ANSWER_TOKENS, "temperature": 0,
            "return_token_ids": True}  # fmt: skip
    before = cluster.pulled()
    status, answer = post(f"{cluster.endpoint}/v1/completions", body)
    assert status == 200, answer
    assert cluster.pulled() - before == length, "the prompt's KV came from the prefill engine"
    _, alone = post(f"{cluster.urls['prefill-0']}/v1/completions", body)
    expected = alone["choices"][0]
    got = answer["choices"][0]
    assert got["token_ids"] == expected["token_ids"]
    assert (got["text"], got["finish_reason"]) == (expected["text"], expected["finish_reason"])
    assert answer["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
    text, reason, ids = stream(f"{cluster.endpoint}/v1/completions", body)
    assert ids == expected["token_ids"]
    assert reason == expected["finish_reason"]
    assert text == expected["text"]


def test_a_router_as_it_starts_gives_one_engines_tokens(cluster: Cluster) -> None:
    """With the default policy, which serves here whole or by hand-over, as it expects the costs to be."""
    with as_it_starts(cluster, pairs=3) as front:
        for length in (5, 129, 700, 1023, 1500, 1900):
            body = {"model": cluster.model, "prompt": prompt_of(length)[::-1], "max_tokens": ANSWER_TOKENS,
                    "temperature": 0, "return_token_ids": True}  # fmt: skip
            status, answer = post(f"{front.endpoint}/v1/completions", body)
            assert status == 200, answer
            expected = post(f"{cluster.urls['prefill-0']}/v1/completions", body)[1]["choices"][0]
            got = answer["choices"][0]
            assert got["token_ids"] == expected["token_ids"]
            assert (got["text"], got["finish_reason"]) == (expected["text"], expected["finish_reason"])
            told = stream(f"{front.endpoint}/v1/completions", body)
            assert told == (expected["text"], expected["finish_reason"], expected["token_ids"])
    within(2.0, cluster.idle, cluster.loads)


QUESTIONS = ["What is Baton?", "hello", "Tell me a story.", "Write café five times.", "Send me a smile.",
             "Say nothing.", "What is the KV cache? " * 60]  # fmt: skip


def chats() -> list[Any]:
    """Short answers and long ones. Three long ones always run: one ends by itself, one is cut inside a character, and
    one follows a prompt of several blocks.
    """
    short = [(question, 13) for question in QUESTIONS]
    kept = {"Write café five times.", "Say nothing.", QUESTIONS[-1]}
    long = [pytest.param(question, 200, marks=[] if question in kept else [pytest.mark.long]) for question in QUESTIONS]
    return [*short, *long]


@pytest.mark.parametrize(("question", "max_tokens"), chats(), ids=lambda given: str(given)[:20])
def test_chat_equals_one_engines(cluster: Cluster, question: str, max_tokens: int) -> None:
    """This holds also where the answer is cut inside a character, and where EOS is its first token ("Say nothing.")."""
    body = {"model": cluster.model, "messages": [{"role": "user", "content": question}], "max_tokens": max_tokens,
            "temperature": 0}  # fmt: skip
    status, answer = post(f"{cluster.endpoint}/v1/chat/completions", body)
    assert status == 200, answer
    _, alone = post(f"{cluster.urls['prefill-0']}/v1/chat/completions", body)
    got, expected = answer["choices"][0], alone["choices"][0]
    assert got["message"]["content"] == expected["message"]["content"]
    assert got["finish_reason"] == expected["finish_reason"]
    text, reason, _ = stream(f"{cluster.endpoint}/v1/chat/completions", body)
    assert text == (expected["message"]["content"] or "")
    assert reason == expected["finish_reason"]
    if question == "Say nothing.":
        assert text == ""
        assert reason == "stop"
    assert within(2.0, cluster.idle, cluster.loads) < 2.0, "nothing stays held"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_one_token_is_answered_by_prefill(cluster: Cluster, path: str) -> None:
    content = {"prompt": STORY} if path == "/v1/completions" else {"messages": [{"role": "user", "content": STORY}]}
    before = cluster.pulled()
    body = {"model": cluster.model, "max_tokens": 1, "temperature": 0, **content}
    status, answer = post(cluster.endpoint + path, body)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["kv_transfer_params"] is None
    assert cluster.pulled() == before
    within(2.0, cluster.idle, cluster.loads)


def test_usage_in_a_stream(cluster: Cluster) -> None:
    body = {"model": cluster.model, "prompt": "Once upon a time", "max_tokens": 5, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    request = urllib.request.Request(
        f"{cluster.endpoint}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        last = answer.read().decode().strip().split("\n\n")[-2]
    usage = json.loads(last.removeprefix("data: "))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (16, 5)
