"""The cells of `make bench-router`, and the measurement of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One thing to measure."""

    kind: Literal["requests", "chunks", "rates", "streams", "twins"]
    prompt_bytes: int = 2 * KIB
    instances: int = 1
    """Of each pool."""
    tokens: int = 16
    pace_ms: float = 0.0
    connections: int = 32
    requests: int = 2000
    rate: float = 0.0

    @property
    def name(self) -> str:
        """Short, for tables and as a key."""
        if self.kind in {"rates", "twins"}:
            return f"{self.rate:,.0f} req/s" + (", twins" if self.kind == "twins" else "")
        what = f"{self.kind} {self.prompt_bytes // KIB} KB {self.instances}×{self.instances}"
        return what if self.kind == "requests" else f"{what}, {self.connections:,} open"


def cells(*, quick: bool) -> list[Cell]:
    """The cells in order."""
    few, many = (1000, 300) if quick else (3000, 1000)
    chosen = [
        Cell(kind="requests", requests=few),
        Cell(kind="chunks", tokens=200, pace_ms=20, connections=64, requests=64 if quick else 128),
        Cell(kind="rates", rate=200, tokens=4, pace_ms=5, requests=600 if quick else 2000),
    ]
    if quick:
        return chosen
    return [
        *chosen,
        Cell(kind="requests", prompt_bytes=100 * KIB, requests=many),
        Cell(kind="requests", instances=16, requests=few),
        Cell(kind="requests", prompt_bytes=100 * KIB, instances=16, requests=many),
        Cell(kind="chunks", instances=16, tokens=200, pace_ms=20, connections=64, requests=128),
        Cell(kind="rates", rate=1000, tokens=4, pace_ms=5, requests=5000),
        Cell(kind="twins", rate=20, tokens=32, requests=200),
        Cell(kind="streams", tokens=20, pace_ms=500, connections=2000, requests=2000),
    ]


@dataclass(slots=True)
class Measured:
    """One cell, one router, one round."""

    done: int
    failed: int
    rewritten: int
    cpu_s: float
    elapsed_s: float
    memory_mb: float
    handed_over: int = 0
    """Answers that decode engines gave with blocks of prefill engines; of twins, prompt tokens."""
    grown_mb: float | None = None
    """MB by which the router's memory grew at its peak; only of `streams`, all of which are open at once."""
    ttft_ms: dict[str, float | None] = field(default_factory=dict)
    """Times to the first token by percentile; like the times below, of open loops only."""
    tt2t_ms: float | None = None
    tpot_ms: float | None = None
    late_ms_p99: float | None = None
    examples: list[str] = field(default_factory=list)

    @property
    def cpu_us(self) -> float | None:
        """CPU per request in µs; None: no request was done."""
        return self.cpu_s * 1e6 / self.done if self.done else None
