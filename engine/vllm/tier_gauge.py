"""The name of Baton's own gauge among an engine's metrics. Agents read it, and the connector writes it in vLLM's
processes.
"""

from __future__ import annotations

from typing import Final

KV_BYTES: Final = "baton:kv_token_bytes"
"""The bytes of one token's KV: with ``of="worker"`` what one worker loads of it, with ``of="all"`` what all workers
have of it together."""
