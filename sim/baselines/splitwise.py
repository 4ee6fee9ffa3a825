"""Splitwise: join the shortest queue, counted in tokens, over a prompt pool, a token pool and a mixed pool.

Source: Patel et al., ISCA 2024, section IV; Mutinifni/splitwise-sim, ``MixedPoolScheduler`` of ``scheduler.py`` and
``mixed_pool.yml`` at 3780880. Prompt: the least pending tokens in the prompt pool, then in the mixed pool; a queue is
long where something waits and pending + prompt > 8,192 tokens. Token: the least booked memory in the token pool, then
mixed; full where prompt and answer do not fit. If none is found, the least loaded machine of the opposite pool
joins the mixed pool; it goes home when it has nothing left to do. Where that fails too, one machine serves all of it.

Homes are given, or the instances' roles; those of role both without a home are mixed from the start, and only those of
role both can leave home: an engine of one role cannot do the other's work. Where no instance has a home, nothing is
split: a request stays on one machine, the one with the least pending tokens, which is the paper's baseline
(``TokenJSQScheduler``).

Different here: theirs knows each answer's length beforehand, which no server does. Here `answer_tokens` is booked for
each, the mean that an operator has seen (Azure's, unless told otherwise), or `known` gives the true ones. On unequal
GPUs (`speeds`) loads are divided by the machine's speed; its queue counts tokens of batches, ours of requests whose
first token is not there yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.ids import InstanceId
from cluster.instance import Role
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet.columns import InstanceView
from router.fleet.snapshot import FleetSnapshot
from router.scheduler.scoring.filters import of_role, ready, with_place

PROMPT_PENDING_MAX: Final = 8192
"""``prompt_max_pending_batch_tokens``."""
ANSWER_TOKENS: Final = 211
"""Mean answer of Azure's conversation trace of 2023, which is theirs."""
KV_FULL: Final = 0.95
"""The reported KV usage from which a machine is full, if the number of tokens that fit is unknown."""


@dataclass(frozen=True, slots=True)
class SplitwiseBooking:
    """The tokens of one placed request, and the machines that they count at."""

    prompt_at: InstanceId
    token_at: InstanceId
    prompt_tokens: int
    memory_tokens: int


