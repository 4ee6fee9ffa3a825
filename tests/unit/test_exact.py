"""Which requests are handed over, and why the others are not."""

from typing import Any

import pytest

from router.core.eligibility import CHAT, COMPLETIONS, Way, has_room, single_token, verdict

CHAT_BODY = {"messages": [{"role": "user", "content": "hello"}]}

HANDED_OVER: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "x"}),
    (COMPLETIONS, {"prompt": [1, 2, 3]}),
    (COMPLETIONS, {"prompt": ["x"]}),
    (COMPLETIONS, {"prompt": [[1, 2]]}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 2, "n": 1, "best_of": 1, "echo": False, "logprobs": 2}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": None, "suffix": None, "prompt_logprobs": None}),
    (COMPLETIONS, {"prompt": "x", "stop": ["a"], "seed": 1, "min_tokens": 3}),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 16}),
    (COMPLETIONS, {"prompt": "x", "max_completion_tokens": 1}),  # vLLM reads it in chats only
    (CHAT, CHAT_BODY),
    (CHAT, {**CHAT_BODY, "tools": [{}], "tool_choice": "auto"}),
    (CHAT, {**CHAT_BODY, "max_tokens": 1, "max_completion_tokens": 5}),
]

WHOLE: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {"input": "x"}, "endpoint"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1}, "one token"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0, "echo": True}, "echo"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "9"}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": True}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 17}, "min_tokens"),  # vLLM's default for max_tokens is 16
    (COMPLETIONS, {"prompt": "x", "min_tokens": 17, "max_tokens": None}, "min_tokens"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 9, "max_tokens": 3, "max_completion_tokens": 99}, "min_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "max_completion_tokens": 9}, "one token"),
    (COMPLETIONS, {"prompt": "x", "n": 2}, "n:"),
    (COMPLETIONS, {"prompt": "x", "n": "2"}, "n:"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 0}, "prompt_logprobs"),  # each prompt token's own
    (CHAT, {**CHAT_BODY, "prompt_logprobs": 0}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"prompt": "x", "suffix": ""}, "suffix"),
    (COMPLETIONS, {"prompt": "x", "use_beam_search": True}, "beam"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {**CHAT_BODY, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {**CHAT_BODY, "tool_choice": {"type": "function"}}, "tool_choice"),
    (CHAT, {**CHAT_BODY, "max_tokens": 9, "max_completion_tokens": 1}, "one token"),
]


@pytest.mark.parametrize(("path", "body"), HANDED_OVER)
def test_handed_over(path: str, body: dict[str, Any]) -> None:
    assert verdict(path, body).way is not Way.AGGREGATED


@pytest.mark.parametrize(("path", "body", "words"), WHOLE)
def test_served_aggregated(path: str, body: dict[str, Any], words: str) -> None:
    said = verdict(path, body)
    assert said.way is Way.AGGREGATED
    assert words in said.because


@pytest.mark.parametrize(
    ("path", "body", "way"),
    [
        (COMPLETIONS, {"prompt": "x", "stream": True, "logprobs": 0}, Way.PLAIN),
        (COMPLETIONS, {"prompt": "x", "stream": True, "logprobs": False}, Way.PLAIN),  # vLLM reads it as 0
        (COMPLETIONS, {"prompt": "x", "stream": True, "logprobs": None}, Way.SEEDED),
        (CHAT, {**CHAT_BODY, "stream": True, "logprobs": True}, Way.PLAIN),
        (CHAT, {**CHAT_BODY, "stream": True, "logprobs": False}, Way.SEEDED),
    ],
)
def test_logprobs_are_a_count_in_completions_and_a_switch_in_chats(path: str, body: dict[str, Any], way: Way) -> None:
    assert verdict(path, body).way is way


@pytest.mark.parametrize(
    ("path", "more", "way"),
    [
        (CHAT, {"tool_choice": "none"}, Way.SEEDED),
        (CHAT, {"tool_choice": "none", "tools": [{}]}, Way.SEEDED),
        (CHAT, {"tools": [{}]}, Way.PLAIN),
        (CHAT, {"tool_choice": None}, Way.PLAIN),  # vLLM's default is "none"; null lets its tool parser read the text
        (CHAT, {"tool_choice": None, "tools": [{}]}, Way.PLAIN),
        (COMPLETIONS, {"tool_choice": None}, Way.SEEDED),
    ],
)
def test_no_seed_where_a_tool_parser_reads_the_text(path: str, more: dict[str, Any], way: Way) -> None:
    assert verdict(path, {"prompt": "x", **CHAT_BODY, "stream": True, **more}).way is way


def test_single_token_is_prefill_work() -> None:
    assert single_token(COMPLETIONS, {"max_tokens": 1})
    assert single_token(CHAT, {"max_completion_tokens": 1, "max_tokens": 9})
    assert not single_token(COMPLETIONS, {"max_completion_tokens": 1, "max_tokens": 9})
    assert not single_token(COMPLETIONS, {"max_tokens": True})
    assert not single_token(COMPLETIONS, {})
    assert not single_token(CHAT, {})


def test_every_limit_that_an_engine_may_read_has_to_fit() -> None:
    assert has_room({"max_tokens": 99}, 90, 99), "vLLM lowers what does not fit beside the prompt"
    assert not has_room({"max_tokens": 100}, 90, 99)
    assert not has_room({"max_tokens": 100, "max_completion_tokens": 2}, 90, 99)
    assert not has_room({"max_tokens": 9}, 99, 99)
    assert not has_room({"max_tokens": 9}, 90, None) and not has_room({"max_tokens": 9}, None, 99)
    assert has_room({"min_tokens": 1}, None, None) and has_room({}, None, None)


def test_no_seed_beside_a_least_length() -> None:
    """An engine may lower the limit below it by itself, and refuses the request then."""
    assert not has_room({"min_tokens": 2}, 90, 99)
    assert not has_room({"min_tokens": 2, "max_tokens": 9}, 90, 99)
