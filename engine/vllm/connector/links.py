"""A worker's links with other engines: which were introduced, where their slots are, and how each link stands.

The worker shakes hands (vLLM's part). This module decides with which engines, and what a peer's metadata must say. Runs
inside vLLM's workers. vLLM's thread calls it; `try_all` runs on the handshake thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlHandshakePayload

from decode.peers import MET
from decode.rank_links import GONE
from engine.vllm.connector.digests import Digests
from engine.vllm.connector.metadata import DIGESTS, TABLE
from kvtransfer.asks import Introduce
from kvtransfer.hold_marks import SLOT_BYTES, SLOTS_MAX, Slot

logger = logging.getLogger("vllm.baton.worker")


class NotServed(RuntimeError):
    """A pull that cannot be served; this engine computes the prompt."""


class SlotTable(NamedTuple):
    """The slots of one rank of a producer."""

    address: int
    slots: int

    def place(self, slot: Slot) -> int:
        """The address of one slot."""
        return self.address + slot.index * SLOT_BYTES


class Links:
    """The links of one rank, by the other engine's id."""

    def __init__(self, digests: Digests | None, readable: Callable[[str, int], bool]) -> None:
        """`digests`: learns of peers' tables of digests; None: digests are off. `readable`: whether the slot at an
        address of a peer's NIXL agent can be read.
        """
        self._digests: Final = digests
        self._readable: Final = readable
        self._introduced: Final[dict[str, Introduce]] = {}
        self._standing: Final[dict[str, str]] = {}
        """How the link with each engine stands: `MET`, or why nothing can be read."""
        self._tables: Final[dict[tuple[str, int], SlotTable]] = {}
        self._news: dict[str, str] = {}

    # --- introductions ---

    def __contains__(self, engine: str) -> bool:
        """Whether the engine was introduced."""
        return engine in self._introduced

    def introduce(self, met: Introduce) -> list[str]:
        """An engine was introduced. Returns the former lives of its instance, which are to be forgotten."""
        self._introduced[met.engine_id] = met
        lives = [each.engine_id for each in self._introduced.values() if each.instance == met.instance]
        return [each for each in lives if each != met.engine_id]

    def forget(self, engine: str) -> None:
        """An engine is gone. What is known of its ranks stays until vLLM releases it (`released`)."""
        self._introduced.pop(engine, None)

    def address(self, engine: str) -> tuple[str, int]:
        """For vLLM's handshake: the instance's name in place of a host, and its number of ranks; unknown: "" and 1."""
        met = self._introduced.get(engine)
        return ("", 1) if met is None else (met.instance, met.ranks)

    def introduction(self, engine: str) -> Introduce:
        """The introduction of an engine.

        Raises:
            NotServed: the engine was not introduced.
        """
        met = self._introduced.get(engine)
        if met is None:
            raise NotServed(f"engine {engine} was not introduced to this one")
        return met

    # --- handshakes ---

    def slots(self, met: Introduce, rank: int, told: Mapping[str, Any]) -> SlotTable:
        """The slots of a rank that has `told` its metadata.

        Raises:
            NotServed: the rank has no slots, or no digests where they are needed.
        """
        match told.get(TABLE):
            case [int(address), int(slots)] if address > 0 and 0 < slots <= SLOTS_MAX:
                pass
            case _:
                raise NotServed(f"{met.instance} has no slots: it does not run Baton's connector")
        if self._digests is not None and not self._digests.meet(met.engine_id, rank, told.get(DIGESTS)):
            raise NotServed(f"{met.instance} does not vouch for its blocks: `digests` is on here and off there")
        return SlotTable(address, slots)

    def reached(self, engine: str, rank: int, slots: SlotTable) -> None:
        """NIXL knows this rank now, and its slots are there."""
        self._tables[engine, rank] = slots

    def table(self, engine: str, rank: int) -> SlotTable:
        """The slots of a rank; a table of 0 slots if the rank was not reached."""
        return self._tables.get((engine, rank), SlotTable(0, 0))

    def check_slot(self, engine: str, ranks: Iterable[int], slot: Slot | None) -> None:
        """Check that a pull from these ranks could be confirmed.

        Raises:
            NotServed: the hold has no slot, or one of the ranks has no such slot.
        """
        if slot is None:
            raise NotServed("nothing would confirm that the hold outlived our read")
        for rank in ranks:
            if slot.index >= self.table(engine, rank).slots:
                raise NotServed(f"rank {rank} of {engine} has no slot {slot.index}")

    def released(self, engine: str) -> None:
        """vLLM has dropped the engine."""
        for key in [each for each in self._tables if each[0] == engine]:
            del self._tables[key]
        if self._digests is not None:
            self._digests.part(engine)
        self._standing.pop(engine, None)
        self._news[engine] = GONE

    # --- how links stand ---

    def report_met(self, engine: str) -> bool:
        """Report once more that the engine can be read, if so: the scheduler half may have forgotten. Returns whether
        the engine can be read.
        """
        stands = self._standing.get(engine) == MET
        if stands:
            self._news[engine] = MET
        return stands

    def try_all(self, engine: str, agents: Mapping[tuple[int, int], str]) -> None:
        """Read a slot of each rank of an engine, and note how the link stands. On the handshake thread."""
        standing = MET
        for (_, rank), agent in agents.items():
            if not self._readable(agent, self._tables[engine, rank].address):
                standing = f"{MET}, and rank {rank} cannot be read"
                logger.warning("engine %s was introduced, and its rank %d cannot be read", engine, rank)
        self._standing[engine] = self._news[engine] = standing

    @property
    def has_news(self) -> bool:
        """Whether any link was tried or released since the last `take_news`."""
        return bool(self._news)

    def take_news(self) -> dict[str, str]:
        """The state of each link that was tried or released since the last call, by engine."""
        news, self._news = self._news, {}
        return news


