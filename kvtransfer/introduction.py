"""What one rank's endpoint tells others so that they can reach it: its name, life, memory, stamps. Pure and total.

It carries the carrier's own metadata, which a library in another language reads and which gives access to memory. So
what it is in goes sealed from agent to agent (`kvtransfer.seal`), and has a digest: bytes that were cut or changed on
the way never reach that library.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from cluster.ids import InstanceId
from kvtransfer.carrier import Memory
from kvtransfer.layout import Shard, Tensor
from kvtransfer.messages import Peer
from kvtransfer.packing import Malformed, Packed, Packer

VERSION = 1
BYTES_MAX = 1 << 20
TENSORS_MAX = 4096
METADATA_BYTES_MAX = 1 << 19
_DIGEST_BYTES = 16
_MAGIC = b"baton-introduction\x00"


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """One rank of one life of an instance."""

    peer: Peer
    link: int
    """Names the connection: never used again by this instance, in no other life either."""
    agent: str
    """The carrier's name of it."""
    metadata: bytes
    shard: Shard
    tensors: tuple[Tensor, ...]
    memory: Memory = Memory.DRAM
    stamps: int = 0
    """Where its stamp table is."""
    slots: int = 0
    """How many stamps it holds; 0: it stamps nothing."""

    def pack(self) -> bytes:
        """As bytes.

        Raises:
            ValueError: a value out of the range of the format.
        """
        if len(self.metadata) > METADATA_BYTES_MAX or not 1 <= len(self.tensors) <= TENSORS_MAX:
            raise ValueError("an introduction of a size that nobody would read")
        packer = Packer().byte(VERSION).text(self.peer.instance).number(self.peer.epoch).number(self.link)
        packer.text(self.agent).byte(self.memory is Memory.VRAM)
        packer.number(self.shard.tp).number(self.shard.rank).number(self.shard.heads).number(self.shard.outer)
        packer.number(self.stamps).number(self.slots).number(len(self.tensors))
        for each in self.tensors:
            packer.number(each.address).number(each.block_bytes).number(each.blocks).number(each.device)
        data = packer.number(len(self.metadata)).raw(self.metadata).done()
        return data + _digest(data)


def read_introduction(data: object) -> Introduction | None:
    """What `pack` made these bytes of; None for anything else. Never raises."""
    if not isinstance(data, bytes) or not _DIGEST_BYTES < len(data) <= BYTES_MAX:
        return None
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if digest != _digest(body):
        return None
    try:
        return _read(Packed(body))
    except ValueError:  # Malformed is one
        return None


def _read(packed: Packed) -> Introduction:
    if packed.byte() != VERSION:
        raise Malformed("another version")
    peer = Peer(InstanceId(packed.text()), packed.number())
    link, agent = packed.number(), packed.text()
    memory = Memory.VRAM if packed.byte() else Memory.DRAM
    tp, rank, heads, outer = (packed.number() for _ in range(4))
    stamps, slots, count = packed.number(), packed.number(), packed.number()
    if max(tp, heads, outer) > 1 << 16 or count > TENSORS_MAX:
        raise Malformed("impossible numbers")
    tensors = tuple(Tensor(*(packed.number() for _ in range(4))) for _ in range(count))
    length = packed.number()
    if length > METADATA_BYTES_MAX or not tensors:
        raise Malformed("impossible numbers")
    metadata = packed.raw(length)
    packed.end()
    return Introduction(
        peer=peer,
        link=link,
        agent=agent,
        metadata=metadata,
        shard=Shard(tp, rank, heads, outer),
        tensors=tensors,
        memory=memory,
        stamps=stamps,
        slots=slots,
    )


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(_MAGIC + data).digest()[:_DIGEST_BYTES]
