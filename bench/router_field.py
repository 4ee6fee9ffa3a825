"""Running engines and routers side by side, and one measurement on one of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import uvloop

from bench.contestants import DIRECT, MAY_SERVE_WHOLE, VARIANTS, Contestants, engines, twin_engines
from bench.processes import Cores, Running, asked, page
from bench.router_cells import Cell, Measured
from bench.sender import closed_loop
from engine.vllm.metrics import parse_load
from loadgen.arrival import Arrival
from loadgen.body import Asking
from loadgen.http import LoadConnections
from loadgen.prompts import Fit
from loadgen.replay import Replay, Sending
from loadgen.report import LoadRun, report_of

CHARS_PER_TOKEN = 5.0

LOOK_S = 0.25
"""Between two looks at a process' memory."""


class Field:
    """Running engines and routers, for one size of fleet; engines are twins, or those that cost nothing."""

    def __init__(
        self, taking: Contestants, instances: int, where: Cores, running: list[Running], *, twins: bool = False
    ) -> None:
        engine, urls = (twin_engines if twins else engines)(2 * instances, where.engines)
        running.append(engine)
        self.twins = twins
        self.engine_url, self.decode_urls = urls[0], urls[instances:]
        self.model = str(asked(f"{self.engine_url}/v1/models")["data"][0]["id"])
        self.endpoints = {DIRECT: urls[-1]}
        self.processes: dict[str, Running] = {}
        for name, start in taking.starts.items():
            if twins and name in VARIANTS:
                continue
            process, self.endpoints[name] = start(urls[:instances], urls[instances:], where.measured)
            running.append(process)
            self.processes[name] = process

    def pace(self, pace_ms: float) -> None:
        """Between two tokens. A twin has its own."""
        if not self.twins:
            asked(f"{self.engine_url}/bench", {"pace_ms": pace_ms})

    def handed_over(self) -> int:
        """Answers that decode engines gave with blocks of prefill engines: of twins, prompt tokens that came so."""
        if not self.twins:
            return int(asked(f"{self.engine_url}/bench")["second_legs"])
        return sum(parse_load(page(f"{url}/metrics")).external_kv_tokens for url in self.decode_urls)


def measure(ground: Field, cell: Cell, name: str) -> Measured:
    """Warm up, then measure one cell on one router."""
    url, process = ground.endpoints[name], ground.processes.get(name)
    if ground.twins:
        _open_loop(url, replace(cell, requests=20), ground.model)
    else:
        ground.pace(0)
        uvloop.run(closed_loop(url, min(cell.connections, 256), max(100, cell.connections), cell.prompt_bytes, 2))
        ground.pace(cell.pace_ms)
    before, cpu_s = ground.handed_over(), process.cpu_s() if process else 0.0
    with largest(process if cell.kind == "streams" else None) as grown:
        found = _open_loop(url, cell, ground.model) if cell.rate else _closed(url, cell)
    found.grown_mb = grown()
    found.cpu_s = (process.cpu_s() if process else 0.0) - cpu_s
    found.memory_mb = process.memory_mb() if process else 0.0
    found.handed_over = ground.handed_over() - before
    missing = found.done - found.handed_over
    if process and missing > 0 and name not in MAY_SERVE_WHOLE:
        found.failed += missing
        found.examples.append(f"{missing} answers were not handed over from a prefill to a decode engine")
    return found


@contextlib.contextmanager
def largest(process: Running | None) -> Iterator[Callable[[], float | None]]:
    """By how many MB a process grew at its peak since the beginning; call the result when the measurement is over."""
    if process is None:
        yield lambda: None
        return
    over, before = threading.Event(), process.memory_mb()
    seen = [before]

    def look() -> None:
        while not over.wait(LOOK_S):
            seen.append(process.memory_mb())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lambda: max(seen) - before
    finally:
        over.set()
        thread.join()


def _closed(url: str, cell: Cell) -> Measured:
    sent = uvloop.run(closed_loop(url, cell.connections, cell.requests, cell.prompt_bytes, cell.tokens))
    return Measured(sent.done, sent.failed, sent.rewritten, 0.0, sent.elapsed_s, 0.0, examples=sent.examples)


def _open_loop(url: str, cell: Cell, model: str) -> Measured:
    """Constant gaps: the measurement is of the router's delay, not of bursts."""
    input_tokens = round(cell.prompt_bytes / CHARS_PER_TOKEN)
    arrivals = [Arrival(number / cell.rate, input_tokens, cell.tokens) for number in range(cell.requests)]
    asking = Asking(model, fit=Fit(CHARS_PER_TOKEN))

    async def replayed() -> Any:
        return await Replay(LoadConnections(url), Sending(asking=asking, timeout_s=30)).run(arrivals)

    load = uvloop.run(replayed())
    report = report_of(load.records, LoadRun(elapsed_s=load.elapsed_s, cpu_s=load.cpu_s))
    wrong = [record for record in load.records if record.error is None and record.chunks != cell.tokens]
    examples = [f"{each.kind}: {each.example}" for each in report.errors]
    return Measured(
        done=report.completed - len(wrong),
        failed=report.failed + len(wrong),
        rewritten=0,
        cpu_s=0.0,
        elapsed_s=load.elapsed_s,
        memory_mb=0.0,
        ttft_ms={"p50": report.ttft_ms.p50, "p99": report.ttft_ms.p99},
        tt2t_ms=report.tt2t_ms.p50,
        tpot_ms=report.tpot_ms.p50,
        late_ms_p99=report.late_ms.p99,
        examples=examples,
    )
