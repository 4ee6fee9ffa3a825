"""The contestants of `bench.real`: two vLLM engines each, a core an engine, in different arrangements.

    baton         two of role both, Baton's connector and policy: Baton chooses for each request
    whole-N       two that serve whole requests, N tokens a step (`max_num_batched_tokens`), behind Baton's router with
                  Baton's admission: a rival with every part of Baton that it can use
    plain         two of `vllm serve` as it starts behind vllm-router's round robin, without admission
    apart-vllm    one prefill + one decode, vLLM's connector as Baton's launcher tunes it; every request is handed over
    apart-baton   the same with Baton's connector

All have prefix caching on, as vLLM has it by default; no two prompts of the load share one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.connectors_models import Model
from bench.contestants import rival
from bench.pair import Engines
from bench.processes import Running, stopping
from bench.real_cluster import up
from bench.real_load import CONTEXT
from bench.rivals import environment
from cluster.instance import Role

LEASE_S: Final = 30
"""vLLM's own default, and not the 120 s of Baton's launcher on CPU: both connectors get the same."""
SERVED: Final = "bench"
"""The model's name to clients."""
ADMITTED: Final = 5
"""One of `FACTORS`: admission keeps requests within so many times the unloaded latency."""
CLASS: Final = f"x{ADMITTED}"


@dataclass(frozen=True, slots=True)
class Contestant:
    """One contestant: two engines, their arrangement and settings."""

    told: str
    pools: Mapping[Role, int]
    """Instances of each role; empty: the contestant is not started from a cluster file."""
    connector: str = "nixl"
    budget: int | None = None
    """Tokens of a step (`max_num_batched_tokens`); None: vLLM's default."""
    policy: str = "least_load"


PLAIN: Final = "plain"
OURS: Final = "baton"
_APART = {Role.PREFILL: 1, Role.DECODE: 1}
CONTESTANTS: Final = {
    OURS: Contestant("2 of role both, Baton's choice", {Role.BOTH: 2}, "baton", policy="workload"),
    **{
        f"whole-{budget}": Contestant(
            f"2 that serve whole, {budget} tokens a step, Baton's admission", {Role.DECODE: 2}, budget=budget
        )
        for budget in (512, 256, 2048)
    },
    PLAIN: Contestant("2 plain vLLM, vllm-router's round robin", {}),
    "apart-vllm": Contestant("1 P + 1 D, vLLM's connector", _APART),
    "apart-baton": Contestant("1 P + 1 D, Baton's connector", _APART, "baton"),
}
CALIBRATES: Final = "whole-512"
"""Targets and load are made of this arrangement's latency and rate."""
USUAL: Final = (OURS, CALIBRATES, PLAIN)


@dataclass(frozen=True, slots=True)
class Serving:
    """One contestant that answers."""

    endpoint: str
    admin: str | None = None
    """Address of the admin side of Baton's router; None: another router."""
    slo_class: str | None = None
    """The class that requests ask for."""
    ended: Callable[[], str] = lambda: ""
    """Which process has ended, with the end of its log; empty: all run. Baton starts its engines again by itself."""


def cluster_file(
    contestant: Contestant, model: Model, path: str, promised: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """What `baton up` is given (JSON is YAML). `promised`: targets of the one class; None: nothing is promised."""
    args: dict[str, Any] = {"enable-prefix-caching": True}
    if contestant.budget is not None:
        args["max-num-batched-tokens"] = contestant.budget
    if model.shape is not None:
        args |= {"load-format": "dummy", "dtype": model.dtype, "max-model-len": CONTEXT}
    pools = {
        role.value: {"start": count, "engine_args": args, "env": {"VLLM_CPU_KVCACHE_SPACE": f"{model.kv_gib}"}}
        for role, count in contestant.pools.items()
    }
    return {
        "models": [{"name": _named(model, path), "served_name": SERVED, "pools": pools}],
        "transfer": {"connector": contestant.connector, "lease_s": LEASE_S},
        "router": {"policy": contestant.policy},
        **({"slo": {CLASS: {**promised, "attainment": 0.9, "when_missed": "queue"}}} if promised else {}),
    }


def _named(model: Model, path: str) -> str:
    return "baton-tiny" if model.shape is None else path


@contextmanager
def serving(name: str, model: Model, folder: Path, promised: Mapping[str, float] | None) -> Iterator[Serving]:
    """A contestant, started and ended. `folder`: for its files, a folder of its own.

    Raises:
        NotInstalled: the rival cannot be had here.
    """
    folder.mkdir(exist_ok=True)
    if name == PLAIN:
        with _plain(model, folder) as found:
            yield found
        return
    path = folder / "baton.yaml"
    path.write_text(json.dumps(cluster_file(CONTESTANTS[name], model, model.path(folder), promised)))
    with up([str(path)], "bench-real") as said:
        yield Serving(said["endpoint"], said["admin"], CLASS if promised else None)


@contextmanager
def _plain(model: Model, folder: Path) -> Iterator[Serving]:
    """`vllm serve` without a connector, twice, and vllm-router."""
    more = {"served_name": SERVED, "dtype": model.dtype, "max_model_len": CONTEXT}
    more["extra_env"] = {"VLLM_CPU_KVCACHE_SPACE": f"{model.kv_gib}"}
    roles = dict.fromkeys(("one", "two"), Role.BOTH)
    with Engines(folder, model.path(folder), roles, more=more, flags=model.flags, connected=False) as engines:
        program, cores = str(environment("router") / "vllm-router"), frozenset(os.sched_getaffinity(0))
        running, endpoint = rival(program, (), (), cores, both=[engines.url(name) for name in roles])
        with stopping([running]):
            yield Serving(endpoint, ended=lambda: _ended(engines, running))


def _ended(engines: Engines, router: Running) -> str:
    for name, engine in engines.running.items():
        if not engine.alive():
            return f"engine {name} ended:\n{engine.tail()}"
    return "" if router.process.poll() is None else f"vllm-router ended:\n{router.said()}"
