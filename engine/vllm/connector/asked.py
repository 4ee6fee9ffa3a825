"""What an agent has asked for at the agent socket, applied to the scheduler half. Runs inside vLLM's engine core."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from decode.peers import ProducerPeers
from kvtransfer.asks import Ask, Forget, Introduce, ReleaseName
from prefill.holds import Holds

if TYPE_CHECKING:
    from engine.vllm.connector.early import EarlyHandoffs


def apply(
    asked: Iterable[Ask], peers: ProducerPeers, early: EarlyHandoffs, holds: Holds, now: float, *, shakes_hands: bool
) -> tuple[tuple[Introduce, ...], tuple[str, ...]]:
    """The introductions and the engines to forget, for the workers. Of one engine that was both introduced and
    forgotten, the workers get only the last request: their batch has no order. `shakes_hands`: whether the engine
    reads from peers. `now`: monotonic seconds.
    """
    introductions: dict[str, Introduce] = {}
    forgotten: set[str] = set()
    for ask in asked:
        match ask:
            case Introduce() as met:
                for former in peers.lives(met.instance, but=met.engine_id):
                    early.forget(former)
                early.meet(met)
                peers.met(met.engine_id, met.instance, now, shakes_hands=shakes_hands)
                introductions[met.engine_id] = met
                forgotten.discard(met.engine_id)
            case Forget(engine_id):
                peers.forgotten(engine_id)
                early.forget(engine_id)
                forgotten.add(engine_id)
                introductions.pop(engine_id, None)
            case ReleaseName(name):
                holds.release(name, now)
    return tuple(introductions.values()), tuple(sorted(forgotten))
