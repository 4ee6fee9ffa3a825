"""`baton profile` on a mock whose costs are known: times measured over HTTP give those costs again."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from support.costed_mock import COST, FIRST_TOKEN_MS

from baton.cli import main
from costs.profile import read_profiles
from costs.step import decoding, prompt
from engine.tiny import model_path

pytestmark = pytest.mark.timed

TESTS = Path(__file__).resolve().parents[1]

LATE_MS = 2.0
"""The most by which timers of a busy machine make a step of the mock longer, as the client measures it."""


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    words = [sys.executable, "-m", "support.costed_mock"]
    with subprocess.Popen(words, cwd=TESTS, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def profile(url: str, *words: str) -> int:
    config = str(model_path() / "config.json")
    return main(["profile", url, "--gpu", "CPU-core", "--config", config, *words])


def test_known_costs_come_out(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.json"
    assert profile(engine, "--batch", "16", "--budget-s", "60", "--out", str(out), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    (found,) = read_profiles(json.loads(out.read_text()))
    assert found.name == "measured/tiny/CPU-core/tp1" == said["profile"]
    assert "vLLM 0.32" in found.origin.source
    for work in (prompt(16), prompt(500), prompt(1100), prompt(2000), decoding(1, 200), decoding(16, 20_000)):
        assert found.cost.step_ms(work) == pytest.approx(COST.step_ms(work), rel=0.05, abs=LATE_MS), work
    assert found.cost.decode_ms == pytest.approx(COST.decode_ms, rel=0.05)
    assert found.cost.floor_ms == pytest.approx(COST.floor_ms, abs=LATE_MS)
    assert found.prefill_error.mean < 0.05
    assert found.decode_error.mean < 0.02
    assert 0 < said["round_trip_ms"] < 20
    assert said["server_ms"] == pytest.approx(FIRST_TOKEN_MS, abs=2 * LATE_MS)
    assert found.origin.first_token_ms == pytest.approx(said["server_ms"], abs=0.001)


@pytest.mark.long
async def test_the_table_is_printed_and_other_requests_are_warned_of(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"model": "tiny", "prompt": "x " * 40, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as session, session.post(f"{engine}/v1/completions", json=body) as other:
        assert other.status == 200
        words = ["--batch", "2", "--budget-s", "20", "--out", str(tmp_path / "p.json")]
        assert await asyncio.to_thread(profile, engine, *words) == 0
    said = capsys.readouterr()
    assert "prompt of 2,048 tokens" in said.out
    assert "2 streams after" in said.out
    assert "max of" in said.out
    assert f"written: {tmp_path / 'p.json'}" in said.out
    assert "busy with other requests" in said.err


def test_an_earlier_profile_is_not_replaced_unasked(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny-CPU-core-tp1.json").write_text("earlier")
    assert profile(engine) == 2
    assert "tiny-CPU-core-tp1.json is here already" in capsys.readouterr().err
    assert profile(engine, "--out", str(tmp_path)) == 2
    assert "is a folder" in capsys.readouterr().err


def test_without_time_no_profile_is_written(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.json"
    assert profile(engine, "--budget-s", "0.02", "--out", str(out)) == 1
    assert "no profile:" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "H900"], "--gpu H900 is not known"),
        (["--prompt-tokens", "1000"], "a fit needs 1,613 and more"),
        (["--config", "/nowhere/config.json"], "--config /nowhere/config.json: no such file"),
        (["--out", "/nowhere/p.json"], "--out /nowhere/p.json: there is no folder /nowhere"),
        (["--api-key-file", "/nowhere/key"], "--api-key-file /nowhere/key"),
    ],
)
def test_wrong_usage_is_one_line(engine: str, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert profile(engine, *words) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("baton:")]
    assert len(lines) == 1
    assert said in lines[0]


def test_a_key_of_two_lines_is_refused(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    key.write_text("one\ntwo\n")
    assert profile(engine, "--api-key-file", str(key)) == 2
    assert "holds more than one line of printable characters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "said"), [("http://127.0.0.1:9", "nothing listens"), ("nonsense", "not a URL"), ("ftp://x", "not a URL")]
)
def test_a_url_without_an_engine_is_refused(url: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", url, "--gpu", "H200"]) == 2
    assert said in capsys.readouterr().err
