"""P encodes a picture once, and D reads the prompt's blocks instead: it encodes only a picture of which it computes a
token itself, and that is the prompt's last.

Real vLLM engines of models with random weights, with Baton's connector and with vLLM's own. A start-up patch makes
each engine write down its encoder's runs (`tests/support/encoder_site`).
"""

from __future__ import annotations

import importlib.util
import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import cluster as clusters
from support.cluster import Cluster, within
from support.random_models import LETTERS, OF_PICTURES, picture, write_model

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1200)]
SITE = Path(clusters.__file__).parent / "encoder_site"
ROOT = Path(clusters.TESTS).parent
"""The patch imports from `engine` before Python looks into the working directory: it must find this checkout's."""
SHOWN = OF_PICTURES[0]
"""Marks a picture's place in the text."""


@dataclass
class Counted:
    """A cluster of one P and one D that write down their encoders' runs."""

    cluster: Cluster
    folder: Path

    def encoded(self) -> tuple[int, int]:
        """Pictures that P and D have encoded until now, those of their starts included."""
        p, d = (sum(map(int, (self.folder / name).read_text().split())) for name in ("prefill", "decode"))
        return p, d

    def pulled(self) -> int:
        return self.cluster.loads()["decode-0"].external_kv_tokens

    def asks(self, body: dict[str, Any], url: str = "") -> tuple[str, int, tuple[int, int]]:
        """Send a chat to the router, or to this engine. Returns its answer, the number of its prompt tokens, and how
        many pictures P and D have encoded for it.
        """
        before = self.encoded()
        told = json.dumps(body).encode()
        request = urllib.request.Request(
            f"{url or self.cluster.endpoint}/v1/chat/completions", told, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            events = answer.read().decode()
        assert events.endswith("data: [DONE]\n\n") and '"error"' not in events, events
        parts = [json.loads(each.removeprefix("data: ")) for each in events.strip().split("\n\n")[:-1]]
        text = "".join(choice["delta"].get("content") or "" for part in parts for choice in part["choices"])
        (tokens,) = {part["usage"]["prompt_tokens"] for part in parts if part.get("usage")}
        p, d = (now - then for now, then in zip(self.encoded(), before, strict=True))
        return text, tokens, (p, d)


@contextmanager
def counted(folder: Path, kind: str, connector: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    monkeypatch.setattr(clusters, "START_S", 600.0)  # as in other tests of models that are made here
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup")
    model = write_model(kind, folder / "model")
    runs = folder / "runs"
    runs.mkdir()
    for name in ("prefill", "decode"):
        (runs / name).touch()
    args = {"dtype": "float32", "max-model-len": 1024, "limit-mm-per-prompt": {"image": 2}}
    pools = {
        name: {
            "start": 1,
            "engine_args": args,
            "env": {"PYTHONPATH": f"{SITE}:{ROOT}", "ENCODER_RUNS": str(runs / name)},
        }
        for name in ("prefill", "decode")
    }
    spec = {"models": [{"name": str(model), "served_name": "tiny", "pools": pools}],
            "transfer": {"connector": connector}, "router": {"policy": "least_load"}}  # fmt: skip
    with Cluster.of(folder, yaml.safe_dump(spec)) as cluster:
        within(60, cluster.proven)
        yield Counted(cluster, runs)


def chat(text: str, *seeds: int) -> dict[str, Any]:
    """A prompt that ends with this text, without a mark of the message's end. `seeds`: its pictures in their order."""
    shown = [{"type": "image_url", "image_url": {"url": picture(seed)}} for seed in seeds]
    content = [{"type": "text", "text": text}, *shown]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0,
            "ignore_eos": True, "allowed_token_ids": LETTERS, "stream": True, "stream_options": {"include_usage": True},
            "add_generation_prompt": False, "continue_final_message": True}  # fmt: skip


CASES = [(f"{SHOWN}look {{}}", 1), (f"{SHOWN}look {{}}{SHOWN}look", 2), (f"look {{}}{SHOWN}", 1),
         (f"{SHOWN}look {{}}{SHOWN}", 2)]  # fmt: skip
"""The text with its pictures' places, and their number: before the text, in it, and at its end."""


@pytest.mark.parametrize(
    ("kind", "connector", "own"),
    [
        ("bare vision", "auto", (0, 0, 1, 1)),
        ("bare vision", "nixl", (0, 0, 1, 1)),
        ("vision", "auto", (0, 0, 0, 0)),  # a mark of the picture's end comes after its tokens
    ],
)
def test_a_picture_is_encoded_once(
    kind: str, connector: str, own: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`own`: how many pictures D encodes for each of the cases."""
    with counted(tmp_path, kind, connector, monkeypatch) as here:
        said = set()
        for number, ((text, pictures), by_d) in enumerate(zip(CASES, own, strict=True)):
            body = chat(text.format("far away " * (1 + 20 * number)), *range(10 * number, 10 * number + pictures))
            pulled = here.pulled()
            answer, tokens, encoded = here.asks(body)
            assert encoded == (pictures, by_d), text
            within(30, lambda: here.pulled() - pulled == tokens)  # noqa: B023 - D has read the whole prompt
            assert here.asks(body)[2] == (0, 0), "both know these pictures now, or need none"
            alone, _, (_, again) = here.asks({**body, "cache_salt": "alone"}, here.cluster.urls["decode-0"])
            assert answer == alone
            assert again == pictures - by_d, "an engine that has no blocks of the prompt does encode"
            said.add(answer)
        assert len(said) == len(CASES), "a model that always gives the same text shows nothing"
