"""`/metrics` of a mock: vLLM 0.32's names, labels and buckets, as far as a mock has something to count.

Counts that a mock cannot have are left out rather than shown as zero.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from cluster.instance import Load
from engine.twin.events import RequestFinished

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
REASONS: Final = ("stop", "length", "abort", "error")

_FIRST_TOKEN_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
                         20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                   40.0, 80.0)  # fmt: skip
_REQUEST_S: Final = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                     480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_TRANSFER_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_BYTES: Final = tuple(float(2**power) for power in range(11, 35, 2))

_HISTOGRAMS: Final = {
    "time_to_first_token_seconds": _FIRST_TOKEN_S,
    "request_time_per_output_token_seconds": _TOKEN_S,
    "e2e_request_latency_seconds": _REQUEST_S,
    "request_queue_time_seconds": _REQUEST_S,
    "request_prefill_time_seconds": _REQUEST_S,
    "request_decode_time_seconds": _REQUEST_S,
    "nixl_xfer_time_seconds": _TRANSFER_S,
    "nixl_bytes_transferred": _BYTES,
}
_COUNTERS: Final = (
    "prompt_tokens",
    "generation_tokens",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "nixl_num_failed_transfers",
    "nixl_num_failed_notifications",
    "nixl_num_kv_expired_reqs",
    "nixl_num_notifications_after_expiry",
)


@dataclass(slots=True)
class Histogram:
    """A Prometheus histogram."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value; a value that equals a bound belongs into the bucket of that bound."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, label: str) -> Iterable[str]:
        """Its samples as lines of Prometheus' text. `label`: the labels, without braces."""
        below = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{{label},le="{bound}"}} {below}'
        yield f"{name}_count{{{label}}} {below}"
        yield f"{name}_sum{{{label}}} {self.total!r}"