def offered(stock: NixlHandshakePayload, table: SlotTable, digests: Digests | None) -> NixlHandshakePayload:
    """A rank's own metadata for other engines: vLLM's (`stock`), with its slots and its digests."""
    told = msgspec.msgpack.decode(stock.agent_metadata_bytes)
    told[TABLE] = list(table)
    if digests is not None:
        told[DIGESTS] = [digests.offered.address, digests.blocks]
    return NixlHandshakePayload(
        compatibility_hash=stock.compatibility_hash, agent_metadata_bytes=msgspec.msgpack.encode(told)
    )


def described(met: Introduce, rank: int, compat_hash: str | None) -> tuple[NixlAgentMetadata, Mapping[str, Any]]:
    """A rank's metadata: vLLM's part of it, and all of it.

    Args:
        met: what the engine was introduced with.
        rank: one of its ranks.
        compat_hash: the hash that it must have (vLLM's `compat_hash`); None: any.

    Raises:
        NotServed: nothing is known of this rank, or it is not compatible.
    """
    data = next((each.data for each in met.payloads if (each.stage, each.rank) == (0, rank)), None)
    if data is None:
        raise NotServed(f"{met.instance}: nothing is known of its rank {rank}")
    handshake = msgspec.msgpack.decode(data, type=NixlHandshakePayload)
    if compat_hash is not None and handshake.compatibility_hash != compat_hash:
        raise NotServed(
            f"{met.instance} serves another model, or with another vLLM, number type or attention backend "
            f"(its hash is {handshake.compatibility_hash}, ours {compat_hash})"
        )
    metadata = msgspec.msgpack.decode(handshake.agent_metadata_bytes, type=NixlAgentMetadata)
    if metadata.engine_id != met.engine_id:
        raise NotServed(f"{met.instance} was introduced as {met.engine_id} and is {metadata.engine_id}")
    return metadata, msgspec.msgpack.decode(handshake.agent_metadata_bytes)
