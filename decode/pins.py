"""The pinned first token of a decode leg's answer, which the prefill instance has already chosen. Pure.

The client may receive that token while the blocks are still on their way, so D's answer must begin with it: inside
vLLM, `engine.vllm.pin` enforces that.
"""

from __future__ import annotations

from cluster.wire import FIRST_TOKEN


def pinned(fields: object) -> int | None:
    """The token that these transfer fields pin; None if the value is not a token. Never raises."""
    token = fields.get(FIRST_TOKEN) if isinstance(fields, dict) else None
    return token if type(token) is int and token >= 0 else None
