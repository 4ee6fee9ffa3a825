"""What our endpoint leaves of NIXL's speed: a pull through it beside a bare NIXL loop, in the same process and run.

    python -m bench.nixl [--quick] [--publish]

Two processes of this machine: one holds blocks and, while they are read, does nothing; the other reads them, by turns

    bare       NIXL's prepared lists, one transfer for all blocks, its state asked for until it is done
    endpoint   ledger, claim, parts in turns, the stamp read after the last part: from reservation to use

Both read the same blocks into the same memory. A figure is the best of the rounds of each way: what others do on the
machine only ever adds. CPU is the reader's, medians. `TCP` takes shared memory away from UCX, so bytes go through
sockets and need the holder's progress thread, as between machines without RDMA. Contiguous blocks are what an empty
engine hands out, scattered ones an old one. Exit code 1 when the endpoint is below the target anywhere.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench import published
from cluster.ids import InstanceId, RequestId, TransferId
from kvtransfer.carrier import Memory, Progress, Way
from kvtransfer.endpoint import Endpoint, OurMemory
from kvtransfer.events import Allocated, Filled, FreeBlocks, OpenHold, Proof, ReservePull, Use
from kvtransfer.introduction import read_introduction
from kvtransfer.layout import Shard, Tensor, grids, pieces
from kvtransfer.ledger import Ledger
from kvtransfer.messages import Peer
from kvtransfer.nixl import Nixl
from kvtransfer.stamps import STAMP_BYTES, StampTable, read_stamp
from kvtransfer.terms import Terms

TENSORS = 32
"""KV tensors of a model of 32 layers whose K and V stand in one block."""
TOTAL_BYTES = 128 << 20
"""1,000 tokens of Llama-3.1-8B. The endpoint's part of a pull is about a millisecond, whatever its size."""
BLOCK_BYTES = (16 << 10, 64 << 10)
"""Of one tensor. 16 tokens x 1,024 values x 2 (K and V) x 2 bytes are 64 KiB: Llama-3.1-8B."""
TARGET = 0.95
SLOTS = 16
PATIENCE_S = 30.0
P, D = InstanceId("p"), InstanceId("d")


