"""Kinds of other operators: which of them the API server knows, and which of them the operator may list. A shell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from k8s.operator.client import ApiAway, ApiClient, ApiFailed
from k8s.operator.watch import WatchCache

logger = logging.getLogger("baton.operator")

OPTIONAL: Final = {
    "PodMonitor": "monitoring.coreos.com/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
}
"""API versions, by kind."""
LIST_S: Final = 10.0
"""Seconds for which plans wait for the first list of such a kind: a Role may not allow it."""
TRY_AGAIN_S: Final = (1.0, 2.0, 5.0)
"""Seconds between the first attempts to learn which kinds the API server knows; then plans begin without them."""
ASK_AGAIN_S: Final = 60.0
"""Seconds for which an answer about all kinds is used before the API server is asked again."""
UNSURE_S: Final = 2.0
"""The same after an incomplete answer."""


class OptionalKinds:
    """The kinds of `OPTIONAL` that plans may use. A kind may be installed or allowed at any time."""

    def __init__(self, client: ApiClient, watch: Callable[[str, str], WatchCache]) -> None:
        """`watch` starts to watch one more kind, given its API version and kind."""
        self.known: frozenset[str] = frozenset()
        """Those that the API server knows and that were listed."""
        self.hidden: frozenset[str] = frozenset()
        """Those that it knows and that the operator may not list."""
        self._client: Final = client
        self._watch: Final = watch
        self._caches: Final[dict[str, WatchCache]] = {}
        self._ask_at = 0.0
        self._asking: Final = asyncio.Lock()

    async def start(self) -> None:
        """Learn the kinds. After some attempts it returns without an answer: `asked_again` goes on."""
        for wait_s in (*TRY_AGAIN_S, None):
            if await self._learn() or wait_s is None:
                return
            await asyncio.sleep(wait_s)

    async def asked_again(self) -> bool:
        """Learn the kinds again if the last answer is old. Returns whether it was."""
        async with self._asking:
            if asyncio.get_running_loop().time() < self._ask_at:
                return False
            await self._learn()
            return True

    def gone(self, kind: str) -> None:
        """Note that the API server does not know a kind any more."""
        self.known -= {kind}

    async def _learn(self) -> bool:
        """Ask about each kind. Returns whether the API server answered for all of them.

        A kind that cannot be listed counts as missing until it can: its watch goes on trying.
        """
        now = asyncio.get_running_loop().time()
        known, is_sure = set(self.known | self.hidden), True
        for kind, group in OPTIONAL.items():
            try:
                is_there = kind in await self._client.kinds([group])
            except (ApiFailed, ApiAway) as error:  # the former answer stays
                logger.warning("whether the API server knows %s is not told: %s", kind, error)
                is_sure = False
            else:
                known = known | {kind} if is_there else known - {kind}
        self._ask_at = now + (ASK_AGAIN_S if is_sure else UNSURE_S)
        fresh = sorted(known - self._caches.keys())
        for kind in fresh:
            self._caches[kind] = self._watch(OPTIONAL[kind], kind)
        with suppress(TimeoutError):
            async with asyncio.timeout(LIST_S):
                for kind in fresh:
                    await self._caches[kind].listed.wait()
        self.known = frozenset(kind for kind in known if self._caches[kind].listed.is_set())
        hidden = known - self.known
        for kind in sorted(hidden - self.hidden):
            logger.warning("%s cannot be listed: clusters are planned without it; does the Role allow it?", kind)
        self.hidden = frozenset(hidden)
        return is_sure
