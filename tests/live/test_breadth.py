"""Further paths on real engines through TLS: responses, messages, tokens, LoRA adapters, and paths that no engine has.

One prefill instance, and one of role both, which takes decode legs and whole requests. The tests take a minute, most of
it the engines' start.
"""

from __future__ import annotations

import importlib.util
import json
import ssl
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from support.adapter import make_adapter
from support.cluster import START_S, Cluster, within
from support.kinds import BATON, Seen, Table

from router.api.paths import PATHS, How

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * START_S)]

FILE = """
models:
  - name: baton-tiny
    aliases: [gpt-4o]
    pools:
      prefill: {start: 1, engine_args: ARGS, env: ENV}
      both: {start: 1, engine_args: ARGS, env: ENV}
router: {policy: least_load, tls_cert_file: cert.pem, tls_key_file: key.pem}
"""
ENV = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}

STORY = "Once upon a time a small robot found a bright red lantern near the river. "
QUESTION = "What is Baton?"
HEARD_S = 40.0
"""In seconds. Agents ask an engine for its models every ten seconds, and tell routers with their next heartbeat."""


@dataclass
class Broad:
    """A cluster, and calls to it."""

    cluster: Cluster
    trust: ssl.SSLContext
    folder: Path

    def ask(self, path: str, body: Any = None, *, at: str = "", **headers: str) -> tuple[int, Any]:
        """Status and answer (text where it is no JSON) of the router, or of the server `at`."""
        url, raw = at or self.cluster.endpoint, None if body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(url + path, raw, {"Content-Type": "application/json", **named})
        trust = self.trust if url.startswith("https") else None
        try:
            with urllib.request.urlopen(request, timeout=60, context=trust) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text.decode()

    def right(self, path: str, body: Any = None, **more: Any) -> Any:
        status, answer = self.ask(path, body, **more)
        assert status == 200, answer
        return answer

    def complete(self, model: str, prompt: str, **more: Any) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0}
        return str(self.right("/v1/completions", body, **more)["choices"][0]["text"])

    def events(self, path: str, body: Any, **headers: str) -> list[dict[str, Any]]:
        """The JSON of a stream's events."""
        lines = str(self.right(path, {**body, "stream": True}, **headers)).splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    def legs(self, model: str, prompt: str) -> tuple[str, list[tuple[str, str]]]:
        """A completion's text, and each of its legs with the instance that ran it."""
        name = uuid.uuid4().hex
        text = self.complete(model, prompt, X_Request_Id=name)
        turns = self.right(f"/explain/{name}", at=self.cluster.admin)["turns"]
        return text, [(turn["leg"], turn["instance"]) for turn in turns if turn["turn"] == "leg"]

    def client(self) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=self.trust)
        return openai.OpenAI(base_url=f"{self.cluster.endpoint}/v1", api_key="none", http_client=http)


@pytest.fixture(scope="module")
def broad(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broad]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup")
    folder = tmp_path_factory.mktemp("broad")
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=baton"]
    words += ["-keyout", "key.pem", "-out", "cert.pem", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)
    poet = make_adapter(folder / "poet", 1)
    make_adapter(folder / "late", 2)
    args = {"enable-lora": True, "max-loras": 2, "max-lora-rank": 8, "lora-modules": f"poet={poet}"}
    (folder / "baton.yaml").write_text(FILE.replace("ARGS", json.dumps(args)).replace("ENV", json.dumps(ENV)))
    cluster = Cluster.start(folder, str(folder / "baton.yaml"))
    try:
        cluster.wait_ready()
        within(60, cluster.proven)  # until then requests are served aggregated
        yield Broad(cluster, ssl.create_default_context(cafile=str(folder / "cert.pem")), folder)
    finally:
        cluster.stop()


