"""The small parts of a handoff's rules: the table as data, spans, alarms, terms, and what these modules import."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.alarms import Alarms, Memory
from kvtransfer.span import Span, pull_span
from kvtransfer.table import ENDS, FIRST, OWN_CAUSES, TABLE, USABLE, Act, Cause, Side, State
from kvtransfer.terms import Terms

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    (side, state, cause, row)
    for side, states in TABLE.items()
    for state, rows in states.items()
    for cause, row in rows.items()
]
MAY_WRITE_HERE = {
    Side.PRODUCER: set(),
    Side.CONSUMER: {
        State.ALLOCATED,
        State.PULLING,
        State.CANCELLING,
        State.RESERVED,
        State.WRITING,
        State.QUARANTINED,
    },
}
"""States in which a transfer may be writing into the entry's blocks."""
IT_IS_OVER = {
    Cause.READ_ENDED,
    Cause.READ_FAILED,
    Cause.WRITTEN,
    Cause.NOT_WRITTEN,
    Cause.LINK_ENDED,
}
"""Causes after which none is."""


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_state_ends_by_time() -> None:
    """Nothing waits for a peer alone."""
    for side, states in TABLE.items():
        for state, rows in states.items():
            assert Cause.TIME_UP in rows, f"{state} on the {side}'s side"
            row = rows[Cause.TIME_UP]
            assert row.state is not state or Act.CUT_LINK in row.acts, f"{state} would just go on"


def test_every_state_is_reached_and_ends_have_no_rows() -> None:
    for side, states in TABLE.items():
        reached = set(FIRST[side]) | {row.state for rows in states.values() for row in rows.values()}
        assert reached - ENDS == set(states)
        assert not ENDS & set(states)


def test_use_is_reached_by_the_producers_word_alone() -> None:
    ways = {(state, cause) for _, state, cause, row in ROWS if row.state in USABLE}
    assert ways == {
        (State.LANDED, Cause.ALIVE),
        (State.RESERVED, Cause.WRITTEN),
        (State.WRITING, Cause.WRITTEN),
    }
    assert {state for _, state, _, row in ROWS if row.state is State.LANDED and state is not State.LANDED} == {
        State.PULLING
    }


def test_memory_that_may_be_written_is_not_freed() -> None:
    for side, state, cause, row in ROWS:
        if state in MAY_WRITE_HERE[side] and row.state in ENDS:
            assert cause in IT_IS_OVER, f"{state} ends by {cause}"


def test_memory_that_is_written_from_is_kept_until_the_writes_are_over() -> None:
    over = {Cause.WRITES_ENDED, Cause.WRITES_FAILED, Cause.LINK_ENDED}
    for side, state, cause, row in ROWS:
        if side is Side.PRODUCER and state in {State.STREAMING, State.WRITING, State.DRAINING} and row.state in ENDS:
            assert cause in over, f"{state} ends by {cause}"


def test_a_claimed_hold_is_freed_by_its_reader_or_its_lease_alone() -> None:
    ways = {cause for side, state, cause, row in ROWS if state is State.READING and row.state in ENDS}
    assert ways == {Cause.GIVEN_BACK, Cause.TIME_UP}


def test_a_request_hears_one_outcome_at_most() -> None:
    """Who was told to recompute is in a state from which neither use nor another recompute follows."""
    after = {row.state for _, _, _, row in ROWS if Act.RECOMPUTE in row.acts} - ENDS
    assert after == {State.CANCELLING, State.QUARANTINED}
    for state in after:
        for row in TABLE[Side.CONSUMER][state].values():
            assert Act.RECOMPUTE not in row.acts
            assert row.state not in USABLE


def test_whoever_gives_up_says_so() -> None:
    """A pulled reservation gives the hold back when it ends, unless the producer itself has gone."""
    pulled = {State.WAITING, State.ALLOCATED, State.PULLING, State.CANCELLING, State.LANDED}
    for side, state, cause, row in ROWS:
        if side is Side.CONSUMER and state in pulled and row.state in ENDS and cause is not Cause.PEER_LOST:
            assert Act.GIVE_BACK in row.acts, f"{state} by {cause}"


def test_only_our_own_word_can_be_impossible() -> None:
    assert all(cause in Cause for cause in OWN_CAUSES)
    peers = {Cause.CLAIMED, Cause.REGISTERED, Cause.ASKED, Cause.GIVEN_BACK, Cause.ALIVE, Cause.GONE, Cause.WRITTEN}
    assert not peers & OWN_CAUSES


@pytest.fixture(scope="module")
def page() -> ModuleType:
    """tools/ledger_diagram.py."""
    spec = importlib.util.spec_from_file_location("ledger_diagram", ROOT / "tools" / "ledger_diagram.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_rules_as_they_are(page: ModuleType) -> None:
    text = page.PAGE.read_text()
    assert page.renew(text) == text, "run .venv/bin/python tools/ledger_diagram.py"
    assert text.count("```mermaid") == len(Side)


# --- spans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "prompt", "cached", "expected"),
    [
        (40, 40, 0, Span(0, 3, 40)),
        (40, 40, 16, Span(1, 2, 40)),
        (32, 33, 0, Span(0, 2, 32)),  # one token longer than what is held, at a block's edge
        (33, 32, 0, Span(0, 2, 32)),
        (100, 20, 0, Span(0, 2, 20)),
        (20, 100, 32, Span(2, 0, 32)),  # more is here than is held there
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
    memory: Memory[str] = Memory(2)
    assert memory.remember("a", 5.0, now=0.0)
    assert memory.remember("b", 9.0, now=0.0)
    assert not memory.remember("c", 9.0, now=4.9)
    assert memory.remember("a", 7.0, now=4.9), "what is known may be known for longer"
    assert (memory.knows("a", 6.9), memory.knows("a", 7.0), memory.room(7.0), len(memory)) == (True, False, 1, 1)


# --- terms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"lease_s": 0.0}, {"cut_s": -1.0}, {"hold_s_max": 1.0}, {"heartbeat_s": 15.0}, {"remember_s": 10.0}],
)
def test_terms_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Terms(**wrong)


# --- what may be imported --------------------------------------------------------------------------------------------

OUTSIDE = {"cluster.ids", "cluster.scan", "cluster.wire"}
INSIDE_VLLM = {"vllm", "msgspec", "blake3"}
"""What the modules named `vllm_…` are written against, with what vLLM requires: it is there, or they are not loaded."""

BESIDES = {"nixl": {"nixl", "numpy"}, "seal": {"cryptography"}, "proving": {"cluster"}}
"""NIXL needs numpy itself; `seal` and `proving` are agents' and routers' and run in no engine."""


@pytest.mark.parametrize("path", sorted((ROOT / "kvtransfer").glob("*.py")), ids=lambda path: path.stem)
def test_modules_that_run_inside_vllm_import_the_standard_library_alone(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            top = name.partition(".")[0]
            more = INSIDE_VLLM if path.stem.startswith("vllm_") else BESIDES.get(path.stem, set())
            assert top in {*sys.stdlib_module_names, "kvtransfer", *more} or name in OUTSIDE, f"{path.name}: {name}"
