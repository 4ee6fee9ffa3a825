"""One request in an OpenTelemetry trace: what its span and its legs' spans say. Pure: the request's span
is given, and makes the others.

Attributes follow the GenAI semantic conventions (opentelemetry-semantic-conventions 0.66b2, ``gen_ai.*``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from cluster.instance import Instance
from cluster.request import Request
from router.core.eligibility import CHAT
from router.core.journey import Chosen
from router.core.timing_parts import Timing
from router.telemetry.timing import Stage

if TYPE_CHECKING:
    from cluster.telemetry import RequestSpan

LEG_NAMES: Final[dict[str, str]] = {
    Stage.PREFILL_LEG: "prefill",
    Stage.DECODE_LEG: "decode",
    Stage.AGGREGATED_LEG: "whole",
}

_SETTINGS: Final = {
    "gen_ai.request.max_tokens": "max_tokens",
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.seed": "seed",
}


class RecordedSpans:
    """The spans of one request whose trace is recorded."""

    __slots__ = ("_request", "_span")

    def __init__(self, request: Request, span: RequestSpan) -> None:
        """`span`: the request's own, which is recorded."""
        self._request: Final = request
        self._span: Final = span
        span.say(_request_attributes(request))

    def chose(self, chosen: Chosen) -> None:
        """The policy has decided."""
        choice = {"baton.prefill": chosen.prefill, "baton.decode": chosen.decode, "baton.because": chosen.because}
        self._span.event("baton.choice", choice)

    def leg(self, stage: str, instance: Instance, headers: dict[str, str]) -> dict[str, str]:
        """A leg begins: returns its headers, with its span in them."""
        place = urlsplit(instance.url)
        attributes = {
            **_common_attributes(self._request),
            "server.address": place.hostname or "",
            "server.port": place.port or (443 if place.scheme == "https" else 80),
            "baton.instance": instance.id,
            "baton.instance.epoch": instance.epoch,
        }
        return self._span.leg(LEG_NAMES[stage], headers, attributes)

    def leg_failed(self, stage: str, error: str) -> None:
        """A leg failed, or its engine refused it."""
        self._span.leg_over(LEG_NAMES[stage], error)

    def prefilled(self, finish_reason: str | None, usage: object) -> None:
        """P has answered. `usage`: the token counts in its answer."""
        told: dict[str, Any] = _usage_attributes(usage if isinstance(usage, dict) else {})
        if finish_reason is not None:
            told["gen_ai.response.finish_reasons"] = [finish_reason]
        self._span.leg_over(LEG_NAMES[Stage.PREFILL_LEG], attributes=told)

    def end(self, outcome: str, timing: Timing, usage: Mapping[str, Any]) -> None:
        """The request is over. `usage`: the answering engine's token counts."""
        times = {} if timing.ttft is None else {"gen_ai.response.time_to_first_chunk": timing.ttft.total_s}
        for name, each in (("ttft", timing.ttft), ("tt2t", timing.tt2t), ("answer", timing.answer)):
            if each is not None:
                parts = {**each.parts, "residual": each.residual_s}
                times |= {f"baton.{name}.{part}": value for part, value in parts.items() if value is not None}
        told = {**_usage_attributes(usage), **times, "baton.way": timing.way, "baton.outcome": outcome}
        self._span.end("" if outcome == "served" else outcome, told)


def span_name(request: Request) -> str:
    """The name of a request's span."""
    return f"{_operation(request)} {request.model}".strip()


def _operation(request: Request) -> str:
    return "chat" if request.path == CHAT else "text_completion"


def _common_attributes(request: Request) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": _operation(request),
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": request.model,
    }


def _request_attributes(request: Request) -> dict[str, Any]:
    found: dict[str, Any] = {
        **_common_attributes(request),
        "gen_ai.request.stream": request.stream,
        "http.route": request.path,
        "baton.request.id": request.id,
    }
    if request.client_id:
        found["baton.request.client_id"] = request.client_id
    for name, key in _SETTINGS.items():
        value = request.body.get(key)
        if isinstance(value, float) or (type(value) is int and -(1 << 63) <= value < 1 << 63):
            found[name] = value  # OTLP's integers have 64 bits
    return found


def _usage_attributes(usage: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's token counts."""
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    counts = {
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens"),
        "gen_ai.usage.cache_read.input_tokens": cached,
    }
    return {name: count for name, count in counts.items() if isinstance(count, int)}
