"""Who moves an engine's KV cache where nobody has said: `transfer: {connector: auto}`. Pure."""

from __future__ import annotations

from typing import Final

from engine.vllm.spec import Connector, given
from kvtransfer.written_for import is_written_for

ASKED: Final = ("auto", "nixl", "baton")
"""What a user may say."""


def connector_for(
    asked: str, *, device: str, vllm: str | None, meets: bool, vllm_args: tuple[str, ...] = ()
) -> Connector:
    """Baton's connector where it was measured beside vLLM's and is the better one, which is on CPU; else vLLM's.

    Args:
        asked: what the user has said, of `ASKED`.
        device: ``cpu`` or ``gpu``: what the engine computes on.
        vllm: its version.
        meets: whether there is somebody who introduces it to others: an agent with a registry. Nothing is pulled from
            a stranger.
        vllm_args: the user's own words to vLLM: a transfer configuration among them is what counts.
    """
    if asked != "auto":
        return "baton" if asked == "baton" else "nixl"
    ours = device == "cpu" and meets and is_written_for(vllm) and not given(vllm_args, "--kv-transfer-config")
    return "baton" if ours else "nixl"
