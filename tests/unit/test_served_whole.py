"""The log says that handing over costs more than it gives, and only for requests that a pair could serve."""

from __future__ import annotations

import logging

import pytest

from cluster.ids import InstanceId
from router.core.journey import Chosen
from router.fleet.view import FleetView
from router.scheduler.decision_log import fleet_of, scheduler_of
from router.scheduler.dispatch import Dispatch
from router.scheduler.scoring.policies import POLICIES

D = InstanceId("decode-0")


def test_the_log_says_so_only_where_a_pair_could_serve_the_request(caplog: pytest.LogCaptureFixture) -> None:
    view = FleetView()
    scheduler, scheduling = scheduler_of(None, view, POLICIES["workload"], admission=False, foresees=True)
    dispatch = Dispatch(view, scheduler, fleet_of(None, view), scheduling)
    with caplog.at_level(logging.INFO, "baton.router"):
        dispatch.served_aggregated(Chosen(None, D, "whole on decode-0; their weights differ"))
        assert not dispatch.said_aggregated and not caplog.records
        for _ in range(2):
            dispatch.served_aggregated(Chosen(None, D, "whole on decode-0 (price 0.20); a pair 0.61; costs told"))
    assert dispatch.said_aggregated
    assert caplog.text.count("a pair 0.61") == 1
