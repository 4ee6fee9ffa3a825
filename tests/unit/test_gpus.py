"""What a cluster file says of a GPU type holds for simulations, routers and controllers alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.cli import main
from baton.gpus import as_told, said_of
from baton.makes import makes_of
from baton.scaling import plan_of
from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from cluster.spec import Hardware, parse
from costs.cost import Costs
from costs.hardware import gpu_named
from goodput.budget import Usage

FILE = """
models:
  - name: meta-llama/Llama-3.1-8B
    pools: {both: {min: 1, max: 2, gpu: h100, power_cap_w: 300}}
slo: {interactive: {ttft_ms: 1000}}
hardware:
  h100: {count: 4, power_w: 400, memory_gib: 40}
"""
"""A cap of three quarters of the 400 W, and not of less than half of the data sheet's 700 W."""


def test_a_file_says_price_power_and_memory_of_a_type_in_any_spelling() -> None:
    h100 = gpu_named("H100-SXM")
    said = {"L4": Hardware(power_w=1.0), "h100": Hardware(price_per_hour=2.0, power_w=350.0), "own": Hardware()}
    told = as_told(h100, said)
    assert (told.usd_per_hour, told.tdp_w, told.memory_gib) == (2.0, 350.0, h100.memory_gib)
    assert told.idle_w == pytest.approx(h100.idle_w / 2)
    assert as_told(h100, {"L4": Hardware(power_w=1.0)}) is h100
    assert said_of(h100, said) is said["h100"]
    assert said_of(h100, {"L4": Hardware()}) is None


@pytest.mark.parametrize("gpu", ["", ", gpu: h100"])
def test_a_pool_has_price_and_power_of_the_only_gpu_type_of_the_file(gpu: str) -> None:
    """A pool without `gpu:` had that type's power, and no price: to a controller such instances were free."""
    text = FILE.replace(", gpu: h100", gpu).replace("power_w: 400", "power_w: 400, price_per_hour: 2.5")
    (pool,) = plan_of(parse(text, "baton.yaml").usable(), "vllm", None, []).pools["meta-llama/Llama-3.1-8B"]
    assert (pool.footprint.price_per_hour, pool.footprint.power_w) == (2.5, 400)


@pytest.mark.parametrize("gpu", ["", ", gpu: h100"])
def test_a_controller_keeps_to_the_files_number_of_gpus(gpu: str) -> None:
    """A pool without `gpu:` had no bound."""
    plan = plan_of(parse(FILE.replace(", gpu: h100", gpu), "baton.yaml").usable(), "vllm", None, [])
    (pool,) = plan.pools["meta-llama/Llama-3.1-8B"]
    used = Usage()
    for number in range(4):
        assert not used.lacks(plan.rules.budget, pool.footprint)
        used.add(InstanceId(f"i{number}"), pool.footprint)
    assert used.lacks(plan.rules.budget, pool.footprint) == "1 × h100 wanted, 0 of 4 left in the budget"


def test_a_power_cap_is_a_share_of_the_power_that_the_file_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(FILE)
    assert main(["simulate", "--cluster", str(file), "--rate", "2", "--requests", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any("power capped at 75% of the TDP" in note for note in found["notes"])
    assert found["fleet"]["energy_j"] / found["fleet"]["gpu_seconds"]["H100-SXM"] < 300
    spec = parse(FILE, "baton.yaml").usable()
    costs = plan_of(spec, "vllm", None, []).members["meta-llama/Llama-3.1-8B"]["both"].costs
    assert isinstance(costs, Costs)
    assert costs.power_cap == 0.75
    assert costs.gpu.memory_gib == 40
    make = makes_of(spec)(Instance(id=InstanceId("both-0"), role=Role.BOTH, url="http://x"))
    assert make is not None
    assert (make.prefill, make.decode) == (costs.by_kind.prefill, costs.by_kind.decode)
