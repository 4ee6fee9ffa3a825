"""Two engines with tiers below small KV caches, and the rounds that tests check and `make bench-tiers` measures.

The cache of each engine has 24 blocks. A prompt of 1,800 tokens takes 15, so that four other prompts evict the first.
"""

from __future__ import annotations

import random
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from support import device
from support.cluster import within
from support.engine_pair import COMPLETIONS, ask, load
from support.random_models import LETTERS, write_model

from bench import pair
from bench.pair import Engines, Running
from cluster import wire
from cluster.ids import RequestId, TransferId
from cluster.instance import Role
from engine.tiny import model_path
from engine.vllm.metrics import parse_tiers
from engine.vllm.tier_speeds import TierCounts, TierSpeeds
from engine.vllm.tiers import FOLDER_PREFIX, Tiers
from kvtransfer.door import ask as knock

TOKENS: Final = 1800
BLOCK, BLOCKS = 128, 24
HOST: Final = {"host": 64 << 20, "disk": 10 << 20}
"""Bytes of host memory with the model that ships: room for all prompts of a test (`host`), and for little more than two
of them (`disk`)."""
DISK: Final = {"host": 0, "disk": 256 << 20}
WIDER: Final = {"tiny": 1, "larger": 4}
"""Bytes of KV a token, over those of the model that ships."""
ROLES: Final = {"p": Role.PREFILL, "d": Role.DECODE}
START_S = 600.0
"""Seconds for the start of an engine: on a machine with two busy cores, vLLM's imports alone take minutes."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Seconds to the first token of one prompt: new, from the tier, and from the KV cache itself."""

    cold_s: float
    tier_s: float
    cached_s: float


@dataclass(frozen=True, slots=True)
class Pulled:
    """Seconds to the first token of one prompt: new, and with the source leg and the pull. `source_s` is a part."""

    cold_s: float
    source_s: float
    both_s: float


@dataclass
class Tiered(Engines):
    """Engines with tiers, each with a folder of its own."""

    kind: str = "host"
    wider: int = 1

    def _start(self, name: str, role: Role, number: int) -> Running:
        folder = str(self.folder / f"{FOLDER_PREFIX}{name}") if DISK[self.kind] else ""
        host, disk = (self.wider * bound[self.kind] for bound in (HOST, DISK))
        tiers = Tiers(host_bytes=host, disk_bytes=disk, folder=folder)
        self.more = {"tiers": tiers, "max_model_len": 2048}
        self.flags = (*device.flags(), "--num-gpu-blocks-override", str(BLOCKS))
        return super()._start(name, role, number)

    @property
    def model_name(self) -> str:
        return next(name for name, wider in WIDER.items() if wider == self.wider)

    def speeds(self, name: str) -> tuple[TierSpeeds, TierCounts]:
        """What an agent would announce of the engine's tiers, and what the engine has counted."""
        with urllib.request.urlopen(f"{self.url(name)}/metrics", timeout=30) as answer:
            (counts,) = parse_tiers(answer.read().decode(), 1)
        found = TierSpeeds()
        found.hear(counts)
        return found, counts

    def files(self, name: str) -> list[Path]:
        return list((self.folder / f"{FOLDER_PREFIX}{name}").rglob("*.bin"))

    def state(self, name: str) -> dict[str, Any]:
        return knock(self.door(name), {"ask": "state"})

    def answer(self, name: str, body: Any) -> dict[str, Any]:
        status, told = ask(self.url(name), COMPLETIONS, body)
        assert status == 200, told
        return dict(told)

    def first_token_s(self, name: str, body: dict[str, Any]) -> float:
        began = time.monotonic()
        self.answer(name, {**body, "max_tokens": 1})
        return time.monotonic() - began

    def text(self, name: str, body: Any) -> str:
        return str(self.answer(name, body)["choices"][0]["text"])

    def evicted(self, name: str, turn: int) -> Evicted:
        """A prompt that four others have evicted comes back, and its answer is that of a cold engine."""
        prompts = [body(100 * turn + number + (50 if name == "d" else 0)) for number in range(5)]
        cold_s = self.first_token_s(name, prompts[0])
        alone = self.text(name, {**prompts[0], "cache_salt": f"alone {turn}"})
        for other in prompts[1:]:
            self.first_token_s(name, other)
        tier_s, cached_s = (self.first_token_s(name, prompts[0]) for _ in range(2))
        assert self.text(name, prompts[0]) == alone
        return Evicted(cold_s, tier_s, cached_s)

    def pulled(self, way: str, turn: int, *, evicts: bool = True) -> Pulled:
        """A source leg makes the engine `way[0]` hold all whole blocks of a prompt, and the engine `way[1]` pulls them;
        the answers of both are one engine's. `evicts`: the source has the prompt in its tier, not in its KV cache.
        """
        there, here = way
        first = (5000 if evicts else 50000) + 100 * turn + (50 if way == "dp" else 0)
        asked, *others = (body(first + number) for number in range(5))
        cold_s = self.first_token_s(here, {**asked, "cache_salt": f"cold {turn}"})
        alone = self.text(here, {**asked, "cache_salt": f"alone {turn}"})
        for each in (asked, *others) if evicts else (asked,):
            self.first_token_s(there, each)
        for other in others[:2]:
            self.first_token_s(here, other)
        name = TransferId(RequestId(f"source-{way}-{turn}-{evicts}"), 1, 0)
        began = time.monotonic()
        held = wire.read_transfer(self.answer(there, {**asked, **wire.source_fields(asked, transfer=name)}))
        source_s = time.monotonic() - began
        assert held is not None and held.is_from_cache
        assert held.tokens == (TOKENS - 1) // BLOCK * BLOCK
        before = load(self.url(here)).external_kv_tokens
        leg = self.answer(here, wire.prefill_body(asked, source=held))
        both_s = time.monotonic() - began
        whole = wire.read_transfer(leg)
        assert whole is not None and whole.tokens == TOKENS
        within(5, lambda: load(self.url(here)).external_kv_tokens == before + held.tokens)
        assert self.text(there, wire.decode_body({**asked, "cache_salt": f"other {turn} {evicts}"}, whole)) == alone
        assert self.text(here, asked) == alone
        return Pulled(cold_s, source_s, both_s)

    def nothing_is_held(self) -> bool:
        return all(self.state(name)["holds"] == 0 for name in self.running)


def body(number: int, tokens: int = TOKENS) -> dict[str, Any]:
    chance = random.Random(number)
    prompt = [chance.randrange(97, 123) for _ in range(tokens)]
    return {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "allowed_token_ids": LETTERS}  # fmt: skip


@contextmanager
def tiered(folder: Path, kind: str, name: str) -> Iterator[Tiered]:
    """Two engines that know each other, with tiers of this kind (`host`, or `disk`: files for all but two prompts) and
    this model (`tiny`: the one that ships, or `larger`).
    """
    model = model_path() if name == "tiny" else write_model(name, folder / "model")
    engines = Tiered(folder, str(model), ROLES, kind=kind, wider=WIDER[name], gpus=device.gpus())
    with patch.object(pair, "START_S", START_S), engines as running:
        within(20, lambda: running.state("d")["peers"])
        yield running
