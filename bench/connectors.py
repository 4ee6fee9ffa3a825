"""vLLM's connectors and ours side by side: what comes between P's answer and D's next token, and what it costs idle.

    python -m bench.connectors [--only ours,tuned] [--models tiny,fat] [--quick] [--publish]

Each connector gets two engines of its own on this machine's cores, one after another: vLLM's pull connector as it
comes (NIXL's progress thread spins), the same tuned (that thread paced, which Baton's launcher does), vLLM's push
connector, and ours. The engines are alike in everything else. Two models: the one that ships (2 KB of KV a token) and
one of random weights with 64 KB a token, at which a hand-over is a thing to measure.

`hand-over` is the time from P's answer to D's first token, less the median of D's later steps in the same run. In
`eight` eight holds are pulled at once while P has nothing to do; in `loop` eight clients prefill and decode without a
pause. What is given up is given up as a router does it: by its name with ours, by a rejected decode leg with vLLM's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.pair import Engines, cores_used
from bench.published import Table, machine, note_of, publish, result, say, show, target
from cluster import wire
from cluster.ids import RequestId, TransferId
from cluster.instance import Role
from engine.tiny import model_path
from kvtransfer.door import ask as knock

PATH = "/v1/completions"
LENGTHS = (250, 1000, 1900)
OUTPUT_TOKENS = 8
EIGHT = 8
LEASE_S = 20
FAT = {"hidden_size": 128, "num_hidden_layers": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128,
       "intermediate_size": 256, "max_position_embeddings": 4096}  # fmt: skip
"""64 KB of KV a token in float32 (2 × 16 layers × 4 heads × 128 × 4 bytes)."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A connector and how it is run."""

    name: str
    connector: str
    paced: bool = True
    """Whether NIXL's progress thread is paced at start-up."""

    def transfer(self, role: Role) -> str:
        """vLLM's own setting; empty: what Baton's launcher writes."""
        if self.connector == "BatonConnector":
            return ""
        told = {
            "kv_connector": self.connector,
            "kv_role": "kv_producer" if role is Role.PREFILL else "kv_consumer",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
        return json.dumps(told)


CONTESTANTS = {
    "stock": Contestant("vLLM pull, as it comes", "NixlConnector", paced=False),
    "tuned": Contestant("vLLM pull, tuned", "NixlConnector"),
    "push": Contestant("vLLM push, tuned", "NixlPushConnector"),
    "ours": Contestant("Baton pull", "BatonConnector"),
}


@dataclass
class Seen:
    """Of one hand-over, in milliseconds."""

    prefill: float
    first: float
    steps: list[float] = field(default_factory=list)


class Fleet:
    """Two engines and what a router would do with them."""

    def __init__(self, engines: Engines, *, ours: bool, seed: int = 3) -> None:
        self.engines, self.ours = engines, ours
        self.p, self.d = engines.url("p"), engines.url("d")
        self._chance, self._lock, self._made = random.Random(seed), threading.Lock(), 0

    def prompt(self, tokens: int) -> tuple[TransferId, list[int]]:
        """A new one, and the name of its transfer."""
        with self._lock:
            self._made += 1
            name = TransferId(RequestId(f"bench-{self._made}"), 1, 1)
            return name, [self._chance.randrange(97, 123) for _ in range(tokens)]

    def body(self, prompt: list[int]) -> dict[str, Any]:
        return {"model": "tiny", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}

    def prefill(self, name: TransferId, prompt: list[int]) -> wire.Transfer:
        """Leg 1, and the hold it leaves."""
        answer = json.loads(_post(self.p, wire.prefill_body(self.body(prompt), transfer=name), name.request).read())
        transfer = wire.read_transfer(answer)
        if transfer is None:
            raise SystemExit(f"bench-connectors: P holds nothing: {answer}")
        return transfer

    def decode(self, name: TransferId, prompt: list[int], transfer: wire.Transfer) -> tuple[float, list[float]]:
        """Leg 2: milliseconds to the first token, and between later ones."""
        body = {**wire.decode_body(self.body(prompt), transfer), "stream": True}
        begun = time.perf_counter()
        times = [
            (time.perf_counter() - begun) * 1e3 for line in _post(self.d, body, name.request) if line[:7] == b"data: {"
        ]
        return times[0], [later - earlier for earlier, later in itertools.pairwise(times)]

    def hand_over(self, length: int) -> Seen:
        """One, from prompt to end."""
        name, prompt = self.prompt(length)
        begun = time.perf_counter()
        transfer = self.prefill(name, prompt)
        prefilled = (time.perf_counter() - begun) * 1e3
        return Seen(prefilled, *self.decode(name, prompt, transfer))

    def eight(self, length: int) -> list[Seen]:
        """Eight holds, then their pulls at once."""
        held = [
            (name, prompt, self.prefill(name, prompt)) for name, prompt in (self.prompt(length) for _ in range(EIGHT))
        ]
        with ThreadPoolExecutor(EIGHT) as pool:
            return [Seen(0.0, *seen) for seen in pool.map(lambda each: self.decode(*each), held)]

    def loop(self, length: int, each: int) -> list[Seen]:
        """Eight clients that hand over one after another."""
        with ThreadPoolExecutor(EIGHT) as pool:
            return [seen for many in pool.map(lambda _: [self.hand_over(length) for _ in range(each)], range(EIGHT))
                    for seen in many]  # fmt: skip

    def release(self, name: TransferId, transfer: wire.Transfer | None) -> None:
        """As a router does: by its name, or with vLLM's connector by a decode leg that D rejects, once it is known."""
        if self.ours:
            knock(self.engines.door("p"), {"ask": "release", "transfer_id": str(name)})
        elif transfer is not None:
            _post(self.d, wire.release_body(transfer), name.request, status=404).read()

    def free_after_s(self) -> float:
        """Seconds from giving a hold up until P's blocks are free, by P's own metrics."""
        name, prompt = self.prompt(600)
        transfer = self.prefill(name, prompt)
        begun = time.perf_counter()
        self.release(name, transfer)
        self._until_free(LEASE_S * 2)
        return time.perf_counter() - begun

    def storm(self, count: int) -> float:
        """Prefill legs whose clients leave: seconds from the last until P holds nothing."""
        with ThreadPoolExecutor(EIGHT) as pool:
            list(pool.map(self._leave, range(count)))
        begun = time.perf_counter()
        self._until_free(LEASE_S * 2)
        return time.perf_counter() - begun

    def _leave(self, number: int) -> None:
        name, prompt = self.prompt(300)
        with self._lock:
            wait_s = self._chance.random() * 0.3
        connection = _send(self.p, wire.prefill_body(self.body(prompt), transfer=name), name.request)
        time.sleep(wait_s)
        connection.close()
        self.release(name, None)

    def _until_free(self, limit_s: float) -> None:
        end = time.perf_counter() + limit_s
        while _metric(self.p, "vllm:kv_cache_usage_perc") > 0 and time.perf_counter() < end:
            time.sleep(0.02)

    def idle_cores(self) -> tuple[float, float]:
        """Cores that P takes while it does nothing, and while it holds."""
        time.sleep(1)
        idle = cores_used(self.engines.running["p"], 3.0)
        name, prompt = self.prompt(300)
        transfer = self.prefill(name, prompt)
        time.sleep(2)
        holding = cores_used(self.engines.running["p"], 6.0)
        self.release(name, transfer)
        return idle, holding

    def rate(self) -> float:
        """Bytes a second of D's transfers, by vLLM's own account; 0 where it gives none."""
        seconds = _metric(self.d, "vllm:nixl_xfer_time_seconds_sum")
        return _metric(self.d, "vllm:nixl_bytes_transferred_sum") / seconds if seconds else 0.0


def _send(url: str, body: Any, request_id: str) -> HTTPConnection:
    parts = urlsplit(url)
    connection = HTTPConnection(str(parts.hostname), parts.port, timeout=120)
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    connection.request("POST", PATH, json.dumps(body).encode(), headers)
    return connection


def _post(url: str, body: Any, request_id: str, status: int = 200) -> Any:
    answer = _send(url, body, request_id).getresponse()
    if answer.status != status:
        raise SystemExit(f"bench-connectors: {answer.status} {answer.read()[:300]!r}")
    return answer


def _metric(url: str, name: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:  # noqa: S310 - an engine of ours
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))


