"""Reads a generation request from its body, as vLLM does, or refuses it in vLLM's form.

The fields are those that change what a mock does. Other fields are accepted without effect, as in vLLM, except those
whose result a client would miss (`logprobs`, `echo`). These are refused, because a mock has no such numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from cluster.errors import ApiError, bad_request
from cluster.readable import json_in, lax_flag
from engine.mock.prompts import Prompted, prompted
from engine.mock.words import ALL_IDS, BYTES_PER_TOKEN, END, OTHER_ROLE, ROLES, TOOLS, Ids, tokenize

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

COMPLETION_TOKENS: Final = 16
"""vLLM's default of ``max_tokens`` for completions; for chats: as many as the context still holds."""

_PARTS_MAX: Final = 64
"""Most parts of one request: prompts times ``n``."""

_NUMBERS: Final[Mapping[str, tuple[bool, float, float]]] = {
    "max_tokens": (True, 1, float("inf")),
    "max_completion_tokens": (True, 1, float("inf")),
    "min_tokens": (True, 0, float("inf")),
    "n": (True, 1, _PARTS_MAX),
    "temperature": (False, 0, float("inf")),
    "top_p": (False, 0, 1),
    "seed": (True, -(2**63), 2**63 - 1),
    "priority": (True, -(2**63), 2**63 - 1),
}
"""Fields with a number: whether it must be whole, its least and its greatest value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MockLimits:
    """The properties of an instance by which a request is checked. Lengths in tokens."""

    model: str
    max_model_len: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MockRequest:
    """One valid request."""

    chat: bool
    prompts: tuple[Prompted, ...]
    n: int
    max_tokens: int | None
    """None: as many as the context still holds."""
    min_tokens: int
    ignore_eos: bool
    stream: bool
    usage: bool
    """Whether the stream ends with an event that has the usage."""
    running_usage: bool
    """Whether every event of the stream has the usage so far."""
    token_ids: bool
    priority: int
    transfer: Mapping[str, Any]
    """``kv_transfer_params``."""


class UnknownToken(ApiError):
    """An error that vLLM finds only after it has begun to answer: in a stream it is an event, after a status 200."""


def read_body(raw: bytes, content_type: str) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        ApiError: 400 with vLLM's message: another content type, or the body is no JSON object.
    """
    if content_type.lower().partition(";")[0].strip() != "application/json":
        raise ApiError(400, "Bad Request", "Unsupported Media Type: Only 'application/json' is allowed")
    try:
        body = json_in(raw)
    except msgspec.DecodeError as error:
        raise ApiError(400, "Bad Request", f"1 validation error:\n  JSON decode error: {error}", "body") from None
    if not isinstance(body, dict):
        raise invalid("body", "Input should be a valid dictionary")
    return body


def invalid(field: str, because: str) -> ApiError:
    """The 400 with which vLLM answers a field of a wrong type."""
    where = field if field == "body" else f"body.{field}"
    return ApiError(400, "Bad Request", f"1 validation error:\n  {{'loc': '{where}', 'msg': '{because}'}}", where)


def read_asked(body: Mapping[str, Any], limits: MockLimits, *, chat: bool) -> MockRequest:
    """The request in a body.

    Raises:
        ApiError: vLLM would refuse the body, or it asks for something that a mock has not.
    """
    for name, (whole, least, most) in _NUMBERS.items():
        _check_number(body, name, least, most, whole=whole)
    fields, options, stream = _object(body, "kv_transfer_params"), _object(body, "stream_options"), streams(body)
    usage, running_usage = _flag(options, "include_usage"), _flag(options, "continuous_usage_stats")
    ignore_eos, token_ids = _flag(body, "ignore_eos"), _flag(body, "return_token_ids")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise invalid("model", "Input should be a valid string")
    sizes = _Sizes.of(body, chat=chat)
    texts = [chat_pieces(body)] if chat else _texts(body)
    if model is not None and model != limits.model:
        raise ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
    _refuse_what_is_not_there(body, chat=chat)
    sizes.check(limits)
    salt, seed = body.get("cache_salt"), body.get("seed")
    prompts = tuple(_prompt(pieces, limits, salt if isinstance(salt, str) else "", seed) for pieces in texts)
    if len(prompts) * sizes.n > _PARTS_MAX:
        raise bad_request(f"A mock answers at most {_PARTS_MAX} choices at once.", "n")
    if options and not stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    return MockRequest(
        chat=chat,
        prompts=prompts,
        n=sizes.n,
        max_tokens=sizes.max_tokens,
        min_tokens=sizes.min_tokens,
        ignore_eos=ignore_eos,
        stream=stream,
        usage=stream and usage,
        running_usage=stream and usage and running_usage,
        token_ids=token_ids,
        priority=body.get("priority") or 0,
        transfer=fields,
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    n: int
    max_tokens: int | None
    min_tokens: int

    @classmethod
    def of(cls, body: Mapping[str, Any], *, chat: bool) -> _Sizes:
        longest = body.get("max_tokens")
        if chat:
            longest = body.get("max_completion_tokens") or longest
        elif longest is None:
            longest = COMPLETION_TOKENS
        return cls(body.get("n") or 1, longest, body.get("min_tokens") or 0)

    def check(self, limits: MockLimits) -> None:
        if self.max_tokens is None:
            return
        if self.max_tokens > limits.max_model_len:
            said = f"max_tokens={self.max_tokens} cannot be greater than max_model_len={limits.max_model_len}."
            raise bad_request(said, "max_tokens")
        if self.min_tokens > self.max_tokens:
            said = f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got {self.min_tokens}."
            raise bad_request(said, "min_tokens")


def _check_number(body: Mapping[str, Any], name: str, least: float, most: float, *, whole: bool) -> None:
    value = body.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and not whole)):
        raise invalid(name, f"Input should be a valid {'integer' if whole else 'number'}")
    if value < least:
        raise bad_request(f"{name} must be at least {least:g}, got {value}.", name)
    if value > most:
        raise bad_request(f"{name} must be at most {most:g}, got {value}.", name)


