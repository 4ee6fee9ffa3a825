"""Several routers' Prometheus texts as one: counters and histograms summed, gauges by what they mean. Pure.

For processes that share one port, and for people with `curl`. A Prometheus server scrapes each router and sums by
itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

_LARGEST: Final[Callable[[Iterable[float]], float]] = max
_LEAST: Final[Callable[[Iterable[float]], float]] = min
_SUM: Final[Callable[[Iterable[float]], float]] = sum

GAUGES: Final = {
    "baton_waiting_requests": _SUM,
    "baton_open_requests": _SUM,
    "baton_client_connections": _SUM,
    "baton_client_connections_max": _SUM,
    "baton_upload_bytes": _SUM,
    "baton_uploads_waiting": _SUM,
    "baton_open_body_bytes": _SUM,
    "baton_instance_inflight": _SUM,
    "baton_instance_up": _LARGEST,  # some router reaches it
    "baton_instance_quarantined": _LARGEST,
    "baton_pair_apart": _LARGEST,  # some routers hand nothing over there
    "baton_handoffs_off": _LARGEST,  # for some routers
    "baton_leg_ready": _LARGEST,
    "baton_early_leg_extra_seconds": _LARGEST,  # each router compares its own legs
    "baton_slo_attainment": _LEAST,  # shares cannot be summed: baton_slo_requests_total can
    "baton_slo_attainment_target": _LARGEST,
    "baton_registry_stale_seconds": _LARGEST,
    "baton_registry_unproven": _LARGEST,
    "baton_controller_heard": _LARGEST,
    "baton_routers": _LARGEST,
    "baton_peer_requests": _LARGEST,  # of one router's peers: the sum would count each request several times
}
"""How the routers' values of a gauge become one. For other gauges the largest is shown."""


ALIKE: Final = frozenset({"baton_handoff_recomputed_tokens_total", "baton_handoff_pulled_tokens_total"})
"""Counters of engines' own counts: each router has all of them."""

_SAMPLE: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*(?:\{[ -~\u00a0-\U0010ffff]*\})?")


class _Metric:
    def __init__(self) -> None:
        self.help = ""
        self.type = ""
        self.samples: dict[str, list[float]] = {}


def merged(texts: Iterable[bytes]) -> bytes:
    """All texts as one. Lines that are not samples of a typed metric are left out."""
    metrics: dict[str, _Metric] = {}
    for text in texts:
        _read(text.decode(errors="replace"), metrics)
    lines: list[str] = []
    for name, metric in metrics.items():
        if metric.help:
            lines.append(f"# HELP {name} {metric.help}")
        if metric.type:
            lines.append(f"# TYPE {name} {metric.type}")
        lines += [f"{key} {_number(_fold(name, metric.type)(values))}" for key, values in metric.samples.items()]
    return "".join(f"{line}\n" for line in lines).encode()


def _read(text: str, metrics: dict[str, _Metric]) -> None:
    metric: _Metric | None = None
    for line in text.splitlines():
        words = line.split(" ", 3)
        if len(words) == 4 and words[0] == "#" and words[1] in {"HELP", "TYPE"}:
            metric = metrics.setdefault(words[2], _Metric())
            if words[1] == "HELP":
                metric.help = words[3]
            else:
                metric.type = words[3]
            continue
        key, _, value = line.rpartition(" ")
        if not _SAMPLE.fullmatch(key):
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if metric is not None:
            metric.samples.setdefault(key, []).append(number)


def _fold(name: str, kind: str) -> Callable[[Iterable[float]], float]:
    if name.endswith("_created"):
        return _LEAST
    if name in ALIKE:
        return _LARGEST
    return _SUM if kind in {"counter", "histogram", "summary"} else GAUGES.get(name, _LARGEST)


def _number(value: float) -> str:
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(repr(value), repr(value))
