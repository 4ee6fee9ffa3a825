"""`baton` with agents that tell routers nothing of tiers: the prefix-cache index forgets what a KV cache drops.

`python -m support.tiers_unknown up FILE ...`. An agent counts a block as evicted when the KV cache drops it, as if its
engine had no tiers, and names no tier in its heartbeats. The engines have their tiers all the same.
"""

from __future__ import annotations

import sys
from typing import Any

from baton import compiled

compiled.use()  # before any compiled module is imported, as `baton` itself does

from baton import cli, members  # noqa: E402 - see above
from engine.agent import rank  # noqa: E402
from engine.vllm.evictions import Evictions  # noqa: E402


def without_tiers(**_: Any) -> Evictions:
    return Evictions(tiered=False)


def words(*given: str) -> list[str]:
    """The command line of an engine's agent, by this program."""
    return [sys.executable, "-m", "support.tiers_unknown", *given, "--json", "--lifeline"]


if __name__ == "__main__":
    vars(rank)["Evictions"] = without_tiers
    vars(members)["baton_words"] = words
    sys.exit(cli.main())
