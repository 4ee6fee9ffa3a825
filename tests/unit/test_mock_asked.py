from __future__ import annotations

from typing import Any

import pytest

from cluster.errors import ApiError
from engine.mock.asked import MockLimits, read_asked, read_body
from engine.mock.words import END, ROLES, tokenize

LIMITS = MockLimits(model="m", max_model_len=100, block_size=16)
GOOD: dict[str, Any] = {"model": "m", "prompt": "hello there"}


def test_defaults_are_vllms() -> None:
    asked = read_asked(GOOD, LIMITS, chat=False)
    assert (asked.max_tokens, asked.n, asked.stream, asked.usage, asked.token_ids) == (16, 1, False, False, False)
    assert len(asked.prompts[0].ids) == 3
    chat = read_asked({"messages": [{"role": "user", "content": "hi"}]}, LIMITS, chat=True)
    assert chat.max_tokens is None


def test_a_chat_is_ids_in_the_order_of_a_template() -> None:
    body = {
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": "yes?"},
            {"role": "user", "content": "bye"},
        ],
        "max_tokens": 9,
        "max_completion_tokens": 5,
    }
    asked = read_asked(body, LIMITS, chat=True)
    user, assistant = ROLES["user"], ROLES["assistant"]
    expected = [ROLES["system"], *tokenize("be kind"), END, user, *tokenize("hi"), END, assistant, *tokenize("yes?"),
                END, user, *tokenize("bye"), END, assistant]  # fmt: skip
    assert asked.prompts[0].ids.tolist() == expected
    assert asked.max_tokens == 5


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [("abcd", [1]), ([1, 2, 3], [3]), (["abcd", "abcdefgh"], [1, 2]), ([[1], [2, 3]], [1, 2])],
)
def test_the_four_forms_of_a_prompt(prompt: object, lengths: list[int]) -> None:
    asked = read_asked({**GOOD, "prompt": prompt}, LIMITS, chat=False)
    assert [len(each.ids) for each in asked.prompts] == lengths


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": None}, 400, "body.prompt"),
    ({"prompt": {"a": 1}}, 400, "body.prompt"),
    ({"prompt": [1, "x"]}, 400, "body.prompt"),
    ({"prompt": [True]}, 400, "body.prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": "x" * 400}, 400, "input_tokens"),
    ({"model": 3}, 400, "body.model"),
    ({"model": "other"}, 404, "model"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 2.5}, 400, "body.max_tokens"),
    ({"max_tokens": True}, 400, "body.max_tokens"),
    ({"max_tokens": 101}, 400, "max_tokens"),
    ({"min_tokens": 17}, 400, "min_tokens"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"top_p": 1.1}, 400, "top_p"),
    ({"n": 65}, 400, "n"),
    ({"n": 40, "prompt": ["a", "b"]}, 400, "n"),
    ({"logprobs": 3}, 400, "logprobs"),
    ({"logprobs": 0}, 400, "logprobs"),
    ({"logprobs": []}, 400, "logprobs"),
    ({"prompt_logprobs": 0}, 400, "prompt_logprobs"),
    ({"prompt_logprobs": {"a": 1}}, 400, "prompt_logprobs"),
    ({"top_logprobs": 1}, 400, "top_logprobs"),
    ({"echo": 1}, 400, "echo"),
    ({"echo": []}, 400, "body.echo"),
    ({"use_beam_search": "yes"}, 400, "use_beam_search"),
    ({"kv_transfer_params": "x"}, 400, "body.kv_transfer_params"),
    ({"stream": "maybe"}, 400, "body.stream"),
    ({"stream": 2, "prompt": [1 << 40]}, 400, "body.stream"),
    ({"ignore_eos": "maybe"}, 400, "body.ignore_eos"),
    ({"stream_options": 1}, 400, "body.stream_options"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
]


@pytest.mark.parametrize(("change", "status", "param"), BAD, ids=[str(row[0])[:40] for row in BAD])
def test_what_vllm_would_refuse(change: dict[str, Any], status: int, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_asked({**GOOD, **change}, LIMITS, chat=False)
    assert (refused.value.status, refused.value.param) == (status, param)
    assert refused.value.message


@pytest.mark.parametrize("flag", [True, 1, "true"])
def test_a_chat_asks_for_logprobs_with_a_flag(flag: object) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "top_logprobs": 0}
    assert read_asked({**chat, "logprobs": 0, "echo": "false"}, LIMITS, chat=True).chat
    with pytest.raises(ApiError, match="has no logprobs"):
        read_asked({**chat, "logprobs": flag}, LIMITS, chat=True)


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"[" * 5000, b'"x"', b"\xff"])
def test_malformed_bodies_are_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        read_body(raw, "application/json")
    assert refused.value.status == 400


def test_content_type() -> None:
    assert read_body(b"{}", "application/json; charset=utf-8") == {}
    with pytest.raises(ApiError, match="Unsupported Media Type"):
        read_body(b"{}", "text/plain")
