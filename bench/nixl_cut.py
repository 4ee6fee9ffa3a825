"""Which calls end a NIXL read that is under way: tries each, and checks whether the memory is written afterwards.

    python -m bench.nixl_cut [--json]

Over TCP a read of 512 MiB begins; in its middle the process that holds the memory is stopped (SIGSTOP), as by a machine
that stalls. The read is given up in one of the ways, our memory is overwritten with a pattern, the holder goes on
(SIGCONT), and two seconds later the pattern is checked. If NIXL reports success but the pattern has changed, no block
may be freed in this way. docs/handoff.md says what the connector does. Takes about half a minute, on any machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
import zlib
from typing import Any

import nixl

from bench import published

_bindings: Any = nixl._bindings  # noqa: SLF001 - the Python class above it has no way to set the delay
BACKEND = "UCX"
PROGRESS_DELAY_US = 1_000
"""How often the progress thread looks, in microseconds."""
BYTES = 512 << 20
PARTS = 8
LOOK_AFTER_S = 2.0
WAYS = {
    "nothing": (),
    "releaseXferReq": ("release",),
    "invalidateRemoteMD, releaseXferReq": ("invalidate", "release"),
    "deregisterMem": ("deregister",),
    "the agent is destroyed": ("destroy",),
}


class Site:
    """A bare NIXL agent, and its memory."""

    def __init__(self, name: str) -> None:
        config = _bindings.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, PROGRESS_DELAY_US
        self.agent: Any = _bindings.nixlAgent(name, config)
        self.backend = self.agent.createBackend(BACKEND, {})
        self.pages = mmap.mmap(-1, BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self.registered = _bindings.nixlRegDList(_bindings.DRAM_SEG, [(self.address, BYTES, 0, "")])
        self.agent.registerMem(self.registered, [self.backend])


def hold() -> None:
    """The other process: prints its address, and waits to be killed."""
    site = Site("holder")
    ctypes.memset(site.address, 7, BYTES)
    sys.stdout.write(json.dumps({"metadata": site.agent.getLocalMD().hex(), "address": site.address}) + "\n")
    sys.stdout.flush()
    time.sleep(60)


def read(way: str) -> dict[str, Any]:
    """One read, given up in one way; NIXL's answer and the fate of the memory."""
    words = [sys.executable, "-m", "bench.nixl_cut", "--hold"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            return _read(way, holder.pid, json.loads(holder.stdout.readline()))
        finally:
            holder.kill()


def _read(way: str, holder: int, said: dict[str, Any]) -> dict[str, Any]:
    site = Site("reader")
    peer = site.agent.loadRemoteMD(bytes.fromhex(said["metadata"])).decode()
    size = BYTES // PARTS

    def part(number: int) -> Any:
        ours = _bindings.nixlXferDList(_bindings.DRAM_SEG, [(site.address + number * size, size, 0)])
        theirs = _bindings.nixlXferDList(_bindings.DRAM_SEG, [(said["address"] + number * size, size, 0)])
        return site.agent.createXferReq(_bindings.NIXL_READ, ours, theirs, peer, "", [site.backend])

    first = part(0)  # so that the connection stands
    status = site.agent.postXferReq(first, "")
    while status == _bindings.NIXL_IN_PROG:
        status = site.agent.getXferStatus(first)
    flights = [part(number) for number in range(PARTS)]
    for flight in flights:
        site.agent.postXferReq(flight, "")
    os.kill(holder, signal.SIGSTOP)
    under_way = sum(site.agent.getXferStatus(flight) == _bindings.NIXL_IN_PROG for flight in flights)
    answers: list[str] = []
    for step in WAYS[way]:
        answers += _give_up(step, site, peer, flights)
    ctypes.memset(site.address, 1, BYTES)
    painted = zlib.crc32(site.pages)
    os.kill(holder, signal.SIGCONT)
    time.sleep(LOOK_AFTER_S)
    return {
        "parts_under_way": under_way,
        "nixl_says": sorted({answer.removeprefix("nixl_status_t.") for answer in answers}),
        "written_afterwards": zlib.crc32(site.pages) != painted,
    }


def _give_up(step: str, site: Site, peer: str, flights: list[Any]) -> list[str]:
    match step:
        case "release":
            return [str(site.agent.releaseXferReq(flight)) for flight in flights]
        case "invalidate":
            return [str(site.agent.invalidateRemoteMD(peer))]
        case "deregister":
            return [str(site.agent.deregisterMem(site.registered, [site.backend]))]
        case _:
            site.agent = None
            return []


def main(words: list[str]) -> int:
    """Try each way in a process of its own, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the line of JSON alone on stdout, no table")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.hold:
        hold()
        return 0
    if arguments.one:
        sys.stdout.write(json.dumps(read(arguments.one)) + "\n")
        sys.stdout.flush()
        os._exit(0)  # NIXL waits for its open reads
    figures: dict[str, Any] = {}
    for way in WAYS:
        again = [sys.executable, "-m", "bench.nixl_cut", "--one", way]
        environment = {**os.environ, "UCX_TLS": "tcp"}
        done = subprocess.run(again, env=environment, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            published.say(done.stderr[-2000:])
            return 2
        figures[way] = json.loads(done.stdout.splitlines()[-1])
    rows = [
        [
            way,
            str(found["parts_under_way"]),
            ", ".join(found["nixl_says"]) or "-",
            "yes" if found["written_afterwards"] else "no",
        ]
        for way, found in figures.items()
    ]
    if not arguments.json:
        columns = ["given up by", "parts under way", "NIXL answers", "written afterwards"]
        published.show([published.Table("A read over TCP whose holder was stopped", columns, rows)])
    published.result("nixl_cut", figures, {})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
