"""The log says once that handing over costs more than it gives, and only of requests that a pair could serve."""

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


def test_it_is_said_once_and_not_where_no_pair_could(caplog: pytest.LogCaptureFixture) -> None:
    view = FleetView()
    scheduler, scheduling = scheduler_of(None, view, POLICIES["workload"], admission=False, foresees=True)
    dispatch = Dispatch(view, scheduler, fleet_of(None, view), scheduling)
    with caplog.at_level(logging.INFO, "baton.router"):
        dispatch.served_aggregated(Chosen(None, D, "whole on decode-0; their weights differ"))
        assert not dispatch.said_aggregated and not caplog.records
        dispatch.served_aggregated(Chosen(None, D, "whole on decode-0 (price 0.20); a pair 0.61; costs told"))
    assert dispatch.said_aggregated
    assert "a pair 0.61" in caplog.text
