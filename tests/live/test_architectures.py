"""A handed-over answer equals one engine's alone, token for token, for every kind of model and for adapters.

Real vLLM engines, with models of random weights that the test makes, given by URL with vLLM's own connector, and
started by `baton up`, which chooses Baton's. On two of these kinds the obvious shortcuts are wrong: a Mamba hybrid's P
leaves the prompt's last token to D, so that P's own token must reach no client, and in 16 bits nothing is handed over;
and one name may mean two adapters.
Each test has its own two engines, which takes about a minute. `make test` runs the two commonest kinds beside grouped
queries, which the model of all other live tests has.

No test tells the router what kind of model it has. Each sees how the router serves it, and compares that with the row
of docs/benchmarks/kinds.json, from which docs/exactness.md is made; `--publish-kinds` writes the row instead.
"""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from unittest.mock import patch

import pytest
import yaml
from support.cluster import Cluster, within
from support.engine_pair import ask
from support.kinds import BATON, Seen, Table
from support.random_models import LETTERS, OF_PICTURES, picture, write_adapter, write_model
from support.redis_server import start

from bench import pair
from bench.pair import Engines
from cluster.instance import Role

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]
LONG = pytest.mark.long

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
UNCACHED: Final = ("--no-enable-prefix-caching",)
FLOAT32: Final = ("--dtype", "float32")
"""In 16 bits a near tie depends on how many tokens a step has: D computes a prompt's last token alone, one engine
together with the others (docs/exactness.md)."""
PROVEN_S = 60.0
IN_ONE_PROCESS: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""An engine of one rank computes in the process that schedules, as on GPUs. On CPUs vLLM otherwise starts a third
process for that. Without it, and with the cache below, the two rows of `make test` take 54 and 54 s, with it 76 and
75 s (2026-11-28, two quiet cores, in turns)."""
SMALL_CACHE: Final = ("--kv-cache-memory-bytes", str(256 << 20))
"""The cache of these models has 2 KiB a token. An engine writes to all of its cache when it starts."""
START_S = 600.0
"""Seconds for the start of an engine: on a machine with two busy cores, vLLM's imports alone take minutes."""


def nixl(role: Role) -> str:
    """vLLM's own connector, as it is usually run."""
    kind = "kv_producer" if role is Role.PREFILL else "kv_consumer"
    return json.dumps({"kv_connector": "NixlConnector", "kv_role": kind, "kv_buffer_device": "cpu",
                       "kv_load_failure_policy": "recompute"})  # fmt: skip


class HasUrls(Protocol):
    """Two engines."""

    def url(self, name: str) -> str:
        """The address of `p` or `d`."""


@dataclass
class Routed:
    """A router in front of two engines."""

    engines: HasUrls
    endpoint: str
    admin: str
    because: str = ""

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

    def chat(self, text: str, *, pictures: int = 0, last: bool = False, seed: int = 0) -> dict[str, Any]:
        """Greedy. `last`: the pictures stand behind the text, as marks in it say: vLLM puts pictures without a mark
        in front, in whatever order a message has its parts.
        """
        shown = [{"type": "image_url", "image_url": {"url": picture(seed + each)}} for each in range(pictures)]
        words = [{"type": "text", "text": text + OF_PICTURES[0] * pictures if last else text}]
        content: Any = [*shown, *words] if shown else text
        return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 12,
                "temperature": 0, "ignore_eos": True, "allowed_token_ids": LETTERS}  # fmt: skip

    def said(self, url: str, body: dict[str, Any]) -> str:
        """The reasoning and content of a streamed chat; names and arguments of its tool calls, whose ids are random."""
        request = urllib.request.Request(
            url + CHAT, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read().decode()
        assert text.endswith("data: [DONE]\n\n"), text
        deltas = [json.loads(each.removeprefix("data: ")) for each in text.strip().split("\n\n")[:-1]]
        assert not [each for each in deltas if "error" in each], text
        told = [each["choices"][0]["delta"] for each in deltas if each["choices"]]
        texts = ["".join(str(each.get(name) or "") for each in told) for name in ("reasoning", "content")]
        calls = [call.get("function") or {} for each in told for call in each.get("tool_calls") or ()]
        return repr([*texts, "".join(str(each.get(name) or "") for each in calls for name in ("name", "arguments"))])

    def unseeded(self) -> str:
        """Why the last request's first token was not given early."""
        (last, *_) = self.get("/explain?n=1")["requests"]
        return str(self.get(f"/explain/{last['id']}")["seed"]["because"])

    def explained(self) -> str:
        """Why the last request was served as it was: the reason of its choice, from `/explain`."""
        (last, *_) = self.get("/explain?n=1")["requests"]
        turns = self.get(f"/explain/{last['id']}")["turns"]
        because = next(str(each["because"]) for each in turns if each["turn"] == "choice")
        return because.partition(": whole on ")[0]

    def alone(self, body: dict[str, Any], name: str = "d") -> str:
        """The answer of one engine that uses no pulled block for it."""
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

    def pair(self) -> dict[str, Any]:
        """What the router reports of its only pair."""
        (told,) = self.get("/ui/data")["pairs"] or [{}]
        return dict(told)

    def way(self) -> Seen:
        """How the router has served all streams so far, and why."""
        handed, seeds = (self.counted(name) for name in ('baton_handoffs_total{result="ok"}', "baton_seeds_total"))
        told = self.pair()
        if seeds:
            return Seen("handed over and seeded", "the pair's proof has passed, and P computes the whole prompt")
        if handed:
            return Seen("handed over", told.get("unseeded") or self.unseeded())
        return Seen("whole", told.get("last_failure") or "not proven")

    def whole(self, body: dict[str, Any]) -> str:
        status, answer = ask(self.endpoint, PATH, body)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])


