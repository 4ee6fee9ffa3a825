"""The contestants of the router benchmark, each started as its users would start it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.processes import BATON_COMMAND, ROOT, Failed, Running, free_port
from bench.rivals import NotInstalled, environment, version_of
from cluster.keys import digest

DIRECT, BATON, RIVAL, RELAY = "engine", "baton", "vllm-router", "relay"
DEFAULT, SEEDING = "baton, default policy", "baton, seeding"
POLICIES, POLICIES_PAIRED = "baton, policies on", "baton, policies on, least_load"
"""Keys and classes: as Baton starts with them, and with every request handed over."""
VARIANTS = frozenset({DEFAULT, POLICIES, POLICIES_PAIRED, SEEDING})
"""Variants of Baton: only their extra cost is measured, in closed loops; of the default policy open ones as well."""
MAY_SERVE_WHOLE = frozenset({DEFAULT, POLICIES})
"""Variants with the default policy: they hand over where that costs least, so an answer of one leg is no failure."""

KEY = "bench-key"
"""Sent with every request; a contestant that asks for no key ignores it, or passes it on."""

CLUSTER = """\
models:
  - name: bench
    pools: {prefill: {min: 1, max: 16, gpu: H100-SXM}, decode: {min: 1, max: 16, gpu: H100-SXM}}
slo:
  interactive: {ttft_ms: 60000, tpot_ms: 10000, attainment: 0.95}
tenants:
  bench: {key_file: key, classes: [interactive], default_class: interactive}
"""
"""Targets that no mock engine misses: admission works for every request, and holds none up."""

Start = Callable[[Sequence[str], Sequence[str], frozenset[int]], tuple[Running, str]]
"""Prefill URLs, decode URLs, cores → the process and its endpoint."""


@dataclass(frozen=True, slots=True)
class Contestants:
    """The contestants; and in one line, why one is missing."""

    starts: dict[str, Start]
    versions: dict[str, str]
    missing: str | None = None


def contestants() -> Contestants:
    """All contestants that this machine can run."""
    from baton import __version__  # noqa: PLC0415 - known when it is installed

    starts = dict(OURS)
    versions = {BATON: __version__, RELAY: "bench/relay.py"}
    try:
        folder = environment("router")
    except NotInstalled as error:
        return Contestants(starts, versions, f"vllm-router cannot be installed here and is left out: {error}")
    versions[RIVAL] = version_of("router", "vllm-router")

    def start(prefill: Sequence[str], decode: Sequence[str], on: frozenset[int]) -> tuple[Running, str]:
        return rival(str(folder / "vllm-router"), prefill, decode, on)

    return Contestants({BATON: OURS[BATON], **_VARIANTS, RIVAL: start, RELAY: OURS[RELAY]}, versions)


def engines(count: int, on: frozenset[int]) -> tuple[Running, list[str]]:
    """One process that plays `count` mock engines, and their addresses."""
    running = Running("engines", [sys.executable, "-m", "bench.engine", "--count", str(count)], on)
    found: list[str] = json.loads(running.line())
    return running, found


def twin_engines(count: int, on: frozenset[int]) -> tuple[Running, list[str]]:
    """Twins behind vLLM's HTTP, which take the time that a model would: half of them for prefill, half for decode."""
    words = [*BATON_COMMAND, "mock", "--instances", f"prefill={count // 2},decode={count // 2}", "--port", "0"]
    return _ready_mock(words, count, on)


def lone_twin(on: frozenset[int], more: Sequence[str] = ()) -> tuple[Running, str]:
    """One twin that serves whole requests, with `more` flags of `baton mock`."""
    running, urls = _ready_mock([*BATON_COMMAND, "mock", "--instances", "both=1", "--port", "0", *more], 1, on)
    return running, urls[0]


def _ready_mock(words: list[str], count: int, on: frozenset[int]) -> tuple[Running, list[str]]:
    running = Running("mock", words, on)
    try:
        return running, [running.line().split()[-1] for _ in range(count)]
    except Failed:
        running.stop()
        raise


def _flags(prefill: Sequence[str], decode: Sequence[str]) -> list[str]:
    return [
        *(word for url in prefill for word in ("--prefill-url", url)),
        *(word for url in decode for word in ("--decode-url", url)),
    ]


