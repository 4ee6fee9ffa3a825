"""The producer's side of parts (`kvtransfer.early_notes.Part`): which blocks of a prompt are complete while the rest of
it is computed. Pure.

The scheduler plans a step (`step`), and learns later that the step's output is there (`computed`). With asynchronous
scheduling the next steps are planned meanwhile, so blocks are announced only after the second. A prompt that one step
completes has no parts, and no prompt's last step is one: the hold is announced instead.

A request may be preempted while it is computed, and gets other blocks, or the same ones after another request has had
them. Or a load of its own fails, and its blocks are computed again. In both cases it begins a new *life*: consumers use
nothing that was announced in an earlier one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, KeysView
from dataclasses import dataclass, field
from typing import Final

from kvtransfer.early_notes import Part


@dataclass(slots=True)
class _Prompt:
    name: str
    tokens: int
    blocks: list[int] = field(default_factory=list)
    planned: int = 0
    """Tokens that are computed once all planned steps are."""
    complete: int = 0
    """Tokens of the steps that have given their outputs."""
    life: int = 0
    chunk: int = 0
    began: float | None = None
    """When this life's first step was planned."""
    had: int = 0
    """Tokens that it had before that: cached ones."""
    told: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By consumer: the life and the number of the blocks that it was told."""


class Parts:
    """The prefill legs of one engine that are under way. `now` in seconds times `unit`."""

    def __init__(self, block_tokens: int, unit: float = 1.0) -> None:
        self._block_tokens: Final = block_tokens
        self._unit: Final = unit
        self._prompts: Final[dict[str, _Prompt]] = {}
        self._planned: Final[deque[tuple[int, str, int, int, int]]] = deque()
        """Of planned steps that complete no prompt: number, request, life, tokens computed then, own tokens."""

    @property
    def requests(self) -> KeysView[str]:
        """The legs' requests."""
        return self._prompts.keys()

    def begin(self, request: str, name: str, tokens: int) -> None:
        """A leg has arrived. `tokens`: its prompt's."""
        self._prompts[request] = _Prompt(name, tokens)

    def step(
        self, number: int, request: str, before: int, scheduled: int, blocks: list[int], now: float, *, anew: bool
    ) -> bool:
        """A step is planned. Returns whether its output is to be reported (`computed`).

        Args:
            number: the step's; later steps have higher ones.
            request: one of those that it computes tokens of.
            before: the request's tokens that are computed before it.
            scheduled: those that it computes.
            blocks: the blocks that the request gets for it.
            now: the time.
            anew: whether these are all blocks of the request, and not only additional ones.
        """
        prompt = self._prompts.get(request)
        if prompt is None:
            return False
        if prompt.began is not None and (anew or before < prompt.planned):
            prompt.life += 1
            prompt.complete, prompt.began = 0, None
        if anew:
            prompt.blocks = []
        prompt.blocks += blocks
        if prompt.began is None:
            prompt.began, prompt.had = now, before
        prompt.planned = before + scheduled
        if prompt.planned >= prompt.tokens:
            return False
        self._planned.append((number, request, prompt.life, prompt.planned, scheduled))
        return True

    def computed(self, number: int, now: float, asking: Callable[[str], tuple[str, ...]]) -> list[tuple[str, Part]]:
        """The outputs of the planned steps up to this number are there. Returns the consumers to tell, and what.
        `asking`: the consumers that have asked for a name.
        """
        more: dict[str, _Prompt] = {}
        while self._planned and self._planned[0][0] <= number:
            _, request, life, tokens, chunk = self._planned.popleft()
            prompt = self._prompts.get(request)
            if prompt is not None and prompt.life == life:
                prompt.complete, prompt.chunk = tokens, chunk
                more[request] = prompt
        told = []
        for request, prompt in more.items():
            for consumer in asking(prompt.name):
                part = self._part(request, prompt, consumer, now)
                if part is not None:
                    told.append((consumer, part))
        return told

    def _part(self, request: str, prompt: _Prompt, consumer: str, now: float) -> Part | None:
        life, first = prompt.told.get(consumer, (prompt.life, 0))
        if life != prompt.life:
            first = 0
        end = min(prompt.complete // self._block_tokens, len(prompt.blocks))
        if end <= first:
            return None
        prompt.told[consumer] = (prompt.life, end)
        took = 0.0 if prompt.began is None else max(0.0, now - prompt.began) / self._unit
        left = (prompt.tokens - prompt.complete) * took / max(1, prompt.complete - prompt.had)
        blocks = tuple(prompt.blocks[first:end])
        return Part(
            prompt.name, request, prompt.life, first, blocks, prompt.tokens, prompt.chunk, self._block_tokens, left
        )

    def end(self, request: str) -> int:
        """The leg has ended. Returns its life: parts of an earlier one are not its hold's."""
        prompt = self._prompts.pop(request, None)
        return 0 if prompt is None else prompt.life
