"""Early legs in the connector's scheduler half, with a notice channel that the test controls."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.notice_channel import NoticeChannel

from cluster.ids import RequestId, TransferId
from cluster.wire import EARLY, TOLD_EARLY, TRANSFER
from decode.peers import ASIDE_S, FAILURES, NOT_ITS_OWN, ProducerPeers
from engine.vllm.connector import early
from engine.vllm.connector.early import EarlyHandoffs
from kvtransfer.asks import Introduce, Payload
from kvtransfer.early_notes import CHANNEL_STAGE, Ready, Want, encode
from kvtransfer.hold_marks import FIELD, Slots, slot_in

OTHER = "engine-o"
MINE, THEIRS = (str(TransferId(RequestId(name), 1, 1)) for name in ("mine", "theirs"))


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> NoticeChannel:
    found = NoticeChannel()
    monkeypatch.setattr(early, "open_channel", lambda: found)
    return found


@pytest.fixture
def peers() -> ProducerPeers:
    return ProducerPeers()


@pytest.fixture
def handoffs(channel: NoticeChannel, peers: ProducerPeers) -> EarlyHandoffs:
    found = EarlyHandoffs(peers)
    peers.met(OTHER, "other", 0.0)
    found.meet(Introduce(OTHER, "other", (Payload(CHANNEL_STAGE, 0, channel.payload),)))
    return found


def _request(name: str, fields: dict[str, Any]) -> Any:
    return SimpleNamespace(request_id=name, kv_transfer_params=fields, prompt_token_ids=[1, 2], output_token_ids=[7])


def _hold(engine: str) -> dict[str, Any]:
    return {"remote_engine_id": engine, "do_remote_prefill": True, "remote_num_tokens": 2}


def test_a_notice_that_comes_while_another_hold_is_made_is_not_missed(
    handoffs: EarlyHandoffs, channel: NoticeChannel
) -> None:
    """An engine that is D of one request and P of another reads the channel when it has made a hold."""
    waiting = _request("leg", {EARLY: "other", TRANSFER: MINE})
    assert handoffs.opened(waiting) and handoffs.waits("leg")
    channel.comes = [(OTHER, encode(Ready(MINE, _hold(OTHER), 5)))]
    assert handoffs.filled(_request("prompt", {}), {**_hold("me"), TRANSFER: THEIRS}) == [waiting]
    assert not handoffs.waits("leg") and waiting.kv_transfer_params["do_remote_prefill"] is True


def test_a_test_pull_of_another_request_ends_no_legs_wait(handoffs: EarlyHandoffs, peers: ProducerPeers) -> None:
    """A leg that is computed here samples a first token of its own, and its client may already have P's."""
    began = time.monotonic() - ASIDE_S
    for _ in range(FAILURES):
        peers.ended(OTHER, NOT_ITS_OWN, began)
    assert handoffs.opened(_request("leg", {EARLY: "other", TRANSFER: MINE})) and handoffs.waits("leg")
    peers.began(OTHER, time.monotonic())
    handoffs.ask()
    assert handoffs.opened(_request("next", {EARLY: "other", TRANSFER: THEIRS}))
    assert handoffs.waits("leg") and handoffs.waits("next")
    peers.ended(OTHER, NOT_ITS_OWN, time.monotonic())
    handoffs.ask()
    assert not handoffs.waits("leg") and not handoffs.waits("next"), "the test pull has failed"


@pytest.mark.parametrize("readable", [True, False])
def test_a_hold_for_a_leg_that_is_computed_here_is_declined(
    handoffs: EarlyHandoffs, channel: NoticeChannel, peers: ProducerPeers, *, readable: bool
) -> None:
    """The ranks tell the producer, with the hold's fields. The request keeps its own, so vLLM pulls nothing."""
    leg = _request("leg", {EARLY: "other", TRANSFER: MINE})
    assert handoffs.opened(leg)
    peers.forgotten(OTHER)
    handoffs.ask()
    assert not handoffs.waits("leg") and handoffs.take_given_back() == []
    slot = Slots(1, bytes(32)).take("hold")
    assert slot is not None
    blocks = {"remote_request_id": "prompt", "remote_block_ids": [[3]], "remote_host": "p", "remote_port": 1,
              FIELD: slot.field() if readable else "?"}  # fmt: skip
    channel.comes = [(OTHER, encode(Ready(MINE, {**_hold(OTHER), **blocks}, 5)))]
    assert handoffs.hear() == [] and leg.kv_transfer_params == {EARLY: "other", TRANSFER: MINE}
    declined = handoffs.take_given_back()
    assert [(each.request_id, slot_in(each.kv_transfer_params)) for each in declined] == [("leg", slot)] * readable
    assert handoffs.take_given_back() == []


