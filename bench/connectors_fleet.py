"""Two engines and a router's actions on them: hand over in several ways, give up, count held blocks."""

from __future__ import annotations

import itertools
import json
import random
import re
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any, Final
from urllib.parse import urlsplit

from bench.pair import Engines, cores_used
from cluster import wire
from cluster.ids import InstanceId, RequestId, TransferId
from kvtransfer.door import ask as knock

PATH: Final = "/v1/completions"
OUTPUT_TOKENS: Final = 8
EIGHT: Final = 8
LEASE_S: Final = 20
"""Lease of P's holds: a hold that is neither pulled nor given up is free after it."""
BUSY_TOKENS: Final = 1000
"""Length of the prompts that keep P busy, one after the other."""
LEFT_TOKENS: Final = 1900
"""Length of the prompts whose clients leave while P computes: long enough for that."""
STILL_S: Final = 0.3
"""Blocks count as free after this long: an engine's metrics are as old as its last step."""

STEPS: Final = "vllm:iteration_tokens_total_count"
"""Counts the steps of an engine that reported something."""

_BLOCKS = re.compile(r'vllm:cache_config_info\{[^}]*num_gpu_blocks="(\d+)"')


@dataclass
class Seen:
    """Times of one hand-over in milliseconds: until P's answer, from there to D's first token, and between later
    tokens.
    """

    prefill: float
    first: float
    steps: list[float] = field(default_factory=list)


class Fleet:
    """One P and one D."""

    def __init__(self, engines: Engines, *, ours: bool, together: bool = False, seed: int = 3) -> None:
        self.engines, self.ours, self.together = engines, ours, together
        self.p, self.d = engines.url("p"), engines.url("d")
        self._chance, self._lock, self._made = random.Random(seed), threading.Lock(), seed * 1_000_000
        self._known: dict[str, Any] = {}

    def prompt(self, tokens: int) -> tuple[TransferId, list[int]]:
        """A new prompt, and the name of its transfer."""
        with self._lock:
            self._made += 1
            name = TransferId(RequestId(f"bench-{self._made}"), 1, 1)
            return name, [self._chance.randrange(97, 123) for _ in range(tokens)]

    def body(self, prompt: list[int]) -> dict[str, Any]:
        """A client's request body."""
        return {"model": "tiny", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}

    def prefill(self, name: TransferId, prompt: list[int]) -> wire.TransferFields:
        """Send leg 1; the hold that it leaves."""
        answer = json.loads(_post(self.p, wire.prefill_body(self.body(prompt), transfer=name), name.request).read())
        transfer = wire.read_transfer(answer)
        if transfer is None:
            raise SystemExit(f"bench-handoff: P holds nothing: {answer}")
        return transfer

    def decode(self, name: TransferId, prompt: list[int], transfer: wire.TransferFields) -> list[float]:
        """Leg 2: when each token came, in seconds of `time.perf_counter`."""
        body = {**wire.decode_body(self.body(prompt), transfer), "stream": True}
        return [time.perf_counter() for line in _post(self.d, body, name.request) if line[:7] == b"data: {"]

    # --- handing over ------------------------------------------------------------------------------------------------

    def hand_over(self, length: int) -> Seen:
        """One hand-over, from prompt to end; both legs at once if the connector works so and P's address is known."""
        name, prompt = self.prompt(length)
        if self.together and (self.ours or self._known):
            return self._both_legs(name, prompt)
        begun = time.perf_counter()
        transfer = self.prefill(name, prompt)
        answered = time.perf_counter()
        self._known = dict(transfer.fields)
        return _seen(begun, answered, self.decode(name, prompt, transfer))

    def _both_legs(self, name: TransferId, prompt: list[int]) -> Seen:
        """Tell D where P is before P has answered: an early leg, or as vLLM's push connector is meant to be used.

        With push the two legs find each other by their `X-Request-Id`; P fills in the blocks and the id of its request.
        """
        pushed = {**self._known, "remote_block_ids": [], "remote_request_id": name.request}
        early = wire.early_fields(name, InstanceId("p"), pins=True)["kv_transfer_params"]
        transfer = wire.TransferFields(early if self.ours else {**pushed, "remote_num_tokens": len(prompt)})
        with ThreadPoolExecutor(1) as pool:
            begun = time.perf_counter()
            decoding = pool.submit(self.decode, name, prompt, transfer)
            self.prefill(name, prompt)
            answered = time.perf_counter()
            return _seen(begun, answered, decoding.result())

    def eight(self, length: int) -> list[Seen]:
        """Make eight holds, then let D pull all at once."""
        held = [
            (name, prompt, self.prefill(name, prompt)) for name, prompt in (self.prompt(length) for _ in range(EIGHT))
        ]

        def pull(one: tuple[TransferId, list[int], wire.TransferFields]) -> Seen:
            begun = time.perf_counter()
            return _seen(begun, begun, self.decode(*one))

        with ThreadPoolExecutor(EIGHT) as pool:
            return list(pool.map(pull, held))

    def loop(self, length: int, each: int) -> list[Seen]:
        """Eight clients that hand over one after another."""
        with ThreadPoolExecutor(EIGHT) as pool:
            return [seen for many in pool.map(lambda _: [self.hand_over(length) for _ in range(each)], range(EIGHT))
                    for seen in many]  # fmt: skip

    def busy(self, length: int, count: int) -> list[Seen]:
        """One hand-over at a time, while P computes other prompts without a pause."""
        with self._other_prompts():
            return [self.hand_over(length) for _ in range(count)]

    def _other_prompts(self) -> AbstractContextManager[None]:
        def compute() -> None:
            name, prompt = self.prompt(BUSY_TOKENS)
            _post(self.p, {**self.body(prompt), "max_tokens": 1}, name.request).read()

        return without_pause(compute)

    # --- giving up ---------------------------------------------------------------------------------------------------

    def release(self, name: TransferId, transfer: wire.TransferFields | None) -> None:
        """Give a hold up as a router does: by its name, or with vLLM's connector by a rejected decode leg, once it is
        known.
        """
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
        return self._freed(begun)

    def left_after_s(self, prefill_s: float) -> float:
        """Seconds from a client's leaving, half-way through P's work, until P's blocks are free: not before the step
        under way has ended.
        """
        steps = _metric(_page(self.p), STEPS)
        name, prompt = self.prompt(LEFT_TOKENS)
        connection = _send(self.p, wire.prefill_body(self.body(prompt), transfer=name), name.request)
        time.sleep(prefill_s / 2)
        connection.close()
        begun = time.perf_counter()
        self.release(name, None)
        return self._freed(begun, steps, max(STILL_S, 2 * prefill_s))

    def storm(self, count: int) -> tuple[int, float]:
        """Prefill legs whose clients leave: blocks held a second after the last leg, and seconds until none are held (1
        if none were held then).
        """
        with ThreadPoolExecutor(EIGHT) as pool:
            list(pool.map(self._leave, range(count)))
        begun = time.perf_counter()
        time.sleep(1)
        held = self.held_blocks()
        return held, self._freed(begun) if held else 1.0

    def _leave(self, number: int) -> None:
        name, prompt = self.prompt(300)
        with self._lock:
            wait_s = self._chance.random() * 0.3
        connection = _send(self.p, wire.prefill_body(self.body(prompt), transfer=name), name.request)
        time.sleep(wait_s)
        connection.close()
        self.release(name, None)

    def _freed(self, begun: float, steps: float | None = None, still_s: float = STILL_S) -> float:
        """Seconds since `begun` until P runs nothing, holds nothing, and stays so; at the longest two leases.

        An engine reports its holds when a step has ended. If `steps` had ended before the step that counts, reports
        before the next one are not believed.
        """
        since = stepped = None
        while time.perf_counter() < begun + LEASE_S * 2:
            now = time.perf_counter()
            page = _page(self.p)
            if steps is not None and stepped is None and _metric(page, STEPS) > steps:
                stepped = now
            if any(_metric(page, f"vllm:{each}") > 0 for each in ("kv_cache_usage_perc", "num_requests_running")):
                since = None
            elif since is None:
                since = now
            elif now - since > still_s:
                return max(since, stepped or since) - begun
            time.sleep(0.02)
        return LEASE_S * 2

    # --- looking -----------------------------------------------------------------------------------------------------

    def held_blocks(self) -> int:
        """Blocks of P in use; while no request runs these are the held ones."""
        page = _page(self.p)
        blocks = _BLOCKS.search(page)
        total = int(blocks[1]) - 1 if blocks else 1  # one block is vLLM's own, and not in the share
        return round(_metric(page, "vllm:kv_cache_usage_perc") * total)

    def idle_cores(self) -> tuple[float, float]:
        """Cores that P uses while it is idle, and while it holds."""
        time.sleep(1)
        idle = cores_used(self.engines.running["p"], 3.0)
        name, prompt = self.prompt(300)
        transfer = self.prefill(name, prompt)
        time.sleep(2)
        holding = cores_used(self.engines.running["p"], 6.0)
        self.release(name, transfer)
        return idle, holding

    def rate(self) -> float:
        """Bytes a second of transfers, by vLLM's own count (the engine that pulls or pushes keeps it); 0 if it gives
        none.
        """
        pages = [_page(url) for url in (self.p, self.d)]
        seconds = sum(_metric(page, "vllm:nixl_xfer_time_seconds_sum") for page in pages)
        return sum(_metric(page, "vllm:nixl_bytes_transferred_sum") for page in pages) / seconds if seconds else 0.0


