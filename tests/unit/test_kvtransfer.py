"""The small parts of a hand-over's rules: spans, alarms, the page that shows the tables, and what modules import."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.span import Span, pull_span
from kvtransfer.timers import Alarms, TimedKeys

ROOT = Path(__file__).resolve().parents[2]


# --- spans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "prompt", "cached", "expected"),
    [
        (40, 40, 0, Span(0, 3, 40)),
        (40, 40, 16, Span(1, 2, 40)),
        (32, 33, 0, Span(0, 2, 32)),  # one token longer than what is held, at a block's edge
        (33, 32, 0, Span(0, 2, 32)),
        (100, 20, 0, Span(0, 2, 20)),
        (20, 100, 32, Span(2, 0, 32)),  # more blocks are cached here than are held there
        (40, 40, 40, Span(2, 0, 40)),
        (40, 40, 48, Span(3, 0, 40)),
        (0, 40, 0, Span(0, 0, 0)),
        (1, 1, 0, Span(0, 1, 1)),
    ],
)
def test_span(held: int, prompt: int, cached: int, expected: Span) -> None:
    assert pull_span(held_tokens=held, prompt_tokens=prompt, cached_tokens=cached, block_tokens=16) == expected


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.integers(1, 9))
def test_a_span_is_within_what_is_held_and_what_is_wanted(held: int, prompt: int, cached: int, block: int) -> None:
    span = pull_span(held_tokens=held, prompt_tokens=prompt, cached_tokens=cached, block_tokens=block)
    assert (span.first + span.blocks) * block < min(held, prompt) + block or not span.blocks
    assert span.tokens <= prompt
    assert span.tokens >= min(cached, prompt)
    if span.blocks:
        assert cached < span.tokens == min(held, prompt) <= (span.first + span.blocks) * block


@pytest.mark.parametrize(
    "wrong", [{"held_tokens": -1}, {"prompt_tokens": -1}, {"cached_tokens": -1}, {"block_tokens": 0}]
)
def test_a_span_of_nonsense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="token"):
        pull_span(**{"held_tokens": 1, "prompt_tokens": 1, "cached_tokens": 0, "block_tokens": 1, **wrong})


# --- alarms and memory -----------------------------------------------------------------------------------------------


def test_alarms_ring_in_order_and_once() -> None:
    alarms: Alarms[str] = Alarms()
    for key, when in [("b", 2.0), ("a", 1.0), ("c", 1.0), ("d", 9.0), ("a", 3.0), ("d", float("inf"))]:
        alarms.set(key, when)
    assert (alarms.next(), len(alarms), "d" in alarms) == (1.0, 3, False)
    rung = [key for now in (0.5, 1.0, 2.5, 2.5, 3.0, 99.0) if (key := alarms.pop(now))]
    assert rung == ["c", "b", "a"]
    assert alarms.next() is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), max_size=300))
def test_alarms_are_a_dictionary_of_times(changes: list[tuple[int, int]]) -> None:
    alarms: Alarms[int] = Alarms()
    expected: dict[int, float] = {}
    for key, when in changes:
        if when == 0:
            alarms.drop(key)
            expected.pop(key, None)
        else:
            alarms.set(key, float(when))
            expected[key] = float(when)
        assert alarms.next() == min(expected.values(), default=None)
        assert len(alarms._heap) <= 64 + 4 * len(expected) + 1
    rung = []
    while (key := alarms.pop(99.0)) is not None:
        rung.append(key)
    assert sorted(rung) == sorted(expected)
    assert [expected[key] for key in rung] == sorted(expected.values())


def test_memory_forgets_by_time_and_refuses_by_size() -> None:
    memory: TimedKeys[str] = TimedKeys(2)
    assert memory.remember("a", 5.0, now=0.0)
    assert memory.remember("b", 9.0, now=0.0)
    assert not memory.remember("c", 9.0, now=4.9)
    assert memory.remember("a", 7.0, now=4.9), "a known key may be given a later time"
    assert (memory.knows("a", 6.9), memory.knows("a", 7.0), memory.room(7.0), len(memory)) == (True, False, 1, 1)


# --- the page --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """The module `tools/handover_page.py`."""
    spec = importlib.util.spec_from_file_location("handover_page", ROOT / "tools" / "handover_page.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_rules_as_they_are(page: ModuleType) -> None:
    text = page.PAGE.read_text()
    assert page.renew(text) == text, "run .venv/bin/python tools/handover_page.py"
    assert text.count("```mermaid") == len(page.TABLES)


# --- what may be imported --------------------------------------------------------------------------------------------

OUTSIDE = {"cluster.ids", "cluster.scan", "cluster.wire"}
INSIDE_VLLM = {"vllm", "torch", "numpy", "msgspec", "blake3", "engine"}
"""What `engine.vllm.connector` may import: it is loaded only inside vLLM, where these packages are."""
BESIDES = {"seal": {"cryptography"}, "proving": {"cluster"}, "rules": {"cluster"}, "vllm_connector": INSIDE_VLLM}
"""By module, what else it may import. `seal`, `proving` and both `rules` run in agents and routers, in no engine."""
FOLDERS = ("kvtransfer", "prefill", "decode", "engine/vllm/connector")
SHARED = ("engine/vllm/adapters.py", "engine/vllm/weights.py", "engine/vllm/kept_files.py", "engine/vllm/tier_gauge.py")
"""Agents' own modules that the connector runs, too: they import the standard library alone."""
CONNECTORS = ("engine.vllm.connector", *(path.removesuffix(".py").replace("/", ".") for path in SHARED))


@pytest.mark.parametrize(
    "path",
    [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))] + [ROOT / path for path in SHARED],
    ids=str,
)
def test_modules_that_run_inside_vllm_import_the_standard_library_alone(path: Path) -> None:
    connector = path.parent.name == "connector"
    ours = {"kvtransfer"} if path.parent.name == "kvtransfer" else {"kvtransfer", "prefill", "decode"}
    more = INSIDE_VLLM if connector else BESIDES.get(path.stem, set())
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            top = name.partition(".")[0]
            known = top in {*sys.stdlib_module_names, *ours, *more} or name in OUTSIDE
            assert known and (top != "engine" or name.startswith(CONNECTORS)), f"{path}: {name}"


def rules_of(*paths: str) -> set[str]:
    """What these modules import from `prefill` and `decode`, by full name."""
    nodes = [node for path in paths for node in ast.walk(ast.parse((ROOT / path).read_text()))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return {
        f"{node.module}.{alias.name}"
        for node in imports
        for alias in node.names
        if (node.module or "").partition(".")[0] in {"prefill", "decode"}
    }


def test_the_connector_and_the_twin_are_written_on_the_same_rules() -> None:
    """Law 3. `tests/live/test_connector_versions.py` imports vLLM, and checks that they are the same objects."""
    connector = rules_of(*(f"engine/vllm/connector/{name}.py" for name in ("scheduler", "worker", "held_slots")))
    twin = rules_of("engine/twin/holds.py", "engine/twin/pulls.py")
    same = {"prefill.holds.Holds", "prefill.leases.Leases", "prefill.leases.terms", "decode.pulls.Pulls",
            "decode.pulls.worth_pulling", "decode.peers.ProducerPeers"}  # fmt: skip
    assert same <= connector & twin
    assert "decode.reads.Reads" in connector and "decode.reads.PullAtRank" in twin, "`Reads` is made of `PullAtRank`"
