"""The first token of a decode leg's answer, where the prefill instance has already chosen it. Pure.

The client may be given that token while the blocks are still on their way, so D must begin with it and with no other:
inside vLLM `engine.vllm.pin` sees to that.
"""

from __future__ import annotations

from cluster.wire import FIRST_TOKEN


def pinned(fields: object) -> int | None:
    """The token that these transfer fields pin; what is no token pins nothing. Never raises."""
    token = fields.get(FIRST_TOKEN) if isinstance(fields, dict) else None
    return token if type(token) is int and token >= 0 else None
