"""Law 8, a row for each kind of request, with real engines: a client gets one engine's answer, seeded or not."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from support.cluster import Cluster

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STORY = "Once upon a time a small robot found a bright red lantern near the river. "
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

ANSWERED_FIRST = 'baton_early_legs_total{result="answered first"}'

SEEDED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "stop": {"stop": ["fox"]},
    "several stops": {"stop": ["zzz", "he "]},
    "seed": {"seed": 5, "temperature": 0.9},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {"101": -5, "97": 2}},
    "bad_words": {"bad_words": ["e"]},
    "top_k and top_p": {"seed": 9, "temperature": 0.7, "top_k": 5, "top_p": 0.9},
    "usage": {"stream_options": {"include_usage": True}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
}
"""Requests that `router.core.eligibility` lets be seeded: the client has the first token before the handoff."""

PLAIN: dict[str, dict[str, Any]] = {
    "min_tokens": {"min_tokens": 5},
    "logprobs": {"logprobs": 2},
    "token ids": {"return_token_ids": True},
    "usage in every chunk": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}
"""Requests that are not seeded: the client's first token comes from D."""


def listen(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a stream holds, however it is cut into chunks: text, roles, reasons, usage, token ids, logprobs' tokens."""
    request = urllib.request.Request(
        url + path, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = answer.read().decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    heard: dict[str, Any] = {"text": "", "roles": [], "finish": [], "usage": None, "ids": [], "tops": []}
    names = set()
    for event in events[:-1]:
        fields = json.loads(event.removeprefix("data: "))
        assert "error" not in fields, fields
        heard["usage"] = fields.get("usage") or heard["usage"]
        names.add((fields["id"], fields["model"], fields["object"]))
        for choice in fields["choices"]:
            delta = choice.get("delta", {})
            heard["text"] += choice.get("text") or delta.get("content") or ""
            heard["roles"] += [delta["role"]] if "role" in delta else []
            heard["finish"] += [(choice["finish_reason"], choice.get("stop_reason"))] if choice["finish_reason"] else []
            heard["ids"] += choice.get("token_ids") or []
            heard["tops"] += _chosen(choice.get("logprobs"))
    assert len(names) == 1, "one answer"
    if heard["usage"]:
        heard["usage"].pop("prompt_tokens_details")  # cached tokens differ between the engines
    return heard


def _chosen(logprobs: Any) -> list[str]:
    if not logprobs:
        return []
    return list(logprobs.get("tokens") or [each["token"] for each in logprobs.get("content", [])])


def body(path: str, length: int, row: dict[str, Any]) -> dict[str, Any]:
    """A prompt of exactly this many tokens for completions, about as many for chat; new for each row and length."""
    text = f"[{length} {sorted(row.items())!s:.40}] {STORY * 9}"
    asked: dict[str, Any] = {"prompt": list(text.encode()[:length])}
    if path == CHAT:
        asked = {"messages": [{"role": "user", "content": text[:length]}]}
        if "logprobs" in row:
            row = {"logprobs": True, "top_logprobs": row["logprobs"]}
    return {**asked, "max_tokens": 14, "temperature": 0, **row}


@pytest.mark.parametrize(
    ("path", "length"),
    [
        (COMPLETIONS, 128),
        (COMPLETIONS, 300),
        (CHAT, 300),
        pytest.param(CHAT, 128, marks=pytest.mark.long),
        pytest.param(COMPLETIONS, 31, marks=pytest.mark.long),
        pytest.param(CHAT, 31, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("row", [*SEEDED, *PLAIN])
def test_every_row_reads_as_one_engines_answer(cluster: Cluster, path: str, row: str, length: int) -> None:
    asked = {"model": cluster.model, **body(path, length, SEEDED.get(row) or PLAIN.get(row) or {})}
    before = _told_first(cluster)
    ours = listen(cluster.endpoint, path, asked)
    seeds, answered_first = (now - then for now, then in zip(_told_first(cluster), before, strict=True))
    assert ours == listen(cluster.urls["prefill-0"], path, asked)
    whole = ours["text"][:1].isascii() and ours["text"] != ""  # not the first byte of a character, not EOS at once
    if row in SEEDED and whole:
        assert seeds + answered_first == 1
    else:
        assert seeds == 0
    assert cluster.router_metric("baton_broken_seams_total") == 0


def _told_first(cluster: Cluster) -> tuple[float, float]:
    """The number of answers so far that were seeded, and of those whose early leg was faster than P's HTTP answer.
    That happens where P's API server gets no processor time.
    """
    return cluster.router_metric("baton_seeds_total"), cluster.router_metric(ANSWERED_FIRST, 0.0)


def test_the_first_half_of_a_character_is_not_seeded(cluster: Cluster) -> None:
    """The first token is the first byte of a two-byte character: its text is not known yet."""
    asked = {"model": cluster.model, "prompt": "x", "max_tokens": 4, "temperature": 0}
    half = {**asked, "logit_bias": {"195": 100, "169": 99}}  # é is 195 169, and every token is a byte
    before = cluster.router_metric("baton_seeds_total")
    ours = listen(cluster.endpoint, COMPLETIONS, half)
    assert cluster.router_metric("baton_seeds_total") == before
    assert ours == listen(cluster.urls["prefill-0"], COMPLETIONS, half)
