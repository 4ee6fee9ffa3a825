"""Tiers on real engines under faults: an engine is killed and comes back, another one stands still for a while, and
files of the tiers on disk are removed or cut, all under conversations. Answers are those of a run without faults,
nothing hangs, nothing stays held, and nothing is left behind.

Not checked:

- files with other bytes and the right length: neither vLLM nor Baton has a checksum of them, so an engine would
  read them as they are (nothing but the engine's own user can write there);
- a disk that is full, slow or returns errors, and host memory that runs out;
- that a source leg from a tier is struck: `least_load` chooses no source, and how many `workload` chooses is only
  printed here (`tests/live/test_peer_tiers.py` has source legs from a tier, without faults);
- an agent or a router that dies (`tests/live/test_losses.py`, without tiers), and keepers killed with their agents;
- times: the cores are shared, so that only a wait of a minute counts as a hang;
- GPUs, where copies to and from the tiers run beside the steps.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.cluster import Cluster, alive, descendants, mapped, processes, within
from support.talks import Heard, ask, converse

from engine.vllm.metrics import parse_load

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1200)]

FILE = """
models:
  - name: baton-tiny
    pools:
      prefill: {start: 1, engine_args: &small {num-gpu-blocks-override: 24}}
      decode: {start: 1, engine_args: *small}
      both: {start: 1, engine_args: *small}
