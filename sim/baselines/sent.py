"""Which prompts went where: what a router knows of engines' prefix caches from its own choices.

One least-recently-used set of blocks for each instance, bounded in tokens. Blocks are named by `Wanted.prefix`: a name
stands for the block and all before it, so that the longest match is the number of leading names that are known. Text
that no other prompt shares takes room, too. Eviction is by size at once; no clock is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from cluster.ids import InstanceId
from router.core.values import Wanted


class SentRequests:
    """The prompts sent to each instance, as far as they are remembered."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens: Final = capacity_tokens
        self._known: Final[dict[InstanceId, OrderedDict[Hashable, int]]] = {}
        self._tokens: Final[dict[InstanceId, int]] = {}
        self._own = 0

    def matched(self, instance: InstanceId, wanted: Wanted, tokens_max: int | None = None) -> int:
        """Tokens of the prompt, from its beginning, that this instance has probably computed before."""
        known = self._known.get(instance)
        if not known or not wanted.prefix:
            return 0
        count = 0
        for name in wanted.prefix:
            if name not in known:
                break
            count += 1
        tokens = min(count * int(wanted.prefix_block_tokens), wanted.prompt_tokens)
        return tokens if tokens_max is None else min(tokens, tokens_max)

    def tokens(self, instance: InstanceId) -> int:
        """The tokens that are remembered of this instance."""
        return self._tokens.get(instance, 0)

    def add(self, instance: InstanceId, wanted: Wanted) -> None:
        """This prompt is sent to the instance: remember it, and forget the oldest blocks beyond the capacity."""
        known = self._known.setdefault(instance, OrderedDict())
        total = self._tokens.get(instance, 0)
        left = wanted.prompt_tokens
        for name in wanted.prefix:
            size = min(int(wanted.prefix_block_tokens), left)
            left -= size
            if name in known:
                known.move_to_end(name)
            else:
                known[name] = size
                total += size
        if left > 0:
            self._own += 1
            known["own", self._own] = left
            total += left
        while total > self.capacity_tokens and known:
            total -= known.popitem(last=False)[1]
        self._tokens[instance] = total