@contextmanager
def routed(
    folder: Path, model: Path, *flags: str, longest: int = 2048, pins: bool = True, **by_role: tuple[str, ...]
) -> Iterator[Routed]:
    """A router in front of two engines with these flags. `by_role`: more flags for one engine (`p` or `d`)."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup")
    for name in "pd":
        (folder / name).mkdir()
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    more = {"max_model_len": longest, "pinning": pins, "extra_env": IN_ONE_PROCESS}
    engines = _Engines(folder, str(model), roles, transfer=nixl, flags=(*flags, *SMALL_CACHE), more=more)
    engines.own = {roles[name]: flags for name, flags in by_role.items()}
    with patch.object(pair, "START_S", START_S), engines:
        words = ("--prefill-url", f"p={engines.url('p')}", "--decode-url", f"d={engines.url('d')}")
        words += ("--policy", "least_load", *(("--pins",) if pins else ()))  # it hands over whenever it can
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


@dataclass
class _OfCluster:
    """The engines of a `baton up`."""

    cluster: Cluster

    def url(self, name: str) -> str:
        return self.cluster.urls["prefill-0" if name == "p" else "decode-0"]


@contextmanager
def started(
    folder: Path, model: Path, *flags: str, longest: int = 2048, pins: bool = True, **by_role: tuple[str, ...]
) -> Iterator[Routed]:
    """A `baton up` of this model with these flags of vLLM. `by_role`: the tensor parallel sizes of `p` and `d`."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup")
    sizes = {name: int(by_role[name][1]) if name in by_role else 1 for name in "pd"}
    pools = {
        pool: {"start": 1, "shape": {"tp": sizes[name]}, "engine_args": {"max-model-len": longest, **_by_name(flags)}}
        for pool, name in (("prefill", "p"), ("decode", "d"))
    }
    spec = {"models": [{"name": str(model), "served_name": "tiny", "pools": pools}], "router": {"policy": "least_load"}}
    with Cluster.of(folder, yaml.safe_dump(spec)) as cluster:
        here = Routed(_OfCluster(cluster), cluster.endpoint, cluster.admin)
        within(PROVEN_S, lambda: here.counted("baton_pair_proofs_total") >= 1)
        yield here


def _by_name(flags: tuple[str, ...]) -> dict[str, Any]:
    """Flags as `engine_args` has them: a flag without a value is true."""
    found: dict[str, Any] = {}
    for word in flags:
        if word.startswith("--"):
            last = word.removeprefix("--")
            found[last] = True
        else:
            found[last] = json.loads(word) if word.startswith("{") else word
    return found


