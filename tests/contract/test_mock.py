"""`baton mock` as a process: what it prints, how it ends, and how its faults are set."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from support.cluster import Cluster, within
from support.engine_pair import COMPLETIONS, Pair, ask, get, stream
from support.mock import Mocks

from baton.checks import CheckVerdict
from baton.engine_checks import check_engine
from engine.vllm.probe import Probe

BODY: dict[str, Any] = {"model": "m", "prompt": "hello", "max_tokens": 5}
QUICK = ("--served-model-name", "m", "--step-ms", "2")


def baton(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton", "mock", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


BAD: list[tuple[list[str], str]] = [
    (["--instances", "prefill=2;decode=1"], "--instances prefill=2;decode=1: write how many of each role"),
    (["--instances", "prefill=0"], "--instances prefill=0: 1 to 1000 in all"),
    (["--instances", "both=1,both=2"], "--instances both=1,both=2"),
    (["--model", "nosuch/model"], "'nosuch/model'"),
    (["--gpu", "H1000"], "H1000"),
    (["--model", "meta-llama/Llama-3.1-70B"], "it does not fit on 1 H100-SXM; raise --tp"),
    (["--kv-blocks", "1" + "0" * 40], "--kv-blocks of so many digits: it must be at least 1, up to"),
    (["--block-size", "100000000"], "--block-size 1e+08: it must be at least 1, up to"),
    (["--block-size", "1000000"], "--block-size 1000000: the KV cache has"),
    (
        ["--model", "meta-llama/Llama-3.1-8B", "--tp", "3"],
        "--tp 3: meta-llama/Llama-3.1-8B has 32 heads, which 3 ranks",
    ),
    (["--host", "no such host"], "--host no such host: "),
    (["--kv-cache-dtype", "fp7"], "--kv-cache-dtype fp7: vLLM has auto, bfloat16"),
    (["--kv-cache-dtype", "turboquant_k8v4"], "--kv-cache-dtype turboquant_k8v4: mocks do not know its size"),
    (["--speed", "0"], "--speed 0: it must be at least 0.001"),
    (["--speed", "nan"], "--speed nan"),
    (["--port", "70000"], "--port 70000: a port is a number from 0 to 65535"),
    (["--kv-blocks", "10", "--max-model-len", "500"], "--max-model-len 500: it does not fit into 10 blocks of 16"),
    (["--output-tokens", "5-3"], "--output-tokens 5-3: write a number of tokens"),
    (["--port", "0", "--fault", '{"fault": "hangs"}'], "must be one of: refuse, hang"),
    (["--", "--max-num-seqs", "3"], "takes no vLLM flags"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=[" ".join(row[0]) for row in BAD])
def test_bad_flags_are_one_line_and_2(words: list[str], said: str) -> None:
    ended = baton(*words)
    assert (ended.returncode, ended.stdout) == (2, "")
    line = ended.stderr.strip().splitlines()[-1]
    assert line.startswith("baton: ")
    assert said in line
    assert "Traceback" not in ended.stderr


def test_a_busy_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = baton("--port", str(port), *QUICK)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"baton: --port {port} on 127.0.0.1: address already in use" in ended.stderr


def test_plain_ready_lines() -> None:
    command = [sys.executable, "-m", "baton", "mock", "--port", "0", "--instances", "prefill=1,decode=2", *QUICK]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as lines:
        said = [lines.readline().split() for _ in range(3)]
        assert [words[:2] for words in said] == [["ready", "prefill-0"], ["ready", "decode-0"], ["ready", "decode-1"]]
        assert all(get(words[2], "/health")[0] == 200 for words in said)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert lines.read() == ""


def test_sigterm_lets_answers_end() -> None:
    with Mocks.start("--instances", "both=1", "--served-model-name", "m", "--step-ms", "20") as mocks:
        url = mocks.urls["both-0"]
        told: list[Any] = []
        asking = threading.Thread(target=lambda: told.append(stream(url, COMPLETIONS, {**BODY, "max_tokens": 40})))
        asking.start()
        within(10, lambda: json.loads(get(url, "/mock/state")[1])["requests"] > 0)
        mocks.process.send_signal(signal.SIGTERM)
        within(10, lambda: not _listens(url))
        asking.join(20)
    ((_, events),) = told
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert len(events) == 40


SERVERS = {
    "mock": ("-m", "baton", "mock", "--port", "0", "--instances", "both=1", *QUICK),
    "router": ("-m", "baton", "router", "--port", "0", "--admin-port", "0", "--both-url", "http://127.0.0.1:9"),
    "registry's stand-in": ("-P", "-m", "cluster.registry.standin"),
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("words", SERVERS.values(), ids=SERVERS)
def test_however_often_it_is_told_to_end_it_ends_in_order(words: tuple[str, ...], number: signal.Signals) -> None:
    """The last signals arrive while the event loop and the interpreter close. By default, a signal would kill then."""
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    with process.stdout as lines:
        assert "ready" in lines.readline()
        while process.poll() is None:
            process.send_signal(number)
        assert process.returncode == 0


@pytest.fixture(scope="module")
def mocks() -> Any:
    with Mocks.start("--instances", "prefill=1,decode=1", *QUICK, "--output-tokens", "8-20") as running:
        yield running


def _faults(url: str, body: Any = None, method: str = "POST") -> Any:
    raw = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, raw, method=method), timeout=10) as answer:
        return json.loads(answer.read())["faults"]


def test_a_fault_that_cannot_be_read_is_a_400(mocks: Mocks) -> None:
    for body in (b"[" * 4000, b"{", b'"\xff"'):
        asked = urllib.request.Request(f"{mocks.urls['decode-0']}/mock/faults", body, method="POST")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked)
        with refused.value as told:
            assert told.code == 400
            assert "This is not JSON" in json.load(told)["error"]["message"]


def test_faults_are_set_seen_and_taken_back(mocks: Mocks) -> None:
    url = f"{mocks.urls['decode-0']}/mock/faults"
    assert _faults(url, method="GET") == []
    (told,) = _faults(url, {"fault": "refuse", "status": 500, "times": 2})
    assert told == {"number": told["number"], "fault": "refuse", "times": 2, "status": 500, "struck": 0}
    statuses = [ask(mocks.urls["decode-0"], COMPLETIONS, BODY)[0] for _ in range(3)]
    assert statuses == [500, 500, 200]
    assert _faults(url, method="GET")[0]["struck"] == 2
    by_sibling = f"{mocks.urls['prefill-0']}/mock/decode-0/faults"
    assert _faults(by_sibling, method="DELETE") == []
    with pytest.raises(urllib.error.HTTPError) as refused:
        _faults(url, {"fault": "refuse", "share": 2})
    assert refused.value.code == 400
    assert "`share` is 2; it must be a number from 0 to 1" in json.loads(refused.value.read())["error"]["message"]


def _listens(url: str) -> bool:
    try:
        return get(url, "/health")[0] == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def test_a_dead_instance_is_brought_back_by_way_of_another(mocks: Mocks) -> None:
    faults = f"{mocks.urls['prefill-0']}/mock/decode-0/faults"
    _faults(faults, {"fault": "die"})
    within(10, lambda: not _listens(mocks.urls["decode-0"]))
    state = json.loads(get(mocks.urls["prefill-0"], "/mock/decode-0/state")[1])
    assert (state["ready"], state["epoch"]) == (False, 1)
    _faults(faults, method="DELETE")
    within(10, lambda: _listens(mocks.urls["decode-0"]))
    assert json.loads(get(mocks.urls["decode-0"], "/mock/state")[1])["epoch"] == 2


def test_answers_end_by_themselves_where_they_may(mocks: Mocks) -> None:
    url = mocks.urls["decode-0"]
    _, answer = ask(url, COMPLETIONS, {**BODY, "max_tokens": 100, "return_token_ids": True})
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert 8 <= answer["usage"]["completion_tokens"] == len(choice["token_ids"]) <= 20
    assert len(choice["text"]) == 4 * (len(choice["token_ids"]) - 1), "the end of text has no text"
    _, again = ask(mocks.urls["prefill-0"], COMPLETIONS, {**BODY, "max_tokens": 100, "return_token_ids": True})
    assert again["choices"] == answer["choices"], "on every instance alike"
    _, forced = ask(url, COMPLETIONS, {**BODY, "max_tokens": 100, "ignore_eos": True})
    assert (forced["choices"][0]["finish_reason"], forced["usage"]["completion_tokens"]) == ("length", 100)
    _, longer = ask(url, COMPLETIONS, {**BODY, "max_tokens": 100, "min_tokens": 50})
    assert longer["usage"]["completion_tokens"] == 51


def test_openais_client_takes_it_for_an_engine(mocks: Mocks) -> None:
    with openai.OpenAI(base_url=f"{mocks.urls['decode-0']}/v1", api_key="none") as client:
        question: Any = [{"role": "user", "content": "hi"}]
        whole = client.chat.completions.create(model="m", messages=question, max_tokens=6)
        parts = client.chat.completions.create(
            model="m", messages=question, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
        events = list(parts)
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 6


def test_the_doctor_finds_nothing_missing(mocks: Mocks) -> None:
    verdicts = {finding.what: finding.verdict for finding in check_engine(mocks.urls["prefill-0"])}
    notes = {what for what, verdict in verdicts.items() if verdict is not CheckVerdict.OK}
    assert notes == {"Side channel", "Failed loads"}, "on loopback; cannot be seen from outside"
    assert CheckVerdict.MISSING not in verdicts.values()


async def test_the_agents_probe_finds_it_well(mocks: Mocks) -> None:
    async with Probe(mocks.urls["decode-0"], None) as probe:
        await probe.health()
        assert await probe.model() == "m"
        await probe.first_token("m")
        assert (await probe.loads())[0].running == 0


def test_a_key_guards_what_vllms_key_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "VLLM_API_KEY", "secret")
    with Mocks.start("--instances", "both=1", *QUICK) as guarded:
        url = guarded.urls["both-0"]
        assert (get(url, "/health")[0], get(url, "/metrics")[0]) == (200, 200)
        assert get(url, "/v1/models")[0] == 401
        assert ask(url, COMPLETIONS, BODY)[0] == 401
        assert ask(url, COMPLETIONS, BODY, Authorization="Bearer secret")[0] == 200


def test_a_whole_cluster_without_a_model(tmp_path: Path) -> None:
    """`baton up --engine mock`: registry, router, agents, and mocks in place of vLLM."""
    cluster = Cluster.start(tmp_path, "--engine", "mock", "--prefill", "1", "--decode", "1", "--", "--speed", "10")
    try:
        cluster.wait_ready()
        proven = 'baton_pair_proofs_total{result="passed"}'
        within(20, lambda: cluster.router_metric(proven, 0.0) == 1)  # the only pair: no later proof pulls tokens
        before = cluster.pulled()
        body = {"model": cluster.model, "prompt": "hello " * 50, "max_tokens": 20}
        status, answer = ask(cluster.endpoint, COMPLETIONS, body)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 20)
        assert cluster.pulled() - before == answer["usage"]["prompt_tokens"] == 75
        assert answer["choices"] == ask(cluster.urls["prefill-0"], COMPLETIONS, body)[1]["choices"]
        within(5, cluster.idle)
        within(5, cluster.all_ready)
    finally:
        assert cluster.stop() == 0


def test_a_mock_instance_says_what_it_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "baton", "engine", "--engine", "mock", "--json", *("--", "--speed", "10")]
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        process.terminate()
        assert process.wait(60) == 0
    assert (said["state"], said["detail"]) == ("starting", "starting a mock engine")


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
def test_two_mocks_on_ipv6_hand_over() -> None:
    with (
        Mocks.start("--host", "::1", "--instances", "prefill=1", *QUICK) as one,
        Mocks.start("--host", "::1", "--instances", "decode=1", *QUICK) as other,
    ):
        pair = Pair(one.urls["prefill-0"], other.urls["decode-0"], "m")
        assert all(url.startswith("http://[::1]:") for url in pair.both)
        pair.hand_over()
        assert pair.pulled() > 0


def test_fifty_instances_in_one_process() -> None:
    started = time.monotonic()
    with Mocks.start("--instances", "prefill=20,decode=30", *QUICK) as many:
        assert time.monotonic() - started < 20
        assert len(set(many.urls.values())) == 50
        for number in range(20):
            pair = Pair(many.urls[f"prefill-{number}"], many.urls[f"decode-{number + 10}"], "m")
            body, answer = pair.hand_over()
            assert answer["choices"][0]["text"] == ask(pair.prefill, COMPLETIONS, body)[1]["choices"][0]["text"]
        assert all(json.loads(get(url, "/mock/state")[1])["holds"] == 0 for url in many.urls.values())
        peak = Path(f"/proc/{many.process.pid}/status").read_text().partition("VmHWM:")[2].split()[0]
        assert int(peak) < 1 << 20, "KiB"