def fat_model(folder: Path) -> Path:
    """A model of random weights with much KV: a configuration, and the tokenizer of the one that ships."""
    made = folder / "fat"
    made.mkdir(parents=True, exist_ok=True)
    for path in model_path().iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, **FAT}))
    return made


def run(contestant: Contestant, model: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    """All figures of one connector with one model."""
    fat = model == "fat"
    ours = contestant.connector == "BatonConnector"
    more: dict[str, object] = {"kv_lease_s": LEASE_S, "extra_env": {"VLLM_CPU_KVCACHE_SPACE": "2" if fat else "1"}}
    flags = ("--load-format", "dummy") if fat else ()
    path = str(fat_model(folder)) if fat else str(model_path())
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    with Engines(
        folder, path, roles, transfer=contestant.transfer, more=more, flags=flags, paced=contestant.paced
    ) as two:
        fleet = Fleet(two, ours=ours)
        figures: dict[str, Any] = {"lengths": {}}
        for length in LENGTHS:
            say(f"{contestant.name}, {model}, {length} tokens")
            figures["lengths"][str(length)] = _measure(fleet, length, quick=quick)
        figures["bytes_per_s"] = fleet.rate()
        figures["idle_cores"], figures["holding_cores"] = fleet.idle_cores()
        figures["free_after_s"] = statistics.median(fleet.free_after_s() for _ in range(3))
        figures["storm"] = 40 if quick else 200
        figures["storm_free_after_s"] = fleet.storm(figures["storm"])
        figures["held_at_the_end"] = _metric(fleet.p, "vllm:kv_cache_usage_perc")
    return figures


def _measure(fleet: Fleet, length: int, *, quick: bool) -> dict[str, Any]:
    for _ in range(2):
        fleet.hand_over(length)
    ways: dict[str, Callable[[], list[Seen]]] = {
        "alone": lambda: [fleet.hand_over(length) for _ in range(5 if quick else 15)],
        "eight": lambda: [seen for _ in range(2 if quick else 5) for seen in fleet.eight(length)],
        "loop": lambda: fleet.loop(length, 2 if quick else 5),
    }
    return {way: _summary(measure()) for way, measure in ways.items()}


def _summary(seen: list[Seen]) -> dict[str, float]:
    step = statistics.median(one for each in seen for one in each.steps)
    over = sorted(each.first - step for each in seen)
    tenth = len(over) // 10
    return {
        "hand_over_ms": statistics.median(over),
        "low_ms": over[tenth],
        "high_ms": over[-1 - tenth],
        "step_ms": step,
        "prefill_ms": statistics.median(each.prefill for each in seen),
        "count": len(over),
    }


def tables(figures: dict[str, dict[str, Any]]) -> list[Table]:
    """Both tables, a row for each connector and model."""
    rows = []
    for model, by_name in figures.items():
        for length in LENGTHS:
            for name, mine in by_name.items():
                ways = mine["lengths"][str(length)]
                cells = [
                    f"{ways[way]['hand_over_ms']:.0f} ({ways[way]['low_ms']:.0f}–{ways[way]['high_ms']:.0f}) + "
                    f"{ways[way]['step_ms']:.0f}"
                    for way in ("alone", "eight", "loop")
                ]
                rows.append([model, f"{length}", CONTESTANTS[name].name, *cells])
    rest = [
        [model, CONTESTANTS[name].name, f"{mine['bytes_per_s'] / 1e9:.2f}", f"{mine['idle_cores'] * 100:.0f} %",
         f"{mine['holding_cores'] * 100:.0f} %", f"{mine['free_after_s']:.2f}", f"{mine['storm_free_after_s']:.1f}",
         "0" if mine["held_at_the_end"] == 0 else "some"]
        for model, by_name in figures.items() for name, mine in by_name.items()
    ]  # fmt: skip
    return [
        Table("Hand-over in milliseconds: median (10th–90th percentile) + one decode step",
              ["model", "prompt tokens", "connector", "alone", "eight at once", "eight in a loop"], rows),
        Table("Idle, and given up", ["model", "connector", "GB/s", "P idle", "P holding", "free after a release, s",
                                     "free after the storm, s", "held at the end"], rest),
    ]  # fmt: skip


def targets(figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ours against vLLM's tuned, where both were run."""
    told: dict[str, Any] = {}
    for model, by_name in figures.items():
        if not {"ours", "tuned"} <= set(by_name):
            continue
        for length in LENGTHS:
            for way in ("alone", "eight", "loop"):
                ours, tuned = (by_name[name]["lengths"][str(length)][way] for name in ("ours", "tuned"))
                limit = 0.7 if model == "fat" and way != "alone" else 1.0
                # With the step: a hand-over alone is small beside it, and the ratio of two small numbers is noise.
                ratio = (ours["hand_over_ms"] + ours["step_ms"]) / (tuned["hand_over_ms"] + tuned["step_ms"])
                told[f"{model}_{length}_{way}_over_tuned"] = target(ratio, limit)
        told[f"{model}_idle_cores"] = target(by_name["ours"]["idle_cores"], 0.05)
        told[f"{model}_free_after_s"] = target(by_name["ours"]["free_after_s"], 1.0)
        told[f"{model}_held_at_the_end"] = target(by_name["ours"]["held_at_the_end"], 0.0)
    return told


def main() -> int:
    """Measure, print, publish."""
    parser = argparse.ArgumentParser(prog="make bench-connectors", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="some of them (default %(default)s)")
    parser.add_argument("--models", default="tiny,fat", help="some of them (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--into", type=Path, help="keep figures in this file, and go on with what it has")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks.md and its JSON")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and the engines with it
    facts = machine()
    kept = json.loads(args.into.read_text()) if args.into and args.into.exists() else {}
    for model in args.models.split(","):
        for name in args.only.split(","):
            with tempfile.TemporaryDirectory(prefix="bench", ignore_cleanup_errors=True) as folder:
                kept.setdefault(model, {})[name] = run(CONTESTANTS[name], model, Path(folder), quick=args.quick)
            if args.into:
                args.into.write_text(json.dumps(kept, indent=1))
    made = tables(kept)
    show(made)
    told = result("connectors", kept, targets(kept))
    if args.publish:
        publish(told, made, facts, note_of(facts, "vLLM 0.32 on CPU, both engines on one machine"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
