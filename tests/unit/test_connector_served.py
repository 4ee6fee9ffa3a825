"""Which engines Baton's connector serves, leaves to vLLM's own, or refuses; configurations by their fields alone."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from engine.vllm.connector.served import left_to_vllm, number_format, rank_in, refused

ONE_DOOR = {"door": "/run/p/door"}


def config(
    *, extra: dict[str, Any] | None = None, lookahead: int = 0, engine_id: str = "7c0e", buffer: str = "cpu",
    experts: bool = False, sleeps: bool = False, **parallel: int,
) -> Any:  # fmt: skip
    sizes = dict.fromkeys(("data_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"), 1)
    sizes |= {"decode_context_parallel_size": 1, "data_parallel_index": 0, "data_parallel_external_lb": False}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes | parallel),
        kv_transfer_config=SimpleNamespace(
            kv_buffer_device=buffer, engine_id=engine_id, get_from_extra_config=(extra or {}).get
        ),
        num_prefill_lookahead_tokens=lookahead,
        aux_output_config=SimpleNamespace(enable_return_routed_experts=experts),
        model_config=SimpleNamespace(enable_sleep_mode=sleeps),
    )


def left(asked: Any, *, full: bool = True, device: str = "cpu") -> str | None:
    return left_to_vllm(asked, full_attention=full, device=device)


def test_an_ordinary_engine_is_served() -> None:
    assert left(config()) is None and left(config(buffer="cuda"), device="cuda") is None
    assert left(config(engine_id="my_dp0_engine")) is None
    assert left(config(lookahead=1)) is None


@pytest.mark.parametrize(
    ("why", "asked"),
    [
        ("data parallelism", {"data_parallel_size": 2, "extra": ONE_DOOR}),
        # vLLM tells a rank of a dense model that `data_parallel_size` is 1.
        ("data parallelism", {"engine_id": "7c0e_dp0", "extra": ONE_DOOR}),
        ("data parallelism", {"engine_id": "7c0e_dp11", "data_parallel_index": 11, "extra": ONE_DOOR}),
        ("data parallelism", {"data_parallel_index": 1, "extra": ONE_DOOR}),
        ("pipeline parallelism", {"pipeline_parallel_size": 2}),
        ("context parallelism", {"prefill_context_parallel_size": 2}),
        ("speculative", {"lookahead": 2}),
        ("bidirectional", {"extra": {"bidirectional_kv_xfer": True}}),
    ],
)
def test_what_is_left_to_vllm_has_a_reason(why: str, asked: dict[str, Any]) -> None:
    assert why in (left(config(**asked)) or "")


@pytest.mark.parametrize(
    ("rank", "asked"),
    [
        (None, {}),
        (0, {"data_parallel_size": 2, "extra": {"door": "/run/p/door{rank}"}}),
        (0, {"engine_id": "7c0e_dp0", "extra": {"door": "/run/p/door{rank}"}}),
        (11, {"engine_id": "7c0e_dp11", "data_parallel_index": 11, "extra": {"door": "/run/p/door{rank}"}}),
        (1, {"engine_id": "7c0e_dp1", "data_parallel_index": 1, "data_parallel_external_lb": True, "extra": ONE_DOOR}),
        (0, {"data_parallel_size": 2}),
    ],
)
def test_a_rank_with_an_agent_socket_of_its_own_is_served(rank: int | None, asked: dict[str, Any]) -> None:
    assert left(config(**asked)) is None and rank_in(config(**asked)) == rank


def test_kinds_of_cache_and_of_memory_that_are_left_to_vllm() -> None:
    assert "kinds of KV cache" in (left(config(), full=False) or "")
    assert "host memory" in (left(config(buffer="cpu"), device="cuda") or "")


def cache(*specs: dict[str, Any]) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(**spec)) for spec in specs])


def in_type(dtype: str, quantization: str | None = None) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(dtype=f"torch.{dtype}", quantization=quantization))


ATTENTION, STATES = {"dtype": "torch.float32"}, {"dtypes": ("torch.float32", "torch.float32")}


@pytest.mark.parametrize(
    ("model", "specs", "said"),
    [
        (in_type("float32"), (ATTENTION, STATES), "float32"),
        (in_type("bfloat16"), ({"dtype": "torch.bfloat16"}, {"dtypes": ("torch.bfloat16",) * 2}), "bfloat16"),
        # What a model's own configuration may say of its states, whatever `--dtype` says.
        (in_type("float32"), (ATTENTION, {"dtypes": ("torch.float32", "torch.bfloat16")}), "bfloat16, float32"),
        (in_type("bfloat16"), (STATES,), "bfloat16, float32"),
        (in_type("float32"), ({"dtype": "torch.uint8"}, STATES), "float32, uint8"),
        (in_type("float32", "fp8"), (ATTENTION, STATES), "float32, fp8"),
        (in_type("float32"), ({},), "float32, unknown"),
    ],
)
def test_the_number_format_names_all_that_a_token_is_rounded_to(model: Any, specs: Any, said: str) -> None:
    assert number_format(model, cache(*specs), device="cpu") == said
    layers = {str(number): SimpleNamespace(**spec) for number, spec in enumerate(specs)}
    assert number_format(model, cache({"kv_cache_specs": layers}), device="cpu") == said, "one group of several kinds"


def test_products_in_float32_are_rounded_on_gpus() -> None:
    assert number_format(in_type("float32"), cache(ATTENTION, STATES), device="cuda") == "float32, tf32"
    assert number_format(in_type("bfloat16"), cache({"dtype": "torch.bfloat16"}), device="cuda") == "bfloat16"


@pytest.mark.parametrize(
    ("asked", "why_left", "device", "wrong"),
    [
        ({}, None, "cpu", None),
        ({}, "pipeline parallelism", "cuda", None),
        ({"extra": {"digests": True}}, None, "cpu", None),
        ({"extra": {"digests": False}}, "pipeline parallelism", "cuda", None),
        ({"extra": {"digests": True}}, None, "cuda", "host memory"),
        ({"extra": {"digests": "yes"}}, None, "cpu", "true or false"),
        ({"extra": {"digests": True}}, "data parallelism", "cpu", r"data parallelism.*Leave `digests` out"),
        ({"decode_context_parallel_size": 2}, None, "cuda", "decode_context_parallel_size.*--transfer nixl"),
        ({"experts": True}, None, "cuda", "enable_return_routed_experts.*Leave it out"),
        ({"sleeps": True}, None, "cuda", "enable_sleep_mode.*Leave it out"),
        ({"sleeps": True}, "pipeline parallelism", "cuda", "enable_sleep_mode.*Leave it out"),
    ],
)
def test_an_engine_that_would_hand_over_wrong_blocks_does_not_start(
    asked: dict[str, Any], why_left: str | None, device: str, wrong: str | None
) -> None:
    said = refused(config(**asked), left=why_left, device=device)
    assert said is None if wrong is None else said is not None and re.search(wrong, said) is not None
