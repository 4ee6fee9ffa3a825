"""Which fleets are worth considering, and which vLLM refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from baton.clusterfile import read
from cluster.instance import Role
from cluster.spec.pairing import refused_pair
from costs.hardware import gpu_named
from costs.shipped import model_named
from goodput.candidates import arrangements, shapes


@pytest.mark.parametrize(
    ("prefill", "decode", "heads", "latent", "refused"),
    [
        (1, 1, 8, False, ""),
        (1, 8, 4, False, ""),
        (2, 3, None, False, "do not divide"),
        (8, 4, 8, False, ""),
        (8, 4, 4, False, "more than the decode side's 4 and than the model's 4 KV heads"),
        (8, 8, 4, False, ""),
        (8, 4, None, False, ""),
        (8, 4, 1, True, ""),
    ],
)
def test_pairs_that_vllm_refuses(prefill: int, decode: int, heads: int | None, latent: bool, refused: str) -> None:
    said = refused_pair(prefill, decode, heads, latent=latent)
    assert refused in said
    assert bool(said) == bool(refused)


def test_a_model_fits_on_some_shapes() -> None:
    assert shapes(model_named("Llama-3.1-8B"), gpu_named("H100-SXM")) == [1, 2, 4, 8]
    assert shapes(model_named("Llama-3.1-8B"), gpu_named("H100-SXM"), 3) == [1, 2]
    assert shapes(model_named("Llama-3.1-70B"), gpu_named("H100-SXM")) == [2, 4, 8]
    assert shapes(model_named("Llama-3.1-70B"), gpu_named("L4")) == [8]
    assert shapes(model_named("Llama-3.1-405B"), gpu_named("L4")) == []
    assert 8 not in shapes(model_named("Qwen2.5-7B"), gpu_named("H100-SXM")), "8 does not divide its 28 heads"


def test_sizes_that_do_not_divide_kv_heads_or_mlps_are_not_tried() -> None:
    """vLLM's attention layers assert that ranks have whole KV heads; Phi-4 has 40 heads, and 10 KV heads."""
    phi = replace(
        model_named("Llama-3.1-8B"), heads=40, kv_heads=10, hidden=5120, head_dim=128, intermediate=17920, layers=40
    )
    assert shapes(phi, gpu_named("H100-SXM")) == [1, 2]
    assert shapes(replace(phi, kv_heads=1), gpu_named("H100-SXM")) == [1, 2, 4, 8], "one KV head is on every rank"
    assert shapes(replace(phi, kv_heads=2, intermediate=17924), gpu_named("H100-SXM")) == [1, 2, 4], (
        "17,924 is 4 × 4,481"
    )
    mixture = model_named("Qwen3-30B-A3B")
    assert mixture.experts is not None
    odd = replace(mixture, experts=replace(mixture.experts, intermediate=766))
    assert shapes(odd, gpu_named("H100-SXM")) == [1, 2]


def test_arrangements_hold_nothing_that_is_refused() -> None:
    model = model_named("Qwen2.5-7B")  # 4 KV heads
    found = list(arrangements(model, [(gpu_named("H100-SXM"), 16), (gpu_named("L40S"), None)]))
    assert {tuple(kind.role for kind in each) for each in found} == {
        (Role.BOTH,),
        (Role.PREFILL, Role.DECODE),
        (Role.PREFILL, Role.BOTH),
        (Role.BOTH, Role.DECODE),
        (Role.BOTH, Role.BOTH),  # of two types of GPU, as in the two below
        (Role.PREFILL, Role.PREFILL, Role.DECODE),
        (Role.PREFILL, Role.DECODE, Role.DECODE),
    }
    assert len(set(found)) == len(found)
    pairs = [
        (giver, taker)
        for each in found
        for giver, taker in product(each, each)
        if giver.role.prefills and taker.role.decodes and giver.role is not taker.role
    ]
    assert not any(refused_pair(giver.tp, taker.tp, model.kv_heads) for giver, taker in pairs)
    assert {giver.gpu.name for giver, taker in pairs if taker.gpu.name != giver.gpu.name} == {"H100-SXM", "L40S"}
    assert str(found[0])
    assert str(pairs[0][0]) == "prefill H100-SXM tp1"


def test_lint_knows_the_same_rule(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    text = "models:\n- name: Qwen/Qwen2.5-7B\n  pools:\n    prefill: {shape: {tp: %d}}\n    decode: {shape: {tp: 4}}\n"
    file.write_text(text % 8)
    problems = [str(each) for each in read(str(file)).problems]
    assert len(problems) == 1
    assert "vLLM hands nothing over from prefill to decode: tp 8 is more than" in problems[0]
    assert "write `tp: 4` or less" in problems[0]
    file.write_text(text % 4)
    assert not read(str(file)).problems