FRONTS: Final = {"": routed, BATON: started}
"""What starts the two engines, by the end of the row's name: the test, with vLLM's own connector and a router that has
their URLs; `baton up`, with Baton's.
"""
BOTH_FRONTS = pytest.mark.parametrize("front", ["", pytest.param(BATON, marks=LONG)], ids=["by URL", "baton up"])


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
    assert len(said) == len(lengths), "a model that always gives the same text shows nothing"


@BOTH_FRONTS
@pytest.mark.parametrize(
    ("kind", "flags", "lengths"),
    [
        pytest.param("dense", FLOAT32, (3, 40, 128, 129, 700), marks=LONG),
        pytest.param("gqa", FLOAT32, (3, 40, 128, 129, 700), marks=LONG),
        pytest.param("mla", FLOAT32, (3, 40, 128, 129, 700), marks=LONG),  # whole: D disagrees with itself
        ("experts", FLOAT32, (3, 40, 128, 129, 700)),
        ("sliding", FLOAT32, (3, 40, 128, 200, 1364)),
        # vLLM's build for CPUs ends an engine of this kind at its second chunk of 256 tokens, or at its prefix cache.
        # In 16 bits D's step for the prompt's last token rounds otherwise than one engine (docs/exactness.md).
        pytest.param("mamba", (*UNCACHED, *FLOAT32), (3, 17, 40, 128, 129, 230), marks=LONG),
        pytest.param("mamba 16 bits", UNCACHED, (3, 17, 40, 128, 129, 230), marks=LONG),
    ],
)
def test_an_answer_equals_one_engines(
    kind: str, flags: tuple[str, ...], lengths: tuple[int, ...], front: str, tmp_path: Path, table: Table
) -> None:
    hybrid = kind.startswith("mamba")
    model = write_model("mamba" if hybrid else kind, tmp_path / "model")
    with FRONTS[front](tmp_path, model, *flags, longest=256 if hybrid else 2048) as here:
        compared(here, lengths)
        handed = here.counted('baton_handoffs_total{result="ok"}')
        assert handed in {0, 2 * len(lengths)}, "all prompts go one way"
        # D may answer before P's HTTP answer is here: such a stream needs no seed.
        first = here.counted('baton_early_legs_total{result="answered first"}')
        seeds = here.counted("baton_seeds_total")
        assert seeds <= handed / 2 and (seeds == 0 or seeds + first >= handed / 2)
        table.saw(kind + front, here.way(), 2 * len(lengths))


@LONG
@pytest.mark.parametrize("kind", ["alibi", "learned positions"])
def test_a_kind_that_is_not_in_the_table_gets_one_engines_answers(kind: str, tmp_path: Path) -> None:
    """Nothing in Baton knows these kinds, and no way is asked for: however they are served, the answers are right."""
    model = write_model(kind, tmp_path / "model", seed=3)  # with this seed no two of the prompts get one text
    with FRONTS[BATON](tmp_path, model, *FLOAT32) as here:
        compared(here, (3, 40, 128, 129, 700))
        print(f"{kind}: {here.way()}")


@LONG
@BOTH_FRONTS
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_tensor_parallel_sizes_may_differ(prefill: int, decode: int, front: str, tmp_path: Path, table: Table) -> None:
    """In float32, because each size adds up in another order, and the answers of both sizes are compared."""
    model = write_model("gqa", tmp_path / "model")
    words = {name: ("--tensor-parallel-size", str(size)) for name, size in (("p", prefill), ("d", decode))}
    with FRONTS[front](tmp_path, model, "--dtype", "float32", **words) as here:
        compared(here, (3, 40, 129, 700))
        assert here.counted('baton_handoffs_total{result="ok"}') in {0, 8}
        table.saw(f"tp {prefill} to {decode}{front}", here.way(), 8)


@LONG
@BOTH_FRONTS
def test_a_cache_of_eight_bits_is_handed_over_as_it_is(front: str, tmp_path: Path, table: Table) -> None:
    """Both engines keep keys and values in fp8: answers are those of one such engine, to the token."""
    model = write_model("gqa", tmp_path / "model")
    with FRONTS[front](tmp_path, model, "--kv-cache-dtype", "fp8_e5m2") as here:
        compared(here, (3, 40, 128, 129, 700))
        assert here.counted('baton_handoffs_total{result="ok"}') in {0, 10}
        table.saw(f"fp8{front}", here.way(), 10)


