"""The splice of two streams: what the client gets first, and what is dropped where another engine's stream takes over.
Pure.

A *seed* is P's first token in the form in which D would have streamed it. D makes that token again (it is pinned), so
exactly its text must be removed from D's stream. The same is done when a stream breaks and another instance generates
the answer anew: everything that the client already has is dropped. Events are parsed only here, within the splice; once
it is closed, bytes are passed on unchanged.

Text that does not match what the client has is never passed on: `SpliceBroken`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cluster.readable import json_in
from cluster.wire import ADAPTER
from router.core.eligibility import CHAT

ERROR_EVENT = b'data: {"error"'
"""The beginning of vLLM's error event in a stream. In an answer's text the quotes would be escaped."""

LAST_EVENT = b"data: [DONE]"
"""The end of a whole stream."""

EVENT_BYTES_MAX = 1 << 20
"""A longer event is passed on in pieces and not kept; if it has to be read, it counts as invalid."""

TOKEN_MAX = 1 << 31
"""The limit of token ids."""

REPLACEMENT = "\ufffd"
"""What a decoder shows for bytes that are not a whole character."""


class SpliceBroken(Exception):
    """The second stream does not begin with what the client was given."""


@dataclass(frozen=True, slots=True)
class Seed:
    """P's first token, ready for the client."""

    token: int
    text: str
    role: bool
    """The events name the role first (chat)."""
    events: bytes
    """Whole SSE events, as D's stream would begin."""


def seed_of(answer: Mapping[str, Any], path: str, stops: Sequence[str]) -> Seed | str:
    """The seed that P's answer allows, or why there is none.

    `answer` is the answer to the prefill leg, which asked for ``return_token_ids``. The events have vLLM 0.32's forms.
    """
    choice, token = _only_choice(answer), token_of(answer)
    if choice is None or token is None:
        return "P's answer does not name its token"
    if path == CHAT and _counts_reasoning(answer):
        return "P's engine has a reasoning parser, which may read the first token otherwise in a stream"
    text = _text_of(choice, path)
    if isinstance(text, _Unfit):
        return text.because
    if not text or text.endswith(REPLACEMENT):
        return "the first token ends inside a character"
    if any(_may_begin(text, stop) for stop in stops):
        return "the first token may begin a stop string"
    return Seed(token, text, path == CHAT, _first_events(answer, path, text))


def token_of(answer: Mapping[str, Any]) -> int | None:
    """The token that the answer to a prefill leg names as its only one."""
    choice = _only_choice(answer)
    tokens = choice.get("token_ids") if choice is not None else None
    token = tokens[0] if isinstance(tokens, list) and len(tokens) == 1 else None
    return token if type(token) is int and 0 <= token < TOKEN_MAX else None


def adapter_of(answer: Mapping[str, Any]) -> str | None:
    """The digest of the adapter that chose the token, empty if P could not tell it; None: the model itself."""
    fields = answer.get("kv_transfer_params")
    told = fields.get(ADAPTER) if isinstance(fields, Mapping) else None
    return None if told is None else str(told)


@dataclass(frozen=True, slots=True)
class _Unfit:
    because: str


def _only_choice(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    choices = answer.get("choices")
    if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], Mapping):
        return choices[0]
    return None


def _text_of(choice: Mapping[str, Any], path: str) -> str | _Unfit:
    if path != CHAT:
        text = choice.get("text")
        return text if isinstance(text, str) else _Unfit("P's answer has no text")
    message = choice.get("message")
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        return _Unfit("the first token is no content: reasoning, or a tool call")
    if any(message.get(name) for name in ("reasoning", "reasoning_content", "tool_calls", "function_call", "refusal")):
        return _Unfit("the first token is not only content")
    return str(message["content"])


def _counts_reasoning(answer: Mapping[str, Any]) -> bool:
    """Whether P's engine has a reasoning parser: exactly then vLLM counts the tokens of a chat's reasoning.

    Such an engine's answer of one token does not tell what a stream has. Some parsers take the text for content, as the
    end of the reasoning is missing, and stream the same token as reasoning; some keep it back in a stream.
    """
    usage = answer.get("usage")
    return isinstance(usage, Mapping) and usage.get("completion_tokens_details") is not None


def _may_begin(text: str, stop: str) -> bool:
    """Whether a stop string stands in the text, or could begin in it and end in later text."""
    return stop in text or any(text.endswith(stop[:length]) for length in range(1, min(len(stop), len(text) + 1)))


