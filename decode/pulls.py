"""Decode requests that name a hold: which are pulled, and what is computed again (`decode.table.WANTS`). Pure.

The engine asks about a request at every step until there is room for it (`judge`), then says that it has room
(`allocated`), and later that every rank has ended its reading (`ended`).
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from decode.peers import Peers
from decode.table import WANTS, Act, Cause, Want

BEATS_PER_LEASE: Final = 6
"""While a request waits for room or is pulled, its producer hears so often within a lease that it is still wanted:
vLLM's ``_heartbeat_interval``.
"""


def worth_pulling(held_tokens: int, prompt_tokens: int, cached_tokens: int) -> int:
    """Tokens that the producer holds of this prompt and that are not here. (vLLM takes a hold to be as long as the
    prompt: one token more, at a block's edge, ends its engine.)
    """
    return max(0, min(held_tokens, prompt_tokens) - cached_tokens)


class _Wanted:
    """One request."""

    __slots__ = ("because", "engine", "state", "tokens")

    def __init__(self, state: Want, engine: str, tokens: int) -> None:
        self.state, self.engine, self.tokens = state, engine, tokens
        self.because: str | None = None
        """What the ranks have said of it; empty: nothing against it."""


class Pulls:
    """By the engine's request ids."""

    def __init__(self, peers: Peers) -> None:
        self.peers: Final = peers
        self.counts: Final[Counter[str]] = Counter()
        self.recomputed_tokens = 0
        """Of prompts that were handed over: what was computed here nevertheless."""
        self._wants: Final[dict[str, _Wanted]] = {}

    @property
    def under_way(self) -> int:
        """Requests whose blocks are being read."""
        return sum(want.state is not Want.LOCAL for want in list(self._wants.values()))

    def judge(self, engine: str, now: float) -> str:
        """Why nothing can be pulled from this engine; empty: it can."""
        if engine not in self.peers:
            return f"engine {engine} was not introduced"
        if not self.peers.may_pull(engine, now):
            self.counts["set aside"] += 1
            peer = self.peers.of(engine)
            return f"pulls from {peer.instance} have failed, the last {peer.in_a_row}"
        return ""

    def local(self, request: str, tokens: int) -> bool:
        """It is not pulled: `tokens` of it, which P holds, will be computed here. Whether that is news."""
        known = self._wants.get(request)
        if known is None:
            self._wants[request] = _Wanted(Want.LOCAL, "", tokens)
            return True
        known.tokens = tokens
        return False

    def allocated(self, request: str, engine: str, tokens: int, now: float) -> None:
        """There is room for it. `tokens` of it are pulled from `engine` now; 0: none."""
        want = self._wants.get(request)
        if not tokens:
            if want is not None:
                self._move(request, want, Cause.ALLOCATED)
            return
        if want is None:
            self._wants[request] = _Wanted(Want.PULLING, engine, tokens)
        else:
            want.engine, want.tokens = engine, tokens
            self._move(request, want, Cause.PULLED)
        self.peers.began(engine, now)

    def finished(self, request: str) -> None:
        """The request is over."""
        want = self._wants.get(request)
        if want is not None:
            self._move(request, want, Cause.FINISHED)

    def said(self, request: str, because: str) -> None:
        """A rank's reading has ended: why its blocks cannot be used; empty: they can, as far as it knows."""
        want = self._wants.get(request)
        if want is None:
            return
        want.because = want.because or because
        if because:
            self._move(request, want, Cause.UNUSABLE)

    def ended(self, request: str, now: float, *, failed: bool = False) -> None:
        """Every rank's reading has ended. `failed`: the engine was told so by a way of its own (a handshake)."""
        want = self._wants.get(request)
        if want is None:
            return
        if want.because is not None:
            self.peers.ended(want.engine, want.because, now)
        if failed:
            self._move(request, want, Cause.UNUSABLE)
        self._move(request, want, Cause.ENDED)

    def _move(self, request: str, want: _Wanted, cause: Cause) -> None:
        row = WANTS[want.state].get(cause)
        if row is None:
            return
        want.state = row.state
        if Act.RECOMPUTE in row.acts:
            self.recomputed_tokens += want.tokens
        if row.state is Want.OVER:
            del self._wants[request]
