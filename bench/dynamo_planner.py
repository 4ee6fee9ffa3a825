"""Dynamo's own planner behind a pipe: one JSON object a line in, one out. Runs with the packages of .bench/scaling.

    .bench/scaling/bin/python bench/dynamo_planner.py

The first line in is what `sim.baselines.scaling.dynamo.opening` makes; the answer is {"next_tick_ms": …}. Every further
line is the argument of `on_tick`; the answer has its result, and the values that the planner reports as read and
predicted (`bench.dynamo_check` compares these with the values sent). The modules that want a Rust core or Kubernetes
are replaced by empty ones: the planner's decisions use none of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import sys
import types
from pathlib import Path
from typing import Any


class Names(str):
    """Every metric name that is asked for: itself a text, because no metrics are scraped here."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Names:
        if name.startswith("__"):
            raise AttributeError(name)
        return Names(f"{self}_{name}")


def stub(name: str, **names: Any) -> types.ModuleType:
    """A module of this name that holds these names only."""
    module = types.ModuleType(name)
    module.__dict__.update(names)
    sys.modules[name] = module
    return module


def stand_in() -> None:
    """Put empty modules in place of imports that the planner does not need here."""
    importlib.import_module("dynamo")
    found = importlib.util.find_spec("dynamo")
    assert found is not None and found.submodule_search_locations, "ai-dynamo is not installed"
    root = Path(next(iter(found.submodule_search_locations)))
    planner = stub("dynamo.planner", __version__="")
    planner.__path__ = [str(root / "planner")]
    runtime = stub("dynamo.runtime", dynamo_worker=lambda *_, **__: None, DistributedRuntime=object)
    runtime.__path__ = []
    stub("dynamo.runtime.logging", configure_dynamo_logging=lambda *_, **__: None)
    names = Names("dynamo")
    sys.modules["dynamo"].prometheus_names = names  # type: ignore[attr-defined]
    sys.modules["dynamo.prometheus_names"] = names  # type: ignore[assignment]
    replay = stub("dynamo.replay")
    replay.__path__ = []
    stub("dynamo.replay.report", PlannerReplayDetails=lambda **fields: fields)


def made(config: dict[str, Any]) -> Any:
    """The planner as its own replay makes it."""
    from dynamo.planner.config.planner_config import PlannerConfig  # noqa: PLC0415
    from dynamo.planner.core.types import EngineCapabilities, WorkerCapabilities  # noqa: PLC0415
    from dynamo.planner.offline import replay_adapter as replay  # noqa: PLC0415

    able = WorkerCapabilities(EngineCapabilities(**config["prefill"]), EngineCapabilities(**config["decode"]))
    adapter = replay.create_replay_planner_adapter(PlannerConfig(**config["config"]), able, capture_details=False)
    points = {role: [replay._build_fpm_from_dict(each) for each in rows] for role, rows in config["benchmarks"].items()}  # noqa: SLF001
    if points:
        adapter.install_benchmark_fpms(prefill_fpms=points["prefill"], decode_fpms=points["decode"])
    return adapter


def listening(adapter: Any) -> dict[str, Any]:
    """The planner's report of its last tick: a dictionary that every tick fills anew."""
    tick, read = adapter._engine.tick, dict[str, Any]()  # noqa: SLF001

    async def heard(*words: Any) -> Any:
        effects = await tick(*words)
        read.clear()
        read.update({k: v for k, v in vars(effects.diagnostics).items() if isinstance(v, float | int)})
        return effects

    adapter._engine.tick = heard  # noqa: SLF001
    return read


def main() -> None:
    """Serve until the pipe ends."""
    logging.disable(logging.CRITICAL)
    out, sys.stdout = sys.stdout, sys.stderr
    stand_in()
    adapter = made(json.loads(sys.stdin.readline()))
    read = listening(adapter)
    answer: dict[str, Any] = {"next_tick_ms": adapter.initial_tick_ms()}
    while True:
        out.write(json.dumps(answer) + "\n")
        out.flush()
        line = sys.stdin.readline()
        if not line:
            return
        answer = adapter.on_tick(json.loads(line)) | {"read": {k: v for k, v in read.items() if v is not None}}


if __name__ == "__main__":
    main()
