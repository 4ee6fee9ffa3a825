"""Decode requests that name a hold: which are pulled, and which prompts are computed again (`decode.table.WANTS`).
Pure.

At every step the engine asks about a request until it has room for it (`judge`). It then reports the room
(`allocated`), and later that every rank has ended its reading (`ended`).
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from decode.peers import ProducerPeers
from decode.table import WANTS, PullAct, PullCause, Want

BEATS_PER_LEASE: Final = 6
"""While a request waits for room or is pulled, its producer gets so many heartbeats within a lease: vLLM's
``_heartbeat_interval``."""


def worth_pulling(held_tokens: int, prompt_tokens: int, cached_tokens: int) -> int:
    """The tokens of this prompt that the producer holds and this instance lacks. (vLLM takes a hold to be as long as
    the prompt: one token more, at a block's edge, ends its engine.)
    """
    return max(0, min(held_tokens, prompt_tokens) - cached_tokens)


class _Wanted:
    """One request."""

    __slots__ = ("because", "engine", "finished", "state", "tests", "tokens")

    def __init__(self, state: Want, engine: str, tokens: int) -> None:
        self.state, self.engine, self.tokens = state, engine, tokens
        self.because: str | None = None
        """The ranks' objection to the blocks; empty: none. None: no rank has ended its reading."""
        self.finished = False
        """Whether the request is over, and its pull may not be."""
        self.tests = False
        """Whether its pull tests the connection to a producer that is set aside."""


class Pulls:
    """Pulls by the engine's request ids."""

    def __init__(self, peers: ProducerPeers, *, reads: bool = True) -> None:
        """`reads`: whether the engine reads from peers at all. One that only produces must not: the blocks that it
        frees may be written once more by steps under way on its GPU (docs/handoff.md, "On GPUs").
        """
        self.peers: Final = peers
        self._reads: Final = reads
        self.counts: Final[Counter[str]] = Counter()
        self.recomputed_tokens = 0
        """Tokens of handed-over prompts that this instance computed nevertheless."""
        self._wants: Final[dict[str, _Wanted]] = {}

    @property
    def under_way(self) -> int:
        """The number of requests whose blocks are being read."""
        return sum(want.state is not Want.LOCAL for want in list(self._wants.values()))

    @property
    def awaited(self) -> int:
        """How many of these requests are not over."""
        wants = list(self._wants.values())
        return sum(want.state is not Want.LOCAL and not want.finished for want in wants)

    def judge(self, request: str, engine: str, now: float) -> str:
        """Why no blocks can be pulled from this engine for the request; empty: they can. If not, call `local` next."""
        if not self._reads:
            return "this engine only produces (kv_role: kv_producer)"
        if engine not in self.peers:
            return f"engine {engine} was not introduced"
        if not self.peers.may_pull(engine, now):
            if request not in self._wants:  # else it was asked before, and has waited for room since
                self.counts["set aside"] += 1
            peer = self.peers.of(engine)
            return f"pulls from {peer.instance} have failed, the last {peer.in_a_row}"
        return ""

    def local(self, request: str, tokens: int) -> bool:
        """The request is not pulled: this instance computes `tokens` tokens that P holds. Returns whether this is the
        first call for the request.
        """
        known = self._wants.get(request)
        if known is None:
            self._wants[request] = _Wanted(Want.LOCAL, "", tokens)
            return True
        known.tokens = tokens
        return False

    def allocated(self, request: str, engine: str, tokens: int, now: float, *, handed_over: bool = True) -> None:
        """The engine has room for the request. `tokens` of its tokens are pulled from `engine` now; 0: none.

        `handed_over`: P computed these tokens for this request. False: a peer had them in its cache, as the prompt's
        beginning: they are not counted as recomputed.
        """
        want = self._wants.get(request)
        if not tokens:
            if want is not None:
                self._move(request, want, PullCause.ALLOCATED)
            return
        lost = tokens if handed_over else 0
        if want is None:
            want = self._wants[request] = _Wanted(Want.PULLING, engine, lost)
        else:
            want.engine, want.tokens, want.because = engine, lost, None  # a former try's reason is not this pull's
            self._move(request, want, PullCause.PULLED)
        want.tests = self.peers.began(engine, now)

    def finished(self, request: str) -> None:
        """The request is over."""
        want = self._wants.get(request)
        if want is not None:
            want.finished = True
            self._move(request, want, PullCause.FINISHED)

    def said(self, request: str, because: str) -> None:
        """A rank's reading has ended: why its blocks cannot be used; empty: this rank has no objection."""
        want = self._wants.get(request)
        if want is None:
            return
        want.because = want.because or because
        if because:
            self._move(request, want, PullCause.UNUSABLE)

    def ended(self, request: str, now: float, *, failed: bool = False) -> None:
        """Every rank's reading has ended. `failed`: the engine learned in another way that it failed (a handshake)."""
        want = self._wants.get(request)
        if want is None:
            return
        if want.because is not None:
            self.peers.ended(want.engine, want.because, now)
        if want.tests:
            self.peers.tested(want.engine)
        if failed:
            self._move(request, want, PullCause.UNUSABLE)
        self._move(request, want, PullCause.ENDED)

    def _move(self, request: str, want: _Wanted, cause: PullCause) -> None:
        row = WANTS[want.state].get(cause)
        if row is None:
            return
        want.state = row.state
        if PullAct.RECOMPUTE in row.acts:
            self.recomputed_tokens += want.tokens
        if row.state is Want.OVER:
            del self._wants[request]
