"""From the pools of a cluster file to the instances to start, and from `engine_args` to vLLM's flags."""

from __future__ import annotations

from typing import Any

import pytest

from baton.commands.engine import CHANGES_ANSWERS
from cluster.instance import Role
from cluster.spec import instances, parse
from cluster.spec.flags import (
    BY_SHAPE,
    DEFAULTED,
    REFUSED,
    SAME_ANSWERS,
    SECRET,
    SET_BY_BATON,
    is_secret_name,
    shape_flags,
    words,
)
from cluster.spec.settings import Shape
from engine.vllm.command import SECRET_FLAGS, command
from engine.vllm.spec import OURS, EngineSpec

TWO_POOLS = """
models:
  - name: Qwen/Qwen3-32B
    served_name: qwen
    pools:
      decode: {start: 2, shape: {tp: 4, dp: 2, ep: 8}, gpu: H200, env: {A: b}}
      prefill: {shape: {tp: 2, dp: 2}, engine_args: {max-num-batched-tokens: 8192, enforce-eager: true}}
transfer: {lease_s: 60}
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max-model-len": 8192}, "--max-model-len 8192"),
        ({"gpu-memory-utilization": 0.9}, "--gpu-memory-utilization 0.9"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16"),
        ({"enforce-eager": True}, "--enforce-eager"),
        ({"enable-prefix-caching": False}, "--no-enable-prefix-caching"),
        ({"compilation-config.pass_config.x": False}, "--compilation-config.pass_config.x false"),
        ({"allowed-media-domains": ["a.org", "b.org"]}, "--allowed-media-domains a.org b.org"),
        ({"cudagraph-capture-sizes": [1, 2]}, "--cudagraph-capture-sizes 1 2"),
        ({"lora-modules": [{"name": "x"}]}, '--lora-modules {"name": "x"}'),
        (
            {"speculative-config": {"model": "m", "n": 3, "on": True}},
            '--speculative-config {"model": "m", "n": 3, "on": true}',
        ),
        ({"chat-template": "-x"}, "--chat-template=-x"),
        ({"seed": -1}, "--seed=-1"),
        ({"tensor-parallel-size": 2, "enable_expert_parallel": True, "seed": 1}, "--seed 1"),
        ({}, ""),
    ],
)
def test_engine_args_become_vllms_flags(given: dict[str, Any], expected: str) -> None:
    assert " ".join(words(given)) == expected


def test_a_value_with_spaces_is_one_word() -> None:
    assert words({"a": "b c", "d": {"e": "f g"}}) == ("--a", "b c", "--d", '{"e": "f g"}')


def test_instances_of_one_model() -> None:
    planned = instances(parse(TWO_POOLS, "f").usable())
    assert [each.name for each in planned] == ["prefill-0", "decode-0", "decode-1"]
    prefill, decode, other = planned
    assert prefill.role is Role.PREFILL
    assert prefill.vllm_args == (
        *("--tensor-parallel-size", "2", "--data-parallel-size", "2"),
        *("--max-num-batched-tokens", "8192", "--enforce-eager"),
    )
    assert (prefill.gpus, prefill.gpu, prefill.env) == (4, None, {})
    assert decode.vllm_args == (
        *("--tensor-parallel-size", "4", "--data-parallel-size", "2"),
        "--enable-expert-parallel",
    )
    assert (decode.gpus, decode.gpu, decode.env) == (8, "H200", {"A": "b"})
    assert (decode.model, decode.served_name, decode.kv_lease_s) == ("Qwen/Qwen3-32B", "qwen", 60)
    assert decode.role is other.role is Role.DECODE


def test_a_shape_becomes_vllms_flags() -> None:
    words_of = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "4", "--data-parallel-size", "3")
    assert shape_flags(Shape(tp=2, pp=4, dp=3, ep=6)) == (*words_of, "--enable-expert-parallel")
    assert shape_flags(Shape()) == ()


def names(*models: str) -> list[str]:
    listed = ", ".join(f"{{name: {name}, pools: {{both: {{}}}}}}" for name in models)
    return [each.name for each in instances(parse(f"models: [{listed}]", "f").usable())]


def test_instances_of_several_models_have_different_names() -> None:
    assert names("Qwen/Qwen3-32B") == ["both-0"]
    assert names("Qwen/Qwen3-32B", "/models/Llama_3.1") == ["qwen3-32b-both-0", "llama-3-1-both-0"]
    assert names("a/model", "b/model") == ["a-model-both-0", "b-model-both-0"]
    assert names("a/x.y", "a/x-y") == ["model-0-both-0", "model-1-both-0"]
    assert names("a/模型", "b/模型") == ["a-both-0", "b-both-0"]
    assert names("模型", "模样") == ["model-0-both-0", "model-1-both-0"]


# -- lists that also stand in engine/vllm, which cluster may not import --


def test_refused_flags_are_those_that_baton_sets_itself() -> None:
    assert {f"--{flag}" for flag in REFUSED} == set(OURS)


def test_secret_flags_are_those_kept_out_of_logs() -> None:
    assert {f"--{flag}" for flag in SECRET} == set(SECRET_FLAGS)


def test_flags_that_the_launcher_sets_are_known() -> None:
    spec: dict[str, Any] = {
        "instance": "prefill-0",
        "role": Role.PREFILL,
        "model": "m",
        "served_name": "s",
        "python": "python",
        "device": "gpu",
        "port": 8100,
        "side_channel_port": 5600,
    }
    set_by_us = {word.removeprefix("--") for word in command(EngineSpec(**spec)) if word.startswith("--")}
    assert set_by_us <= set(REFUSED) | set(SET_BY_BATON) | DEFAULTED
    assert not set(BY_SHAPE) & set(SET_BY_BATON)


@pytest.mark.parametrize("name", ["HF_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "PASSWORD", "api-key"])
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "key_file", "VLLM_KEYRING", "HF_HOME"])
def test_names_that_are_not_secret(name: str) -> None:
    assert not is_secret_name(name)


def test_flags_that_change_answers_are_those_that_agents_announce_with_the_weights() -> None:
    assert {f"--{flag}" for flag in SAME_ANSWERS} == {*CHANGES_ANSWERS, "--revision"}
