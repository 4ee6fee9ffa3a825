"""Several routers' Prometheus texts as one."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from router.admin.expositions import GAUGES, merged
from router.fleet.view import FleetView
from router.telemetry.metrics import RouterMetrics


def text_of(requests: int, waiting: int, seconds: tuple[float, ...], stale_s: float = 0.0) -> bytes:
    meters, view = RouterMetrics(), FleetView()
    view.add(Instance(id=InstanceId("d"), role=Role.DECODE, url="http://d"))
    view.leg_started(InstanceId("d"))
    for _ in range(requests):
        meters.ended("/v1/completions", "handoff", "served", 0.02)
    for each in seconds:
        meters.leg("decode", each)
    return meters.text(view, waiting, stale_s)


def samples(text: bytes) -> dict[str, float]:
    return {
        sample.name + "".join(sorted(f",{name}={value}" for name, value in sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_counts_add_up() -> None:
    one, other = text_of(3, 1, (0.02, 4.0)), text_of(4, 2, (0.02,), stale_s=7.5)
    both = samples(merged([one, other]))
    assert both["baton_requests_total,outcome=served,path=/v1/completions,way=handoff"] == 7
    assert both["baton_leg_seconds_count,leg=decode"] == 3
    assert both["baton_leg_seconds_bucket,le=0.025,leg=decode"] == 2
    assert both["baton_leg_seconds_bucket,le=+Inf,leg=decode"] == 3
    assert both["baton_waiting_requests"] == 3
    assert both["baton_instance_inflight,instance=d,role=decode"] == 2
    assert both["baton_registry_stale_seconds"] == 7.5


def test_one_text_is_itself() -> None:
    text = text_of(3, 1, (0.02, 4.0))
    assert samples(merged([text])) == samples(text)


def test_every_pair_that_was_tried_has_a_series_from_its_first_failure_on() -> None:
    """`increase` of a series that is born at 5 is 0."""
    meters = RouterMetrics()
    meters.pulled(InstanceId("p"), InstanceId("d"), None)
    meters.pulled(InstanceId("p"), InstanceId("d2"), "no route")
    found = samples(meters.text(FleetView(), 0))
    assert found["baton_pair_failures_total,decode=d2,prefill=p"] == 1
    assert found["baton_pair_failures_total,decode=d,prefill=p"] == 0
    assert (found["baton_releases_total,ok=true"], found["baton_releases_total,ok=false"]) == (0, 0)
    assert (found["baton_handoffs_total,result=ok"], found["baton_handoffs_total,result=failed"]) == (1, 1)


def test_every_gauge_says_how_it_is_merged() -> None:
    """All but `baton_routers_silent`: the answering router adds it to the merged text."""
    registry = RouterMetrics().registry
    gauges = {family.name for family in registry.collect() if family.type == "gauge"}
    assert {name for name in gauges if not name.endswith("_created")} == set(GAUGES)


def test_what_is_no_sample_is_left_out() -> None:
    kind = b"# TYPE baton_y counter\n"
    odd = b"nonsense\n# HELP\nx one\n\xff\xfe 1\nbaton_x 1\n" + kind + b"baton_y_total one\nbaton_y_total 2\n"
    assert merged([odd, b"", kind + b"baton_y_total 3"]) == kind + b"baton_y_total 5.0\n"
