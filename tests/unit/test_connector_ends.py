"""Requests that end before their pull has begun, in the connector's scheduler half."""

from __future__ import annotations

import warnings
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="make setup installs torch")
pytest.importorskip("vllm", reason="make setup installs vLLM")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own deprecations as it is imported
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

    from engine.vllm.connector.scheduler import BatonScheduler

from cluster.wire import TRANSFER
from kvtransfer.hold_marks import Slots
from prefill.holds import Holds

HOLD = {"remote_engine_id": "p", "remote_request_id": "r", "remote_block_ids": [[1, 2]], "remote_host": "::1",
        "remote_port": 1, "remote_num_tokens": 32}  # fmt: skip
NAMED = {TRANSFER: "mine/1/1"}


@pytest.fixture
def scheduler() -> Any:
    made: Any = object.__new__(BatonScheduler)
    nothing = SimpleNamespace(finished=lambda _: None, over=lambda _: None)
    made._pulls = made._early = nothing
    made._sources = SimpleNamespace(ended=lambda _: True)
    made._holds, made._vouched, made._counts = Holds(Slots(4, b"k" * 32)), None, Counter()
    made._reqs_need_recv, made._reqs_need_save, made._reqs_not_processed = {}, {}, set()
    made._heartbeat_req_engine = {"leg": ("p", "r")}
    made._heartbeat_by_engine = {"p": SimpleNamespace(req_ids={"r"})}
    made.is_bidirectional_kv_xfer_enabled = False
    return made


def ended(scheduler: Any, fields: dict[str, Any]) -> NixlConnectorMetadata:
    """What the next step tells the workers."""
    request = SimpleNamespace(request_id="leg", status="aborted", kv_transfer_params=fields)
    assert scheduler.request_finished(request, ((),)) == (False, None)
    told = NixlConnectorMetadata()
    for name, (each, local, cached, waits) in scheduler._reqs_need_recv.items():
        told.add_new_req_to_recv(name, local, each.kv_transfer_params, cached, waits)
    return told


@pytest.mark.parametrize("missing", ["", *HOLD])
def test_a_producer_is_told_where_the_fields_name_its_hold(scheduler: Any, missing: str) -> None:
    """Any client of an engine without a guard can send fields; a missing one must not end the engine."""
    fields = {name: value for name, value in HOLD.items() if name != missing} | {"do_remote_prefill": True}
    told = ended(scheduler, fields)
    assert list(told.reqs_to_recv) == (["leg"] if missing in {"", "remote_num_tokens"} else [])
    assert not scheduler._heartbeat_req_engine and not scheduler._heartbeat_by_engine


@pytest.mark.parametrize("pulls", [True, False], ids=["before its own pull", "after it"])
def test_a_prefill_leg_that_was_given_up_leaves_no_heartbeat(scheduler: Any, pulls: bool) -> None:
    scheduler._holds.begin("leg", NAMED[TRANSFER], 0.0)
    scheduler._holds.release(NAMED[TRANSFER], 0.0)
    told = ended(scheduler, HOLD | NAMED | {"do_remote_decode": True, "do_remote_prefill": pulls})
    assert list(told.reqs_to_recv) == (["leg"] if pulls else []), "the source is told that its hold is not wanted"
    assert not scheduler._heartbeat_req_engine and not scheduler._heartbeat_by_engine
    assert scheduler._holds.open_legs == 0
