"""How a simulated instance reads vLLM's flags."""

import pytest

from cluster.errors import UsageError
from cluster.instance import Role
from costs.hardware import Dtype, gpu_named
from costs.shape import Spans
from costs.shipped import model_named, profiles
from engine.twin.config import Policy, TwinConfig
from sim.engine_args import engine_of, read_words

LLAMA = model_named("meta-llama/Llama-3.1-8B")


def config(*words: str, gpu: str = "H100-SXM", **rest: object) -> TwinConfig:
    return engine_of(
        Role.DECODE,
        LLAMA,
        gpu_named(gpu),
        Spans(),
        read_words(words),
        profiles=profiles(),
        **rest,  # type: ignore[arg-type]
    )[1]


def test_defaults_are_vllms() -> None:
    large, small = config(), config(gpu="L40S")
    assert (large.max_num_batched_tokens, large.max_num_seqs) == (8192, 1024)
    assert (small.max_num_batched_tokens, small.max_num_seqs) == (2048, 256)
    assert large.prefix_caching and large.chunked_prefill and large.version.async_scheduling
    assert large.num_blocks * 16 == pytest.approx(470_000, rel=0.1), "80 GB less 16 GB of weights, 128 KiB a token"


def test_flags_in_every_form() -> None:
    found = config(
        "--max-num-seqs", "32", "--max_num_batched_tokens=512", "--no-enable-prefix-caching", "--no-async-scheduling",
        "--num-gpu-blocks-override", "1000", "--max-model-len=4096", "--scheduling-policy", "priority",
    )  # fmt: skip
    assert (found.max_num_seqs, found.max_num_batched_tokens, found.num_blocks) == (32, 512, 1000)
    assert (found.max_model_len, found.policy) == (4096, Policy.PRIORITY)
    assert not found.prefix_caching and not found.version.async_scheduling


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("2048", 2048), ("2_048", 2048), ("2k", 2000), ("2K", 2048), ("1.5k", 1500), ("1m", 1_000_000), ("1M", 2**20)],
)
def test_numbers_of_tokens_may_have_a_suffix(text: str, tokens: int) -> None:
    found = config(f"--max-num-batched-tokens={text}", f"--max-model-len={text}", "--num-gpu-blocks-override=100000")
    assert (found.max_num_batched_tokens, found.max_model_len) == (tokens, tokens)


@pytest.mark.parametrize("text", ["-1", "auto", "AUTO"])
def test_a_length_that_vllm_chooses_is_the_default(text: str) -> None:
    assert config("--max-model-len=4096", f"--max-model-len={text}") == config()


def test_memory_flags_change_the_capacity() -> None:
    whole, half = config(), config("--gpu-memory-utilization", "0.5")
    assert half.num_blocks < whole.num_blocks * 0.6
    costs, found = engine_of(
        Role.DECODE, LLAMA, gpu_named("H100"), Spans(), read_words(["--kv-cache-dtype", "fp8"]), profiles=profiles()
    )
    assert costs.kv_dtype is Dtype.FP8
    assert found.num_blocks == pytest.approx(2 * whole.num_blocks, rel=0.01)


def test_flags_that_change_nothing_in_the_simulation_are_named() -> None:
    read = read_words(["--enforce-eager", "--tensor-parallel-size", "2", "--seed", "3", "--max-num-seqs", "4"])
    assert read.unread == ("--enforce-eager", "--seed")
    assert read_words(["-tp", "2", "--kv-cache-dtype=turboquant_k8v4"]).unread == ("--kv-cache-dtype turboquant_k8v4",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-num-seqs", "many"), "--max-num-seqs many: must be a whole number from 1"),
        (("--max-num-seqs",), "--max-num-seqs : must be a whole number from 1"),
        (("--block-size", "0"), "--block-size 0: must be a whole number from 1"),
        (("--kv-cache-dtype", "fp7"), "--kv-cache-dtype fp7: vLLM has auto, bfloat16"),
        (("max-num-seqs", "8"), "`max-num-seqs` belongs to no flag of vLLM: write `--max-num-seqs`"),
        (("--block-size", "0.5"), "--block-size 0.5: must be a whole number from 1"),
        (("--block-size", "16.0"), "--block-size 16.0: must be a whole number from 1"),
        (("--max-num-seqs", "1" * 5000), "must be a whole number from 1 to 1,000,000,000,000"),
        (("--max-num-batched-tokens", "25.6K"), "must be a whole number from 1 to 1,000,000,000,000, or one such as"),
        (("--gpu-memory-utilization", "92"), "--gpu-memory-utilization 92: must be a number above 0 and up to 1"),
        (("--gpu-memory-utilization", "0"), "must be a number above 0 and up to 1"),
        (("--gpu-memory-utilization", "nan"), "must be a number above 0 and up to 1"),
        (("--max-model-len", "100000000"), "max_model_len does not fit"),
    ],
)
def test_bad_values_are_usage_errors(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(*words)


def test_a_model_that_does_not_fit() -> None:
    with pytest.raises(UsageError, match="does not fit on L4"):
        engine_of(
            Role.BOTH, model_named("Qwen/Qwen3-32B"), gpu_named("L4"), Spans(), read_words(()), profiles=profiles()
        )
