"""`Costs`: which source it answers from, the reason that it gives, and that its methods agree with each other."""

import pytest

from costs import shipped
from costs.cost import Costs, CostSource, costs_of
from costs.hardware import Dtype, gpu_named
from costs.profile import FIRST_TOKEN_MS, KERNEL_STEP_FACTOR, Profile
from costs.shape import Spans
from costs.step import StepWork, decoding, prompt
from costs.transfer import Link

PROFILES = shipped.profiles()
GRID = [
    profile
    for profile in PROFILES
    if profile.origin.name == "aiconfigurator"
    and shipped.model_named(profile.model).experts is None
    and (profile.gpu != "L40S" or profile.tp <= 2)
]
QWEN, H200 = shipped.model_named("Qwen/Qwen3-32B"), gpu_named("H200")


def qwen(tp: int = 2, **options: object) -> Costs:
    return costs_of(QWEN, H200, Spans(tp=tp), profiles=PROFILES, **options)  # type: ignore[arg-type]


# -- which source --


def test_a_profile_of_this_very_engine_comes_first() -> None:
    costs = qwen()
    assert costs.source is CostSource.PROFILE
    assert costs.because == "profile aiconfigurator/Qwen/Qwen3-32B/H200/tp2 (fit error 1.4% mean, 4.9% max)"


def test_a_fine_tune_uses_its_base_models_profile() -> None:
    mine = costs_of(shipped.model_named("llama-3.1-8b-instruct"), gpu_named("H100"), profiles=PROFILES)
    assert mine.source is CostSource.PROFILE and "Llama-3.1-8B/H100-SXM/tp1" in mine.because


def test_another_shape_is_carried_over() -> None:
    costs = qwen(16)
    assert costs.source is CostSource.CARRIED
    assert costs.because.endswith("carried over to tp16 by the roofline")
    assert qwen(2, kv_dtype=Dtype.FP8).source is CostSource.CARRIED
    assert qwen(2, kv_dtype=Dtype.BF16).source is CostSource.PROFILE


@pytest.mark.parametrize("profile", GRID, ids=[profile.name for profile in GRID])
def test_costs_that_are_carried_over_meet_the_profile_that_was_left_out(profile: Profile) -> None:
    """Mean error 7 % over all (docs/costs.md); below 2,000 tokens of prefill it can be 40 %."""
    model, gpu = shipped.model_named(profile.model), gpu_named(profile.gpu)
    others = [each for each in PROFILES if each is not profile]
    costs = costs_of(model, gpu, Spans(tp=profile.tp), profiles=others)
    for work in (prompt(2048), prompt(8192), decoding(1, 1000), decoding(32, 64_000), decoding(128, 256_000)):
        assert costs.by_kind.prefill.step_ms(work) == pytest.approx(profile.cost.step_ms(work), rel=0.15)


def test_without_a_profile_the_roofline_answers() -> None:
    costs = costs_of(shipped.model_named("Qwen/Qwen3-14B"), gpu_named("H100"), profiles=PROFILES)
    assert costs.source is CostSource.ROOFLINE
    assert costs.because == ("roofline of Qwen/Qwen3-14B on H100-SXM tp1: no profile; efficiencies fitted on this GPU")
    other = costs_of(QWEN, gpu_named("MI300X"), profiles=PROFILES)
    assert other.because.endswith("efficiencies typical of GPUs")


def test_old_profiles_answer_only_by_name() -> None:
    old = next(each for each in PROFILES if each.name == "splitwise/meta-llama/Llama-2-70b-hf/H100-SXM/tp8")
    model, gpu, shape = shipped.model_named("meta-llama/Llama-2-70b-hf"), gpu_named("H100"), Spans(tp=8)
    then, now = costs_of(model, gpu, shape, only=old), costs_of(model, gpu, shape, profiles=PROFILES)
    assert then.source is CostSource.PROFILE and now.source is CostSource.ROOFLINE
    assert then.decode_step_ms(1, 600) > 2 * now.decode_step_ms(1, 600)
    assert then.first_token_ms == 0, "measured whole: nothing to add"


