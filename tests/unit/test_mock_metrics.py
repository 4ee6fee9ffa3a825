from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from cluster.instance import Load
from engine.mock.metrics import Histogram, Metrics
from engine.vllm.metrics import parse_load

LOAD = Load(running=3, waiting=2, kv_usage=0.25, external_kv_tokens=640)


def test_the_router_reads_back_what_is_written() -> None:
    assert parse_load(Metrics('odd "name" \\ {x}').text(LOAD)) == LOAD


def test_prometheus_reads_it() -> None:
    metrics = Metrics("m")
    metrics.prompt(100, 32, 0)
    metrics.prompt(50, 0, 50)
    metrics.observe("time_to_first_token_seconds", 0.03)
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics.text(LOAD))
        for sample in family.samples
    }
    assert found["vllm:prompt_tokens_total", "0", "m"] == 150
    assert found["vllm:prompt_tokens_by_source_total", "0", "local_compute", "m"] == 68
    assert found["vllm:prompt_tokens_by_source_total", "0", "local_cache_hit", "m"] == 32
    assert found["vllm:time_to_first_token_seconds_bucket", "0", "0.04", "m"] == 1
    assert found["vllm:time_to_first_token_seconds_bucket", "0", "0.02", "m"] == 0
    assert found["vllm:time_to_first_token_seconds_count", "0", "m"] == 1


def test_a_value_on_a_bound_is_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 9.0):
        histogram.observe(value)
    assert list(histogram.lines("x", "l")) == [
        'x_bucket{l,le="1.0"} 1',
        'x_bucket{l,le="2.0"} 2',
        'x_bucket{l,le="+Inf"} 3',
        "x_count{l} 3",
        "x_sum{l} 11.5",
    ]
