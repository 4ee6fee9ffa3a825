"""What the cluster file tells the router about its instances' speeds."""

from __future__ import annotations

import pytest

from baton.makes import makes_of
from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from cluster.spec import parse
from router.predict.step_model import Make

FILE = """
models:
  - name: Qwen/Qwen3-32B
    pools:
      prefill: {gpu: H100-SXM, shape: {tp: 2}, engine_args: {max-num-batched-tokens: 4096}}
      decode: {gpu: H200, shape: {tp: 4}}
"""


def make(text: str, name: str, role: Role) -> Make | None:
    return makes_of(parse(text, "f").usable())(Instance(id=InstanceId(name), role=role, url="http://x"))


def test_instances_are_known_by_their_pools() -> None:
    prefill, decode = make(FILE, "prefill-0", Role.PREFILL), make(FILE, "decode-0", Role.DECODE)
    assert prefill is not None
    assert decode is not None
    assert (prefill.budget_tokens, decode.budget_tokens) == (4096, 8192)
    assert decode.prompt_ms(4000) < prefill.prompt_ms(4000)
    assert decode.capacity_tokens > prefill.capacity_tokens > 0


def test_a_step_budget_is_read_as_vllm_reads_it() -> None:
    prefill = make(FILE.replace("4096", "4K"), "prefill-0", Role.PREFILL)
    assert prefill is not None and prefill.budget_tokens == 4096


@pytest.mark.parametrize("name", ["prefill-7", "anything", "decode"])
def test_instances_started_later_or_under_other_names_are_known_by_their_role(name: str) -> None:
    assert make(FILE, name, Role.PREFILL) == make(FILE, "prefill-0", Role.PREFILL)


def test_instances_of_the_operator_are_known_by_their_pools() -> None:
    more = FILE + "      extra: {prefill-fast: {role: prefill, gpu: H200, shape: {tp: 2}}}\n"
    for cluster in ("chat", "chat-prefill"):
        assert make(more, f"{cluster}-prefill-2", Role.PREFILL) == make(more, "prefill-0", Role.PREFILL) is not None
        fast = make(more, f"{cluster}-prefill-fast-0", Role.PREFILL)
        assert fast == make(more, "prefill-fast-0", Role.PREFILL) is not None
        assert fast != make(more, "prefill-0", Role.PREFILL)


def test_the_memory_given_in_the_file_takes_precedence() -> None:
    less = make(FILE + "hardware: {H100-SXM: {}, H200: {memory_gib: 80}}\n", "decode-0", Role.DECODE)
    more = make(FILE, "decode-0", Role.DECODE)
    assert less is not None
    assert more is not None
    assert less.capacity_tokens < more.capacity_tokens


@pytest.mark.parametrize(
    "text",
    [
        "models: [{name: Qwen/Qwen3-32B}]",
        "models: [{name: nobody/knows-this, pools: {prefill: {gpu: H200}, decode: {gpu: H200}}}]",
    ],
    ids=["no GPU", "no such model"],
)
def test_an_unknown_gpu_or_model_has_no_make(text: str) -> None:
    assert make(text, "prefill-0", Role.PREFILL) is None


def test_with_several_models_a_name_of_no_pool_has_no_make() -> None:
    pools = "pools: {prefill: {gpu: H200}, decode: {gpu: H200}}"
    text = f"models: [{{name: Qwen/Qwen3-32B, {pools}}}, {{name: Qwen/Qwen3-8B, {pools}}}]"
    assert make(text, "qwen3-8b-prefill-0", Role.PREFILL) is not None
    assert make(text, "qwen3-8b-prefill-0", Role.PREFILL) != make(text, "qwen3-32b-prefill-0", Role.PREFILL)
    assert make(text, "prefill-0", Role.PREFILL) is None


def test_a_cache_of_eight_bits_is_priced() -> None:
    """Half the bytes a token: to move, to read and to keep."""
    both = FILE.replace("gpu: H200", "gpu: H200, engine_args: {kv_cache_dtype: fp8}")
    half = make(both.replace("tokens: 4096", "tokens: 4096, kv-cache-dtype: fp8"), "decode-0", Role.DECODE)
    whole = make(FILE, "decode-0", Role.DECODE)
    assert half is not None
    assert whole is not None
    assert half.kv_bytes == whole.kv_bytes / 2
    assert half.capacity_tokens == pytest.approx(2 * whole.capacity_tokens, rel=0.01)
    assert half.decode.context_ms < whole.decode.context_ms
