"""Which requests may be handed over at all (law 8: exact or not at all).

A request that is not plainly an ordinary generation is sent whole to one engine, whose own validation and semantics
then speak for it. This is the first form of the table: seeding and resuming add columns to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATING_PATHS = frozenset({COMPLETIONS, CHAT})

_WHOLE_WHEN_SET = {
    "best_of": "several candidates per prompt",
    "echo": "the prompt is part of the answer",
    "prompt_embeds": "the prompt is not text",
    "prompt_logprobs": "prompt logprobs need the whole prefill on one engine",
    "suffix": "infilling",
    "truncate_prompt_tokens": "the truncation depends on max_tokens, which differs between legs",
    "use_beam_search": "beam search",
}
"""Parameters that send a request whole when they hold anything but None, False or 0."""


def whole_because(path: str, body: Mapping[str, Any]) -> str | None:
    """Why this request must run on one engine; None when it may be handed over.

    Neutral values (None, False, 0, ``n=1``) count as absent.
    """
    if path not in GENERATING_PATHS:
        return "not a text generation endpoint"
    for name, why in _WHOLE_WHEN_SET.items():
        if body.get(name) and not (name == "best_of" and body[name] == 1):
            return f"{name}: {why}"
    if body.get("n", 1) not in (None, 1) or isinstance(body.get("n"), bool):
        return "n: several answers to one prompt"
    return _limits_because(body) or (_chat_because(body) if path == CHAT else _prompt_because(body.get("prompt")))


def single_token(body: Mapping[str, Any]) -> bool:
    """Whether the client asked for one token: P's own answer is then the whole answer."""
    limit = _token_limit(body)
    return isinstance(limit, int) and not isinstance(limit, bool) and limit == 1


def _token_limit(body: Mapping[str, Any]) -> Any:
    """The output limit as vLLM reads it: ``max_completion_tokens`` (chat) wins over ``max_tokens``; None = no limit."""
    limit = body.get("max_completion_tokens")
    return body.get("max_tokens") if limit is None else limit


def _limits_because(body: Mapping[str, Any]) -> str | None:
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        value = body.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            return f"{name}: not a count, the engine shall say so"
    limit = _token_limit(body)
    if limit is not None and limit < 2:
        return "at most one token: nothing left to decode elsewhere"
    minimum = body.get("min_tokens")
    if minimum is not None and limit is not None and minimum > limit:
        return "min_tokens above max_tokens: the engine shall say so"
    return None


def _prompt_because(prompt: Any) -> str | None:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return None
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return None
    return "prompt: not one text or one list of token ids"


def _chat_because(body: Mapping[str, Any]) -> str | None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return "messages: not a list of messages, the engine shall say so"
    choice = body.get("tool_choice")
    if choice == "required" or isinstance(choice, Mapping):
        return "tool_choice: a forced call cannot be parsed from the prefill leg's single token"
    return None
