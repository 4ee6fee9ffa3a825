"""The mock's answers: bodies and server-sent events, byte for byte in vLLM 0.32's order of keys.

Events of a stream are framed for HTTP's chunked transfer coding. The events of an answer's tokens differ only in the
four bytes of the token, so the parts around them, and the length, are made once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from engine.mock.words import END, words

VERSION: Final = "0.32.0"
"""The version of vLLM whose API this is."""
LAST_CHUNK: Final = b"0\r\n\r\n"
DONE: Final = b"e\r\ndata: [DONE]\n\n\r\n" + LAST_CHUNK
_SLOT: Final = "\x00slot"


def encode(body: object) -> bytes:
    """JSON as vLLM's server writes it."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked answer."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(body: object) -> bytes:
    """One server-sent event, as one chunk."""
    return chunk(b"data: " + encode(body) + b"\n\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The values that all parts of one answer share."""

    id: str
    model: str
    created: int
    """Seconds since 1970."""
    chat: bool
    token_ids: bool
    usage: bool
    """Whether an event with the usage comes after the last token."""
    running_usage: bool
    """Whether every event has the usage so far."""

    def begin(self, *, stream: bool) -> dict[str, Any]:
        """The first keys of a body or event."""
        kind = ("chat.completion.chunk" if stream else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(slots=True)
class MockChoice:
    """One choice of an answer so far. `prompt` has the prompt's ids, or a range of their number."""

    index: int
    prompt: Sequence[int]
    ids: list[int] = field(default_factory=list)
    reason: str | None = None

    @property
    def text(self) -> str:
        """The text of its ids."""
        known = words()
        return b"".join(known[token] for token in self.ids if token != END).decode()


class Events:
    """The events of one choice of a stream. Call `opening`, `tokens` and `closing` in this order."""

    def __init__(self, head: AnswerHead, choice: MockChoice) -> None:
        self._head = head
        self._choice = choice
        self._plain = not (head.token_ids or head.running_usage)
        if self._plain:
            data = b"data: " + encode(self._body([], _SLOT, None)) + b"\n\n"
            before, after = data.split(json.dumps(_SLOT).encode()[1:-1])
            self._before = b"%x\r\n%b" % (len(before) + 4 + len(after), before)
            self._after = after + b"\r\n"

    def opening(self) -> bytes:
        """The event before the first token: in a chat, the role of the message; for a completion nothing."""
        if not self._head.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        body = self._head.begin(stream=True)
        body["choices"] = [{"index": self._choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]
        body["prompt_token_ids"] = list(self._choice.prompt) if self._head.token_ids else None
        body["prompt_text"] = None
        return event(self._with_usage(body, 0))

    def tokens(self, ids: Sequence[int]) -> bytes:
        """An event for each of these tokens, none of them the last."""
        if self._plain:
            before, after, known = self._before, self._after, words()
            return b"".join([before + known[token] + after for token in ids])
        return b"".join([self._event([token], None) for token in ids])

    def closing(self, ids: Sequence[int], reason: str) -> bytes:
        """The last token's event, which says why the answer ends; without a token, an event without text."""
        return self.tokens(ids[:-1]) + self._event(ids[-1:], reason)

    def _event(self, ids: Sequence[int], reason: str | None) -> bytes:
        known = words()
        text = b"".join(known[token] for token in ids if token != END).decode()
        body = self._body(ids, text, reason)
        if reason is not None and not self._head.usage:
            body["system_fingerprint"] = fingerprint()  # only the last event has it
        count = len(self._choice.ids) + len(ids)
        self._choice.ids += ids
        return event(self._with_usage(body, count))

    def _body(self, ids: Sequence[int], text: str, reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self._choice.index}
        shown = list(ids) if self._head.token_ids else None
        if self._head.chat:
            choice |= {"delta": {"content": text}, "logprobs": None, "finish_reason": reason}
            if reason is not None:
                choice["stop_reason"] = None
            choice["token_ids"] = shown
        else:
            choice |= {"text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
            first = self._head.token_ids and not self._choice.ids
            choice["prompt_token_ids"] = list(self._choice.prompt) if first else None
            choice["token_ids"] = shown
        return {**self._head.begin(stream=True), "choices": [choice]}

    def _with_usage(self, body: dict[str, Any], completion_tokens: int) -> dict[str, Any]:
        if self._head.running_usage:
            body["usage"] = _counts(len(self._choice.prompt), completion_tokens)
        return body


def usage_event(head: AnswerHead, usage: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> bytes:
    """The event after the last token, for requests that asked for the usage."""
    body = {**head.begin(stream=True), "choices": [], "usage": usage, "system_fingerprint": fingerprint()}
    if metrics:
        body["metrics"] = {name: value for name, value in metrics.items() if value is not None}
    return event(body)


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """``usage`` as with vLLM's ``--enable-prompt-tokens-details``."""
    return {**_counts(prompt_tokens, completion_tokens), "prompt_tokens_details": {"cached_tokens": cached_tokens}}


def _counts(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}


def fingerprint() -> str:
    """``system_fingerprint``, which says that a mock answered."""
    return f"vllm-{VERSION}-mock"


def whole(
    head: AnswerHead,
    choices: Sequence[MockChoice],
    usage: Mapping[str, Any],
    transfer: Mapping[str, Any] | None,
    metrics: Mapping[str, Any] | None,
) -> bytes:
    """An answer that is not streamed."""
    details = {**usage["prompt_tokens_details"], "created_cache_tokens": None, "multimodal_tokens": None}
    body = head.begin(stream=False)
    body["choices"] = [_chat_choice(head, one) if head.chat else _choice(head, one) for one in choices]
    body |= {"service_tier": None, "system_fingerprint": fingerprint()}
    body["usage"] = {**usage, "prompt_tokens_details": details, "completion_tokens_details": None}
    if head.chat:
        body |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
        body["prompt_token_ids"] = list(choices[0].prompt) if head.token_ids else None
    return encode({**body, "kv_transfer_params": transfer, "ec_transfer_params": None, "metrics": metrics})


def _choice(head: AnswerHead, choice: MockChoice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": None,
        "finish_reason": choice.reason,
        "stop_reason": None,
        "token_ids": choice.ids if head.token_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": list(choice.prompt) if head.token_ids else None,
        "routed_experts": None,
    }


def _chat_choice(head: AnswerHead, choice: MockChoice) -> dict[str, Any]:
    empty = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, **empty},
        "logprobs": None,
        "finish_reason": choice.reason,
        "stop_reason": None,
        "token_ids": choice.ids if head.token_ids else None,
        "routed_experts": None,
    }
