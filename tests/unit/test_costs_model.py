"""Sizes of models: parameters as their checkpoints have them, bytes of weights and KV, per GPU."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.errors import UsageError
from costs import shipped
from costs.config import read_config
from costs.hardware import Dtype
from costs.model import ModelShape
from costs.shape import ONE_GPU, Spans, gpus, shown
from costs.shipped import MODELOPT_FILE, model_in

FILES = sorted(file.name for file in (resources.files("costs") / "models").iterdir())
LLAMA = shipped.model_named("meta-llama/Llama-3.1-8B")


def document(file: str) -> dict[str, Any]:
    read = msgspec.json.decode((resources.files("costs") / "models" / file).read_bytes())
    assert isinstance(read, dict)
    return read


@pytest.mark.parametrize("file", FILES)
def test_parameters_are_those_of_the_checkpoint(file: str) -> None:
    """`params` was counted by transformers 5.19 on such a model, not by us."""
    told = document(file)
    assert read_config(told["config"]).params == told["params"]
    assert told["source"].startswith("huggingface.co/")


def test_a_good_number_of_models_ships() -> None:
    assert len(FILES) >= 15
    names = [name for file in FILES for name in (document(file)["name"], *document(file)["also"])]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("meta-llama/Llama-3.1-8B", 131_072),
        ("Qwen/Qwen3-32B", 262_144),
        ("meta-llama/Llama-3.1-70B", 327_680),
        ("meta-llama/Llama-2-7b-hf", 524_288),  # multi-head
        ("google/gemma-2b", 18_432),  # multi-query
        ("deepseek-ai/DeepSeek-V3", 70_272),  # latent: (512 + 64) numbers a layer
    ],
)
def test_kv_bytes_per_token(name: str, kv_bytes: int) -> None:
    model = shipped.model_named(name)
    assert model.kv_bytes_per_token() == kv_bytes
    assert model.kv_bytes_per_token(Dtype.FP8) == kv_bytes // 2


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen/Qwen3-30B-A3B", 3.35), ("mistralai/Mixtral-8x7B-v0.1", 12.9), ("deepseek-ai/DeepSeek-R1", 37.6)],
)
def test_one_token_meets_few_experts(name: str, billions: float) -> None:
    assert shipped.model_named(name).active_params / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("meta-llama/Llama-3.1-8B", 16.06),
        ("deepseek-ai/DeepSeek-V3", 673),  # fp8, embeddings in bf16
        ("openai/gpt-oss-120b", 65.2),  # experts in mxfp4, the rest in bf16: the checkpoint's 65.3 GB
        ("openai/gpt-oss-20b", 13.8),
    ],
)
def test_weight_bytes(name: str, gigabytes: float) -> None:
    assert shipped.model_named(name).weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


GROUP: dict[str, Any] = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}


@pytest.mark.parametrize(
    ("quantisation", "dtype", "stored"),
    [
        ({"quant_method": "fp8"}, Dtype.FP8, 1.0),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Dtype.FP8, 1 + 4 / 128**2),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, Dtype.BF16, 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, Dtype.BF16, 1.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, Dtype.BF16, 0.5625),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, Dtype.INT8, 1.0),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 8, "type": "float"},
                        "input_activations": {"num_bits": 8, "type": "float"},
                    }
                },
            },
            Dtype.FP8,
            1.0,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
            },
            Dtype.BF16,
            0.5 + 2 / 128,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "weights": {"num_bits": 4, "type": "float", "group_size": 16},
                        "input_activations": {"num_bits": 4, "type": "float", "group_size": 16},
                    }
                },
            },
            Dtype.FP4,
            0.5 + 1 / 16,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, Dtype.FP4, 0.5 + 1 / 16),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4_AWQ", "bits": 4}, Dtype.FP4, 0.5 + 1 / 16),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, Dtype.BF16, 0.5 + 1 / 16),
        (  # weights only, whatever its name says
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"group_0": GROUP}},
            Dtype.BF16,
            0.5 + 1 / 16,
        ),
        (
            {
                "quant_method": "modelopt",
                "quantization": {"quant_algo": "NVFP4"},
                "config_groups": {"group_0": {**GROUP, "input_activations": None}},
            },
            Dtype.BF16,
            0.5 + 1 / 16,
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "config_groups": {"group_0": GROUP, "group_1": {**GROUP, "input_activations": GROUP["weights"]}},
            },
            Dtype.FP4,
            0.5 + 1 / 16,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {}}, Dtype.FP4, 0.5 + 1 / 16),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}},
            Dtype.BF16,
            0.5 + 1 / 16,
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, Dtype.FP8, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, Dtype.FP8, 1 + 1 / 32),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, Dtype.FP4, 0.5 + 1 / 16),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, Dtype.FP8, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, Dtype.FP8, 1 + 4 / 128**2),
        ({"quant_method": "modelopt_fp4"}, Dtype.FP4, 0.5 + 1 / 16),
        ({"quant_method": "mxfp8"}, Dtype.FP8, 1 + 1 / 32),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "attention": {"weights": {"num_bits": 8, "type": "int"}, "targets": ["a"]},
                    "mlp": {"weights": {"num_bits": 8, "type": "int"}, "targets": ["b"]},
                    "cache": {"weights": None},
                },
            },
            Dtype.BF16,
            1.0,
        ),
        ({"quant_method": "something-new", "bits": 4, "group_size": 128}, Dtype.BF16, 0.5 + 2.5 / 128),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, Dtype.BF16, 2.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": False}, Dtype.BF16, 2.0),
        ({}, Dtype.BF16, 2.0),
    ],
)
def test_quantised_weights(quantisation: dict[str, Any], dtype: Dtype, stored: float) -> None:
    config = document("llama-3.1-8b.json")["config"]
    model = read_config({**config, "quantization_config": quantisation})
    assert (model.linear_dtype, model.linear_bytes) == (dtype, stored)
    assert model.rest_bytes == 2, "embeddings and KV cache stay as they were"
    assert model.kv_bytes_per_token() == 131_072


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
            "config.json, in quantization_config: quant_algo is 'MIXED_PRECISION': its layers have.*Give a copy",
        ),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "mixed_precision", "quantized_layers": {}}},
            "in quantization_config: quantization.quant_algo is 'MIXED_PRECISION': its layers have several",
        ),
        ({"quant_method": "modelopt_mixed"}, "in quantization_config: quant_method is 'modelopt_mixed'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ', of which.*Known are FP8"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}, "quant_algo is 'W4A8_MXFP4_FP8', of which"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"}, "quant_algo is 'W4A8_NVFP4_FP8', of which"),
        (
            {"quant_method": "modelopt", "quant_algo": "INT4_FP8", "bits": 4},
            "'INT4_FP8'.*NVFP4, NVFP4_AWQ, W4A16_NVFP4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "mixed-precision",
                "config_groups": {
                    "a": {"weights": {"num_bits": 8, "type": "float"}},
                    "b": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}},
                },
            },
            "config_groups is .*'num_bits': 8.*its layers have several formats",
        ),
        ({"quant_method": "something-new"}, "quant_method is 'something-new', of which.*Known are fp8.*Give a copy"),
        ({"quant_method": "quark"}, "in quantization_config: quant_method is 'quark', of which costs know no sizes"),
        ({"quant_method": "torchao", "quant_type": {"default": "int4"}}, "quant_method is 'torchao', of which"),
        ({"quant_method": "hqq", "quant_config": {}}, "quant_method is 'hqq', of which"),
        ({"quant_method": "gptq"}, "quant_method is 'gptq', of which.*with bits 2, 3, 4 or 8"),
        ({"quant_method": "gptq", "bits": 6}, "bits is 6, of which costs know no sizes"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, r"config_groups is \[1\], which has no group"),
    ],
)
def test_weights_of_which_costs_know_no_sizes_are_refused(quantisation: dict[str, Any], message: str) -> None:
    """They were taken for bf16, or for fp8."""
    config = document("llama-3.1-8b.json")["config"]
    with pytest.raises(UsageError, match=message):
        read_config({**config, "quantization_config": quantisation})


def test_model_optimizers_own_file_beside_the_config_counts_where_the_config_names_no_format(tmp_path: Path) -> None:
    config, file = document("llama-3.1-8b.json")["config"], tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert model_in(file, "m").linear_bytes == 2
    (tmp_path / MODELOPT_FILE).write_text(json.dumps({"producer": {}, "quantization": {"quant_algo": "FP8"}}))
    assert model_in(file, "m").linear_bytes == 1
    (tmp_path / MODELOPT_FILE).write_text(json.dumps({"quantization": {"quant_algo": "MIXED_PRECISION"}}))
    with pytest.raises(UsageError, match="MIXED_PRECISION"):
        model_in(file, "m")
    file.write_text(json.dumps({**config, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}))
    assert model_in(file, "m").linear_bytes == 0.5 + 1 / 16
    file.write_text(json.dumps({"text_config": config, "torch_dtype": "auto", "model_type": "llama"}))
    (tmp_path / MODELOPT_FILE).write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert model_in(file, "m").linear_bytes == 0.5 + 1 / 16


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"quantization": {"quant_algo": "MIXED_PRECISION"}}',
            ": quantization.quant_algo is 'MIXED_PRECISION': its layers",
        ),
        (
            '{"quantization": {"quant_algo": "W4A8_AWQ"}}',
            ": quantization.quant_algo is 'W4A8_AWQ', of which costs know",
        ),
        ("{", " is no JSON: Expecting"),
        ("3", ": 3 is no object"),
    ],
    ids=["mixed", "not known", "no JSON", "no object"],
)
def test_errors_of_model_optimizers_file_name_that_file(tmp_path: Path, content: str, message: str) -> None:
    """They named config.json, and fields that it has not."""
    file, beside = tmp_path / "config.json", tmp_path / MODELOPT_FILE
    file.write_text(json.dumps(document("llama-3.1-8b.json")["config"]))
    beside.write_text(content)
    with pytest.raises(UsageError) as caught:
        model_in(file, "m")
    assert str(caught.value).startswith(f"{beside}{message}")


def test_float32_is_twice_as_large() -> None:
    model = read_config({**document("llama-3.1-8b.json")["config"], "torch_dtype": "float32"})
    assert model.weight_bytes == 2 * LLAMA.weight_bytes
    assert model.kv_bytes_per_token() == 2 * 131_072


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"sliding_window": 4096}, (4096, 32)),
        ({"sliding_window": 4096, "use_sliding_window": False}, (0, 0)),
        ({"sliding_window": None}, (0, 0)),
        ({"sliding_window": 128, "model_type": "gpt_oss"}, (128, 16)),
        ({"sliding_window": 1024, "sliding_window_pattern": 6}, (1024, 27)),
        ({"sliding_window": 4096, "model_type": "gemma2"}, (4096, 16)),
        ({"sliding_window": 4096, "model_type": "cohere2"}, (4096, 24)),
        ({"sliding_window": 1024, "model_type": "gemma3_text"}, (1024, 27)),
        ({"model_type": "gemma3", "text_config": {"sliding_window": 1024, "model_type": "gemma3_text"}}, (1024, 27)),
        ({"sliding_window": 1024, "model_type": "gemma3", "sliding_window_pattern": 4}, (1024, 24)),
        ({"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"] * 16}, (9, 16)),
    ],
)
def test_sliding_windows(config: dict[str, Any], window: tuple[int, int]) -> None:
    model = read_config({**document("llama-3.1-8b.json")["config"], **config})
    assert (model.window_tokens, model.window_layers) == window


def test_a_multimodal_file_is_read_by_its_text_model() -> None:
    inner = document("llama-3.1-8b.json")["config"]
    assert read_config({"model_type": "some_vl", "text_config": inner}).params == LLAMA.params
    assert read_config({**inner, "text_config": None}).params == LLAMA.params


_LLAMA_4 = {
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 202_048,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "interleave_moe_layer_step": 1,
}
_ERNIE = {
    "model_type": "ernie4_5_moe",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "vocab_size": 103_424,
    "tie_word_embeddings": True,
    "moe_intermediate_size": 1536,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 1,
}


@pytest.mark.parametrize(
    ("config", "params"),
    [
        (_LLAMA_4, 107_769_861_120),
        ({**_LLAMA_4, "num_local_experts": 128, "interleave_moe_layer_step": 2}, 400_711_848_960),
        (_ERNIE, 21_825_436_160),  # less the 1,728 of a correction of its routers
    ],
)
def test_mixtures_with_fields_of_their_own(config: dict[str, Any], params: int) -> None:
    """Counted by transformers. Llama 4 Maverick was read twice as large, and ERNIE as a dense model of a sixth."""
    assert read_config(config).params == params


@pytest.mark.parametrize(
    "experts", [{"moe_num_primary_experts": 32}, {"ffn_config": {"moe_n_experts": 16, "ffn_hidden_size": 10752}}]
)
def test_experts_in_an_unknown_field_are_not_a_dense_model(experts: dict[str, Any]) -> None:
    config = document("llama-3.1-8b.json")["config"]
    with pytest.raises(UsageError, match=r"config\.json: moe_n.*_experts is (32|16), and the model's other sizes"):
        read_config({**config, **experts})
    for dense in ({"num_experts_per_tok": 2}, {"vision_config": {"num_experts": 8}}, {"n_shared_experts": 2}):
        assert read_config({**config, **dense}) == read_config(config)


def test_layers_with_experts_are_counted_by_a_list_too() -> None:
    config = document("qwen3-30b-a3b.json")["config"]
    layers = config["num_hidden_layers"]
    config.pop("decoder_sparse_step", None)
    every = read_config(config).experts
    listed = read_config({**config, "moe_layer_freq": [0] + [1] * (layers - 1)}).experts
    assert every is not None and listed is not None
    assert (every.layers, listed.layers) == (layers, layers - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"hidden_size": None, "n_embd": -1}, "n_embd is -1, which is no positive whole number"),
        ({"num_local_experts": -1}, "num_local_experts is -1, which is no whole number from 0"),
        ({"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": [1]}, r"n_shared_experts is \[1\]"),
        (
            {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": "3"},
            "first_k_dense_replace is '3'",
        ),
        ({"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_layer_freq": {}}, "moe_layer_freq is {}"),
        (
            {"n_routed_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": 3},
            "mlp_only_layers is 3, which is no list",
        ),
        ({"sliding_window": 9, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": [4]}}, r"bits is \[4\]"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": "all"}}, "group_size is 'all'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, None]}}, "weight_block_size"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": 3}}}, "config_groups"),
    ],
)
def test_what_cannot_be_read_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_config({**document("llama-3.1-8b.json")["config"], **change})


@pytest.mark.parametrize("config", [[], "text", None, 3])
def test_a_file_that_is_no_object_is_named(config: Any) -> None:
    with pytest.raises(UsageError, match="is no object"):
        read_config(config)


@pytest.mark.parametrize(
    "change",
    [
        {"num_local_experts": 0},
        {"num_experts": 1, "shared_expert_intermediate_size": 0},
        {"kv_lora_rank": 0, "q_lora_rank": 0},
        {"sliding_window": 0},
    ],
)
def test_a_part_of_size_0_is_one_that_the_model_lacks(change: dict[str, int]) -> None:
    config = document("llama-3.1-8b.json")["config"]
    assert read_config({**config, **change}) == read_config(config)


def test_a_mixture_whose_file_says_0_has_no_shared_experts() -> None:
    config = document("qwen3-30b-a3b.json")["config"]
    assert read_config({**config, "shared_expert_intermediate_size": 0}) == read_config(config)


def test_names_are_found_without_owner_and_in_any_case() -> None:
    assert shipped.model_named("llama-3.1-8b-instruct") is shipped.model_named("meta-llama/Llama-3.1-8B-Instruct")
    with pytest.raises(UsageError, match=r"do not ship.*llama-3.1-8b"):
        shipped.model_named("meta-llama/Llama-3.9-8B")


def test_a_fine_tune_has_its_base_models_fingerprint() -> None:
    config = document("llama-3.1-8b.json")["config"]
    assert read_config({**config, "vocab_size": 128_264}, "me/my-llama").fingerprint == LLAMA.fingerprint
    for other in ({"quantization_config": {"quant_method": "fp8"}}, {"vocab_size": 32_000}, {"sliding_window": 4096}):
        assert read_config({**config, **other}).fingerprint != LLAMA.fingerprint
    prints = {model.fingerprint for model in shipped.models().values()}
    assert len(prints) == len({model.name for model in shipped.models().values()})


# -- per GPU --


def test_one_gpu_holds_everything() -> None:
    for model in shipped.models().values():
        assert model.weight_bytes_per_gpu(ONE_GPU) == pytest.approx(model.weight_bytes, rel=1e-9)
        assert model.kv_bytes_per_token_per_gpu(ONE_GPU) == model.kv_bytes_per_token()


def test_heads_are_split_then_copied() -> None:
    per_gpu = [LLAMA.kv_bytes_per_token_per_gpu(Spans(tp=tp)) for tp in (1, 2, 4, 8, 16)]
    assert per_gpu == [131_072, 65_536, 32_768, 16_384, 16_384]
    # 8 KV heads on 16 ranks: each rank holds a whole head's projection, twice its share.
    copied = 16 * LLAMA.weight_bytes_per_gpu(Spans(tp=16)) - 8 * LLAMA.weight_bytes_per_gpu(Spans(tp=8))
    assert copied > LLAMA.layers * LLAMA.hidden * LLAMA.head_dim * 2 * 8


def test_latents_are_copied_to_every_rank() -> None:
    model = shipped.model_named("deepseek-ai/DeepSeek-V3")
    assert model.kv_bytes_per_token_per_gpu(Spans(tp=8)) == model.kv_bytes_per_token()


def test_experts_are_split_over_all_ranks() -> None:
    model = shipped.model_named("deepseek-ai/DeepSeek-V3")
    eight, sixteen = Spans(tp=8), Spans(tp=8, dp=2, ep=16)
    halved = model.weight_bytes_per_gpu(eight) - model.weight_bytes_per_gpu(sixteen)
    assert halved == pytest.approx(model.expert_params * model.expert_bytes / 16, rel=1e-6)


def test_stages_split_layers() -> None:
    assert LLAMA.kv_bytes_per_token_per_gpu(Spans(pp=2)) == 65_536
    assert LLAMA.kv_bytes_per_token_per_gpu(Spans(pp=3)) == 131_072 * 11 // 32
    assert LLAMA.weight_bytes_per_gpu(Spans(pp=2)) < 0.6 * LLAMA.weight_bytes


def test_spans() -> None:
    assert gpus(Spans(tp=2, pp=3, dp=4)) == 24
    assert shown(Spans(tp=8, dp=2, ep=16)) == "tp8 dp2 ep16"
    assert shown(ONE_GPU) == "tp1"
    with pytest.raises(AssertionError):
        Spans(tp=4, ep=2)


def test_any_four_numbers_are_a_shape() -> None:
    class Theirs:
        tp, pp, dp, ep = 2, 1, 1, 1

    assert LLAMA.weight_bytes_per_gpu(Theirs()) == LLAMA.weight_bytes_per_gpu(Spans(tp=2))


def test_an_invented_model_needs_no_file() -> None:
    tiny = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10)
    assert tiny.params == 2 * (8 * 4 * 2 * 3 + 3 * 8 * 16) + 2 * 80