def baton(
    prefill: Sequence[str],
    decode: Sequence[str],
    on: frozenset[int],
    more: Sequence[str] = (),
    env: Sequence[str] = (),
    command: Sequence[str] = BATON_COMMAND,
) -> tuple[Running, str]:
    """Baton as it starts, with `more` flags; with `env`, words of the form NAME=VALUE."""
    words = [*command, "router", *_flags(prefill, decode), "--port", "0", "--admin-port", "0", *more]
    words.append("--no-prove-pairs")  # engines that compute nothing hand nothing over that could be proven
    running = Running(BATON, [*(("env", *env) if env else ()), *words, "--log-level", "WARNING"], on)
    endpoint = running.line().split()[-1]
    running.wait_for(f"{endpoint}/ready")
    return running, endpoint


HANDS_OVER: Final = ("--policy", "least_load")
"""All contestants carry two legs but `MAY_SERVE_WHOLE`: Baton's own default, `workload`, serves most requests whole
where engines compute in no time."""


def _handing_over(prefill: Sequence[str], decode: Sequence[str], on: frozenset[int]) -> tuple[Running, str]:
    """Baton as it starts, except that it hands over whenever it can."""
    return baton(prefill, decode, on, HANDS_OVER)


def _as_it_starts(prefill: Sequence[str], decode: Sequence[str], on: frozenset[int]) -> tuple[Running, str]:
    """Baton as it starts."""
    return baton(prefill, decode, on)


def _policies(prefill: Sequence[str], decode: Sequence[str], on: frozenset[int]) -> tuple[Running, str]:
    """As it starts, with classes."""
    return _with_classes(prefill, decode, on)


def _policies_paired(prefill: Sequence[str], decode: Sequence[str], on: frozenset[int]) -> tuple[Running, str]:
    """With classes, except that it hands over whenever it can."""
    return _with_classes(prefill, decode, on, HANDS_OVER)


def _with_classes(
    prefill: Sequence[str], decode: Sequence[str], on: frozenset[int], more: Sequence[str] = ()
) -> tuple[Running, str]:
    """With keys, and a class with targets (so lengths, prefixes and admission work); traces of one in 100."""
    folder = ROOT / ".bench" / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "baton.yaml").write_text(CLUSTER)
    (folder / "key").write_text(f"{digest(KEY)}\n")
    (folder / "key").chmod(0o600)
    env = ["OTEL_TRACES_SAMPLER=parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG=0.01"]
    env += [f"OTEL_EXPORTER_OTLP_ENDPOINT={prefill[0]}"]  # its mock engine takes spans, and forgets them
    return baton(prefill, decode, on, ("--config", str(folder / "baton.yaml"), *more), env)


def _seeding(prefill: Sequence[str], decode: Sequence[str], on: frozenset[int]) -> tuple[Running, str]:
    """With engines that can be told their first token: clients have it from P."""
    return baton(prefill, decode, on, ("--pins", *HANDS_OVER))


def rival(
    program: str,
    prefill: Sequence[str],
    decode: Sequence[str],
    on: frozenset[int],
    policy: str = "round_robin",
    both: Sequence[str] = (),
) -> tuple[Running, str]:
    """vllm-router before a prefill and a decode pool, or before instances of `both` roles alone.

    Its release build with nothing logged per request (some policies warn at each, until the pipe is full and it stops
    answering); its limits (32,768 requests at once) are far away.
    """
    port, metrics = free_port(), free_port()
    words = [program, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    words += ["--policy", policy, "--log-level", "error"]
    words += ["--worker-urls", *both] if both else ["--vllm-pd-disaggregation"]
    words += [word for url in prefill for word in ("--prefill", url)]
    words += [word for url in decode for word in ("--decode", url)]
    running = Running(RIVAL, words, on)
    endpoint = f"http://127.0.0.1:{port}"
    try:
        running.wait_for(f"{endpoint}/health")
    except Failed:
        running.stop()
        raise
    return running, endpoint


def _relay(prefill: Sequence[str], decode: Sequence[str], on: frozenset[int]) -> tuple[Running, str]:
    running = Running(RELAY, [sys.executable, "-m", "bench.relay", *_flags(prefill, decode)], on)
    return running, running.line().split()[-1]


_VARIANTS: dict[str, Start] = {
    DEFAULT: _as_it_starts,
    POLICIES: _policies,
    POLICIES_PAIRED: _policies_paired,
    SEEDING: _seeding,
}

OURS: dict[str, Start] = {BATON: _handing_over, **_VARIANTS, RELAY: _relay}
"""Those that need no installing."""