# -- what it says --


def test_kernel_times_become_those_of_an_engine() -> None:
    costs = qwen()
    fitted = costs.by_kind.prefill
    assert costs.prefill_ms(4000) == fitted.step_ms(prompt(4000))
    assert costs.decode_step_ms(8, 8000) == pytest.approx(KERNEL_STEP_FACTOR * fitted.step_ms(decoding(8, 8000)))
    assert costs.first_token_ms == FIRST_TOKEN_MS


def test_a_lone_first_token_on_an_h100_comes_as_was_measured() -> None:
    """One short prompt at a time; `FIRST_TOKEN_MS` names the sources. 80 layers add no more to it than 32."""
    llama = costs_of(shipped.model_named("meta-llama/Llama-3.1-8B"), gpu_named("H100"), profiles=PROFILES)
    assert llama.prefill_ms(32) + llama.first_token_ms == pytest.approx(13.98, rel=0.1)
    large = shipped.model_named("meta-llama/Llama-3.1-70B")
    costs = costs_of(large, gpu_named("H100"), Spans(tp=4), profiles=PROFILES)
    assert costs.first_token_ms == llama.first_token_ms


def test_a_mixed_step_of_one_kind_costs_what_that_kind_costs() -> None:
    costs = qwen()
    assert costs.mixed_step_ms(0, 0, 8, 8000) == costs.decode_step_ms(8, 8000)
    assert costs.mixed_step_ms(4000, 100, 0, 0) == costs.prefill_ms(4000, 100)
    assert costs.mixed_step_ms(2048, 0, 8, 8000) > costs.prefill_ms(2048)
    assert costs.step_ms(StepWork()) == 0


def test_attention_beside_prompts_is_slower_where_that_was_measured() -> None:
    llama, rtx = shipped.model_named("meta-llama/Llama-3.1-8B"), gpu_named("RTX-4090")
    costs = costs_of(llama, rtx, profiles=shipped.profiles())
    plain = costs.by_kind.decode
    work = prompt(256) + decoding(64, 64_000)
    factor = 1 + (costs.step_ms(work) - plain.step_ms(work)) / (plain.context_ms * 64_000)
    assert factor == pytest.approx(2.3, abs=0.1), "measured layers, docs/costs.md"
    assert costs.step_ns(work) == pytest.approx(costs.step_ms(work) * 1e6, abs=3)
    assert costs.decode_step_ms(64, 64_000) == plain.step_ms(decoding(64, 64_000)), "only beside prompts"
    other = costs_of(shipped.model_named("Qwen/Qwen3-8B"), rtx, profiles=shipped.profiles())
    assert other.source is CostSource.ROOFLINE
    mixed, decode = other.by_kind.mixed, other.by_kind.decode
    assert mixed.context_ms == pytest.approx(2.3 * decode.context_ms, rel=0.02), "the factor belongs to the GPU"
    h100 = qwen().by_kind
    assert h100.mixed.context_ms == h100.decode.context_ms, "not measured there"


def test_nanoseconds_are_the_same_times() -> None:
    costs = qwen()
    for work in (prompt(100), prompt(4000, 900), decoding(31, 77_777), prompt(700) + decoding(5, 999)):
        assert costs.step_ns(work) == pytest.approx(costs.step_ms(work) * 1e6, abs=3)
    assert costs.decode_step_ns(31, 77_777) == costs.step_ns(decoding(31, 77_777))
    run = costs.decode_run_ns(3, 3000, 40)
    assert run == sum(costs.decode_step_ns(3, 3000 + 3 * at) for at in range(40))
    assert costs.decode_steps_for(3, 3000, run) == 40
    assert costs.decode_steps_for(3, 3000, run + 1) == 41