@dataclass(slots=True)
class Metrics:
    """One instance's counts since its engine's start."""

    model: str
    block_size: int = 16
    num_blocks: int = 0
    """Blocks of its KV cache; 0: they are not reported."""
    engine: int = 0
    """Its number among the data parallel ranks of its server."""
    counts: Counter[str] = field(default_factory=Counter)
    """By the names of `_COUNTERS`."""
    ended: Counter[str] = field(default_factory=Counter)
    """Requests by finish reason."""
    local_compute: int = 0
    """Prompt tokens that were computed here."""
    local_cache_hit: int = 0
    """Prompt tokens that were in the prefix cache here."""
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(bounds) for name, bounds in _HISTOGRAMS.items()}
    )

    def anew(self) -> Metrics:
        """The counts of the engine's next life, which begin at zero."""
        return Metrics(self.model, self.block_size, self.num_blocks, self.engine)

    def prompt(self, tokens: int, local: int, remote: int, failed: int = 0) -> None:
        """Count a computed prompt of so many tokens: `local` were in the cache here, `remote` were pulled from another
        engine, `failed` should have been pulled and were computed here. vLLM counts the failed ones as a hit, too, and
        asks its connector a second time.
        """
        self.counts["prompt_tokens"] += tokens
        self.counts["prefix_cache_queries"] += tokens
        self.counts["prefix_cache_hits"] += local
        if remote or failed:
            self.counts["external_prefix_cache_queries"] += (tokens - local) * (2 if failed else 1)
            self.counts["external_prefix_cache_hits"] += remote + failed
        self.local_cache_hit += local
        self.local_compute += tokens - local - remote

    def over(
        self,
        over: RequestFinished,
        *,
        prompt_tokens: int,
        not_pulled: int,
        arrived_ns: int,
        first_ns: int | None,
        took_s: Callable[[int, int], float],
    ) -> None:
        """Count a request that is over. `arrived_ns`, `first_ns`: its arrival and its first token, on the twin's clock.
        `not_pulled`: tokens that were held for it and could not be pulled. `took_s`: the real seconds between two
        moments of the twin's clock.
        """
        self.ended[over.reason] += 1
        self.counts["generation_tokens"] += over.outputs
        if over.first_run_ns is None or first_ns is None:
            return
        remote = 0 if not_pulled else over.remote_tokens
        failed = max(0, min(not_pulled, prompt_tokens) - over.local_tokens)
        self.prompt(prompt_tokens, over.local_tokens, remote, failed)
        self.observe("time_to_first_token_seconds", took_s(arrived_ns, first_ns))
        self.observe("request_queue_time_seconds", max(0.0, took_s(arrived_ns, over.first_run_ns)))
        self.observe("request_prefill_time_seconds", max(0.0, took_s(over.first_run_ns, first_ns)))
        decode_s = max(0.0, took_s(first_ns, over.at_ns))
        self.observe("request_decode_time_seconds", decode_s)
        self.observe("e2e_request_latency_seconds", took_s(arrived_ns, over.at_ns))
        if over.outputs > 1:
            self.observe("request_time_per_output_token_seconds", decode_s / (over.outputs - 1))

    def observe(self, name: str, value: float) -> None:
        """Count one value in the histogram of this name."""
        self.histograms[name].observe(value)

    def text(self, load: Load, ranks: int = 1) -> str:
        """All metrics as Prometheus' text, with the present load. `ranks`: the data parallel ranks of its server."""
        model = self.model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        label = f'engine="{self.engine}",model_name="{model}"'
        lines = [*_gauges(load, label), *self._cache(ranks), *self._counters(load, label)]
        for name, histogram in self.histograms.items():
            lines += [f"# TYPE vllm:{name} histogram", *histogram.lines(f"vllm:{name}", label)]
        return "\n".join(lines) + "\n"

    def _cache(self, ranks: int) -> Iterable[str]:
        """As vLLM does for each rank: the blocks of all ranks together, and the tokens of one."""
        if self.num_blocks:
            sizes = f'block_size="{self.block_size}",engine="{self.engine}"'
            sizes += f',kv_cache_size_tokens="{self.num_blocks * self.block_size}"'
            sizes += f',num_gpu_blocks="{self.num_blocks * ranks}"'
            yield "# TYPE vllm:cache_config_info gauge"
            yield f"vllm:cache_config_info{{{sizes}}} 1.0"

    def _counters(self, load: Load, label: str) -> Iterable[str]:
        for name in _COUNTERS:
            yield f"# TYPE vllm:{name}_total counter"
            yield f"vllm:{name}_total{{{label}}} {float(self.counts[name])}"
        sources = {
            "local_compute": self.local_compute,
            "local_cache_hit": self.local_cache_hit,
            "external_kv_transfer": load.external_kv_tokens,
        }
        yield "# TYPE vllm:prompt_tokens_by_source_total counter"
        for source, tokens in sources.items():
            yield f'vllm:prompt_tokens_by_source_total{{{label},source="{source}"}} {float(tokens)}'
        yield "# TYPE vllm:request_success_total counter"
        for reason in REASONS:
            yield f'vllm:request_success_total{{{label},finished_reason="{reason}"}} {float(self.ended[reason])}'


def merged(pages: Iterable[str]) -> str:
    """The pages of an engine's ranks as one page: each name's type once, followed by the samples of all ranks."""
    families: dict[str, list[str]] = {}
    for page in pages:
        family = ""
        for line in page.splitlines():
            if line.startswith("# TYPE "):
                family = line
                families.setdefault(family, [])
            else:
                families[family].append(line)
    return "".join(f"{line}\n" for family, samples in families.items() for line in (family, *samples))


def _gauges(load: Load, label: str) -> Iterable[str]:
    gauges = {
        "num_requests_running": load.running,
        "num_requests_waiting": load.waiting,
        "kv_cache_usage_perc": load.kv_usage,
    }
    for name, value in gauges.items():
        yield f"# TYPE vllm:{name} gauge"
        yield f"vllm:{name}{{{label}}} {float(value)}"
    yield "# TYPE vllm:num_requests_waiting_by_reason gauge"
    for reason, count in (("capacity", load.waiting - load.deferred), ("deferred", load.deferred)):
        yield f'vllm:num_requests_waiting_by_reason{{{label},reason="{reason}"}} {float(count)}'
