"""Blocks that a worker of D reads before their hold is there (`decode.early_reads`), until the pull of the rest joins
them. Runs inside vLLM's workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta

from decode.early_reads import PartRead

NOT_HELD: Final = "what was read early is not the hold's"
BROKEN: Final = "an early read could not begin"


@dataclass(slots=True)
class EarlyRead:
    """What was read early for one request."""

    first: int
    """The index in the prompt of its first block."""
    remote: list[int] = field(default_factory=list)
    local: list[int] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    """All its reads. Each may be under way, or have ended."""
    broken: bool = False
    """Whether a read could not begin: the others may be under way, so nothing is read into its blocks any more."""
    refused: bool = False
    """Whether nothing can be read early here."""

    def joins(self, meta: Any) -> str:
        """Let a pull read only what was not read early. Returns why it cannot; empty: it can."""
        if self.broken:
            return BROKEN
        (cached,), (local,), remote = meta.local_num_computed_blocks, meta.local_block_ids, meta.remote.block_ids[0]
        many = len(self.remote)
        if many and (
            cached != self.first
            or list(remote[cached : cached + many]) != self.remote
            or list(local[:many]) != self.local
            or len(local) <= many
        ):
            return NOT_HELD
        meta.local_block_ids = (list(local[many:]),)
        meta.local_num_computed_blocks = (cached + many,)
        return ""


class EarlyReadsHere:
    """The early reads of one rank, by request."""

    def __init__(self) -> None:
        self._reads: Final[dict[str, EarlyRead]] = {}
        self.joined: Final[set[str]] = set()
        """Pulls of which some was read early: the time of those reads says nothing of the wire."""

    def open(self, request: str, part: PartRead) -> EarlyRead | None:
        """What was read for the request, which this part continues; None: the part is not to be read."""
        read = self._reads.setdefault(request, EarlyRead(part.first))
        if read.broken or read.refused or part.first != read.first + len(read.remote):
            return None
        return read

    def take(self, request: str) -> EarlyRead | None:
        """What was read for the request, whose reads are the caller's from now on; None: nothing was."""
        return self._reads.pop(request, None)


def wanted(part: PartRead) -> ReqMeta:
    """A part as vLLM's connector takes a pull."""
    remote = RemoteMeta(block_ids=(list(part.remote),), host="", port=0, engine_id=part.engine, request_id=part.request)
    local = (list(part.local),)
    return ReqMeta(local, local, 1, local_num_computed_blocks=(0,), remote=remote, awaiting_kvs=True)