kv: {host_gib: 0.012, disk_gib: 0.5, disk_folder: FOLDER}
router: {policy: POLICY}
"""
"""The KV cache of each engine has room for two conversations, its host memory for four, its disk for all. With more
host memory than that nothing would ever come from disk."""
TALKS, CLIENTS = 12, 3
HUNG_S = 60.0
"""Seconds after which a request hangs."""
STILL_S = 5.0
"""Seconds that an engine stands still: its agent would kill it after 30."""
BACK_S = 240.0
HELD = 'baton_prefix_sources_total{outcome="held"}'


@dataclass(frozen=True)
class Outcome:
    """How one request ended."""

    number: int
    took_s: float
    text: str
    error: str = ""


@dataclass
class Traffic:
    """Clients that ask turns of known conversations again, in an order of chance, one after the other."""

    endpoint: str
    known: Heard
    outcomes: list[Outcome] = field(default_factory=list)
    going: threading.Event = field(default_factory=threading.Event)
    over: bool = False

    @contextlib.contextmanager
    def flowing(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as clients:
            told = [clients.submit(self._keep_asking, random.Random(seed)) for seed in range(CLIENTS)]
            self.going.set()
            try:
                yield
            finally:
                self.over = True
                self.going.set()
        for each in told:
            each.result()

    def _keep_asking(self, chance: random.Random) -> None:
        while not self.over:
            self.outcomes.append(self._one(chance.randrange(len(self.known.said))))
            self.going.wait()

    def _one(self, number: int) -> Outcome:
        began, text, error = time.monotonic(), "", ""
        try:
            turn = ask(self.endpoint, self.known.asked[number])
        except (OSError, KeyError) as broken:
            error = repr(broken)
        else:
            text, error = turn.text, "" if turn.usage else "the stream ended early"
        return Outcome(number, time.monotonic() - began, text, error)

    def answered(self, more: int) -> None:
        """Wait until so many more requests have ended."""
        until = len(self.outcomes) + more
        within(120, lambda: len(self.outcomes) >= until)

    def rest_until_ready(self, cluster: Cluster) -> None:
        """Ask nothing more until all instances are ready: two cores are few for a start alone."""
        self.going.clear()
        within(BACK_S, cluster.all_ready)
        self.going.set()


def files_of(folder: Path, instance: str) -> list[Path]:
    return sorted(folder.glob(f"baton-kv-{instance}-*/**/*.bin"))


def damage(folder: Path, instance: str) -> tuple[int, int]:
    """Remove a third of an instance's files, and cut a third in the middle; return how many of each. The engine may
    remove files itself meanwhile.
    """
    removed = cut = 0
    for at, each in enumerate(files_of(folder, instance)):
        with contextlib.suppress(FileNotFoundError):
            if at % 3 == 0:
                each.unlink()
                removed += 1
            elif at % 3 == 1:
                os.truncate(each, each.stat().st_size // 2)
                cut += 1
    return removed, cut


def busy(cluster: Cluster, instance: str) -> bool:
    return parse_load(cluster.metrics(instance)).running > 0  # the others may be away


@contextlib.contextmanager
def standing_still(cluster: Cluster, instance: str) -> Iterator[None]:
    found = processes(cluster, instance)
    pids = [found["core"], found["server"]]
    within(60, lambda: busy(cluster, instance))
    try:
        for each in pids:
            os.kill(each, signal.SIGSTOP)
        yield
    finally:
        for each in pids:
            os.kill(each, signal.SIGCONT)


def by_source(cluster: Cluster) -> dict[str, float]:
    """Prompt tokens by the place where the engines have found them, of all engines together."""
    found: dict[str, float] = {}
    for name in cluster.urls:
        for line in cluster.metrics(name).splitlines():
            if line.startswith("vllm:prompt_tokens_cached_by_source_total{"):
                source = line.split('source="')[1].split('"')[0]
                found[source] = found.get(source, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


@pytest.mark.parametrize("policy", ["workload", "least_load"])
def test_conversations_beside_faults_of_engines_and_files(tmp_path: Path, policy: str) -> None:
    """`workload`, the default, serves most turns whole where the conversation is; `least_load` hands them over."""
    folder = tmp_path / "kv"
    with Cluster.of(tmp_path, FILE.replace("FOLDER", str(folder)).replace("POLICY", policy)) as cluster:
        within(120, lambda: cluster.proven(1))
        known = converse(cluster.endpoint, TALKS, at_once=2, seed=7)
        used = mapped(descendants(cluster.process.pid))
        epochs = {name: each["epoch"] for name, each in cluster.status().items()}
        held = cluster.router_metric(HELD, 0.0)
        struck = under_faults(cluster, Traffic(cluster.endpoint, known), folder)
        held = cluster.router_metric(HELD, 0.0) - held
        found = by_source(cluster)
        print(f"{policy}: cached by source {found}; {held:.0f} prompts' beginnings held for another instance")
        assert found["host"] > 0 and found["disk"] > 0
        after = {name: each["epoch"] for name, each in cluster.status().items()}
        assert [name for name in after if after[name] > epochs[name]] == ["decode-0"], "no other engine has ended"
        took_s = within(30, cluster.idle)
        family = descendants(cluster.process.pid)
        used |= mapped(family)
    print(f"{policy}: {struck}, idle after {took_s:.1f} s")
    assert not alive(family)
    assert any("vllm_offload_" in each for each in used), "what the engines had is known"
    assert not [each for each in used if (Path("/dev/shm") / each).exists()]
    assert not [each for each in cluster.left_behind() if not (Path("/dev/shm") / each).exists()]
    assert list(folder.iterdir()) == [], "files end with their engines"


def under_faults(cluster: Cluster, traffic: Traffic, folder: Path) -> str:
    """Strike, and check all answers. Returns what was struck, in words."""
    with traffic.flowing():
        traffic.answered(6)
        victim = processes(cluster, "decode-0")["server"]
        within(60, lambda: busy(cluster, "decode-0"))
        os.kill(victim, signal.SIGKILL)
        hurt = [damage(folder, "prefill-0"), damage(folder, "both-0")]
        traffic.answered(24)
        with standing_still(cluster, "both-0"):
            time.sleep(STILL_S)  # the fault itself
        traffic.answered(6)
        traffic.rest_until_ready(cluster)
        traffic.answered(24)
        hurt += [damage(folder, name) for name in ("prefill-0", "decode-0", "both-0")]
        traffic.answered(36)
    wrong = [each for each in traffic.outcomes if not each.error and each.text != traffic.known.said[each.number]]
    failed = [each for each in traffic.outcomes if each.error]
    longest_s = max(each.took_s for each in traffic.outcomes)
    struck = (f"{len(traffic.outcomes)} requests, {len(wrong)} wrong, {len(failed)} failed, the longest "
              f"{longest_s:.1f} s; files removed and cut {hurt}")  # fmt: skip
    assert not wrong, (struck, wrong)
    assert not failed, (struck, failed)
    assert longest_s < HUNG_S, struck
    assert sum(removed for removed, _ in hurt) and sum(cut for _, cut in hurt), struck
    return struck
