"""The sums of a request's times: their parts and residual, for every kind of journey; histograms; the explain store."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from cluster.errors import UsageError
from cluster.ids import InstanceId, RequestId
from cluster.instance import Instance, Role
from cluster.request import Request
from router.api.config import RouterConfig
from router.core.clients import Client
from router.core.eligibility import Verdict, Way
from router.core.timing_parts import Sum, Timing
from router.telemetry.explain_store import TURNS_MAX, ExplainStore, Story
from router.telemetry.histograms import Histograms, Times
from router.telemetry.timing import LEGS, EngineTimes, RequestTimeline, Stage, engine_times, told_at_end, told_in

P = EngineTimes(queue_s=0.010, first_s=0.050)
D = EngineTimes(queue_s=0.030, first_s=0.020, generation_s=0.4)


def known(each: Sum | None) -> dict[str, float | None]:
    """The parts that are not 0, with the residual, in milliseconds. Asserts that they add up to the total."""
    assert each is not None
    added = sum(part for part in each.parts.values() if part is not None) + each.residual_s
    assert added == pytest.approx(each.total_s)
    named = {**each.parts, "residual": each.residual_s}
    seen = {name: part for name, part in named.items() if part is None or abs(part) > 1e-9}
    return {name: None if part is None else round(part * 1000) for name, part in seen.items()}


def seeded() -> RequestTimeline:
    line = RequestTimeline(100.0, stream=True)
    line.enter(Stage.PREFILL_LEG, 100.001)
    line.enter(Stage.ROUTER, 100.063)  # P's answer is here
    line.report(Stage.PREFILL_LEG, P)
    line.seeded = True
    line.relabel(Stage.RELAY)
    line.first(100.065, Stage.ROUTER)
    line.enter(Stage.DECODE_LEG, 100.066)
    line.enter(Stage.STEP, 100.120)
    line.second(100.140)
    return line


def test_a_seeded_request_has_its_first_token_before_the_handoff() -> None:
    line = seeded()
    line.end(101.0)
    timing = line.read(102.0)
    assert timing.way == "seeded"
    assert known(timing.ttft) == {"router": 1, "queue_p": 10, "prefill": 50, "relay": 2, "residual": 2}
    assert known(timing.tt2t) == {
        "router": 1,
        "handoff_queue_d": None,
        "step_d": None,
        "decode_leg": 54,
        "step": 20,
    }
    assert timing.answer is None
    assert timing.first_made_s == pytest.approx(0.063)
    assert timing.total_s == pytest.approx(1.0)


def test_ds_report_replaces_that_part_of_the_decode_leg() -> None:
    line = seeded()
    line.report(Stage.DECODE_LEG, D)
    assert known(line.read(101.0).tt2t) == {
        "router": 1,
        "handoff_queue_d": 30,
        "step_d": 20,
        "step": 20,
        "residual": 4,
    }


@pytest.mark.parametrize(
    ("queued_s", "queue_ms", "step_ms", "residual_ms"),
    [(0.080, 30, 20, 4), (0.045, 0, 15, 39), (0.020, 0, 0, 54)],
    ids=["queued until later", "its step had begun", "its token was there"],
)
def test_an_early_decode_leg_counts_from_ps_answer(
    queued_s: float, queue_ms: float, step_ms: float, residual_ms: float
) -> None:
    """D's report counts from the leg's arrival, 50 ms before the stage began. The work that D did in these 50 ms ran
    beside P's leg and does not count.
    """
    line = RequestTimeline(100.0, stream=True)
    line.enter(Stage.PREFILL_LEG, 100.001)
    line.enter(Stage.ROUTER, 100.063)
    line.report(Stage.PREFILL_LEG, P)
    line.seeded = True
    line.relabel(Stage.RELAY)
    line.first(100.065, Stage.ROUTER)
    line.enter(Stage.DECODE_LEG, 100.066, 0.050)
    line.enter(Stage.STEP, 100.120)
    line.second(100.140)
    line.report(Stage.DECODE_LEG, EngineTimes(queued_s, 0.020))
    said = {"router": 1, "handoff_queue_d": queue_ms, "step_d": step_ms, "step": 20, "residual": residual_ms}
    assert known(line.read(101.0).tt2t) == {name: ms for name, ms in said.items() if ms}


def test_a_plain_request_waits_for_the_handoff() -> None:
    line = RequestTimeline(0.0, stream=True)
    line.enter(Stage.PREFILL_LEG, 0.001)
    line.enter(Stage.ROUTER, 0.063)
    line.report(Stage.PREFILL_LEG, P)
    line.enter(Stage.DECODE_LEG, 0.064)
    line.enter(Stage.RELAY, 0.120)
    line.first(0.121, Stage.STEP)
    line.second(0.141)
    line.end(1.0)
    line.report(Stage.DECODE_LEG, D)
    timing = line.read(1.0)
    assert timing.way == "plain"
    assert known(timing.ttft) == {
        "router": 2, "queue_p": 10, "prefill": 50, "handoff_queue_d": 30, "step_d": 20, "relay": 1, "residual": 8,
    }  # fmt: skip
    assert known(timing.tt2t) == {"step": 20}
    assert timing.first_made_s == pytest.approx(0.063)


STAGES = [value for name, value in vars(Stage).items() if name.isupper()]


@pytest.mark.parametrize("leg", [Stage.DECODE_LEG, Stage.AGGREGATED_LEG])
def test_an_answer_in_one_piece_has_one_sum(leg: str) -> None:
    line = RequestTimeline(0.0, stream=False)
    line.enter(leg, 0.001)
    line.enter(Stage.RELAY, 0.461)
    line.report(leg, D)
    line.end(0.462)
    timing = line.read(5.0)
    assert (timing.ttft, timing.tt2t) == (None, None)
    queue, first = LEGS[leg]
    assert known(timing.answer) == {
        "router": 1, queue: 30, first: 20, "generation": 400, "relay": 1, "residual": 10,
    }  # fmt: skip
    assert timing.first_made_s == pytest.approx(0.051)


def test_an_aggregated_stream() -> None:
    line = RequestTimeline(0.0, stream=True)
    line.enter(Stage.CREDIT, 0.001)
    line.enter(Stage.ROUTER, 0.501)
    line.enter(Stage.AGGREGATED_LEG, 0.502)
    line.enter(Stage.RELAY, 0.602)
    line.first(0.603, Stage.STEP)
    timing = line.read(0.7)
    assert timing.way == "aggregated"
    assert known(timing.ttft) == {
        "router": 2, "credit": 500, "queue": None, "prefill": None, "whole_leg": 100, "relay": 1,
    }  # fmt: skip
    assert timing.tt2t is None, "the second token has not been sent yet"
    assert timing.first_made_s == pytest.approx(0.602)


def test_the_time_of_lost_legs_counts_as_retries() -> None:
    line = RequestTimeline(0.0, stream=True)
    line.again(0.0)  # the first choice: nothing has been lost
    line.enter(Stage.PREFILL_LEG, 0.001)
    line.again(0.201)  # the prefill leg was lost
    line.enter(Stage.PREFILL_LEG, 0.202)
    line.enter(Stage.ROUTER, 0.262)
    line.report(Stage.PREFILL_LEG, P)
    line.enter(Stage.DECODE_LEG, 0.263)
    line.again(0.363)
    line.enter(Stage.CREDIT, 0.364)
    line.enter(Stage.ROUTER, 0.374)
    line.enter(Stage.DECODE_LEG, 0.374)
    line.enter(Stage.RELAY, 0.424)
    line.first(0.424, Stage.STEP)
    line.again(0.524)  # the stream broke before its second token
    line.enter(Stage.AGGREGATED_LEG, 0.525)
    line.enter(Stage.STEP, 0.625)
    line.second(0.626)
    timing = line.read(1.0)
    assert known(timing.ttft) == {
        "router": 4, "credit": 10, "retries": 300, "queue_p": 10, "prefill": 50,
        "handoff_queue_d": None, "step_d": None, "decode_leg": 50,
    }  # fmt: skip
    assert known(timing.tt2t) == {
        "router": 1, "retries": 100, "queue": None, "prefill": None, "whole_leg": 100, "step": 1,
    }  # fmt: skip


def test_a_request_without_a_first_token_has_no_sums() -> None:
    line = RequestTimeline(0.0, stream=True)
    line.enter(Stage.PREFILL_LEG, 0.001)
    assert line.read(5.0) == Timing(way="aggregated", ttft=None, tt2t=None, answer=None, first_made_s=None, total_s=5.0)


@given(st.data())
def test_parts_and_residual_add_up_whatever_happens(data: st.DataObject) -> None:
    now, line = 0.0, RequestTimeline(0.0, stream=data.draw(st.booleans()))
    given_out = 0
    for _ in range(data.draw(st.integers(0, 12))):
        now += data.draw(st.floats(0, 10))
        act = data.draw(st.sampled_from(["enter", "again", "out", "report"]))
        if act == "enter":
            line.enter(data.draw(st.sampled_from(STAGES)), now)
        elif act == "again":
            line.again(now)
        elif act == "report":
            times = EngineTimes(*data.draw(st.tuples(st.floats(0, 20), st.floats(0, 20), st.floats(0, 20) | st.none())))
            line.report(data.draw(st.sampled_from(sorted(LEGS))), times)
        elif given_out < 2:
            given_out += 1
            line.first(now, Stage.STEP) if given_out == 1 else line.second(now)
    line.end(now)
    timing = line.read(now)
    ttft_s, tt2t_s = (None if each is None else each.total_s for each in (timing.ttft, timing.tt2t))
    assert line.totals(now) == (ttft_s, tt2t_s, timing.first_made_s, timing.total_s)
    for each in (timing.ttft, timing.tt2t, timing.answer):
        if each is not None:
            added = sum(part for part in each.parts.values() if part is not None) + each.residual_s
            assert added == pytest.approx(each.total_s, abs=1e-6)
    json.dumps(timing.as_json())


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"queue_time_ms": 10, "time_to_first_token_ms": 50.0}, P),
        ({"queue_time_ms": 30, "time_to_first_token_ms": 20, "generation_time_ms": 400}, D),
        ({"queue_time_ms": 10, "time_to_first_token_ms": None}, None),
        ({"queue_time_ms": True, "time_to_first_token_ms": 1}, None),
        ({"queue_time_ms": -1, "time_to_first_token_ms": 1}, None),
        ({"queue_time_ms": float("nan"), "time_to_first_token_ms": 1}, None),
        ({"queue_time_ms": "10", "time_to_first_token_ms": 1}, None),
        ([1], None),
        (None, None),
    ],
)
def test_malformed_reports_of_engines_are_ignored(metrics: object, expected: EngineTimes | None) -> None:
    assert engine_times(metrics) == expected


def test_usage_and_metrics_are_read_from_an_answer() -> None:
    body = {"choices": [{"text": 'said "metrics": 1'}], "usage": {"prompt_tokens": 3}, "metrics": {"queue_time_ms": 1}}
    told = told_in(json.dumps(body).encode())
    assert told is not None
    assert (told.usage, told.metrics) == ({"prompt_tokens": 3}, {"queue_time_ms": 1})
    assert told_in(b"not JSON") is None
    assert told_in(b'{"metrics": 7}') is None


LAST = b'data: {"choices":[{"text":"x"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3},"metrics":{"queue_time_ms":1}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("tail", [LAST + USAGE + DONE, USAGE + DONE, b'rest of another"}\n\n' + USAGE])
def test_the_usage_is_found_at_a_streams_end(tail: bytes) -> None:
    told = told_at_end(tail)
    assert told is not None
    assert (told.usage, told.metrics) == ({"prompt_tokens": 3}, {"queue_time_ms": 1})


@pytest.mark.parametrize("tail", [b"", LAST + DONE, USAGE[3:] + DONE, b'data: {"usage":'])
def test_a_stream_end_without_usage_has_none(tail: bytes) -> None:
    assert told_at_end(tail) is None


# -- histograms --


def lines(registry: CollectorRegistry) -> Iterator[str]:
    return (line for line in generate_latest(registry).decode().splitlines() if "_created" not in line)


def test_our_histograms_have_the_same_text_as_prometheus_clients() -> None:
    bounds = (0.005, 0.1, 2.5)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = Histograms("seconds", "What.", ["way"], bounds, ours)
    other = Histogram("seconds", "What.", ["way"], buckets=bounds, registry=theirs)
    for way, value in (("a", 0.005), ("a", 0.0051), ("b", 3.0), ("a", -0.001), ("b", 2.5)):
        mine.observe((way,), value)
        other.labels(way).observe(value)
    assert list(lines(ours)) == list(lines(theirs))


def test_a_served_request_is_observed_part_by_part() -> None:
    registry = CollectorRegistry()
    times = Times(registry, (0.01, 0.1, 1))
    times.observe(seeded().read(101.0))
    labels = {"sum": "ttft", "part": "queue_p", "way": "seeded"}
    assert registry.get_sample_value("baton_part_seconds_sum", labels) == pytest.approx(0.010)
    assert registry.get_sample_value("baton_part_seconds_bucket", {**labels, "le": "0.01"}) == 1
    assert registry.get_sample_value("baton_ttft_seconds_sum", {"way": "seeded"}) == pytest.approx(0.065)
    assert registry.get_sample_value("baton_first_made_seconds_sum", {"way": "seeded"}) == pytest.approx(0.063)
    unknown = {"sum": "tt2t", "part": "step_d", "way": "seeded"}
    assert registry.get_sample_value("baton_part_seconds_count", unknown) is None, "absent, not 0"


# -- the explain store --


def story(name: str, body: Mapping[str, object] | None = None) -> Story:
    request = Request(id=RequestId(name), path="/v1/completions", model="m", stream=True, body=body or {}, arrived=1.0)
    return Story(request, Verdict(Way.SEEDED, "", resumable=True))


def remembered(memory: ExplainStore, *names: str) -> list[str]:
    return [name for name in names if memory.get(name) is not None]


def test_the_oldest_finished_requests_are_forgotten_and_open_ones_never() -> None:
    memory = ExplainStore(last_max=2)
    stories = [story(name) for name in "abcd"]
    for each in stories:
        memory.begin(each)
    assert remembered(memory, *"abcd") == ["a", "b", "c", "d"]
    for each in stories[1:]:
        memory.finish(each)
        memory.finish(each)  # once only
    assert remembered(memory, *"abcd") == ["a", "c", "d"]
    assert [each.request_id for each in memory.latest(9)] == ["a", "d", "c"]
    assert [each.request_id for each in memory.latest(2)] == ["a", "d"]
    assert len(memory) == 3


def test_bytes_are_bounded_too() -> None:
    memory = ExplainStore(last_max=1000, bytes_max=20_000)
    for number in range(100):
        each = story(str(number))
        memory.begin(each)
        each.add(1.0, "lost", because="x" * 400)
        memory.finish(each)
        assert memory.bytes <= 20_000
    assert 5 < len(memory) < 20
    assert remembered(memory, "0", "99") == ["99"]


def test_a_long_story_keeps_its_beginning_and_its_end() -> None:
    each = story("a")
    for number in range(1000):
        each.add(1.0, "refused", (number,))
    told = each.as_json(2.0)
    numbers = [turn["status"] for turn in told["turns"]]
    assert (len(numbers), numbers[0], numbers[-1]) == (TURNS_MAX, 0, 999)
    assert told["turns_left_out"] == 1000 - TURNS_MAX


def called(name: str, client_id: str, tenant: str = "") -> Story:
    request = Request(id=RequestId(name), client_id=client_id, path="/", model="m", stream=True, body={}, arrived=1.0)
    return Story(request, Verdict(Way.SEEDED, "", resumable=True), Client(tenant))


def test_requests_with_the_same_client_id_are_found_newest_first_and_forgotten_one_by_one() -> None:
    memory = ExplainStore(last_max=2)
    stories = [called("1", "a", "x"), called("2", "a", "y"), called("3", "a", "x"), called("4", "b", "x")]
    for each in stories:
        memory.begin(each)
    assert [each.request_id for each in memory.named("a")] == ["3", "2", "1"]
    assert [each.request_id for each in memory.named("a", "x")] == ["3", "1"]
    assert memory.named("a", "z") == memory.named("nobody's") == memory.named("") == []
    assert memory.get("a") is None
    for each in stories:
        memory.finish(each)
    assert [each.request_id for each in memory.named("a")] == ["3"]
    memory.finish(stories[0])
    for number in range(2):
        memory.begin(last := called(f"last {number}", ""))
        memory.finish(last)
    assert memory.named("a") == []
    assert memory.named("") == []
    assert not memory._by_client_id, "the store keeps nothing of a forgotten request"


def test_a_negative_explain_last_is_refused() -> None:
    instance = Instance(id=InstanceId("both-0"), role=Role.BOTH, url="http://127.0.0.1:1")
    with pytest.raises(UsageError, match="--explain-last is -1: it must be at least 0"):
        RouterConfig(instances=(instance,), explain_last=-1)
    assert RouterConfig(instances=(instance,), explain_last=0).explain_last == 0