class Splitwise:
    """Splitwise's policy: the pools, load in flight, and the choice."""

    def __init__(
        self,
        prompts: Iterable[InstanceId] = (),
        tokens: Iterable[InstanceId] = (),
        capacity_tokens: int | None = None,
        answer_tokens: int = ANSWER_TOKENS,
        known: Sequence[int] = (),
        speeds: Mapping[InstanceId, float] | None = None,
    ) -> None:
        self.speeds: Final = speeds or {}
        self.homes: Final[dict[InstanceId, Role]] = {
            **dict.fromkeys(prompts, Role.PREFILL),
            **dict.fromkeys(tokens, Role.DECODE),
        }
        self.capacity_tokens: Final = capacity_tokens
        self.answer_tokens: Final = answer_tokens
        self.known: Final = known
        """Answers' tokens by the number of the request, if they are known."""
        self.mixed: Final[set[InstanceId]] = set()
        """Instances that have left their home pool for the mixed pool."""
        self.pending: Final[Counter[InstanceId]] = Counter()
        """Prompt tokens not computed yet, and one for each answer under way."""
        self.memory: Final[Counter[InstanceId]] = Counter()
        """Tokens of prompts and answers that are booked there."""
        self.requests: Final[Counter[InstanceId]] = Counter()
        self._active: Final[dict[int, SplitwiseBooking]] = {}
        self._prefilling: Final[set[int]] = set()

    def pool_of(self, view: InstanceView) -> Role:
        """The pool in which this instance is now; `Role.BOTH` is the mixed pool."""
        if view.id in self.mixed:
            return Role.BOTH
        return self.homes.get(view.id, view.role)

    def __call__(self, fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        found = ready(fleet, wanted)
        if not len(found.any):
            return Chosen(None, None, "no ready instance serves this model")
        free = [fleet.at(row) for row in with_place(fleet, found.any, wanted).tolist()]
        if not free:
            return Chosen(None, None, "every instance is full", wait=True)
        if not self.homes and len(of_role(found, Role.BOTH)) == len(found.any):
            return self._alone(free, None)
        prompt = self._prompt(free, wanted)
        token = self._token(free, wanted)
        prompt = prompt or self._borrow(free, Role.DECODE, self.pending)
        token = token or self._borrow(free, Role.PREFILL, self.memory)
        if prompt is None or token is None or not wanted.hand_over:
            return self._alone(free, prompt if wanted.prefill_only else token)
        if prompt.id == token.id:
            return Chosen(None, token.id, f"shortest queue (Splitwise): whole on {token.id}")
        return Chosen(prompt.id, token.id, f"shortest queue (Splitwise): {self._say(prompt)}, {self._say(token)}")

    def _prompt(self, free: list[InstanceView], wanted: Wanted) -> InstanceView | None:
        def short(view: InstanceView) -> bool:
            return not self.pending[view.id] or self.pending[view.id] + wanted.prompt_tokens <= PROMPT_PENDING_MAX

        return self._first(free, Role.PREFILL, self.pending, short)

    def _token(self, free: list[InstanceView], wanted: Wanted) -> InstanceView | None:
        needed = wanted.prompt_tokens + self.answer_tokens

        def roomy(view: InstanceView) -> bool:
            if self.capacity_tokens is None:
                return view.load.kv_usage < KV_FULL
            return self.memory[view.id] + needed < self.capacity_tokens

        return self._first(free, Role.DECODE, self.memory, roomy)

    def _first(
        self, free: list[InstanceView], home: Role, by: Counter[InstanceId], fits: Callable[[InstanceView], bool]
    ) -> InstanceView | None:
        """The least loaded of the home pool if that fits, else the least loaded of the mixed pool if that fits."""
        for pool in (home, Role.BOTH):
            among = [view for view in free if self.pool_of(view) is pool]
            if among and fits(best := min(among, key=lambda view: self._rank(view, by))):
                return best
        return None

    def _borrow(self, free: list[InstanceView], pool: Role, by: Counter[InstanceId]) -> InstanceView | None:
        """Move the least loaded machine of the opposite pool to the mixed pool, if its engine can do both."""
        among = [view for view in free if self.pool_of(view) is pool and view.role is Role.BOTH]
        if not among:
            return None
        best = min(among, key=lambda view: self._rank(view, by))
        self.mixed.add(best.id)
        return best

    def _alone(self, free: list[InstanceView], best: InstanceView | None) -> Chosen:
        """Mixed batching on one machine: the least pending one."""
        if best is None:
            able = [view for view in free if view.role is Role.BOTH] or free
            best = min(able, key=lambda view: self._rank(view, self.pending))
        return Chosen(None, best.id, f"shortest queue (Splitwise): whole on {self._say(best)}")

    def _rank(self, view: InstanceView, by: Counter[InstanceId]) -> tuple[float, int, str]:
        return by[view.id] / self.speeds.get(view.id, 1.0), view.sent, view.id

    def _say(self, view: InstanceView) -> str:
        return f"{view.id} ({self.pending[view.id]} tokens pending)"

    # --- load in flight (sim.baselines.following) ---------------------------------------------------------------------

    def placed(self, request: int, wanted: Wanted, chosen: Chosen) -> None:
        self.ended(request)
        assert chosen.decode is not None
        answer_tokens = self.known[request] if self.known else self.answer_tokens
        booked = SplitwiseBooking(
            chosen.prefill or chosen.decode,
            chosen.decode,
            wanted.prompt_tokens,
            wanted.prompt_tokens + answer_tokens,
        )
        self._active[request] = booked
        self._prefilling.add(request)
        self.pending[booked.prompt_at] += booked.prompt_tokens
        self.pending[booked.token_at] += 1
        self.memory[booked.token_at] += booked.memory_tokens
        self.requests.update({booked.prompt_at, booked.token_at})

    def prefilled(self, request: int) -> None:
        if request not in self._prefilling:
            return
        self._prefilling.remove(request)
        booked = self._active[request]
        self.pending[booked.prompt_at] -= booked.prompt_tokens
        if booked.prompt_at != booked.token_at:
            self._leave(booked.prompt_at)

    def ended(self, request: int) -> None:
        self.prefilled(request)
        booked = self._active.pop(request, None)
        if booked is None:
            return
        self.pending[booked.token_at] -= 1
        self.memory[booked.token_at] -= booked.memory_tokens
        self._leave(booked.token_at)

    def _leave(self, name: InstanceId) -> None:
        self.requests[name] -= 1
        if not self.requests[name]:
            self.mixed.discard(name)
