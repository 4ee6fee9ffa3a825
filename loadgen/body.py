"""The request body for one arrival. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loadgen.arrival import Arrival
from loadgen.prompts import Fit, prompt_ids, prompt_text


@dataclass(frozen=True, slots=True)
class Asking:
    """The form of requests: API, model, options."""

    model: str
    chat: bool = False
    fit: Fit = field(default_factory=Fit)
    vocabulary: tuple[int, int] | None = None
    """Send token ids of this range instead of text (completions only): exact lengths for any tokenizer."""
    ignore_eos: bool = True
    """vLLM's `ignore_eos`: answers are as long as the arrival says. Other servers may refuse the field."""
    salt: str = ""
    """Makes this run's texts unlike another run's, so that no cache has seen them."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are put into every body last, over existing ones."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


def body_of(arrival: Arrival, asking: Asking, number: int) -> bytes:
    """The JSON of request `number` of this run."""
    salt = f"{asking.salt} {number}"
    if asking.chat:
        said: dict[str, Any] = {"messages": [{"role": "user", "content": prompt_text(arrival, asking.fit, salt)}]}
    elif asking.vocabulary is not None:
        said = {"prompt": prompt_ids(arrival, asking.vocabulary, salt)}
    else:
        said = {"prompt": prompt_text(arrival, asking.fit, salt)}
    return _encoded(said, arrival.output_tokens, asking)


def turn_body(said: Sequence[str], output_tokens: int, asking: Asking) -> bytes:
    """The JSON of a conversation's turn: all messages so far, user and answers in turn, with the new message last."""
    if asking.chat:
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
        return _encoded({"messages": messages}, output_tokens, asking)
    return _encoded({"prompt": "".join(said)}, output_tokens, asking)


def _encoded(said: dict[str, Any], output_tokens: int, asking: Asking) -> bytes:
    body: dict[str, Any] = {"model": asking.model, **said}
    body |= {
        "max_tokens": max(1, output_tokens),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if asking.ignore_eos:
        body["ignore_eos"] = True
    return msgspec.json.encode(body | dict(asking.extra))