def stops_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The stop strings of a request; empty ones stop nothing."""
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return tuple(each for each in stops if isinstance(each, str) and each)


def _first_events(answer: Mapping[str, Any], path: str, text: str) -> bytes:
    head = {name: answer.get(name) for name in ("id", "created", "model")}
    common = {"logprobs": None, "finish_reason": None}
    if path != CHAT:
        choice = {"index": 0, "text": text, **common, "stop_reason": None, "prompt_token_ids": None, "token_ids": None}
        return _event({"id": head["id"], "object": "text_completion", **head, "choices": [choice]})
    head = {"id": head["id"], "object": "chat.completion.chunk", **head}
    role = {"index": 0, "delta": {"role": _role_in(answer), "content": ""}, **common}
    said = {"index": 0, "delta": {"content": text}, **common, "token_ids": None}
    prompt = {"prompt_token_ids": None, "prompt_text": answer.get("prompt_text")}
    return _event({**head, "choices": [role], **prompt}) + _event({**head, "choices": [said]})


def _role_in(answer: Mapping[str, Any]) -> str:
    """The role of a chat's answer: an engine may have another one than "assistant" (``--response-role``), and has the
    last message's with ``add_generation_prompt: false``.
    """
    message = (_only_choice(answer) or {}).get("message")
    role = message.get("role") if isinstance(message, Mapping) else None
    return role if isinstance(role, str) else "assistant"


def _event(fields: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


@dataclass(frozen=True, slots=True)
class SaidSoFar:
    """The part of an answer that a client has received."""

    text: str
    role: bool
    """The chunk that only names the role has been sent (chat)."""


def said_in(events: bytes, path: str) -> SaidSoFar | None:
    """What these whole SSE events told the client; None if another answer cannot be joined to them.

    It cannot if they hold an error, the answer's end, or anything but text.
    """
    text, role = "", False
    for event in events.split(b"\n\n"):
        if not event or not event.startswith(b"data:"):
            continue
        delta = _delta_of(event, path)
        if delta is None or delta.ended:
            return None
        text += delta.text
        role = role or delta.role
    return SaidSoFar(text, role)


@dataclass(frozen=True, slots=True)
class _Delta:
    text: str
    role: bool
    ended: bool
    fields: dict[str, Any]


def _delta_of(event: bytes, path: str) -> _Delta | None:
    """One choice's part of an answer; None for anything else."""
    try:
        fields = json_in(event.partition(b":")[2])
    except msgspec.DecodeError:
        return None
    choice = _only_choice(fields) if isinstance(fields, dict) else None
    if choice is None or choice.get("index"):  # one of several answers
        return None
    ended = choice.get("finish_reason") is not None
    if path != CHAT:
        text = choice.get("text")
        return _Delta(text, role=False, ended=ended, fields=fields) if isinstance(text, str) else None
    delta = choice.get("delta")
    if not isinstance(delta, dict) or any(delta[name] for name in delta.keys() - {"role", "content"}):
        return None
    content = delta.get("content")
    if content is not None and not isinstance(content, str):
        return None
    return _Delta(content or "", role="role" in delta, ended=ended, fields=fields)


class Splice:
    """Removes what the client already has from the beginning of a second stream."""

    def __init__(self, path: str, said: SaidSoFar) -> None:
        self._path = path
        self._left = said.text
        self._role = said.role
        self._rest = b""

    @property
    def closed(self) -> bool:
        """Whether all that the client already has is removed: further bytes may pass unchanged."""
        return not self._left and not self._role

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes of the second stream; return those that the client gets.

        Raises:
            SpliceBroken: the stream is a different answer.
        """
        self._rest += chunk
        out = b""
        while not self.closed:
            event, end, rest = self._rest.partition(b"\n\n")
            if not end:
                if len(self._rest) > EVENT_BYTES_MAX:
                    raise SpliceBroken(f"an event of more than {EVENT_BYTES_MAX} bytes came")
                return out
            if event.startswith(ERROR_EVENT):
                return out + event + end  # this stream has ended, too: the caller looks for the end
            self._rest = rest
            out += self._take(event)
        out, self._rest = out + self._rest, b""
        return out

    def _take(self, event: bytes) -> bytes:
        if event and not event.startswith(b"data:"):
            return event + b"\n\n"  # a comment, which some engines send to keep a connection alive
        delta = _delta_of(event, self._path) if event else None
        if delta is None:
            raise SpliceBroken(f"a stream of text was to go on, and this came: {event[:120]!r}")
        if delta.role and not delta.text and not delta.ended:
            self._role = False
            return b""
        return self._join(delta)

    def _join(self, delta: _Delta) -> bytes:
        self._role = False  # an engine that names the role together with its first text
        if self._left.startswith(delta.text):
            self._left = self._left[len(delta.text) :]
            if not delta.ended:
                return b""
            if self._left:
                raise SpliceBroken(f"the answer ended {len(self._left)} characters before what was said")
            return _event(_with_text(delta.fields, self._path, ""))
        if not delta.text.startswith(self._left):
            raise SpliceBroken("another text than was said")
        rest, self._left = delta.text[len(self._left) :], ""
        return _event(_with_text(delta.fields, self._path, rest))


def _with_text(fields: dict[str, Any], path: str, text: str) -> dict[str, Any]:
    choice = dict(fields["choices"][0])
    if path == CHAT:
        choice["delta"] = {**choice["delta"], "content": text}
    else:
        choice["text"] = text
    return {**fields, "choices": [choice]}
