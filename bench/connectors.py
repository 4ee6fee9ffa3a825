"""vLLM's connectors and Baton's side by side: the time from P's answer to D's next token, and the cost of idling.

    make bench-handoff ARGS="--part connectors"          about 95 minutes
    make bench-handoff ARGS="--gpu"                      two engines on GPUs, a model of 8B's layers

Each connector gets two engines of its own, on one of this machine's cores each or on its GPUs: vLLM's pull connector
unchanged (NIXL's progress thread spins), the same tuned (that thread paced, as Baton's launcher does, and a shorter
lease), vLLM's push connector tuned likewise, and Baton's. The engines are alike in everything else. All of them but
the spinning one run at the same time, if the memory of the GPUs holds them, and are measured by turns, a few seconds
each. Machines get faster and slower by the minute: of two connectors measured one after the other the second may seem
better by a third. Two models: the one that ships (2 KB of KV a token) and one of random weights with 64 KB a token, at
which a hand-over takes a measurable time.

`hand-over` is the time from P's answer to D's first token, less the median of D's later steps in the same run. It is
measured alone; alone while P computes other prompts without a pause; with eight holds pulled at once while P is idle;
and in a loop of eight clients that prefill and decode without a pause. Legs go one after the other, except that push,
which is made for it, and `early` get both at once (not in `eight`, which begins with holds): D has then done its part
before P answers. `early` uses the engines of `ours`: it is what a router does by itself with Baton's connector.

A hold is given up as a router does it: by its name with Baton's connector, by a rejected decode leg with vLLM's. A hold
that P never answered has no name there, and is free when the lease ends.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.connectors_fleet import EIGHT, LEASE_S, Fleet, Seen, summary
from bench.connectors_models import EIGHT_B, LENGTHS, MODELS, Model
from bench.connectors_tables import WAYS, dates, tables, targets
from bench.pair import Engines
from bench.published import machine, note_of, publish, result, save, say, show
from cluster.instance import Role
from engine.vllm.hardware import find_hardware
from engine.vllm.placement import CudaGpu

ON_CPU: Final = "tiny,fat"
TURNS: Final = 10
"""Turns of five hand-overs each, if `--turns` says nothing: fifty for each figure that is measured one by one. Ratios
are taken turn by turn; fewer than six turns give no interval."""
RESTS_S: Final = 1.3
"""After each step vLLM's workers spin for a second: no connector is measured beside that. Hosts of GPUs have cores for
all."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A connector and the settings of its engines."""

    name: str
    connector: str
    paced: bool = True
    """Whether NIXL's progress thread is paced at start-up."""
    together: bool = False
    """Whether both legs are sent at once."""
    beside: str = ""
    """The name of another contestant: both use the same engines, and differ only in what the router does."""

    @property
    def ours(self) -> bool:
        """Whether it is Baton's."""
        return self.connector == "BatonConnector"

    def transfer(self, role: Role, buffer: str = "cpu") -> str:
        """vLLM's own setting; empty: the one that Baton's launcher writes."""
        if self.ours:
            return ""
        told = {
            "kv_connector": self.connector,
            "kv_role": "kv_producer" if role is Role.PREFILL else "kv_consumer",
            "kv_buffer_device": buffer,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
        return json.dumps(told)


CONTESTANTS: Final = {
    "stock": Contestant("vLLM pull, as it comes", "NixlConnector", paced=False),
    "tuned": Contestant("vLLM pull, tuned", "NixlConnector"),
    "push": Contestant("vLLM push, tuned", "NixlPushConnector", together=True),
    "ours": Contestant("Baton pull", "BatonConnector"),
    "early": Contestant("Baton pull, early leg", "BatonConnector", together=True, beside="ours"),
}


GPU_KV_GIB: Final = 4
"""KV memory of an engine on a GPU: twice what eight prompts of 1,900 tokens take at 128 KB a token."""
GPU_BESIDES_GIB: Final = 2.5
"""What an engine takes of a GPU besides weights and KV: CUDA's context, activations of a step."""
GRAPHS: Final = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
"""CUDA graphs for decode steps, as users have them; nothing is compiled, which takes a minute."""
ON_GPU: Final = ("--kv-cache-memory-bytes", str(GPU_KV_GIB << 30), "--gpu-memory-utilization", "0.1",
                 "--compilation-config", json.dumps(GRAPHS))  # fmt: skip
"""Flags of engines on GPUs. All start at the same time, and each finds a tenth of the memory free, which vLLM wants."""


def groups(only: Sequence[str], pairs: int = len(CONTESTANTS)) -> list[dict[str, Contestant]]:
    """The connectors that are measured at the same time: those that are idle without requests, `pairs` of them at most.

    A connector that uses another one's engines is in the other's group, and takes no room.
    """
    alone = [{name: CONTESTANTS[name]} for name in only if not CONTESTANTS[name].paced]
    together: list[dict[str, Contestant]] = []
    for name in (each for each in only if CONTESTANTS[each].paced):
        host = next((group for group in together if CONTESTANTS[name].beside in group), None)
        room = host if host is not None else next((group for group in together if _pairs(group) < pairs), None)
        if room is None:
            together.append(room := {})
        room[name] = CONTESTANTS[name]
    return alone + together


def _pairs(group: Mapping[str, Contestant]) -> int:
    return sum(each.beside not in group for each in group.values())


def pairs_at_once(model: Model, gpus: Sequence[CudaGpu]) -> int:
    """How many pairs of engines these GPUs' memory holds, one at the least; without GPUs: all."""
    if not gpus:
        return len(CONTESTANTS)
    gib = sum(gpu.memory_mib for gpu in gpus) / 1024
    return max(1, int(gib / (2 * (model.weights_gib + GPU_KV_GIB + GPU_BESIDES_GIB))))


def engines(contestant: Contestant, model: Model, folder: Path, gpus: Sequence[str] = ()) -> Engines:
    """The contestant's two engines, not started."""
    more: dict[str, object] = {"kv_lease_s": LEASE_S, "dtype": model.dtype}
    if not gpus:
        more["extra_env"] = {"VLLM_CPU_KVCACHE_SPACE": f"{model.kv_gib}"}
    return Engines(
        folder,
        model.path(folder),
        {"p": Role.PREFILL, "d": Role.DECODE},
        transfer=lambda role: contestant.transfer(role, "cuda" if gpus else "cpu"),
        more=more,
        flags=(*model.flags, *(ON_GPU if gpus else ())),
        paced=contestant.paced,
        gpus=tuple(gpus),
    )


def run(
    contestants: Mapping[str, Contestant], model: Model, folder: Path, gpus: Sequence[str], *, turns: int, storm: int
) -> dict[str, dict[str, Any]]:
    """All figures of these connectors with one model, measured by turns; `storm`: clients that leave at once."""
    with ExitStack() as stack:
        own = {name: each for name, each in contestants.items() if each.beside not in contestants}
        for name in own:
            (folder / name).mkdir()
        with ThreadPoolExecutor(len(own) if gpus else 1) as pool:  # two cores start one pair after the other
            pairs = pool.map(lambda name: stack.enter_context(engines(own[name], model, folder / name, gpus)), own)
            started = dict(zip(own, pairs, strict=True))
        fleets: dict[str, Fleet] = {}
        for name, each in contestants.items():
            two = started[name if name in own else each.beside]
            fleets[name] = Fleet(two, ours=each.ours, together=each.together, seed=len(fleets))
        begun = datetime.now(UTC).isoformat(timespec="seconds")
        figures: dict[str, dict[str, Any]] = {name: {"begun": begun, "lengths": {}} for name in fleets}
        for length in LENGTHS:
            say(f"{', '.join(each.name for each in contestants.values())}: {model.name}, {length} tokens")
            rest_s = 0.0 if gpus or len(fleets) == 1 else RESTS_S
            seen = _measure(fleets, length, turns, rest_s)
            for name, ways in seen.items():
                figures[name]["lengths"][str(length)] = ways
            say(_medians(seen))

        def besides(name: str) -> dict[str, Any]:
            say(f"{contestants[name].name}, {model.name}, idle and given up")
            return _besides(fleets[name], figures[name]["lengths"][str(LENGTHS[-1])], storm)

        # Those that share engines would count each other's holds, and on two cores engines slow each other.
        for names in _apart(contestants) if gpus else [[name] for name in fleets]:
            with ThreadPoolExecutor(len(names)) as pool:
                for name, told in zip(names, pool.map(besides, names), strict=True):
                    figures[name] |= told
    return figures


def _medians(seen: Mapping[str, Mapping[str, Any]]) -> str:
    """What one length gave, in a line for each way: a run that is cut off has not measured in vain."""
    lines = []
    for way in WAYS:
        told = (f"{name} {mine[way]['hand_over_ms']:.1f} + {mine[way]['step_ms']:.2f}" for name, mine in seen.items())
        lines.append(f"  {way}: {', '.join(told)} ms")
    return "\n".join(lines)


def _apart(contestants: Mapping[str, Contestant]) -> list[list[str]]:
    """First those with engines of their own, all at once; then the others."""
    own = [name for name, each in contestants.items() if each.beside not in contestants]
    return [names for names in (own, [name for name in contestants if name not in own]) if names]


def _besides(fleet: Fleet, longest: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Bytes a second, cores, and the fate of given-up holds."""
    time.sleep(RESTS_S)
    idle, holding = fleet.idle_cores()
    figures = {
        "bytes_per_s": fleet.rate(),
        "idle_cores": idle,
        "holding_cores": holding,
        "free_after_s": _usual(fleet.free_after_s),
        "left_after_s": _usual(lambda: fleet.left_after_s(longest["alone"]["prefill_ms"] / 1e3)),
    }
    held, free_after_s = fleet.storm(count)
    storm = {"storm": count, "storm_held_blocks": held, "storm_free_after_s": free_after_s}
    return {**figures, **storm, "held_at_the_end": fleet.held_blocks()}


def _measure(fleets: Mapping[str, Fleet], length: int, turns: int, rest_s: float) -> dict[str, dict[str, Any]]:
    """By connector, each way of handing over: some of it with each, then some more with each."""
    for fleet in fleets.values():
        for _ in range(2):
            fleet.hand_over(length)
    ways: dict[str, Callable[[Fleet], list[Seen]]] = {
        "alone": lambda fleet: [fleet.hand_over(length) for _ in range(5)],
        "busy": lambda fleet: fleet.busy(length, 5),
        "eight": lambda fleet: [seen for _ in range(2) for seen in fleet.eight(length)],
        "loop": lambda fleet: fleet.loop(length, 2),
    }
    seen: dict[str, dict[str, list[list[Seen]]]] = {name: {way: [] for way in WAYS} for name in fleets}
    for way in WAYS:
        for _ in range(turns):
            for name, fleet in fleets.items():
                time.sleep(rest_s)
                seen[name][way].append(ways[way](fleet))
    return {name: {way: summary(found) for way, found in mine.items()} for name, mine in seen.items()}


def _usual(measure: Callable[[], float]) -> float:
    """The median of three, or one value if that took a lease's time: that is no accident, and takes long."""
    first = measure()
    return first if first > LEASE_S / 2 else statistics.median([first, measure(), measure()])


def gpus_here() -> tuple[CudaGpu, ...]:
    """This machine's GPUs, one or two of them.

    Raises:
        SystemExit: 2, with what is missing, if there is none that vLLM can use.
    """
    found = find_hardware()
    if not found.gpus:
        why = "there is no GPU on this machine" if found.vllm else "vLLM is not installed"
        say(f"bench-handoff: --gpu: {why} (nvidia-smi lists none, or vLLM here is the build for CPUs: "
            "`make clean setup DEVICE=gpu`)")  # fmt: skip
        raise SystemExit(2)
    return tuple(found.gpus[:2])


def usual_contestants(*, gpu: bool) -> tuple[str, ...]:
    """The connectors of a whole run. On GPUs without vLLM's untuned one: it differs by a core that spins, and a host of
    GPUs has cores enough.
    """
    return tuple(name for name in CONTESTANTS if not gpu or name != "stock")


def missing(only: Sequence[str] | None, models: Sequence[str] | None, into: Path | None, *, gpu: bool) -> list[str]:
    """Connectors and models of a whole run that neither this run measures nor `into` has; None: all of them."""
    usual = [EIGHT_B.name] if gpu else ON_CPU.split(",")
    wanted = usual_contestants(gpu=gpu)
    kept = _kept(into)
    return [
        f"{name} of {model}"
        for model in usual
        for name in wanted
        if name not in kept.get(model, {}) and not (name in (only or wanted) and model in (models or usual))
    ]


def _kept(into: Path | None) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(into.read_text()) if into and into.exists() else {}
    return found


def measure(
    *,
    only: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    turns: int = TURNS,
    storm: int = 200,
    publishes: bool = False,
    into: Path | None = None,
    gpu: bool = False,
) -> None:
    """Measure, print, publish: as `connectors`, on GPUs as `connectors-gpu`."""
    gpus = gpus_here() if gpu else ()
    wanted = models or ([EIGHT_B.name] if gpu else ON_CPU.split(","))
    facts = machine()
    kept = _kept(into)
    for model in wanted:
        for group in groups(only or usual_contestants(gpu=gpu), pairs_at_once(MODELS[model], gpus)):
            with tempfile.TemporaryDirectory(prefix="bench", ignore_cleanup_errors=True) as folder:
                ids = [each.id for each in gpus]
                figures = run(group, MODELS[model], Path(folder), ids, turns=turns, storm=storm)
            kept[model] = kept.get(model, {}) | figures
            if into:
                save(into, json.dumps(kept, indent=1))
    made = tables(kept, {name: each.name for name, each in CONTESTANTS.items()})
    show(made)
    told = result("connectors-gpu" if gpu else "connectors", kept, targets(kept))
    if publishes:
        where = f"on {', '.join(each.name for each in gpus)}" if gpu else "on CPU"
        fewest = min(each["lengths"][f"{length}"]["alone"]["count"]
                     for by_name in kept.values() for each in by_name.values() for length in LENGTHS)  # fmt: skip
        said = (f"vLLM 0.32 {where}, both engines on one machine; {EIGHT} in flight; {fewest} or more of each kind"
                f"{dates(kept)}")  # fmt: skip
        publish(told, made, facts, note_of(facts, said))
