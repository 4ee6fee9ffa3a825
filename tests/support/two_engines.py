"""Two real engines, P and D, without a router or agents. Tests send them requests as a router does."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support import device
from support.cluster import within
from support.engine_pair import COMPLETIONS, RandomPrompts, ask, get

from bench.pair import Engines
from cluster.ids import RequestId, TransferId
from cluster.instance import Role
from engine.tiny import model_path
from kvtransfer.door import ask as knock


class TwoEngines(RandomPrompts):
    """One pair for all tests of a module. No two of its prompts or transfer names are the same."""

    seed: ClassVar[int]
    """The seed of its prompts."""
    counts: ClassVar[tuple[str, ...]] = ("holds", "legs", "pulls")
    """The fields of an engine's state that are 0 when it holds nothing."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.p, self.d = engines.url("p"), engines.url("d")
        self.chance = random.Random(self.seed)
        self.made = 0

    def name(self) -> TransferId:
        self.made += 1
        return TransferId(RequestId(f"live-{self.made}"), 1, 1)

    def alone(self, prompt: list[int]) -> list[int]:
        status, answer = ask(self.p, COMPLETIONS, self.body(prompt))
        assert status == 200, answer
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    def state(self, name: str) -> dict[str, Any]:
        return knock(self.engines.door(name), {"ask": "state"})

    def nothing_is_held(self) -> bool:
        states = [self.state(name) for name in "pd"]
        return all(state[what] == 0 for state in states for what in self.counts)

    def met(self) -> None:
        """Wait until each engine lists the other as a peer."""
        within(20, lambda: all(self.state(name)["peers"] for name in "pd"))

    def both_live(self) -> None:
        """Check that both engines still serve, and wait until neither holds anything."""
        for name in "pd":
            assert self.engines.running[name].alive(), self.engines.running[name].tail()
            assert get(self.engines.url(name), "/health")[0] == 200
        within(10, self.nothing_is_held)


@contextmanager
def real_engines(
    folder: Path, *, another: str = "", model: Path | None = None, flags: tuple[str, ...] = ()
) -> Iterator[Engines]:
    """The engines `p` and `d`, and another D with the name `another`, if given. Without vLLM, the test is skipped.
    `model`: another than the one that ships; `flags`: more of vLLM's.
    """
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup")
    roles = {"p": Role.PREFILL, "d": Role.DECODE, **({another: Role.DECODE} if another else {})}
    flags = (*device.flags(), *flags)
    with Engines(folder, str(model or model_path()), roles, flags=flags, gpus=device.gpus()) as running:
        yield running
