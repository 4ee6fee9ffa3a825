"""Chooses the connector for `transfer: {connector: auto}`. Pure."""

from __future__ import annotations

from typing import Final

from engine.vllm.connector.served import CONTEXT, RANKS, SLEEP, STAGES
from engine.vllm.connector.written_for import is_written_for
from engine.vllm.spec import SOME_RANKS, Connector, given, ranks_in, switched_on, value_of

ASKED: Final = ("auto", "nixl", "baton")
"""The values that a user may give."""

_SIZES: Final = (
    ("--pipeline-parallel-size", "-pp", STAGES),
    ("--prefill-context-parallel-size", "-pcp", CONTEXT),
    ("--decode-context-parallel-size", "-dcp", CONTEXT),
)
"""vLLM flags that, above 1, leave the KV cache to vLLM's own connector, and their meaning."""


def left_by_flags(vllm_args: tuple[str, ...]) -> str | None:
    """Why an engine with these flags needs vLLM's own connector; None: the flags do not require it.

    What follows from the model is decided inside the engine (`engine.vllm.connector.served`).
    """
    here = value_of(vllm_args, "--data-parallel-size-local", "-dpl")
    # Ranks on other machines have their agent sockets there, too.
    elsewhere = here is not None and here.isdecimal() and int(here) < ranks_in(vllm_args)
    if here is None and ranks_in(vllm_args) > 1:  # vLLM chooses, and may choose other machines
        backend, nodes = value_of(vllm_args, "--data-parallel-backend", "-dpb"), value_of(vllm_args, "--nnodes")
        elsewhere = backend == "ray" or (nodes is not None and nodes != "1")
    if elsewhere or any(given(vllm_args, *flag) for flag in SOME_RANKS):
        return RANKS
    if switched_on(vllm_args, "--enable-sleep-mode"):
        return SLEEP
    for flag, short, what in _SIZES:
        size = value_of(vllm_args, flag, short)
        if size is not None and size.isdecimal() and int(size) > 1:
            return what
    return None


def connector_for(asked: str, *, vllm: str | None, meets: bool, vllm_args: tuple[str, ...] = ()) -> Connector:
    """Baton's connector, wherever it can serve the engine (docs/decisions/0008-default-connector.md); else vLLM's.

    Args:
        asked: the user's choice, one of `ASKED`.
        vllm: vLLM's version; None: it is not installed.
        meets: whether an agent with a registry introduces the engine to its peers. Baton's connector pulls nothing from
            unknown engines.
        vllm_args: the user's own vLLM flags. ``--kv-transfer-config`` or a flag that Baton's connector cannot serve
            leads to vLLM's.
    """
    if asked != "auto":
        return "baton" if asked == "baton" else "nixl"
    ours = meets and is_written_for(vllm) and not given(vllm_args, "--kv-transfer-config")
    return "baton" if ours and left_by_flags(vllm_args) is None else "nixl"
