"""Block digests in one worker: its own tables in registered memory, those of its peers, and the comparison.

`kvtransfer.block_digests` defines a digest; this module provides its memory and its reads. Runs inside vLLM's workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from decode.peers import NOT_ITS_OWN
from engine.vllm.connector.pages import PagedMemory
from kvtransfer.block_digests import DIGEST_BYTES, Hash, Region, Vouchers, runs

logger = logging.getLogger("vllm.baton.worker")

BLOCKS_MAX: Final = 1 << 28
"""No engine has more blocks: a peer's number is checked against this before it becomes an address."""


class Digests:
    """The digests of one rank. Call `begin` first."""

    def __init__(self, blocks: int) -> None:
        """`blocks`: the number of blocks of its KV cache."""
        self.blocks = blocks
        self.offered, self._landing = (PagedMemory(blocks * DIGEST_BYTES) for _ in range(2))
        self._tables: dict[tuple[str, int], tuple[int, int]] = {}
        """As D, the producers' tables: by engine and rank, the address and the number of blocks."""
        self._vouchers: Vouchers | None = None

    @property
    def memory(self) -> tuple[PagedMemory, PagedMemory]:
        """The memory to register."""
        return self.offered, self._landing

    def begin(self, regions: Sequence[Region], new: Callable[[bytes], Hash] | None = None) -> None:
        """The KV memory exists now. `new` makes a hash of a name; None: BLAKE3, vLLM's own."""
        if new is None:
            from blake3 import blake3  # noqa: PLC0415 - BLAKE2, Python's own, takes four times as long

            new = blake3
        self._vouchers = Vouchers(self.offered.view, self._landing.view, regions, new)

    # --- peers ---

    def meet(self, engine: str, rank: int, told: object) -> bool:
        """Take a producer's data about its table; returns whether the table is usable."""
        match told:
            case [int(address), int(blocks)] if address > 0 and 0 < blocks <= BLOCKS_MAX:
                self._tables[engine, rank] = address, blocks
                return True
        return False

    def part(self, engine: str) -> None:
        """The producer is gone."""
        for key in [each for each in self._tables if each[0] == engine]:
            del self._tables[key]

    # --- as P ---

    def vouch(self, prompts: Mapping[str, tuple[Sequence[int], Sequence[bytes]]]) -> bool:
        """These prompts are computed: write their blocks' digests. Returns whether all are written. Never raises: that
        would end the engine, and a consumer computes prompts without digests itself.
        """
        try:
            for blocks, names in prompts.values():
                assert self._vouchers is not None
                self._vouchers.vouch(blocks, names)
        except Exception:  # an error here would end the engine; without digests D computes the prompts itself
            logger.exception("%d prompts are not vouched for", len(prompts))
            return False
        return True

    # --- as D ---

    def read(self, nixl: Any, agent: str, source: tuple[str, int], remote: Sequence[int], local: Sequence[int]) -> Any:
        """Post the read of the digests of these blocks at `source` (engine and rank). Returns its handle.

        Raises:
            LookupError: the source has no such table, or no such block in it.
        """
        assert self._vouchers is not None
        address, blocks = self._tables[source]
        if not all(0 <= block < blocks for block in remote):
            raise LookupError(f"{source[0]} vouches for {blocks} blocks")
        self._vouchers.forget(local)
        here, there = [], []
        for first, ours, count in runs(remote, local):
            here.append((self._landing.address + ours * DIGEST_BYTES, count * DIGEST_BYTES, 0))
            there.append((address + first * DIGEST_BYTES, count * DIGEST_BYTES, 0))
        handle = nixl.initialize_xfer(
            "READ", nixl.get_xfer_descs(here, "DRAM"), nixl.get_xfer_descs(there, "DRAM"), agent
        )
        nixl.transfer(handle)
        return handle

    def compare(self, names: Sequence[bytes], local: Sequence[int]) -> Callable[[], str]:
        """A function to call once all bytes have arrived. It returns why these blocks, named by `names`, must not be
        used; empty: they may.
        """
        vouchers = self._vouchers
        assert vouchers is not None
        return lambda: NOT_ITS_OWN if vouchers.wrong(local, names) else ""