def memory(block_bytes: int) -> tuple[OurMemory, StampTable, mmap.mmap]:
    """Tensors of twice as many blocks as are moved, a stamp table and scratch."""
    blocks = 2 * TOTAL_BYTES // TENSORS // block_bytes
    each = blocks * block_bytes
    pages = mmap.mmap(-1, each * TENSORS + 2 * SLOTS * STAMP_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    ctypes.memset(address, 1, each * TENSORS)
    stamps = each * TENSORS
    scratch = stamps + SLOTS * STAMP_BYTES
    view = memoryview(pages)
    ours = OurMemory(
        tensors=tuple(Tensor(address + each * number, block_bytes, blocks) for number in range(TENSORS)),
        stamps=address + stamps,
        slots=SLOTS,
        scratch=address + scratch,
        scratch_view=view[scratch:],
    )
    return ours, StampTable(view[stamps:scratch], os.urandom(32)), pages


def endpoint(name: InstanceId, block_bytes: int) -> Endpoint:
    """One with room for everything."""
    ours, table, _pages = memory(block_bytes)
    proofs = (Proof(str(number), "bench", 60.0) for number in itertools.count())
    return Endpoint(
        Peer(name, 1),
        Ledger(1, Terms()),
        Nixl(f"{name}-{os.getpid()}"),
        ours,
        key=lambda _: bytes(32),
        admit=lambda _by, _message: next(proofs),
        stamps=table,
    )


def hold(words: Sequence[str]) -> None:
    """The other process: holds what it is told to, one order a line."""
    end = endpoint(P, int(words[0]))
    for line in sys.stdin:
        order = json.loads(line)
        if "introduce" in order:
            end.introduce(bytes.fromhex(order["introduce"]), time.monotonic())
            told: dict[str, Any] = {"introduction": end.introduction().hex()}
        elif "hold" in order:
            id_ = TransferId(RequestId(order["hold"]), 1, 1)
            end.tell(OpenHold(id_, "bench"), time.monotonic())
            end.tell(Filled(id_, tuple(order["blocks"]), len(order["blocks"])), time.monotonic())
            stamp = end.stamp(id_)
            told = {"stamp": stamp.text() if stamp else None}
        else:
            told = {"freed": "settle" in order and wait_free(end)}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


def wait_free(end: Endpoint) -> bool:
    """Look after the endpoint until the release came."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if any(isinstance(effect, FreeBlocks) for effect in end.poll(time.monotonic())):
            return True
        time.sleep(0.0005)
    return False


class Holder:
    """The other process, from here."""

    def __init__(self, block_bytes: int) -> None:
        words = [sys.executable, "-m", "bench.nixl", "--hold", str(block_bytes)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **order: Any) -> dict[str, Any]:
        """One order and its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


class Reader:
    """Reads the same blocks both ways."""

    def __init__(self, block_bytes: int) -> None:
        self.end = endpoint(D, block_bytes)
        self.holder = Holder(block_bytes)
        said = bytes.fromhex(self.holder.ask(introduce=self.end.introduction().hex())["introduction"])
        self.end.introduce(said, time.monotonic())
        found = read_introduction(said)
        assert found is not None and self.end.peers
        ours = self.end._memory.tensors  # noqa: SLF001 - the bare loop reads into the very same memory
        self.grids, self.their_grids = grids(ours, found.tensors, Shard(), Shard())
        self.ours = self.end.carrier.prepare(None, self.grids)
        self.theirs = self.end.carrier.prepare(found.agent, self.their_grids, Memory.DRAM)
        self.numbers = itertools.count()

    def bare(self, blocks: Sequence[int]) -> tuple[float, float]:
        """Seconds, and seconds of CPU, of a bare NIXL loop: the carrier, and nothing of the endpoint."""
        carrier = self.end.carrier
        self.holder.ask()  # as before a pull: both begin where the other process has just run
        begun, cpu = time.perf_counter(), time.process_time()
        mine, others = pieces(self.grids, blocks), pieces(self.their_grids, blocks)
        flight = carrier.post(Way.READ, self.ours, mine, self.theirs, others)
        while carrier.look(flight) is Progress.UNDER_WAY:
            pass
        took = time.perf_counter() - begun, time.process_time() - cpu
        assert carrier.look(flight) is Progress.DONE and carrier.release(flight)
        self.holder.ask()
        return took

    def through(self, blocks: Sequence[int]) -> tuple[float, float]:
        """The same of a pull through the endpoint, from the reservation to the use."""
        name = f"r{next(self.numbers)}"
        id_ = TransferId(RequestId(name), 1, 1)
        stamp = read_stamp(self.holder.ask(hold=name, blocks=list(blocks))["stamp"])
        begun, cpu = time.perf_counter(), time.process_time()
        now = time.monotonic()
        self.end.tell(ReservePull(id_, P, tuple(blocks), len(blocks), name), now, stamp=stamp)
        effects = self.end.tell(Allocated(id_, tuple(blocks)), now)
        while not effects:
            effects = self.end.poll(time.monotonic())
        took = time.perf_counter() - begun, time.process_time() - cpu
        assert isinstance(effects[0], Use), effects
        assert self.holder.ask(settle=True)["freed"]
        return took


def measure(block_bytes: int, rounds: int) -> dict[str, Any]:
    """Both ways by turns, contiguous and scattered."""
    reader = Reader(block_bytes)
    count = TOTAL_BYTES // TENSORS // block_bytes
    dice = random.Random(1)
    figures: dict[str, Any] = {}
    try:
        for name, blocks in (("contiguous", range(count)), ("scattered", dice.sample(range(2 * count), count))):
            took: dict[str, list[tuple[float, float]]] = {"bare": [], "through": []}
            for number in range(rounds + 2):  # the first two open connections and touch pages
                for way in [reader.bare, reader.through] if number % 2 else [reader.through, reader.bare]:
                    took[way.__name__].append(way(blocks))
            best = {way: min(seconds for seconds, _ in rounds_of[2:]) for way, rounds_of in took.items()}
            spent = {way: statistics.median(cpu for _, cpu in rounds_of[2:]) for way, rounds_of in took.items()}
            figures[name] = {
                "bare_gb_s": round(TOTAL_BYTES / best["bare"] / 1e9, 2),
                "endpoint_gb_s": round(TOTAL_BYTES / best["through"] / 1e9, 2),
                "share": round(best["bare"] / best["through"], 3),
                "bare_cpu_ms": round(1e3 * spent["bare"], 1),
                "endpoint_cpu_ms": round(1e3 * spent["through"], 1),
            }
        stood = reader.end.counts.stamps_stood
        assert stood == 2 * (rounds + 2), "every use was confirmed by its stamp"
    finally:
        reader.holder.close()
        reader.end.close()
    return figures


def main(words: list[str]) -> int:
    """Measure, tell, publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--publish", action="store_true", help="write docs/")
    parser.add_argument("--hold", nargs=1, metavar="BYTES", help=argparse.SUPPRESS)
    parser.add_argument("--one", type=int, metavar="BYTES", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    rounds = 7 if arguments.quick else 31
    if arguments.hold:
        hold(arguments.hold)
        return 0
    if arguments.one:
        print(json.dumps(measure(arguments.one, rounds)))
        return 0
    facts = published.machine()
    figures: dict[str, Any] = {}
    rows = []
    for wire, environment in (("shared memory", {}), ("TCP", {"UCX_TLS": "tcp"})):
        for size in BLOCK_BYTES:
            again = [sys.executable, "-m", "bench.nixl", "--one", str(size), *(["--quick"] if arguments.quick else [])]
            done = subprocess.run(again, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
            if done.returncode:
                published.say(done.stderr[-2000:])
                return 2
            for order, found in json.loads(done.stdout.splitlines()[-1]).items():
                figures[f"{wire}, {size >> 10} KiB, {order}"] = found
                rows.append([wire, f"{size >> 10} KiB", order, *(f"{each:.2f}" for each in found.values())])
                published.say(f"nixl: {rows[-1]}")
    worst = min(found["share"] for found in figures.values())
    targets = {"worst_share_of_bare_nixl": published.target(worst, TARGET, at_most=False)}
    columns = [
        "wire",
        "block of one tensor",
        "blocks",
        "bare NIXL, GB/s",
        "endpoint, GB/s",
        "share",
        "bare, CPU ms",
        "endpoint, CPU ms",
    ]
    tables = [published.Table(f"{TOTAL_BYTES >> 20} MiB in {TENSORS} tensors, one process to another", columns, rows)]
    published.show(tables)
    told = published.result("nixl", figures, targets)
    if arguments.publish:
        note = published.note_of(facts, f"best of {rounds} rounds, both ways by turns")
        published.publish(told, tables, facts, note)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
