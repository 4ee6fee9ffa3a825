"""Reads an engine's load from the text of its `/metrics`. Pure and total: whatever it is given, it answers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from cluster.instance import Load

_SAMPLE = re.compile(
    r"""^(?P<name>vllm:(?:num_requests_running|num_requests_waiting|num_requests_waiting_by_reason|kv_cache_usage_perc
                                 |prompt_tokens_by_source_total|prompt_tokens_total|generation_tokens_total))
        (?:\{(?P<labels>[^\n]*)\})?   # label values may hold spaces and braces, so up to the line's last brace
        [ \t]+(?P<value>[^ \t\n]+)(?:[ \t]+-?\d+)?[ \t]*$""",
    re.MULTILINE | re.VERBOSE,
)
_CACHE = re.compile(r"^vllm:cache_config_info\{(?P<labels>[^\n]*)\}[ \t]", re.MULTILINE)
_BLOCKS = re.compile(r'(?:^|,)(block_size|num_gpu_blocks)="(\d{1,12})"')
REQUESTS_MAX = 1 << 31
"""No engine has so many requests: from there on it is no count, and reads 0."""

TOKENS_MAX = 1 << 53
"""The same of tokens, whose counters are floats: from there on they would not count single ones."""

_ONLY = {
    "prompt_tokens_by_source_total": 'source="external_kv_transfer"',
    "num_requests_waiting_by_reason": 'reason="deferred"',
}
"""Of these, the samples that have this label."""


def parse_load(text: str) -> Load:
    """The load of all of a server's engine cores together: counts are summed, KV usage is their mean.

    One server runs one core per data-parallel rank, each with the same number of blocks. What is missing reads 0.
    """
    found: dict[str, list[float]] = {}
    for sample in _SAMPLE.finditer(text):
        name = sample["name"].removeprefix("vllm:")
        if name in _ONLY and _ONLY[name] not in (sample["labels"] or ""):
            continue
        value = _number(sample["value"])
        if value is not None:
            found.setdefault(name, []).append(value)
    usages = found.get("kv_cache_usage_perc", [])
    return Load(
        running=_total(found.get("num_requests_running", []), REQUESTS_MAX),
        waiting=_total(found.get("num_requests_waiting", []), REQUESTS_MAX),
        kv_usage=min(1.0, sum(usages) / len(usages)) if usages else 0.0,
        external_kv_tokens=_total(found.get("prompt_tokens_by_source_total", [])),
        kv_tokens=_total([_kv_tokens(sample["labels"]) for sample in _CACHE.finditer(text)]),
        deferred=_total(found.get("num_requests_waiting_by_reason", []), REQUESTS_MAX),
        prompt_tokens=_total(found.get("prompt_tokens_total", [])),
        generation_tokens=_total(found.get("generation_tokens_total", [])),
    )


def _kv_tokens(labels: str) -> int:
    """Of one engine core, from the labels of ``vllm:cache_config_info``; 0 where they do not say.

    vLLM 0.32 counts blocks as ``num_gpu_blocks`` on CPUs, too, and writes ``None`` until they are known.
    """
    said = {name: int(count) for name, count in _BLOCKS.findall(labels)}
    return said.get("block_size", 0) * said.get("num_gpu_blocks", 0)


def _number(word: str) -> float | None:
    """A count or a share: finite and not negative, else None."""
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _total(values: Sequence[float], below: int = TOKENS_MAX) -> int:
    total = sum(values)
    return int(total) if total < below else 0
