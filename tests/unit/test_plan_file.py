"""The cluster file that `baton plan --out` writes means what the user's file means, but for the planned pools."""

from __future__ import annotations

import json
from dataclasses import replace

from baton.plan_file import text_of
from baton.planning import FleetResults, Task
from cluster.instance import Role
from cluster.spec import parse
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