@contextmanager
def without_pause(act: Callable[[], None]) -> Iterator[None]:
    """Meanwhile a thread does this again and again."""
    over = threading.Event()

    def keep_on() -> None:
        while not over.is_set():
            act()

    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(keep_on)
        try:
            yield
        finally:
            over.set()
        acting.result()


def _seen(begun: float, answered: float, times: list[float]) -> Seen:
    steps = [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(times)]
    return Seen((answered - begun) * 1e3, (times[0] - answered) * 1e3, steps)


def summary(turns: Sequence[Sequence[Seen]]) -> dict[str, Any]:
    """The median hand-over less the median of D's later steps in the same run, its percentiles, and its parts.

    Each turn's median stays: of P's answer to D's first token, and of sending to D's first token. Another connector's
    turn of the same number ran a few seconds before or after it.
    """
    seen = [each for turn in turns for each in turn]
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
        "first_ms_by_turn": [round(statistics.median(each.first for each in turn), 3) for turn in turns],
        "sent_ms_by_turn": [round(statistics.median(each.prefill + each.first for each in turn), 3) for turn in turns],
    }


def _send(url: str, body: Any, request_id: str) -> HTTPConnection:
    parts = urlsplit(url)
    connection = HTTPConnection(str(parts.hostname), parts.port, timeout=120)
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    connection.request("POST", PATH, json.dumps(body).encode(), headers)
    return connection


def _post(url: str, body: Any, request_id: str, status: int = 200) -> Any:
    answer = _send(url, body, request_id).getresponse()
    if answer.status != status:
        raise SystemExit(f"bench-handoff: {answer.status} {answer.read()[:300]!r}")
    return answer


def _page(url: str) -> str:
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:  # noqa: S310 - an engine of ours
        return str(answer.read().decode())


def _metric(page: str, name: str) -> float:
    lines = page.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))
