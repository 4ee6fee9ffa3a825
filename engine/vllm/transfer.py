"""Who moves an engine's KV cache where nobody has said: `transfer: {connector: auto}`. Pure."""

from __future__ import annotations

from typing import Final

from engine.vllm.connector.served import CONTEXT, RANKS, STAGES
from engine.vllm.connector.written_for import is_written_for
from engine.vllm.spec import Connector, given, value_of

ASKED: Final = ("auto", "nixl", "baton")
"""What a user may say."""

_SIZES: Final = (
    ("--data-parallel-size", "-dp", RANKS),
    ("--pipeline-parallel-size", "-pp", STAGES),
    ("--prefill-context-parallel-size", "-pcp", CONTEXT),
    ("--decode-context-parallel-size", "-dcp", CONTEXT),
)
"""vLLM's flags that leave the KV cache to vLLM's own connector where they are above 1, and what they are."""


def left_by_flags(vllm_args: tuple[str, ...]) -> str | None:
    """Why vLLM's own connector has to hand over the KV cache of an engine with these flags; None: they say nothing.

    What follows from the model is decided inside the engine (`engine.vllm.connector.served`).
    """
    if given(vllm_args, "--data-parallel-rank", "-dpn"):
        return RANKS
    for flag, short, what in _SIZES:
        size = value_of(vllm_args, flag, short)
        if size is not None and size.isdecimal() and int(size) > 1:
            return what
    return None


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
        vllm_args: the user's own words to vLLM: a transfer configuration among them is what counts, and so are flags
            with which ours would leave the cache to vLLM's.
    """
    if asked != "auto":
        return "baton" if asked == "baton" else "nixl"
    ours = device == "cpu" and meets and is_written_for(vllm) and not given(vllm_args, "--kv-transfer-config")
    return "baton" if ours and left_by_flags(vllm_args) is None else "nixl"