def test_clients_speak_tls_and_plain_http_is_not_served(broad: Broad) -> None:
    endpoint = broad.cluster.endpoint
    assert endpoint.startswith("https://")
    body = json.dumps({"model": "gpt-4o", "prompt": STORY, "max_tokens": 6, "stream": True})
    curl = ["curl", "-sS", "--max-time", "60", "-H", "Content-Type: application/json", "-d", body]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*curl, *words], capture_output=True, text=True, check=False)

    trusting = run("--cacert", str(broad.folder / "cert.pem"), f"{endpoint}/v1/completions")
    assert trusting.returncode == 0, trusting.stderr
    assert trusting.stdout.endswith("data: [DONE]\n\n")
    assert run(f"{endpoint}/v1/completions").returncode == 60, "a certificate that curl does not trust"
    plain = run(f"{endpoint.replace('https', 'http')}/v1/completions")
    assert (plain.returncode != 0, plain.stdout) == (True, "")


def test_responses_whole_streamed_stored_and_continued(broad: Broad) -> None:
    asked = {"model": "baton-tiny", "input": QUESTION, "max_output_tokens": 20, "temperature": 0}
    alone = broad.right("/v1/responses", asked, at=broad.cluster.urls["both-0"])
    pulled = broad.cluster.pulled()
    with broad.client() as client:
        whole = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
        assert whole.output_text == alone["output"][0]["content"][0]["text"]
        assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == whole.output_text
        last = next(each for each in events if each.type in {"response.completed", "response.incomplete"}).response
        for usage in (whole.usage, last.usage):
            assert usage is not None
            assert (usage.input_tokens, usage.output_tokens) == (alone["usage"]["input_tokens"], 20)
            assert usage.total_tokens == usage.input_tokens + 20
        assert client.responses.retrieve(whole.id).output_text == whole.output_text
        then = client.responses.create(
            model="baton-tiny", input="And then?", previous_response_id=whole.id, max_output_tokens=4, temperature=0
        )
        assert then.usage is not None
        assert then.usage.input_tokens > alone["usage"]["input_tokens"] + 20, "question and answer are in the prompt"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(f"resp_{uuid.uuid4().hex}")
    assert broad.cluster.pulled() == pulled, "aggregated on one instance, as the table of paths says"


def test_messages_whole_streamed_and_counted(broad: Broad) -> None:
    asked = {"model": "baton-tiny", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    count = broad.right("/v1/messages/count_tokens", asked)["input_tokens"]
    whole = broad.right("/v1/messages", {**asked, "max_tokens": 20})
    assert (whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]) == (count, 20)
    assert whole["stop_reason"] == "max_tokens"
    events = broad.events("/v1/messages", {**asked, "max_tokens": 20})
    kinds = [each["type"] for each in events]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    deltas = [each["delta"]["text"] for each in events if each["type"] == "content_block_delta"]
    assert "".join(deltas) == whole["content"][0]["text"]
    assert events[0]["message"]["usage"]["input_tokens"] == count
    assert next(each for each in events if each["type"] == "message_delta")["usage"]["output_tokens"] == 20


def test_tokens_are_detokenized_to_the_same_text(broad: Broad) -> None:
    tokens = broad.right("/tokenize", {"model": "baton-tiny", "prompt": STORY})
    assert broad.right("/detokenize", {"model": "baton-tiny", "tokens": tokens["tokens"]})["prompt"] == STORY
    usage = broad.right("/v1/completions", {"model": "baton-tiny", "prompt": STORY, "max_tokens": 2})["usage"]
    assert usage["prompt_tokens"] == tokens["count"] == len(tokens["tokens"])


def test_a_path_that_this_model_lacks_is_refused_with_what_it_needs(broad: Broad) -> None:
    rows = [row for row in PATHS if row.needs and row.how is How.PASSTHROUGH]
    assert len(rows) > 8
    for row in rows:
        status, told = broad.ask(row.template, {"model": "baton-tiny", "input": "x"})
        assert status == 404
        said = f"No engine that serves `baton-tiny` has `{row.template}`. It needs {row.needs}."
        assert told["error"]["message"] == said


