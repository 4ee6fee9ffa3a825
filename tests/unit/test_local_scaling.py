"""What a controller knows of the GPUs of instances that it may start, on one machine and on Ray."""

from __future__ import annotations

from typing import Any, cast

import pytest

from baton.local_fleet import LocalScaling
from baton.plan import templates
from baton.ray_fleet import ray_actuator
from baton.scaling import plan_of
from cluster.spec import parse
from engine.vllm.hardware import EngineHardware
from engine.vllm.placement import CudaGpu
from goodput.actuate.local import LocalPool

FILE = """
models:
  - name: meta-llama/Llama-3.1-8B-Instruct
    pools:
      prefill: {max: 2, gpu: H100-SXM}
      decode: {max: 2, gpu: H100-SXM, shape: {tp: 4}}
slo:
  chat: {ttft_ms: 6000, tpot_ms: 150}
hardware:
  H100-SXM: {}
"""


def on_ray(engine: str, vllm_args: list[str]) -> dict[str, int]:
    """GPUs that each pool's instances ask of Ray."""
    spec, unused = parse(FILE, "f").usable(), cast("Any", None)
    actuator = ray_actuator("ray", "c", spec, templates(spec, vllm_args, engine), unused, unused, unused)
    actuator.connection.close()
    return {name: kind.gpus for name, kind in actuator._pools.items()}


def kinds(monkeypatch: pytest.MonkeyPatch, engine: str, vllm_args: list[str]) -> dict[str, LocalPool]:
    """What the actuator is told of each pool."""
    told: list[dict[str, LocalPool]] = []
    monkeypatch.setattr("baton.local_fleet.LocalActuator", lambda _, kinds, *__, **___: told.append(kinds))
    spec = parse(FILE, "f").usable()
    plan = plan_of(spec, engine, None, vllm_args)
    assert not plan.off
    hardware = EngineHardware(gpus=(CudaGpu(id="0"),), cores=(0,), vllm="0.32.0", nixl=None)
    fleet: Any = None
    made = LocalScaling(
        "c", plan, templates(spec, vllm_args, engine), hardware, lambda: fleet, None, lambda _: None, lambda _: "", None
    )
    made._actuator(fleet, fleet)
    return told[0]


def test_a_new_instance_takes_as_many_gpus_as_its_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of the start: words after `--` win over the file's shape. With fewer GPUs vLLM would not start."""
    found = kinds(monkeypatch, "vllm", [])
    assert (found["prefill"].gpus, found["decode"].gpus) == (1, 4)
    found = kinds(monkeypatch, "vllm", ["--tensor-parallel-size", "2"])
    assert (found["prefill"].gpus, found["decode"].gpus) == (2, 2)
    assert on_ray("vllm", []) == {"prefill": 1, "decode": 4}
    assert on_ray("vllm", ["-tp", "2"]) == {"prefill": 2, "decode": 2}


def test_a_mock_counts_as_many_gpus_as_it_imitates(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kinds(monkeypatch, "mock", [])
    assert (found["prefill"].gpus, found["decode"].gpus, found["decode"].takes) == (1, 4, False)
    assert on_ray("mock", []) == {"prefill": 1, "decode": 4}


def test_a_pool_of_data_parallel_engines_says_how_many_ranks_they_have() -> None:
    spec = parse(FILE.replace("{tp: 4}", "{tp: 2, dp: 2}"), "f").usable()
    for engine in ("vllm", "mock"):
        (pools,) = plan_of(spec, engine, None, []).pools.values()
        assert [(each.ranks, each.footprint.gpus) for each in pools] == [(1, 1), (2, 4)]