@pytest.mark.parametrize("asked", [True, False])
def test_an_answer_says_nothing_of_a_notice_that_could_not_be_sent(
    handoffs: EarlyHandoffs, channel: NoticeChannel, monkeypatch: pytest.MonkeyPatch, *, asked: bool
) -> None:
    """Nobody has asked for the hold, or the channel to the one who has is broken."""
    monkeypatch.setattr(channel, "tell", lambda *_: False)
    channel.comes = [(OTHER, encode(Want(THEIRS)))] * asked
    fields = {**_hold("me"), TRANSFER: THEIRS}
    handoffs.filled(_request("prompt", {}), fields)
    assert fields[TOLD_EARLY] is False


def test_a_hold_is_told_to_an_engine_that_asked_in_the_last_moment(
    handoffs: EarlyHandoffs, channel: NoticeChannel
) -> None:
    channel.comes = [(OTHER, encode(Want(THEIRS)))]
    fields = {**_hold("me"), TRANSFER: THEIRS}
    handoffs.filled(_request("prompt", {}), fields)
    assert fields.pop(TOLD_EARLY) is True, "P's answer says that D knows the token"
    ((caller, note),) = channel.told
    assert caller == OTHER and isinstance(note, Ready) and (note.name, note.token) == (THEIRS, 7)


@pytest.mark.parametrize("ends", [True, False])
def test_a_hold_that_is_told_late_is_given_back_when_the_leg_is_scheduled_not_when_it_ends(
    handoffs: EarlyHandoffs, channel: NoticeChannel, *, ends: bool
) -> None:
    """P says that no engine was told: its router may replace this leg, and the next one pulls the same hold."""
    told = {**_hold("me"), TRANSFER: MINE}
    handoffs.filled(_request("prompt", {}), told)
    channel.comes = [(OTHER, encode(Want(MINE)))]
    handoffs.hear()
    ((_, late),) = channel.told
    assert isinstance(late, Ready) and late.late, "the notice says what the answer has said"
    slot = Slots(1, bytes(32)).take("hold")
    assert slot is not None
    blocks = {"remote_request_id": "prompt", "remote_block_ids": [[3]], "remote_host": "p", "remote_port": 1,
              FIELD: slot.field(), TOLD_EARLY: False}  # fmt: skip
    leg = _request("leg", {EARLY: "other", TRANSFER: MINE})
    assert handoffs.opened(leg)
    channel.comes = [(OTHER, encode(Ready(MINE, {**_hold(OTHER), **blocks}, 5)))]
    assert handoffs.hear() == [leg] and leg.kv_transfer_params["do_remote_prefill"] is True
    assert handoffs.keeps("leg") and TOLD_EARLY not in leg.kv_transfer_params
    if ends:
        handoffs.finished("leg")
        assert leg.kv_transfer_params.get("do_remote_prefill") is False, "vLLM notifies P of a leg that ends with this"
    handoffs.scheduled("leg")
    given_back = [slot_in(each.kv_transfer_params) for each in handoffs.take_given_back()]
    assert given_back == ([] if ends else [slot])
    assert not handoffs.keeps("leg") and handoffs.take_given_back() == []


def test_notices_that_cannot_be_read_are_counted(handoffs: EarlyHandoffs, channel: NoticeChannel) -> None:
    channel.comes = [(OTHER, b"nonsense"), (OTHER, encode(Ready(MINE, _hold(OTHER), 5)))]
    assert handoffs.hear() == []
    assert handoffs.counts["early notices ignored"] == 2, "one that is no notice, and one that no leg waits for"