def streams(body: Mapping[str, Any]) -> bool:
    """Whether the answer is to be a stream.

    Raises:
        ApiError: vLLM would refuse the flag.
    """
    return _flag(body, "stream")


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    given = lax_flag(value)
    if given is None and value is not None:
        raise invalid(name, "Input should be a valid boolean, unable to interpret input")
    return bool(given)


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(name, "Input should be a valid dictionary")
    return value


def _refuse_what_is_not_there(body: Mapping[str, Any], *, chat: bool) -> None:
    """Refuse what a mock has not. In vLLM, `logprobs` is a flag of chats and a number of completions, where 0 asks for
    them, too. `top_logprobs` is 0 unless given.
    """
    flags = ("echo", "use_beam_search", "logprobs") if chat else ("echo", "use_beam_search")
    numbers = {name: body.get(name) for name in ("logprobs", "prompt_logprobs", "top_logprobs") if name not in flags}
    if numbers["top_logprobs"] == 0:
        del numbers["top_logprobs"]
    asked = [name for name in flags if _flag(body, name)]
    asked += [name for name, value in numbers.items() if value is not None and value is not False]
    if asked:
        raise bad_request(f"A mock engine has no {asked[0]}.", asked[0])


def _prompt(pieces: list[Ids], limits: MockLimits, salt: str, seed: int | None) -> Prompted:
    count = sum(len(piece) for piece in pieces)
    if count >= limits.max_model_len:
        said = (
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt contains "
            f"{count} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt."
        )
        raise bad_request(said, "input_tokens")
    return prompted(pieces, limits.block_size, salt=salt, seed=seed)


# -- completions --


def _texts(body: Mapping[str, Any]) -> list[list[Ids]]:
    """The prompts of a completion: a text, ids, or a list of either."""
    prompt = body.get("prompt")
    if prompt is None:
        raise invalid("prompt", "Field required")
    many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    found = [[_ids(one)] for one in (prompt if many else [prompt])]
    if any(not len(ids) for (ids,) in found):
        raise bad_request("The prompt cannot be empty.", "prompt")
    return found


def _ids(prompt: object) -> Ids:
    if isinstance(prompt, str):
        return tokenize(prompt)
    if not isinstance(prompt, list) or not all(type(one) is int for one in prompt):
        raise invalid("prompt", "Input should be a valid string or a list of token ids")
    if any(one < 0 for one in prompt):
        raise bad_request("Token ids are 0 or more.", "prompt")
    if any(one >= ALL_IDS for one in prompt):
        raise UnknownToken(400, "BadRequestError", f"Token id is out of vocabulary: ids are 0 to {ALL_IDS - 1}.")
    return np.array(prompt, np.uint32)


# -- chats --


def chat_pieces(body: Mapping[str, Any]) -> list[Ids]:
    """The ids of a chat, in the order of a chat template, tools first. Pieces alternate: other text, the assistant's.

    Raises:
        ApiError: ``messages`` is no list of objects.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise invalid("messages", "Input should be a valid list of messages")
    pieces: list[Ids] = []
    text: list[Ids] = []
    if body.get("tools"):
        text += [_mark(TOOLS), tokenize(json.dumps(body["tools"])), _mark(END)]
    for message in messages:
        role, said = message.get("role"), tokenize(_content(message))
        text.append(_mark(ROLES.get(str(role), OTHER_ROLE)))
        if role == "assistant" and len(said):
            pieces += [np.concatenate(text), said]
            text = []
        else:
            text.append(said)
        text.append(_mark(END))
    if body.get("add_generation_prompt", True):
        text.append(_mark(ROLES["assistant"]))
    return [*pieces, np.concatenate(text)]


MEDIA: Final = frozenset({"image_url", "input_image", "video_url", "audio_url", "input_audio"})
"""Types of the parts of a message that are pictures, sounds or videos."""
PICTURE_TOKENS: Final = 576
"""Tokens of each of them: as many as LLaVA has for one tile of 336 × 336 pixels."""


def _picture(part: Mapping[str, Any]) -> str:
    """The text that stands for a picture, a sound or a video: `PICTURE_TOKENS` tokens, which follow from its JSON."""
    digest = hashlib.blake2b(json.dumps(part).encode()).digest()
    return hashlib.shake_256(digest).hexdigest(PICTURE_TOKENS * BYTES_PER_TOKEN // 2)


def _mark(token: int) -> Ids:
    return np.array([token], np.uint32)


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message, with `_picture` for its media, and any other part as JSON."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else []
    for part in content if isinstance(content, list) else []:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(part, dict) and part.get("type") in MEDIA:
            text = _picture(part)
        parts.append(text if isinstance(text, str) else json.dumps(part))
    if calls := message.get("tool_calls"):
        parts.append(json.dumps(calls))
    return "".join(parts)
