"""What a router expects in the prefix caches of real engines is there: conversations with tools, several at a time.

The engines are the session's. The router in front of them is another one, whose policy needs the prefix-cache index.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.cluster import Cluster
from support.other_router import OtherRouter, other_router

TURNS, TALKS = 5, 4
SYSTEM_BYTES = 1100
"""The tiny model reads at most 2,048 bytes, so only one chunk of text fits into a conversation's fixed beginning."""

TOOLS = [{"type": "function", "function": {"name": "lantern", "parameters": {"type": "object", "properties": {}}}}]
SENTENCE = "On day {} the fox carried the baton to the mill and the owl carried it back. "


def _talk(router: OtherRouter, number: int) -> list[tuple[int, int]]:
    """Hold one conversation. Return for each turn the prompt's tokens and how many of them were cached."""
    system = "".join(SENTENCE.format(1000 * number + day) for day in range(20))[:SYSTEM_BYTES]
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    told = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"What happened on day {1000 * number + turn}, and why?"})
        body = {"messages": messages, "tools": TOOLS, "tool_choice": "none", "max_tokens": 20, "temperature": 0}
        status, answer, _ = router.ask("/v1/chat/completions", body)
        assert status == 200, answer
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
        usage = answer["usage"]
        told.append((usage["prompt_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)))
    return told


@pytest.mark.long
def test_prefixes_that_are_expected_in_a_cache_are_there(cluster: Cluster) -> None:
    """It takes six seconds, once the engines run."""
    with other_router(cluster, "--policy", "workload") as router, ThreadPoolExecutor(2) as clients:
        usages = list(clients.map(lambda number: _talk(router, number), range(TALKS)))
        metrics = router.metrics()
    expected, found, cached = (metrics[f"baton_prefix_{name}_tokens_total"] for name in ("expected", "found", "cached"))
    told = f"expected {expected:.0f}, found {found:.0f}, cached {cached:.0f}; usage {usages}"
    print(told)
    assert expected >= (TURNS - 2) * TALKS * 500, told  # bytes per token are learned first
    assert found >= 0.95 * expected, told
    assert sum(tokens for talk in usages for _, tokens in talk) == cached, f"clients are told what engines had: {told}"
