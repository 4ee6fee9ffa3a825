"""Handed-over answers are one engine's alone, token for token, whatever the architecture; and so are those of adapters.

Real vLLM engines, with models of random weights that the test makes. On two of these kinds the obvious shortcuts are
wrong: a Mamba hybrid's P leaves the prompt's last token to D, so that its own token must reach no client; and one name
may mean two adapters. Each test has its own two engines, which takes about a minute.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.cluster import within
from support.engine_pair import ask
from support.random_models import LETTERS, write_adapter, write_model
from support.redis_server import start

from bench import pair
from bench.pair import Engines
from cluster.instance import Role

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1200)]

PATH = "/v1/completions"
PROVEN_S = 60.0
START_S = 600.0
"""On a machine whose two cores others use, too, vLLM's imports alone take minutes."""


def nixl(role: Role) -> str:
    """vLLM's own connector, as it is usually run."""
    kind = "kv_producer" if role is Role.PREFILL else "kv_consumer"
    return json.dumps({"kv_connector": "NixlConnector", "kv_role": kind, "kv_buffer_device": "cpu",
                       "kv_load_failure_policy": "recompute"})  # fmt: skip


@dataclass
class Routed:
    """A router in front of two engines, given by URL."""

    engines: Engines
    endpoint: str
    admin: str

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.admin + path, timeout=30) as answer:
            return json.loads(answer.read())

    def counted(self, name: str) -> float:
        with urllib.request.urlopen(self.admin + "/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def body(self, tokens: int, number: int, model: str = "tiny") -> dict[str, Any]:
        """Greedy, in letters, so that an answer's text tells its tokens."""
        prompt = [97 + (at * 7 + at * at * number + number) % 26 for at in range(tokens)]
        return {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True,
                "allowed_token_ids": LETTERS}  # fmt: skip

    def alone(self, body: dict[str, Any], name: str = "d") -> str:
        """What one engine says of it, with nothing that was ever pulled."""
        status, answer = ask(self.engines.url(name), PATH, {**body, "cache_salt": "alone"})
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    def streamed(self, body: dict[str, Any]) -> str:
        request = urllib.request.Request(
            self.endpoint + PATH, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read().decode()
        assert text.endswith("data: [DONE]\n\n"), text
        events = [json.loads(each.removeprefix("data: ")) for each in text.strip().split("\n\n")[:-1]]
        assert not [each for each in events if "error" in each], text
        return "".join(each["choices"][0]["text"] for each in events)

    def whole(self, body: dict[str, Any]) -> str:
        status, answer = ask(self.endpoint, PATH, body)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])


@contextmanager
def routed(folder: Path, model: Path, *flags: str, longest: int = 2048, **by_role: tuple[str, ...]) -> Iterator[Routed]:
    """Both engines with these flags. `by_role`: the flags of one of them."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup")
    for name in "pd":
        (folder / name).mkdir()
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    engines = _Engines(folder, str(model), roles, transfer=nixl, flags=flags, more={"max_model_len": longest})
    engines.own = {roles[name]: flags for name, flags in by_role.items()}
    with patch.object(pair, "START_S", START_S), engines:
        words = ("--prefill-url", f"p={engines.url('p')}", "--decode-url", f"d={engines.url('d')}", "--pins")
        argv = (sys.executable, "-m", "baton", "router", "--port", "0", "--admin-port", "0", "--json", *words)
        router = start(argv, stderr=subprocess.DEVNULL)
        try:
            assert router.stdout is not None
            told = json.loads(router.stdout.readline())
            here = Routed(engines, told["endpoint"], told["admin"])
            within(PROVEN_S, lambda: here.counted("baton_pair_proofs_total") >= 1)
            yield here
        finally:
            router.terminate()
            router.communicate(timeout=60)


@dataclass
class _Engines(Engines):
    """Engines with flags of their own."""

    own: Any = None

    def _start(self, name: str, role: Role, number: int) -> Any:
        flags = self.flags
        self.flags = (*flags, *(self.own or {}).get(role, ()))
        try:
            return super()._start(name, role, number)
        finally:
            self.flags = flags


def compared(here: Routed, lengths: tuple[int, ...]) -> None:
    """Each prompt in one piece and as a stream, against D alone."""
    said = set()
    for number, tokens in enumerate(lengths, 1):
        plain, streamed = here.body(tokens, 2 * number), here.body(tokens, 2 * number + 1)
        alone = here.alone(plain)
        assert here.whole(plain) == alone, tokens
        assert here.streamed(streamed) == here.alone(streamed), tokens
        one = {**plain, "max_tokens": 1}
        assert here.whole(one) == here.streamed(one) == here.alone(one), f"{tokens}: an answer of one token"
        said.add(alone)
    assert len(said) == len(lengths), "a model that says one thing only shows nothing"


@pytest.mark.parametrize(("kind", "lengths"), [
    ("dense", (3, 40, 128, 129, 700)), ("sliding", (3, 40, 128, 200, 1364)), ("experts", (3, 40, 128, 129, 700)),
])  # fmt: skip
def test_handed_over_and_seeded_as_one_engine_alone(kind: str, lengths: tuple[int, ...], tmp_path: Path) -> None:
    model = write_model(kind, tmp_path / "model")
    with routed(tmp_path, model) as here:
        assert here.counted('baton_pair_proofs_total{result="passed"}') == 1, here.get("/ui/data")["pairs"]
        compared(here, lengths)
        assert here.counted('baton_handoffs_total{result="ok"}') == 2 * len(lengths)
        assert here.counted("baton_seeds_total") == len(lengths)


def test_a_mamba_hybrid_is_handed_over_and_never_seeded(tmp_path: Path) -> None:
    """vLLM's build for CPUs ends an engine of this kind at its second chunk of 256 tokens, or at its prefix cache."""
    model, lengths = write_model("mamba", tmp_path / "model"), (3, 17, 40, 128, 129, 230)
    with routed(tmp_path, model, "--no-enable-prefix-caching", longest=256) as here:
        assert here.counted('baton_pair_proofs_total{result="passed"}') == 1, here.get("/ui/data")["pairs"]
        compared(here, lengths)
        assert here.counted('baton_handoffs_total{result="ok"}') == 2 * len(lengths)
        assert here.counted("baton_seeds_total") == 0
        (told,) = here.get("/ui/data")["pairs"]
        assert "not the first" in told["unseeded"]


def test_adapters_that_nobody_vouches_for_are_served_whole(tmp_path: Path) -> None:
    """One name with other weights on P and on D, and a name that means an adapter on D alone."""
    model = write_model("dense", tmp_path / "model")
    first, second = (write_adapter(tmp_path / f"adapter-{seed}", seed) for seed in (1, 2))
    lora = ("--enable-lora", "--max-lora-rank", "8")
    mine = ("--served-model-name", "tiny", "odd", "--lora-modules", f"same={first}")
    theirs = ("--lora-modules", f"same={second}", f"odd={second}")
    with routed(tmp_path, model, *lora, p=mine, d=theirs) as here:
        compared(here, (40, 200))
        handed = here.counted('baton_handoffs_total{result="ok"}')
        assert handed > 0, "the model itself is handed over"
        for name in ("same", "odd"):
            for number, tokens in enumerate((40, 200), 1):
                body = here.body(tokens, number, name)
                alone = here.alone(body)
                assert alone != here.alone(body, "p"), "the two would say something else"
                assert here.whole(body) == here.streamed(body) == alone
        assert here.counted('baton_handoffs_total{result="ok"}') == handed