def test_an_adapter_is_listed_served_by_name_and_handed_over(broad: Broad, table: Table) -> None:
    cards = {each["id"]: each for each in broad.right("/v1/models")["data"]}
    assert cards.keys() == {"baton-tiny", "poet", "gpt-4o"}
    assert (cards["poet"]["parent"], cards["gpt-4o"]["root"]) == ("baton-tiny", "baton-tiny")
    prompt = f"[{uuid.uuid4().hex}] {STORY * 5}"
    before = broad.cluster.pulled()
    base, _ = broad.legs("baton-tiny", prompt)
    poem, legs = broad.legs("poet", prompt)
    assert legs == [("prefill", "prefill-0"), ("decode", "both-0")]
    assert broad.cluster.pulled() >= before + 2 * (len(prompt) - 32), "D pulls of each prompt all but its last block"
    alone = [broad.complete(model, prompt, at=broad.cluster.urls["prefill-0"]) for model in ("baton-tiny", "poet")]
    assert [base, poem] == alone, "neither model uses the other's keys and values"
    asked = {"model": "poet", "prompt": f"Then {prompt}", "max_tokens": 24, "temperature": 0}
    name = uuid.uuid4().hex
    events = broad.events("/v1/completions", asked, X_Request_Id=name)
    seed = broad.right(f"/explain/{name}", at=broad.cluster.admin)["seed"]
    assert seed["given"], f"an adapter's stream is seeded as other models' are: {seed['because']}"
    streamed = "".join(each["choices"][0]["text"] for each in events if each["choices"])
    assert streamed == broad.complete("poet", asked["prompt"], at=broad.cluster.urls["prefill-0"])
    assert base != poem
    because = "both agents tell one digest, and the pair is proven"
    table.saw(f"adapter{BATON}", Seen("handed over and seeded", because), 2)


def test_requests_for_an_adapter_go_where_it_is_loaded(broad: Broad) -> None:
    """The adapter is loaded on one of the two engines, then on both; the router refuses to load it."""
    loading = {"lora_name": "late", "lora_path": str(broad.folder / "late")}
    assert broad.ask("/v1/load_lora_adapter", loading)[0] == 403
    prompt = f"[{uuid.uuid4().hex}] {STORY * 5}"

    def served(*places: tuple[str, str]) -> bool:
        status, _ = broad.ask("/v1/completions", {"model": "late", "prompt": prompt, "max_tokens": 1})
        return status == 200 and broad.legs("late", prompt)[1] == list(places)

    assert broad.ask("/v1/completions", {"model": "late", "prompt": prompt})[0] == 404
    broad.right("/v1/load_lora_adapter", loading, at=broad.cluster.urls["both-0"])
    within(HEARD_S, lambda: served(("whole", "both-0")))
    assert broad.legs("poet", prompt)[1] == [("prefill", "prefill-0"), ("decode", "both-0")]
    broad.right("/v1/load_lora_adapter", loading, at=broad.cluster.urls["prefill-0"])
    within(HEARD_S, lambda: served(("prefill", "prefill-0"), ("decode", "both-0")))
    text = broad.complete("late", prompt)
    assert text == broad.complete("late", prompt, at=broad.cluster.urls["both-0"])
    assert text not in {broad.complete("poet", prompt), broad.complete("baton-tiny", prompt)}


def test_an_instance_of_both_roles_takes_everything_while_prefill_drains(broad: Broad) -> None:
    admin = broad.cluster.admin

    def states() -> dict[str, str]:
        return {each["id"]: each["state"] for each in broad.ask("/ready", at=admin)[1]["instances"]}

    prompt = f"[{uuid.uuid4().hex}] {STORY * 5}"
    assert broad.ask("/drain/prefill-0", {"deadline_s": 30}, at=admin)[0] == 202
    try:
        within(HEARD_S, lambda: states()["prefill-0"] == "draining")
        status, told = broad.ask("/ready", at=admin)
        assert (status, told["ready"]) == (200, True), "an instance is left for each leg"
        text, legs = broad.legs("baton-tiny", prompt)
        assert legs == [("whole", "both-0")]
    finally:
        assert broad.ask("/resume/prefill-0", {}, at=admin)[0] == 202
    within(HEARD_S, lambda: states()["prefill-0"] == "up")
    again, legs = broad.legs("baton-tiny", f"{prompt} Then")
    assert [leg for leg, _ in legs] == ["prefill", "decode"]
    assert text
    assert again
    within(15, broad.cluster.idle)