@LONG
@BOTH_FRONTS
def test_drafts_are_handed_over_and_never_seeded(front: str, tmp_path: Path, table: Table) -> None:
    """vLLM takes no logits processor beside speculation, so that nothing would pin a first token."""
    model = write_model("gqa", tmp_path / "model")
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
    with FRONTS[front](tmp_path, model, "--speculative-config", drafts, pins=False) as here:
        compared(here, (3, 40, 128, 129, 700))
        assert here.counted("baton_seeds_total") == 0
        here.streamed(here.body(50, 99))  # a stream that could have had a seed: `way` asks `/explain` about it
        table.saw(f"speculation{front}", here.way(), 10)


@LONG
@BOTH_FRONTS
def test_parsers_stand_between_tokens_and_text(front: str, tmp_path: Path, table: Table) -> None:
    """All text is reasoning, as the model never ends it; where a request turns reasoning off, a grammar makes the model
    call the tool.
    """
    model = write_model("gqa", tmp_path / "model")
    parsers = ("--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    with FRONTS[front](tmp_path, model, *parsers) as here:
        handed = here.counted('baton_handoffs_total{result="ok"}')
        for number, more in enumerate(({}, {"tools": [tool]}, {}, {"tools": [tool]})):
            asked = {**here.chat(f"{number} " * (30 + 40 * number)), **more}
            said = here.said(here.endpoint, asked)
            assert said == here.said(here.engines.url("d"), {**asked, "cache_salt": "d"})
            assert re.fullmatch(r"\['[a-z]{12}', '', ''\]", said), said
        call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
        calls = {"tools": [tool], "structured_outputs": {"choice": [call]}, "max_tokens": len(call) + 1}
        asked = {**here.chat("5 " * 80), **calls, "chat_template_kwargs": {"enable_thinking": False}}
        del asked["allowed_token_ids"], asked["ignore_eos"]
        said = here.said(here.endpoint, asked)
        assert said == here.said(here.engines.url("d"), {**asked, "cache_salt": "d"}) == "['', '', 'look{}']"
        assert here.counted('baton_handoffs_total{result="ok"}') == handed + 5
        table.saw(f"parsers{front}", here.way(), 5)


@LONG
@BOTH_FRONTS
def test_pictures_go_both_ways(front: str, tmp_path: Path, table: Table) -> None:
    """One picture and two, before and behind the text (`test_encoder_runs.py` counts what is encoded)."""
    model = write_model("vision", tmp_path / "model")
    with FRONTS[front](tmp_path, model, "--limit-mm-per-prompt", '{"image": 2}') as here:
        said = set()
        for number, (pictures, last) in enumerate(((1, False), (2, False), (1, True), (1, False))):
            asked = here.chat("look " * (10 + 20 * number), pictures=pictures, last=last, seed=number)
            alone = here.said(here.engines.url("d"), {**asked, "cache_salt": "alone"})
            assert here.said(here.endpoint, asked) == alone
            said.add(alone)
        assert len(said) == 4, "a model that always gives the same text shows nothing"
        assert here.counted('baton_handoffs_total{result="ok"}') in {0, 4}
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            asked = here.chat("look", pictures=1)
            asked["messages"][0]["content"][0]["image_url"]["url"] = (
                f"http://127.0.0.1:{stranger.getsockname()[1]}/a.png"
            )
            status, told = ask(here.endpoint, CHAT, asked)
            assert (status, "allowed domains" in json.dumps(told)) == (400, True), told
            stranger.settimeout(0)
            with pytest.raises(BlockingIOError):
                stranger.accept()
        table.saw(f"vision{front}", here.way(), 4)


@LONG
def test_adapters_that_no_agent_vouches_for_are_served_aggregated(tmp_path: Path, table: Table) -> None:
    """One name with other weights on P and on D, and a name that means an adapter on D alone."""
    model = write_model("gqa", tmp_path / "model")
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
                assert alone != here.alone(body, "p"), "the two adapters give different texts"
                assert here.whole(body) == here.streamed(body) == alone
                here.because = here.explained()
        assert here.counted('baton_handoffs_total{result="ok"}') == handed
        table.saw("adapter unknown", Seen("whole", here.because), 4)
