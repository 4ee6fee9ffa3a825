"""Decode requests that name a hold, as the engine's scheduler sees them: what is pulled, and what is computed again."""

from __future__ import annotations

import pytest

from decode.peers import ASIDE_S, FAILURES, ProducerPeers
from decode.pulls import Pulls, worth_pulling

READ = "a read failed"
STALE = "the hold did not outlive the read"


def pulls() -> Pulls:
    made = Pulls(ProducerPeers())
    made.peers.met("p@1", "p", 0.0)
    return made


@pytest.mark.parametrize(
    ("held", "prompt", "cached", "worth"), [(10, 12, 4, 6), (12, 10, 4, 6), (4, 10, 4, 0), (4, 9, 8, 0)]
)
def test_what_is_worth_pulling(held: int, prompt: int, cached: int, worth: int) -> None:
    assert worth_pulling(held, prompt, cached) == worth


def test_what_is_not_pulled_counts_as_computed_again_once_there_is_room() -> None:
    p = pulls()
    assert "was not introduced" in p.judge("r", "p@2", 1.0) and p.judge("r", "p@1", 1.0) == ""
    assert p.local("r", 300) and not p.local("r", 200), "the scheduler asks again at each step"
    assert (p.under_way, p.recomputed_tokens, dict(p.counts)) == (0, 0, {})
    p.allocated("r", "", 0, 2.0)
    p.allocated("r", "", 0, 3.0)
    assert p.recomputed_tokens == 200


def test_a_former_tries_reason_is_not_this_pulls() -> None:
    """Early reads of the request had ended in vain: its producer is not to be set aside for that."""
    p = pulls()
    for number in range(FAILURES):
        request = f"r{number}"
        p.local(request, 300)
        p.said(request, READ)
        p.allocated(request, "p@1", 300, 1.0)
        p.said(request, "")
        p.ended(request, 2.0)
    assert p.peers.may_pull("p@1", 2.0) and p.recomputed_tokens == 0


def test_no_request_waits_for_a_pull_that_was_aborted() -> None:
    p = pulls()
    for request in ("aborted", "alive"):
        p.allocated(request, "p@1", 300, 1.0)
    p.local("computed", 300)
    p.finished("aborted")
    assert (p.under_way, p.awaited) == (2, 1)
    p.ended("aborted", 2.0)
    assert (p.under_way, p.awaited) == (1, 1)


def test_an_engine_that_only_produces_pulls_nothing() -> None:
    """vLLM keeps blocks that a step on a GPU may still write only from a consumer's pulls."""
    p = Pulls(ProducerPeers(), reads=False)
    p.peers.met("p@1", "p", 0.0)
    assert p.judge("r", "p@1", 1.0) == "this engine only produces (kv_role: kv_producer)"
    assert p.local("r", 300)


def test_a_request_that_leaves_before_there_is_room_computes_nothing() -> None:
    p = pulls()
    p.local("r", 300)
    p.finished("r")
    p.allocated("r", "", 0, 2.0)
    assert p.recomputed_tokens == 0


def test_a_request_that_is_pulled_after_all_counts_nothing() -> None:
    """Its producer was introduced while the request waited for room. Pulled tokens are not computed again."""
    p = pulls()
    p.local("r", 300)
    p.allocated("r", "p@1", 280, 2.0)
    p.finished("r")  # the request has left, and its blocks are still written to
    assert p.under_way == 1
    p.said("r", "")
    p.ended("r", 3.0)
    assert (p.under_way, p.recomputed_tokens, p.peers.of("p@1").pulled) == (0, 0, 1)


@pytest.mark.parametrize("says", [("", READ), (READ, ""), (STALE, "")])
def test_a_pull_that_one_rank_cannot_use_is_not_used(says: tuple[str, str]) -> None:
    p = pulls()
    p.allocated("r", "p@1", 280, 2.0)
    for because in says:
        p.said("r", because)
    p.ended("r", 3.0)
    assert p.recomputed_tokens == 280 and p.peers.of("p@1").failed == (READ in says)


def test_a_handshake_that_failed_is_no_read_that_failed() -> None:
    """vLLM reports a failed handshake separately, and no rank reports a result of the pull."""
    p = pulls()
    for number in range(2 * FAILURES):
        p.allocated(f"r{number}", "p@1", 10, 2.0)
        p.ended(f"r{number}", 3.0, failed=True)
    assert p.recomputed_tokens == 20 * FAILURES and p.judge("r", "p@1", 4.0) == ""


def set_aside(p: Pulls, now: float) -> None:
    for number in range(FAILURES):
        p.allocated(f"f{number}", "p@1", 10, now)
        p.said(f"f{number}", READ)
        p.ended(f"f{number}", now)


def test_a_request_that_waits_for_room_is_set_aside_once() -> None:
    p = pulls()
    set_aside(p, 1.0)
    for request in ("r", "s"):
        for _ in range(100):
            assert "have failed" in p.judge(request, "p@1", 1.0)
            p.local(request, 300)
    assert p.counts == {"set aside": 2}


@pytest.mark.parametrize(("because", "failed"), [(STALE, False), (None, True), (None, False)])
def test_a_test_pull_without_a_result_is_waited_for_no_longer(because: str | None, failed: bool) -> None:
    """Requests that waited on would find the producer still set aside when their hold is there."""
    p = pulls()
    set_aside(p, 1.0)
    now = 1.0 + ASIDE_S
    p.allocated("r", "p@1", 10, now)
    assert p.peers.may_wait("p@1", now) and not p.peers.may_pull("p@1", now)
    if because is not None:
        p.said("r", because)
    p.ended("r", now, failed=failed)
    assert not p.peers.may_wait("p@1", now)
    assert p.peers.may_pull("p@1", now + ASIDE_S) and p.peers.of("p@1").failed == FAILURES


def test_another_pull_without_a_result_does_not_end_the_test() -> None:
    p = pulls()
    p.allocated("earlier", "p@1", 10, 1.0)
    set_aside(p, 1.0)
    now = 1.0 + ASIDE_S
    p.allocated("test", "p@1", 10, now)
    p.said("earlier", STALE)
    p.ended("earlier", now)
    assert p.peers.may_wait("p@1", now)


def test_an_unknown_request_changes_nothing() -> None:
    p = pulls()
    for happens in (p.finished, lambda name: p.said(name, READ), lambda name: p.ended(name, 1.0, failed=True)):
        happens("never")
    assert (p.under_way, p.recomputed_tokens) == (0, 0)
