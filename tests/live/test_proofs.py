"""Two real engines with other weights under one name: every hold would be confirmed, but no request is handed over.

The hand-over itself cannot detect that, because names, shapes and layouts are the same. The router's proof detects it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.cluster import START_S, within
from support.engine_pair import ask
from support.redis_server import RedisServer, start

from baton.ticket_keys import files_for
from engine.tiny import model_path

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(900)]

MODEL = "baton-tiny"
APART = 'baton_pair_apart{decode="decode-0",prefill="prefill-0"}'


def other_weights(folder: Path) -> Path:
    """The small model with negated weights of its attention's values: the same shapes, other answers."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(model_path(), folder)
    weights = load_file(folder / "model.safetensors")
    turned = {name: -each if "v_proj" in name else each for name, each in weights.items()}
    assert any("v_proj" in name for name in turned)
    save_file(turned, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass
class Odd:
    """A router with a registry, and an engine of each role whose weights differ."""

    endpoint: str
    admin: str
    decode: str
    agents: tuple[str, ...]

    def weights(self) -> list[str]:
        """The digests of the weights, as the agents report them."""
        found = []
        for agent in self.agents:
            with urllib.request.urlopen(agent + "/state", timeout=30) as answer:
                found.append(str(json.loads(answer.read())["weights"]))
        return found

    def metrics(self) -> str:
        with urllib.request.urlopen(self.admin + "/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    def counted(self, name: str) -> float:
        found = [line for line in self.metrics().splitlines() if line.startswith(f"{name} ")]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


@pytest.fixture(params=["nixl", "baton"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Odd]:
    """Agents would tell the engines apart by their weights, so both are started with one name for them."""
    yield from pair(request.param, tmp_path, "--weights", "said to be the same")


@pytest.fixture
def strangers(tmp_path: Path) -> Iterator[Odd]:
    """The same engines, whose agents report their own digests."""
    yield from pair("baton", tmp_path)


def pair(connector: str, tmp_path: Path, *more: str) -> Iterator[Odd]:
    """A router, and two engines with these flags and other weights."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup")
    with ExitStack() as stack:
        (tmp_path / "registry").mkdir()
        server = RedisServer(tmp_path / "registry", standin=False)
        server.start()
        stack.callback(server.kill)
        registry = ("--registry", server.url, "--registry-password-file", str(server.command.password_file))
        of_router, of_engines = stack.enter_context(files_for(["prefill-0", "decode-0"], None))
        environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}

        def begun(*words: str) -> subprocess.Popen[bytes]:
            argv = (sys.executable, "-m", "baton", *words, "--json", *registry)
            process = start(argv, env=environment, stderr=subprocess.DEVNULL)
            stack.callback(ended, process)
            return process

        router = begun("router", "--port", "0", "--admin-port", "0", "--policy", "least_load", *keys(of_router))
        assert router.stdout is not None
        told = json.loads(router.stdout.readline())
        # One folder for both, because engines compare its name; its weights change between the two starts.
        model = other_weights(tmp_path / "model")
        shared = (str(model), "--served-model-name", MODEL, "--transfer", connector, *more)
        prefill = ready(begun("engine", *shared, "--role", "prefill", "--cores", "0", *keys(of_engines["prefill-0"])))
        shutil.copyfile(model_path() / "model.safetensors", model / "model.safetensors")
        decode = begun("engine", *shared, "--role", "decode", "--cores", "1", *keys(of_engines["decode-0"]))
        answers = ready(decode)
        yield Odd(told["endpoint"], told["admin"], answers["endpoint"], (prefill["agent"], answers["agent"]))


def keys(file: Path) -> tuple[str, str]:
    return "--ticket-keys-file", str(file)


def ended(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.communicate(timeout=90)


def ready(process: subprocess.Popen[bytes]) -> dict[str, str]:
    """The addresses of an engine and its agent, once the engine is ready."""
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event.get("event") == "ready":
            return {name: str(event[name]) for name in ("endpoint", "agent")}
    raise AssertionError("`baton engine` ended before its engine was ready")


def test_other_weights_under_one_name_hand_nothing_over(odd: Odd) -> None:
    within(START_S, lambda: odd.counted('baton_pair_proofs_total{result="failed"}') >= 1, odd.metrics)
    within(5.0, lambda: odd.counted(APART) == 1, odd.metrics)
    with urllib.request.urlopen(odd.admin + "/ui/data", timeout=30) as answer:
        (pair,) = json.loads(answer.read())["pairs"]
    assert "answers otherwise" in pair["last_failure"], "the proof failed for its answers, and for no other reason"
    assert odd.counted('baton_pair_proofs_total{result="passed"}') == 0
    handed = odd.counted('baton_handoffs_total{result="ok"}')
    body = {"model": MODEL, "prompt": "What is Baton? " * 12, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    alone = ask(odd.decode, "/v1/completions", body)[1]["choices"][0]["text"]
    status, answer = ask(odd.endpoint, "/v1/completions", body)
    assert status == 200
    assert answer["choices"][0]["text"] == alone, "P's blocks got into an answer"
    assert odd.counted('baton_handoffs_total{result="ok"}') == handed


def test_agents_tell_other_weights_apart_and_nothing_is_even_tried(strangers: Odd) -> None:
    """The digests of the weight files differ: no request is handed over, and no proof is made."""
    first, second = strangers.weights()
    assert first and second and first != second
    body = {"model": MODEL, "prompt": "What is Baton? " * 12, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    alone = ask(strangers.decode, "/v1/completions", body)[1]["choices"][0]["text"]
    for _ in range(6):
        status, answer = ask(strangers.endpoint, "/v1/completions", body)
        assert (status, answer["choices"][0]["text"]) == (200, alone)
    assert strangers.counted('baton_handoffs_total{result="ok"}') == 0
    assert strangers.counted('baton_handoffs_total{result="failed"}') == 0
    for result in ("passed", "failed"):
        assert strangers.counted(f'baton_pair_proofs_total{{result="{result}"}}') == 0
