"""The GPU table: names, units, and that nothing in it is out of line with the rest."""

import pytest

from cluster.errors import UsageError
from costs.hardware import GPUS, Dtype, find_gpu, gpu_named, kv_dtype_named

NAMES = ["A100-40G-SXM", "A100-80G-SXM", "H100-SXM", "H100-PCIe", "H200", "B200", "L40S", "RTX-4090", "RTX-PRO-6000"]
NAMES += ["A10G", "L4", "MI300X", "CPU-core"]


def test_the_table_holds_what_is_promised() -> None:
    assert list(GPUS) == NAMES


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        ("H100-SXM", "H100-SXM"),
        ("h100", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-80G-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-40G-SXM"),
        ("a100_sxm", "A100-80G-SXM"),
        ("NVIDIA H200", "H200"),
        ("b200_sxm", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA A10G", "A10G"),
        ("cpu", "CPU-core"),
    ],
)
def test_a_gpu_is_found_as_others_spell_it(spelt: str, name: str) -> None:
    assert gpu_named(spelt).name == name


def test_an_unknown_gpu_is_told_with_the_nearest() -> None:
    assert find_gpu("H900") is None
    with pytest.raises(UsageError, match=r"'H900'.*H200"):
        gpu_named("H900")
    with pytest.raises(UsageError, match="Known and near: A100-40G-SXM, "):
        gpu_named("~")


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_in_their_units(name: str) -> None:
    """A slip by 8 (bits and bytes), 2 (sparsity, both ways) or 1,000 leaves these ranges."""
    gpu = GPUS[name]
    assert 4 <= gpu.memory_gib <= 192
    assert 0.02 <= gpu.idle_w / gpu.tdp_w <= 0.3
    assert 0.01 <= gpu.usd_per_hour <= 10
    assert gpu.nic_gb_s <= gpu.link_gb_s <= 900
    operations_per_byte = gpu.bf16_tflops * 1000 / gpu.bandwidth_gb_s
    assert operations_per_byte <= 450
    assert gpu.fp8_tflops == 0 or gpu.fp8_tflops / gpu.bf16_tflops == pytest.approx(2, rel=0.02)


def test_a_format_without_hardware_of_its_own_runs_in_the_next_wider_format() -> None:
    a100, h100, b200 = GPUS["A100-80G-SXM"], GPUS["H100-SXM"], GPUS["B200"]
    assert a100.tflops(Dtype.FP8) == a100.tflops(Dtype.BF16) == 312
    assert h100.tflops(Dtype.FP4) == h100.tflops(Dtype.FP8) == 1978
    assert b200.tflops(Dtype.FP4) == 9000
    assert h100.tflops(Dtype.FP32) < h100.tflops(Dtype.BF16)


@pytest.mark.parametrize(
    ("word", "dtype"),
    [
        ("fp8", Dtype.FP8),
        ("fp8_e5m2", Dtype.FP8),
        ("bfloat16", Dtype.BF16),
        ("int8_per_token_head", Dtype.INT8),
        ("nvfp4", Dtype.FP4),
        ("int4_per_token_head", Dtype.FP4),
        ("auto", None),
        ("turboquant_k8v4", None),
        (None, None),
        (["fp8"], None),
    ],
)
def test_formats_of_a_cache_by_vllms_words(word: object, dtype: Dtype | None) -> None:
    assert kv_dtype_named(word) is dtype
