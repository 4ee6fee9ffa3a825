"""The flags of a mock that stands for an instance of a cluster file."""

from __future__ import annotations

import argparse

import pytest

from baton.commands import mock
from baton.mock_command import mock_args
from baton.mock_settings import settings_of
from baton.plan import from_file
from cluster.spec import instances, parse

FILE = """
models:
  - name: meta-llama/Llama-3.1-8B
    pools:
      both: {gpu: L40S, shape: {tp: 2}, power_cap_w: 200, engine_args: {max-num-batched-tokens: 2048, dtype: auto}}
      extra:
        both-other: {role: both, gpu: a-gpu-of-tomorrow, engine_args: {num-gpu-blocks-override: 100}}
hardware: {L40S: {}, a-gpu-of-tomorrow: {}}
"""


def test_a_mock_has_the_gpus_and_the_flags_that_change_its_timing() -> None:
    first, other = instances(parse(FILE, "baton.yaml").usable())
    words = ("--tp", "2", "--gpu", "L40S", "--power-cap-w", "200", "--max-num-batched-tokens", "2048")
    assert mock_args(first) == words
    assert mock_args(other) == ("--kv-blocks", "100")
    spec = parse(
        FILE.replace("L40S: {}", "l40s: {power_w: 250}").replace("gpu: L40S", "gpu: l40s"), "baton.yaml"
    ).usable()
    assert "280" in from_file(spec, [], "mock")[0].vllm_args, "200 of 250 W are 280 of the data sheet's 350"


def test_a_mock_has_the_format_of_the_cache() -> None:
    text = "models: [{name: m, pools: {both: {engine_args: {kv-cache-dtype: fp8}}}}]"
    (only,) = instances(parse(text, "f").usable())
    assert mock_args(only) == ("--kv-cache-dtype", "fp8")
    parser = argparse.ArgumentParser()
    mock.add_arguments(parser)
    whole, half = (
        settings_of(parser.parse_args(["--model", "Qwen/Qwen3-32B", "--tp", "2", *words]), {})[0]
        for words in ([], mock_args(only))
    )
    assert half.kv_bytes_per_token == whole.kv_bytes_per_token / 2
    assert half.config.num_blocks == pytest.approx(2 * whole.config.num_blocks, rel=0.01)


def test_up_gives_vllm_the_files_own_flags_and_mocks_theirs() -> None:
    spec = parse(FILE, "baton.yaml").usable()
    real = from_file(spec, ["--seed", "1"])[0]
    mocked = from_file(spec, ["--speed", "2"], "mock")[0]
    assert real.vllm_args[:2] == ("--tensor-parallel-size", "2")
    assert "--dtype" in real.vllm_args
    assert mocked.vllm_args[-2:] == ("--speed", "2")
    assert "--dtype" not in mocked.vllm_args
    assert mocked.engine == "mock"
