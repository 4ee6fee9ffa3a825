"""Engines that Baton's connector leaves to vLLM's own hand over, and tell why; inside a MultiConnector it pulls."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.cluster import within
from support.engine_pair import ask, get, load
from support.random_hybrid import PROMPT_TOKENS_MAX, random_hybrid

from bench import pair
from bench.pair import Engines, Running
from cluster import wire
from cluster.instance import Role
from engine.tiny import model_path
from kvtransfer.asks import LEFT
from kvtransfer.door import ask as knock
from kvtransfer.door import introduce_each_other

pytestmark = [
    pytest.mark.live,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup"),
]

PATH = "/v1/completions"
ROLES = {"p": Role.PREFILL, "d": Role.DECODE}


@dataclass
class Each(Engines):
    """Engines with flags that differ from one to the other."""

    flags_of: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def _start(self, name: str, role: Role, number: int) -> Running:
        self.flags = self.flags_of.get(name, ())
        return super()._start(name, role, number)


def prompt(chance: random.Random, tokens: int) -> list[int]:
    return [chance.randrange(97, 123) for _ in range(tokens)]


def body(tokens: list[int]) -> dict[str, Any]:
    asked = {"model": "tiny", "prompt": tokens, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return {**asked, "return_token_ids": True}


def answer(url: str, asked: Any, **headers: str) -> dict[str, Any]:
    status, said = ask(url, PATH, asked, **headers)
    assert status == 200, said
    return dict(said)


def hand_over(engines: Engines, tokens: list[int], **headers: str) -> list[int]:
    """Run both legs of a prompt, and return D's tokens. Only the prefill leg gets the headers."""
    transfer = wire.read_transfer(answer(engines.url("p"), wire.prefill_body(body(tokens)), **headers))
    assert transfer is not None
    ids: list[int] = answer(engines.url("d"), wire.decode_body(body(tokens), transfer))["choices"][0]["token_ids"]
    return ids


def alone(engines: Engines, tokens: list[int]) -> list[int]:
    ids: list[int] = answer(engines.url("p"), {**body(tokens), "cache_salt": "alone"})["choices"][0]["token_ids"]
    return ids


def each_is_pulled(
    engines: Engines, lengths: tuple[int, ...], expected: Callable[[int], int], headers: tuple[dict[str, str], ...]
) -> None:
    chance = random.Random(5)
    for length, more in zip(lengths, headers, strict=True):
        tokens, before = prompt(chance, length), load(engines.url("d")).external_kv_tokens
        assert hand_over(engines, tokens, **more) == alone(engines, tokens), length
        within(5, lambda: load(engines.url("d")).external_kv_tokens - before == expected(length))  # noqa: B023
    within(5, lambda: load(engines.url("d")).recomputed_tokens == 0)
    for name in "pd":
        assert engines.running[name].alive() and get(engines.url(name), "/health")[0] == 200


def test_a_mamba_hybrid_starts_and_is_handed_over_by_vllm(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    more = {"max_model_len": 512}
    with Engines(tmp_path, str(random_hybrid(folder)), ROLES, introduced=False, more=more) as engines:
        for name in "pd":
            assert "kinds of KV cache" in knock(engines.door(name), {"ask": "metadata"})[LEFT]
            assert "handed over by vLLM's own connector: it has more kinds" in engines.running[name].log.read_text()
        lengths = (7, 130, PROMPT_TOKENS_MAX)
        each_is_pulled(engines, lengths, lambda length: length - 1, ({},) * 3)  # the last token's state is D's own


def test_data_parallel_ranks_hand_over_by_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks of P hand over to a D with vLLM's own connector, as `engine.vllm.transfer` chooses it for such a P."""
    monkeypatch.setattr(pair, "START_S", 480.0)  # three engine cores on two cores

    def transfer(role: Role) -> str:
        config = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_buffer_device": "cpu"}
        if role is Role.PREFILL:
            config |= {"kv_connector": "BatonConnector", "kv_role": "kv_producer"}
            config |= {"kv_connector_module_path": "kvtransfer.vllm_connector"}
        extra = {"door": str(tmp_path / "p" / "door")} if role is Role.PREFILL else {}
        return json.dumps({**config, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra})

    flags = {"p": ("--data-parallel-size", "2")}
    with Each(tmp_path, str(model_path()), ROLES, transfer=transfer, flags_of=flags) as engines:
        assert "data parallelism" in knock(engines.door("p"), {"ask": "state"})[LEFT]
        ranks = tuple({"X_data_parallel_rank": rank} for rank in "0101")
        each_is_pulled(engines, (288, 281, 130, 131), lambda length: length, ranks)


def test_inside_a_multi_connector_batons_pulls_and_no_engine_ends(tmp_path: Path) -> None:
    def transfer(role: Role) -> str:
        name, kv_role = ("p", "kv_producer") if role is Role.PREFILL else ("d", "kv_consumer")
        ours = {"kv_connector": "BatonConnector", "kv_connector_module_path": "kvtransfer.vllm_connector",
                "kv_role": kv_role, "kv_buffer_device": "cpu",
                "kv_connector_extra_config": {"door": str(tmp_path / name / "door")}}  # fmt: skip
        return json.dumps({"kv_connector": "MultiConnector", "kv_role": kv_role,
                           "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"connectors": [ours]}})  # fmt: skip

    with Engines(tmp_path, str(model_path()), ROLES, transfer=transfer) as engines:
        introduce_each_other(*((name, engines.door(name)) for name in "pd"))
        within(20, lambda: all(knock(engines.door(name), {"ask": "state"})["peers"] for name in "pd"))
        lengths = tuple(5 + 29 * number % 600 for number in range(40))
        each_is_pulled(engines, lengths, lambda length: length, ({},) * len(lengths))
        within(10, lambda: all(knock(engines.door(name), {"ask": "state"})["holds"] == 0 for name in "pd"))
