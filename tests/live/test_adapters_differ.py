"""Real engines on which one name means two adapters: D computes such a prompt itself, and pulls nothing for it.

A router hands nothing over between such engines (`tests/live/test_architectures.py`). Here no router runs: the tests
send the hold's fields, as a router would that does not yet know of an adapter's exchange.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.cluster import within
from support.engine_pair import ask, load
from support.random_models import LETTERS, write_adapter, write_model

from bench import pair
from bench.pair import Engines, Running
from cluster import wire
from cluster.instance import Role
from kvtransfer.door import ask as knock

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(900)]

PATH, TOKENS = "/v1/completions", 300


@dataclass
class TwoAdapters(Engines):
    """Engines with three adapter names: `same` means other weights on each, `poet` and `late` equal weights on both."""

    def _start(self, name: str, role: Role, number: int) -> Running:
        files = f"same={self.folder}/adapter-{name}", f"poet={self.folder}/poet", f"late={self.folder}/late-{name}"
        self.flags = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "3", "--lora-modules", *files)
        return super()._start(name, role, number)

    def leg(self, body: dict[str, Any]) -> tuple[wire.TransferFields, int]:
        """The fields of P's hold, and P's token."""
        status, answer = ask(self.url("p"), PATH, wire.prefill_body(body, token_ids=True))
        transfer = wire.read_transfer(answer)
        assert status == 200 and transfer is not None, answer
        return transfer, answer["choices"][0]["token_ids"][0]

    def text(self, name: str, body: Any) -> str:
        status, answer = ask(self.url(name), PATH, body)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    def alone(self, body: dict[str, Any], name: str = "d") -> str:
        return self.text(name, {**body, "cache_salt": "alone"})

    def counted(self, what: str) -> int:
        return int(knock(self.door("d"), {"ask": "state"})["counts"].get(what, 0))

    def nothing_is_held(self) -> bool:
        return int(knock(self.door("p"), {"ask": "state"})["holds"]) == 0


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoAdapters]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup")
    folder = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(("adapter-p", "adapter-d", "poet"), 1):
        write_adapter(folder / name, number)
    for name in ("late-p", "late-d"):
        write_adapter(folder / name, 4)
    model = write_model("gqa", folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair, "START_S", 600.0)
        with TwoAdapters(folder, str(model), {"p": Role.PREFILL, "d": Role.DECODE}) as running:
            within(20, lambda: knock(running.door("d"), {"ask": "state"})["peers"])
            yield running


def body(model: str, number: int) -> dict[str, Any]:
    prompt = [97 + (at * 7 + at * at * number + number) % 26 for at in range(TOKENS)]
    return {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True,
            "allowed_token_ids": LETTERS}  # fmt: skip


def test_one_adapter_under_one_name_is_pulled(engines: TwoAdapters) -> None:
    asked, before = body("poet", 1), load(engines.url("d")).external_kv_tokens
    transfer, token = engines.leg(asked)
    assert len(transfer.fields[wire.ADAPTER]) == 24, "P's answer tells which adapter"
    assert engines.text("d", wire.decode_body(asked, transfer, token)) == engines.alone(asked)
    within(5, lambda: load(engines.url("d")).external_kv_tokens - before == TOKENS)
    assert engines.alone(asked) != engines.alone({**asked, "model": "tiny"}), "an adapter that changes nothing"


@pytest.mark.parametrize(("held", "asked"), [("same", "same"), ("tiny", "poet"), ("poet", "tiny"), ("same", "poet")])
def test_the_keys_and_values_of_another_adapter_are_never_used(engines: TwoAdapters, held: str, asked: str) -> None:
    number = 10 + len(held) + 3 * len(asked)
    theirs, mine = body(held, number), body(asked, number)
    assert engines.alone(theirs, "p") != engines.alone(mine), "the two adapters give different texts"
    before, counted = load(engines.url("d")).external_kv_tokens, engines.counted("not pulled")
    transfer, _ = engines.leg(theirs)
    assert engines.text("d", wire.decode_body(mine, transfer)) == engines.alone(mine)
    assert load(engines.url("d")).external_kv_tokens == before
    assert engines.counted("not pulled") == counted + 1
    within(10, engines.nothing_is_held)


def test_a_first_token_that_another_adapter_chose_is_not_pinned(engines: TwoAdapters) -> None:
    """A router that gave the client such a token would see another text in D's stream, and end it with an error."""
    asked, counted = body("same", 40), engines.counted("not pinned")
    transfer, _ = engines.leg(asked)
    alone = engines.alone(asked)
    other = next(token for token in LETTERS if chr(token) != alone[0])
    assert engines.text("d", wire.decode_body(asked, transfer, other)) == alone
    assert engines.counted("not pinned") == counted + 1


def test_without_a_hold_a_first_token_is_pinned_if_the_same_adapter_chose_it(engines: TwoAdapters) -> None:
    asked, counted = body("poet", 41), engines.counted("not pinned")
    transfer, token = engines.leg(asked)
    told, alone = transfer.fields[wire.ADAPTER], engines.alone(asked)
    assert engines.text("d", wire.decode_body(asked, transfer, token)) == alone
    other = next(token for token in LETTERS if chr(token) != alone[0])
    assert engines.text("d", wire.decode_body(asked, None, other, told))[0] == chr(other)
    assert engines.counted("not pinned") == counted
    for another in (None, "", "5f" * 12):
        assert engines.text("d", wire.decode_body(asked, None, other, another)) == alone
    assert engines.counted("not pinned") == counted + 3
    within(10, engines.nothing_is_held)


def test_files_that_were_touched_are_of_an_unknown_adapter(engines: TwoAdapters) -> None:
    asked, before = body("late", 50), load(engines.url("d")).external_kv_tokens
    transfer, _ = engines.leg(asked)
    assert engines.text("d", wire.decode_body(asked, transfer)) == engines.alone(asked)
    within(5, lambda: load(engines.url("d")).external_kv_tokens - before == TOKENS)
    file = engines.folder / "late-p" / "adapter_model.safetensors"
    os.utime(file, ns=(1, 1))
    transfer, _ = engines.leg(body("late", 51))
    assert transfer.fields[wire.ADAPTER] == "", "P cannot tell which files its engine has read"
    before = load(engines.url("d")).external_kv_tokens
    assert engines.text("d", wire.decode_body(body("late", 51), transfer)) == engines.alone(body("late", 51))
    assert load(engines.url("d")).external_kv_tokens == before
