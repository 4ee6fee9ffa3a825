"""The cluster file that `baton plan --out` writes means what the user's file means, but for the planned pools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from baton.plan_file import text_of
from baton.planning import FleetResults, Task
from cluster.instance import Role
from cluster.spec import Parsed, Pool, flags, parse
from costs.hardware import find_gpu
from costs.shipped import find_model
from goodput.candidates import InstanceKind
from sim.evaluate import Evaluation

FILE = """\
# A comment
x-shared: &shared
  env: {RATIO: 1.50, ANSWER: no, OCTAL: 0123, BIG: 1_000, DAY: 2026-11-26, TIME: 1:30, HEX: 0x1F, E: 1e5, Q: "1"}
  engine_args: {seed: 7, override-generation-config: {a: on, b: 0123, c: 1_000, d: 2026-11-26, f: ~, g: [no, ""]}}
models:
  - name: meta-llama/Llama-3.1-8B
    served_name: no
    pools:
      prefill: {<<: *shared, min: 1, max: 3}
      decode: *shared
  - name: Qwen/Qwen3-32B
    served_name: 2026-11-26
    pools:
      both: {<<: *shared, min: 1, max: 2, gpu: H100-SXM, shape: {tp: 2}}
slo:
  on: {ttft_ms: 6.0e2, attainment: .9}
tenants:
  yes: {classes: [on], key_file: keys/0123}
  1_000: {classes: [on]}
hardware:
  H100-SXM: {count: 8, price_per_hour: 2.50}
"""


def test_every_scalar_of_the_file_means_what_it_meant() -> None:
    before = parse(FILE, "baton.yaml").usable()
    llama, shape, gpu = before.models[0], find_model(before.models[0].name), find_gpu("H100-SXM")
    assert shape is not None
    assert gpu is not None
    task = Task(model=llama, shape=shape, gpus=((gpu, 8),), arrivals=(), goals={}, usual="on")
    seen = Evaluation(classes={}, seconds=1, gpu_seconds={}, energy_j=0, output_tokens=0, prompt_tokens=0)
    kinds = (InstanceKind(role=Role.PREFILL, gpu=gpu), InstanceKind(role=Role.DECODE, gpu=gpu))
    text = text_of(FILE, task, FleetResults(arrangement=kinds, counts=(2, 1), seen=seen))
    after = parse(text, "planned.yaml").usable()
    assert after.models[1:] == before.models[1:]
    assert replace(after, models=()) == replace(before, models=())
    planned, given = after.models[0].pools.prefill, llama.pools.prefill
    assert planned is not None
    assert given is not None
    assert (planned.min, planned.max, planned.gpu) == (2, 2, "H100-SXM")
    assert (planned.env, planned.engine_args) == (given.env, given.engine_args)
    assert replace(after.models[0], pools=llama.pools) == llama
    assert json.loads(json.dumps(planned.env))["RATIO"] == "1.50"


def planned_pools(text: str, gpu_name: str, count: int) -> tuple[Parsed, Mapping[Role, Pool]]:
    """The file that a plan of so many instances that do both writes, read again, and its pools."""
    spec = parse(text, "baton.yaml").usable()
    shape, gpu = find_model(spec.models[0].name), find_gpu(gpu_name)
    assert shape is not None
    assert gpu is not None
    task = Task(model=spec.models[0], shape=shape, gpus=((gpu, None),), arrivals=(), goals={}, usual="")
    seen = Evaluation(classes={}, seconds=1, gpu_seconds={}, energy_j=0, output_tokens=0, prompt_tokens=0)
    kinds = (InstanceKind(role=Role.BOTH, gpu=gpu, batched_tokens=2048),)
    parsed = parse(text_of(text, task, FleetResults(arrangement=kinds, counts=(count,), seen=seen)), "planned.yaml")
    return parsed, parsed.usable().models[0].pools.named()


LLAMA = "models: [{name: meta-llama/Llama-3.1-8B, pools: {both: {engine_args: {%s}}}}]\n"


def test_a_gpu_keeps_the_name_and_more_gpus_than_the_file_has_are_counted() -> None:
    """`gpu:` of a pool is a name under `hardware`, and lint counts the GPUs there: --gpus may have given more."""
    text = LLAMA % "" + "hardware: {h100: {count: 2, price_per_hour: 2.50}, l40s: {count: 9}}\n"
    parsed, pools = planned_pools(text, "H100-SXM", 3)
    assert not parsed.problems
    assert pools[Role.BOTH].gpu == "h100"
    assert {name: each.count for name, each in parsed.usable().hardware.items()} == {"h100": 3, "l40s": 9}
    assert planned_pools(text, "L40S", 3)[0].usable().hardware["l40s"].count == 9


TWO = """\
models:
  - {name: Qwen/Qwen3-32B, pools: {prefill: {start: 2, gpu: h100, shape: {tp: 2}}, decode: {start: 4, gpu: h100}}}
  - name: meta-llama/Llama-3.1-8B
hardware: {h100: {count: %d}, l40s: {count: 1}}
"""


@pytest.mark.parametrize(("count", "after"), [(8, 16), (15, 16), (20, 20)])
def test_gpus_of_the_other_models_pools_are_counted_beside_those_of_the_plan(count: int, after: int) -> None:
    """--gpus gives the planned model 8 GPUs; the other model's pools start with 8 of that type, too."""
    given = TWO % count
    spec = parse(given, "baton.yaml").usable()
    shape, gpu = find_model("Llama-3.1-8B"), find_gpu("H100-SXM")
    assert shape is not None
    assert gpu is not None
    task = Task(model=spec.models[1], shape=shape, gpus=((gpu, 8),), arrivals=(), goals={}, usual="")
    seen = Evaluation(classes={}, seconds=1, gpu_seconds={}, energy_j=0, output_tokens=0, prompt_tokens=0)
    kinds = (InstanceKind(role=Role.BOTH, gpu=gpu),)
    text = text_of(given, task, FleetResults(arrangement=kinds, counts=(8,), seen=seen))
    parsed = parse(text, "planned.yaml")
    assert not parsed.problems
    assert {name: each.count for name, each in parsed.usable().hardware.items()} == {"h100": after, "l40s": 1}
    told = f"# `hardware.h100.count` was {count}: the plan has 8 of these GPUs, and other models' pools start with 8.\n"
    assert (told in text) == (after != count)


@pytest.mark.parametrize(
    ("given", "gpu", "length"),
    [
        ("", "L4", "auto"),
        ("", "H100-SXM", None),
        ("max_model_len: 8192", "L4", 8192),
        ("gpu-memory-utilization: 0.35", "H100-SXM", "auto"),
    ],
)
def test_vllm_chooses_its_length_where_memory_holds_less_than_models_take(given: str, gpu: str, length: object) -> None:
    """Otherwise vLLM ends at its start: an L4 has room for some 40,000 of the 131,072 tokens of Llama 3.1."""
    _, pools = planned_pools(LLAMA % given, gpu, 1)
    assert flags.given(pools[Role.BOTH].engine_args, flags.LENGTH)[1] == length