def test_transfer_and_memory() -> None:
    prefill, decode = qwen(1), qwen(4)
    assert prefill.kv_bytes_per_token == 262_144
    one_nic = prefill.transfer_ms(4000, decode)
    assert one_nic == pytest.approx(4000 * 262_144 / 36e9 * 1e3, rel=0.02)
    assert prefill.transfer_ms(4000, decode, sharers=3) == pytest.approx(3 * one_nic, rel=0.01)
    assert prefill.transfer_ms(4000, decode, link=Link(latency_ms=0, gb_s=100)) == pytest.approx(10.49, rel=0.01)
    assert decode.max_batch(8000) == decode.kv_capacity_tokens // 8000
    assert qwen(kv_tokens=4096).kv_capacity_tokens == 4096
    assert qwen(memory_share=0.7).kv_capacity_tokens < qwen().kv_capacity_tokens


def test_power() -> None:
    costs = qwen(2)
    assert costs.power_w(StepWork()) == pytest.approx(2 * H200.idle_w)
    assert costs.power_w(prompt(8000)) == pytest.approx(2 * H200.tdp_w)
    assert costs.energy_j(prompt(8000)) == pytest.approx(2 * 700 * costs.prefill_ms(8000) / 1000)


def test_no_prediction_is_below_what_is_possible() -> None:
    costs = qwen()
    assert costs.least(4000, 4000).ttft_ms < costs.prefill_ms(4000)
    assert costs.least(4000, 4000).tpot_ms < costs.decode_step_ms(1, 4000)


def test_a_power_cap_slows_prompts_and_not_generation() -> None:
    """Splitwise's capped H100: half of the TDP, prompts 1.3 times as long, tokens as before."""
    costs = qwen()
    half = costs.capped(0.5)
    assert half.prefill_ms(8000) / costs.prefill_ms(8000) == pytest.approx(1.3, abs=0.01)
    assert half.decode_step_ms(32, 64_000) == pytest.approx(costs.decode_step_ms(32, 64_000), rel=0.01)
    assert half.power_w(prompt(8000)) == pytest.approx(costs.power_w(prompt(8000)) / 2)
    assert half.energy_j(prompt(8000)) < costs.energy_j(prompt(8000))
    assert costs.prefill_ms(8000) < costs.capped(0.8).prefill_ms(8000) < half.prefill_ms(8000)
    assert costs.capped(1.0).prefill_ms(8000) == costs.prefill_ms(8000)
    assert "capped at 50%" in half.because
    assert half.step_ns(prompt(8000)) == pytest.approx(half.prefill_ms(8000) * 1e6, rel=1e-6)


@pytest.mark.parametrize("cap", [0.49, 1.01, 0.0, -1.0])
def test_a_power_cap_outside_the_measured_range_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match=r"must be from 0\.5 to 1"):
        qwen().capped(cap)


@pytest.mark.parametrize(
    ("model", "tp", "prefill", "whole", "half"),
    [
        ("meta-llama/Llama-3.1-8B", 1, 89, (21.0, 10.5, 167.8, 83.9, 19.8, 464), (10.5, 5.3, 83.9, 42.0, 13.6, 928)),
        (
            "meta-llama/Llama-3.1-70B",
            4,
            261,
            (52.4, 26.2, 419.4, 209.7, 26.0, 504),
            (26.2, 13.1, 209.7, 104.9, 22.2, 1007),
        ),
    ],
)
def test_what_a_cache_of_eight_bits_gives(
    model: str, tp: int, prefill: float, whole: tuple[float, ...], half: tuple[float, ...]
) -> None:
    """The table of docs/decisions/0016-compression.md."""
    for dtype, told in ((Dtype.BF16, whole), (Dtype.FP8, half)):
        shape = Spans(tp=tp)
        costs = costs_of(
            shipped.model_named(model), gpu_named("H100-SXM"), shape, profiles=shipped.profiles(), kv_dtype=dtype
        )
        links = [(Link(latency_ms=0.019, gb_s=speed), sharers) for sharers in (1, 8) for speed in (25, 50)]
        found = [link.ms(costs.kv_bytes_per_token * 4000, sharers=sharers) for link, sharers in links]
        found += [costs.decode_step_ms(64, 64 * 4000), costs.kv_capacity_tokens / 1000]
        assert found == pytest.approx(told, rel=0.01)
        assert costs.prefill_ms(4000) == pytest.approx(prefill, rel=0.01)
