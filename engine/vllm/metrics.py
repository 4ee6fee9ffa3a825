"""Reads an engine's load from the text of its `/metrics`. Pure and total: any text gives a load."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from cluster.instance import Load
from engine.vllm.tier_gauge import KV_BYTES
from engine.vllm.tier_speeds import TierCounts

_REST = r"(?:\{(?P<labels>[^\n]*)\})?[ \t]+(?P<value>[^ \t\n]+)(?:[ \t]+-?\d+)?[ \t]*$"
"""Behind a sample's name. Label values may hold spaces and braces, so labels go up to the line's last brace."""

_CACHE = "cache_config_info"
_READ = (
    "num_requests_running|num_requests_waiting|num_requests_waiting_by_reason|kv_cache_usage_perc"
    "|prompt_tokens_by_source_total|prompt_tokens_total|generation_tokens_total|external_prefix_cache_hits_total"
)
_SAMPLE = re.compile(rf"\nvllm:(?P<name>{_READ}|{_CACHE}){_REST}", re.MULTILINE)
"""A sample that is read, with the end of the line before it: `re` finds a pattern that begins with fixed characters ten
times as fast as one that begins with ``^``, and an engine's text has a thousand lines."""
_LOADED = re.compile(rf"\nvllm:kv_offload_(?P<name>(?:load|tiering_read)_(?:bytes|time)_total){_REST}", re.MULTILINE)
_KV_BYTES = re.compile(rf"\n(?P<name>{KV_BYTES}){_REST}", re.MULTILINE)
_ENGINE = re.compile(r'(?:^|,)engine="(\d{1,9})"')
_SIZES = re.compile(r'(?:^|,)(block_size|kv_cache_size_tokens|num_gpu_blocks)="(\d{1,12})"')
REQUESTS_MAX = 1 << 31
"""Largest count of requests; a larger number is no count, and reads 0."""

TOKENS_MAX = 1 << 53
"""The same for tokens, whose counters are floats: above this they cannot count single tokens."""

_ONLY = {
    "prompt_tokens_by_source_total": {'source="external_kv_transfer"': "pulled", 'source="local_compute"': "computed"},
    "num_requests_waiting_by_reason": {'reason="deferred"': "deferred"},
}
"""For these metrics, the samples with one of these labels, and their meaning here."""


def parse_load(text: str) -> Load:
    """The load of all of a server's engine cores together: counts are summed, KV usage is their mean.

    One server runs one core per data-parallel rank, each with the same number of blocks. What is missing reads 0.
    """
    samples = [*_SAMPLE.finditer("\n" + text)]
    return _load(samples, _caches(samples))


def parse_loads(text: str, ranks: int) -> tuple[Load, ...]:
    """The load of each data parallel rank, whose samples have the label ``engine="N"``, N from 0. One rank: as
    `parse_load`.
    """
    if ranks == 1:
        return (parse_load(text),)
    found = [*_SAMPLE.finditer("\n" + text)]
    samples, caches = _by_engine(found), _caches(found)
    return tuple(_load(samples.get(rank, []), caches) for rank in range(ranks))


def parse_tiers(text: str, ranks: int) -> tuple[TierCounts, ...]:
    """What each data parallel rank has loaded from the tiers below its KV cache, in the order of `parse_loads`."""
    found = [sample for pattern in (_LOADED, _KV_BYTES) for sample in pattern.finditer("\n" + text)]
    if ranks == 1:
        return (_loaded(found),)
    samples = _by_engine(found)
    return tuple(_loaded(samples.get(rank, [])) for rank in range(ranks))


def _loaded(samples: Sequence[re.Match[str]]) -> TierCounts:
    found: dict[str, float] = {}
    for sample in samples:
        name, labels, value = sample["name"], sample["labels"] or "", sample["value"]
        number = _number(value) or 0.0
        if name == KV_BYTES:  # a gauge: several API servers of one engine tell the same
            name = next((label for label in ('of="worker"', 'of="all"') if label in labels), "")
            found[name] = max(found.get(name, 0.0), number)
        else:
            found[name] = found.get(name, 0.0) + number
    names = ("load_bytes_total", "load_time_total", "tiering_read_bytes_total", "tiering_read_time_total")
    counts = [found.get(name, 0.0) for name in (*names, 'of="worker"', 'of="all"')]
    return TierCounts(*(each if each < TOKENS_MAX else 0.0 for each in counts))


def _by_engine(samples: Iterable[re.Match[str]]) -> dict[int, list[re.Match[str]]]:
    found: dict[int, list[re.Match[str]]] = {}
    for sample in samples:
        engine = _ENGINE.search(sample["labels"] or "")
        if engine is not None:
            found.setdefault(int(engine[1]), []).append(sample)
    return found


def _caches(samples: Sequence[re.Match[str]]) -> int:
    """How many engine cores of a server describe their KV cache."""
    return sum(sample["name"] == _CACHE for sample in samples)


def _load(samples: Sequence[re.Match[str]], caches: int) -> Load:
    """`samples`: of the engine cores that are meant; `caches`: `_caches` of the whole server."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        labels = sample["labels"] or ""
        name = _named(sample["name"], labels)
        value = _kv_tokens(labels, caches) if name == _CACHE else _number(sample["value"])
        if value is not None:
            found.setdefault(name, []).append(value)
    usages = found.get("kv_cache_usage_perc", [])
    pulled = _total(found.get("pulled", []))
    return Load(
        running=_total(found.get("num_requests_running", []), REQUESTS_MAX),
        waiting=_total(found.get("num_requests_waiting", []), REQUESTS_MAX),
        kv_usage=min(1.0, sum(usages) / len(usages)) if usages else 0.0,
        external_kv_tokens=pulled,
        recomputed_tokens=_recomputed(found, pulled),
        kv_tokens=_total(found.get(_CACHE, [])),
        deferred=_total(found.get("deferred", []), REQUESTS_MAX),
        prompt_tokens=_total(found.get("prompt_tokens_total", [])),
        generation_tokens=_total(found.get("generation_tokens_total", [])),
    )


def _named(name: str, labels: str) -> str:
    """The meaning of a sample here; empty: it is not needed."""
    if name not in _ONLY:
        return name
    return next((what for label, what in _ONLY[name].items() if label in labels), "")


def _recomputed(found: dict[str, list[float]], pulled: int) -> int:
    """Tokens that vLLM's connector was to bring but that the engine computed itself.

    vLLM 0.32 counts a connector's hit when it begins to load, and does not take it back. It counts the source of a
    prompt's tokens with the first token of the answer, and counts anew after a failed load.
    """
    missing = _total(found.get("external_prefix_cache_hits_total", [])) - pulled
    return max(0, min(missing, _total(found.get("computed", []))))


def _kv_tokens(labels: str, caches: int) -> int:
    """Tokens of one engine core's KV cache, from the labels of ``vllm:cache_config_info``; 0 if they do not say.

    vLLM 0.32 writes the same sizes for each of a server's cores. ``kv_cache_size_tokens`` is one core's, also of a
    hybrid model, with several groups of KV blocks. ``num_gpu_blocks`` is the sum of all cores' blocks, also on
    CPUs. Both are ``None`` until they are known; earlier versions lack the first.
    """
    said = {name: int(count) for name, count in _SIZES.findall(labels)}
    blocks = said.get("num_gpu_blocks", 0) // max(1, caches)
    return said.get("kv_cache_size_tokens", 0) or said.get("block_size", 0) * blocks


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
