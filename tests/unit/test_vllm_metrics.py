"""An engine's load, read from its /metrics: exact on vLLM's own text, and without an error on any other text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from cluster.instance import Load
from engine.vllm.metrics import parse_load

REAL = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="baton-tiny"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="baton-tiny"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="baton-tiny",reason="capacity"} 9.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="baton-tiny",reason="deferred"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="baton-tiny"} 0.0009768009768009733
vllm:prompt_tokens_by_source_total{engine="0",model_name="baton-tiny",source="local_compute"} 480.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="baton-tiny",source="external_kv_transfer"} 3724.0
vllm:prompt_tokens_total{engine="0",model_name="baton-tiny"} 4204.0
vllm:generation_tokens_total{engine="0",model_name="baton-tiny"} 77.0
vllm:prompt_tokens_by_source_created{engine="0",model_name="x",source="external_kv_transfer"} 1.795190770e+09
"""


def test_vllms_own_text() -> None:
    expected = Load(
        running=2, waiting=3, kv_usage=0.0009768009768009733, external_kv_tokens=3724, deferred=1, prompt_tokens=4204,
        generation_tokens=77,
    )  # fmt: skip
    assert parse_load(REAL) == expected


def text(hits: float, pulled: float, computed: float, engine: int = 0) -> str:
    label = f'engine="{engine}",model_name="m"'
    return (
        f"vllm:external_prefix_cache_hits_total{{{label}}} {hits}\n"
        f'vllm:prompt_tokens_by_source_total{{{label},source="external_kv_transfer"}} {pulled}\n'
        f'vllm:prompt_tokens_by_source_total{{{label},source="local_compute"}} {computed}\n'
        f'vllm:prompt_tokens_by_source_total{{{label},source="local_cache_hit"}} 9000.0\n'
    )


def test_tokens_that_were_computed_instead_of_pulled_are_counted() -> None:
    """vLLM counts a hit of its connector when a pull begins. It counts the source of a prompt's tokens with the first
    token of the answer.
    """
    assert parse_load(text(3724.0, 3724.0, 480.0)).recomputed_tokens == 0
    assert parse_load(text(3724.0, 3443.0, 480.0)).recomputed_tokens == 281
    assert parse_load(text(3724.0, 0.0, 480.0)).recomputed_tokens == 480, (
        "the other tokens are still being pulled, or their client left"
    )
    assert parse_load(text(10.0, 20.0, 480.0)).recomputed_tokens == 0, "the two counters are of different moments"
    both = parse_load(text(300.0, 300.0, 0.0) + text(281.0, 0.0, 281.0, engine=1))
    assert (both.recomputed_tokens, both.external_kv_tokens) == (281, 300)


def test_data_parallel_ranks_are_one_server() -> None:
    text = "\n".join(
        f'vllm:num_requests_running{{engine="{rank}"}} {running}\nvllm:kv_cache_usage_perc{{engine="{rank}"}} {usage}'
        for rank, running, usage in ((0, 1, 0.2), (1, 4, 0.6))
    )
    assert parse_load(text) == Load(running=5, kv_usage=0.4)


def test_odd_model_names_do_not_confuse() -> None:
    text = 'vllm:num_requests_running{engine="0",model_name="a } 7 {b"} 2.0 1795190770000\n'
    assert parse_load(text).running == 2


def test_missing_and_impossible_values_read_as_zero() -> None:
    text = "vllm:num_requests_running NaN\nvllm:num_requests_waiting -1\nvllm:kv_cache_usage_perc +Inf\n"
    assert parse_load(text) == Load()
    assert parse_load("") == Load()


_NAMES = st.sampled_from(
    ["vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens_by_source_total", "other"]
)
_LABELS = st.one_of(st.just(""), st.just('{source="external_kv_transfer"}'), st.text(max_size=20).map("{{{}}}".format))
_VALUES = st.one_of(st.text(max_size=12), st.floats().map(str), st.integers().map(str))
_LINES = st.one_of(st.text(max_size=60), st.builds("{}{} {}".format, _NAMES, _LABELS, _VALUES))


@given(st.lists(_LINES, max_size=12).map("\n".join))
@example("vllm:num_requests_running 1e308\n" * 3)
@example("vllm:num_requests_running{ 1")
@example("vllm:num_requests_running{}} 1_0")
def test_any_text_gives_a_load(text: str) -> None:
    load = parse_load(text)
    assert load.running >= 0
    assert load.waiting >= 0
    assert 0.0 <= load.kv_usage <= 1.0
    assert load.external_kv_tokens >= 0


def test_capacity_is_what_the_engine_says() -> None:
    line = 'vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",num_gpu_blocks="4096",x="y"} 1.0\n'
    assert parse_load("# HELP x\n" + line).kv_tokens == 128 * 4096
    assert parse_load('vllm:cache_config_info{block_size="128"} 1.0').kv_tokens == 0
    assert parse_load("").kv_tokens == 0
