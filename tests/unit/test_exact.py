"""Which requests are handed over, and why the others are not."""

from typing import Any

import pytest

from router.core.eligibility import CHAT, COMPLETIONS, Way, single_token, verdict

CHAT_BODY = {"messages": [{"role": "user", "content": "hello"}]}

HANDED_OVER: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "x"}),
    (COMPLETIONS, {"prompt": [1, 2, 3]}),
    (COMPLETIONS, {"prompt": ["x"]}),
    (COMPLETIONS, {"prompt": [[1, 2]]}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 2, "n": 1, "best_of": 1, "echo": False, "logprobs": 2}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": None, "suffix": None, "prompt_logprobs": None}),
    (COMPLETIONS, {"prompt": "x", "stop": ["a"], "seed": 1, "min_tokens": 3}),
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
    (COMPLETIONS, {"prompt": "x", "n": 2}, "n:"),
    (COMPLETIONS, {"prompt": "x", "n": "2"}, "n:"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
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


def test_single_token_is_prefill_work() -> None:
    assert single_token({"max_tokens": 1})
    assert single_token({"max_completion_tokens": 1, "max_tokens": 9})
    assert not single_token({"max_tokens": True})
    assert not single_token({})
