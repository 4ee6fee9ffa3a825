"""The agent socket in the connector's scheduler half: answers from memory, and keeps the rest for the next step.

The socket's own threads call it, and vLLM's thread takes what waits. Runs inside vLLM's engine core.
"""

from __future__ import annotations

import logging
import queue
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from decode.peers import PEERS_MAX, ProducerPeers
from decode.pulls import Pulls
from kvtransfer.asks import DTYPE, Ask, HeldState, Introduce, Metadata, Payload
from kvtransfer.door import Door
from prefill.holds import Holds

logger = logging.getLogger("vllm.baton.scheduler")


class AgentSocket:
    """The socket of one engine. It is shut until `open`."""

    def __init__(
        self,
        path: str | None,
        engine_id: str,
        epoch: int,
        dtype: str,
        peers: ProducerPeers,
        *,
        state: Callable[[], dict[str, Any]],
        wake: Callable[[], None],
    ) -> None:
        """`path`: where it opens; None: nowhere. `engine_id`, `epoch` and `dtype` (its number format): of the
        engine, told to agents. `peers` are read, `state` gives the answer to `HeldState`, and `wake` is called when
        something waits for a step. All three on a thread of the socket.
        """
        self._path: Final = path
        self._about: Final[dict[str, Any]] = {"engine_id": engine_id, "epoch": epoch, DTYPE: dtype}
        self._peers: Final = peers
        self._state: Final = state
        self._wake: Final = wake
        self._door: Door | None = None
        self._metadata: dict[str, Any] = {}
        self._asked: Final[queue.SimpleQueue[Ask]] = queue.SimpleQueue()

    def open(self, handshakes: dict[tuple[int, int], Any], more: tuple[Payload, ...]) -> None:
        """Open the socket. It tells agents the ranks' `handshakes`, by stage and rank, and `more` payloads.

        Raises:
            OSError: the socket cannot be opened there (`kvtransfer.door`).
            ValueError: its path is too long, or other users may enter its folder.
        """
        encoder = msgspec.msgpack.Encoder()
        ranks = [Payload(stage, rank, encoder.encode(told)) for (stage, rank), told in sorted(handshakes.items())]
        self._metadata = {
            **self._about,
            "compatibility": next(iter(handshakes.values())).compatibility_hash,
            "payloads": [each.object() for each in (*ranks, *more)],
        }
        if self._path is None:
            logger.warning("No `door` in kv_connector_extra_config: no agent can introduce engines to this one.")
        elif self._door is None:
            self._door = Door(Path(self._path), self._answer)
            logger.info("The agent socket is at %s", self._path)

    def close(self) -> None:
        """Close the socket."""
        if self._door is not None:
            self._door.close()

    @property
    def waits(self) -> bool:
        """Whether something was asked for the next step."""
        return not self._asked.empty()

    def take(self) -> list[Ask]:
        """What was asked since the last call, in order."""
        asked: list[Ask] = []
        while not self._asked.empty():
            asked.append(self._asked.get())
        return asked

    def _answer(self, ask: Ask) -> dict[str, Any]:
        """Answer one question of an agent. Runs on a thread of the socket."""
        match ask:
            case Metadata():
                return self._metadata
            case HeldState():
                return self._state()
            case Introduce(engine_id):
                known = self._peers
                if engine_id not in known and len(known) + self._asked.qsize() >= PEERS_MAX:
                    return {"error": f"{PEERS_MAX} engines are known already"}
        self._asked.put(ask)
        self._wake()
        return {"ok": True}


def held_state(holds: Holds, pulls: Pulls, early: int, counts: Counter[str], now: float) -> dict[str, Any]:
    """The answer to `HeldState`, without the engine's id. `early`: early legs that wait; `counts`: of everything."""
    peers = {
        engine: {
            "instance": peer.instance,
            "link": peer.link,
            "pulled": peer.pulled,
            "failed": peer.failed,
            "aside": peer.aside,
            "shunned": not pulls.peers.may_pull(engine, now),
        }
        for engine, peer in pulls.peers.items()
    }
    return {
        "holds": holds.held,
        "legs": holds.open_legs,
        "pulls": pulls.under_way,
        "early": early,
        "slots_free": holds.slots.free,
        "recomputed_tokens": pulls.recomputed_tokens,
        "peers": peers,
        "counts": dict(sorted(counts.items())),
    }
