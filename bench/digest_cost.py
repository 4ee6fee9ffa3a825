"""Processor time of digests of KV blocks: for 128 MiB on one side, by the size of a block's pieces.

    python -m bench.digest_cost [--json]

As in engines: BLAKE3, one digest a block over its bytes in all tensors. The figure is the CPU time of this process, the
least of five runs. Both sides pay it: P within a step, D on the thread that follows reads. Takes a few seconds, on any
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time

from blake3 import blake3

from kvtransfer.block_digests import DIGEST_BYTES, Region, Vouchers

TOTAL = 128 << 20
RUNS = 5
SHAPES = {"32 tensors of 512 KiB": (32, 512 << 10), "32 tensors of 64 KiB": (32, 64 << 10),
          "32 tensors of 8 KiB": (32, 8 << 10)}  # fmt: skip
"""Shapes of a block: 128 tokens and 16 tokens with 4 KiB of KV a token and layer (8B, 16 bits), and smaller ones."""


def cost_ms(tensors: int, length: int) -> float:
    """CPU milliseconds to vouch for 128 MiB in blocks of so many pieces of so many bytes."""
    blocks = TOTAL // (tensors * length)
    memory = os.urandom(blocks * length)
    regions = [Region(memoryview(bytearray(memory)), length, length) for _ in range(tensors)]
    offered, found = (memoryview(bytearray(blocks * DIGEST_BYTES)) for _ in range(2))
    vouchers = Vouchers(offered, found, regions, blake3)
    names = [block.to_bytes(16, "big") for block in range(blocks)]
    took = []
    for _ in range(RUNS):
        started = time.process_time()
        vouchers.vouch(range(blocks), names)
        took.append(time.process_time() - started)
    return 1000 * min(took)


def main() -> None:
    """Measure all shapes, and print milliseconds of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout, no table")
    args = parser.parse_args()
    told = {name: round(cost_ms(*shape), 1) for name, shape in SHAPES.items()}
    if args.json:
        print(json.dumps(told))
        return
    for name, took in told.items():
        print(f"{name:24} {took:6.1f} ms of a processor for 128 MiB")


if __name__ == "__main__":
    main()
