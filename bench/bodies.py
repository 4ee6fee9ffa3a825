"""Checks whether one allowed body can hold a router up: sends each of the worst known, and asks `/health` meanwhile.

    make bench-bodies                           all of them, about three minutes
    make bench-bodies ARGS="--only deep"        those whose name contains this

Mock engines stand behind a `baton router` that predicts (so that prompts are measured and named), with a fresh router
for each body: memory that an earlier body left behind would count for the next one. For each body it reports the
answer, the slowest `/health` between the body's first byte and its answer (asked every 2 ms by a thread that does
nothing else), and the router's peak of resident memory, by the kernel's own mark, above that of the idle router, over
the body's size. The first row sends nothing: it shows what the machine itself does to `/health`. Ends with 1 if a
target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bench.bodies_worst import Worst, bodies
from bench.processes import BATON_COMMAND, Cores, Running, cores, stopping
from bench.published import Table, machine, note_of, publish, result, say, show, target

HOLD_MS_MAX = 50.0
GROWTH_MAX = 3.0
GROWS_FROM = 4_000_000
"""Bytes from which on a body's memory is judged: with a smaller one a router's usual variation would be measured."""

ASK_EVERY_S = 0.002
ANSWER_S = 120.0
WARMING = Worst("a first request", lambda: b'{"prompt":"x","max_tokens":2,"stream":true}')
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Seen:
    """The results of one body."""

    name: str
    bytes: int
    status: int
    said: str
    slowest_ms: float
    """The best of the rounds: the body's effect comes every time, the machine's comes once."""
    took_ms: float
    growth: float
    """Memory at its peak less that of an idle router, over the body's size."""
    right: bool


class Asker:
    """Asks for `/health` all the time, on a connection of its own."""

    def __init__(self, endpoint: str) -> None:
        where = urlsplit(endpoint)
        self._socket = socket.create_connection((where.hostname, where.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._over = threading.Event()
        self.slowest_s = 0.0
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        with contextlib.suppress(OSError):
            while not self._over.wait(ASK_EVERY_S):
                began = time.perf_counter()
                self._socket.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                if not self._socket.recv(4096):
                    return
                self.slowest_s = max(self.slowest_s, time.perf_counter() - began)

    def stop(self) -> float:
        """Seconds of the slowest answer."""
        self._over.set()
        self._thread.join(ANSWER_S)
        self._socket.close()
        return self.slowest_s


def memory(pid: int, name: str) -> float:
    """A line of the kernel's account of a process' memory, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def send(endpoint: str, body: Worst, raw: bytes) -> tuple[int, str]:
    """The status of a body's answer, and its error's words."""
    where = urlsplit(endpoint)
    head = f"POST {body.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\nConnection: close\r\n"
    if body.content_type:
        head += f"Content-Type: {body.content_type}\r\n"
    with socket.create_connection((where.hostname, where.port), timeout=ANSWER_S) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(head.encode() + b"\r\n")
            connection.sendall(raw)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                answer += piece
    begin, _, rest = answer.partition(b"\r\n\r\n")
    words = re.search(rb'"message":\s*"((?:[^"\\]|\\.)*)"', rest)
    return int(begin.split(b" ", 2)[1]) if begin else 0, words[1].decode()[:100] if words else ""


def tried(router: Running, endpoint: str, body: Worst) -> Seen:
    """Send one body, some times, to a router that had no body before."""
    raw = body.make()
    send(endpoint, WARMING, WARMING.make())  # the router's imports and first lessons are no body's fault
    idle_bytes = memory(router.process.pid, "VmRSS")
    slowest, took, growth = [], [], 0.0
    status, said = 0, ""
    for _ in range(ROUNDS):
        pid = router.process.pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is that from here on
        asker = Asker(endpoint)
        began = time.perf_counter()
        status, said = send(endpoint, body, raw)
        took.append(time.perf_counter() - began)
        time.sleep(0.02)
        slowest.append(asker.stop())
        growth = max(growth, (memory(pid, "VmHWM") - idle_bytes) / len(raw))
    right = status == 200 if body.passes else status == 200 or 400 <= status < 500
    return Seen(body.name, len(raw), status, said, 1000 * min(slowest), 1000 * min(took), growth, right)


def quiet(endpoint: str) -> float:
    """The slowest `/health` in a second without any body, in milliseconds."""
    asker = Asker(endpoint)
    time.sleep(1)
    return 1000 * asker.stop()


@contextlib.contextmanager
def engines(where: Cores) -> Iterator[list[str]]:
    """Mock engines: the router's words that name them."""
    running: list[Running] = []
    with stopping(running):
        mocks = Running("engines", [sys.executable, "-m", "bench.engine", "--count", "2"], where.engines)
        running.append(mocks)
        prefill, decode = json.loads(mocks.line())
        yield ["--prefill-url", prefill, "--decode-url", decode]


@contextlib.contextmanager
def served(words: list[str], where: Cores) -> Iterator[tuple[Running, str]]:
    """A router before them."""
    running: list[Running] = []
    with stopping(running):
        started = [*BATON_COMMAND, "router", "--port", "0", "--admin-port", "0", "--json", "--policy", "workload"]
        router = Running("router", started + words, where.measured)
        running.append(router)
        said = json.loads(router.line())
        router.wait_for(f"{said['admin']}/ready")
        yield router, said["endpoint"]


def main() -> int:
    """Run the benchmark and report."""
    parser = argparse.ArgumentParser(prog="make bench-bodies", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="bodies whose name contains this")
    parser.add_argument(
        "--publish", action="store_true", help="write docs/benchmarks.md and docs/benchmarks/bodies.json"
    )
    args = parser.parse_args()
    facts = machine()
    found = []
    where = cores()
    with engines(where) as words:
        os.sched_setaffinity(0, where.sender)
        with served(words, where) as (_, endpoint):
            idle_ms = quiet(endpoint)
        say(f"nothing: slowest /health {idle_ms:.1f} ms")
        for body in bodies():
            if args.only in body.name:
                with served(words, where) as (router, endpoint):
                    seen = tried(router, endpoint, body)
                found.append(seen)
                say(f"{seen.name}: {seen.status}, {seen.slowest_ms:.1f} ms, {seen.growth:.1f} times; {seen.said}")
    rows = [["nothing", "", "", f"{idle_ms:.1f}", "", ""]]
    rows += [
        [each.name, f"{each.bytes / 1e6:.2f}", str(each.status), f"{each.slowest_ms:.1f}", f"{each.took_ms:.0f}",
         f"{each.growth:.2f}"]
        for each in found
    ]  # fmt: skip
    columns = ("body", "MB", "answer", "slowest /health, ms", "answered in, ms", "memory, times its size")
    table = Table("One body and other requests", columns, rows)
    show([table])
    judged = [each.growth for each in found if each.bytes >= GROWS_FROM]
    targets = {
        "slowest /health while one body is read, ms": target(
            max((each.slowest_ms for each in found), default=None), HOLD_MS_MAX
        ),
        "bodies that were not answered as they should": target(sum(not each.right for each in found), 0.0),
    }
    if judged:  # with --only no body may be large enough
        targets["memory at its peak, times the body's size"] = target(max(judged), GROWTH_MAX)
    told = result("bodies", {"idle_ms": round(idle_ms, 2), "bodies": [asdict(each) for each in found]}, targets)
    if args.publish:
        publish(told, [table], facts, note_of(facts))
    return 0 if all(each["met"] for each in targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
