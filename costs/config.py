"""Reads a Hugging Face ``config.json`` into a `ModelShape`. Pure: the caller has parsed the JSON.

Knows the spellings of the usual families: Llama, Mistral, Qwen 2/3, Gemma, Phi-3, OPT, BLOOM, Falcon, StarCoder 2
(dense; multi-head, grouped or multi-query), Mixtral, Qwen-MoE, gpt-oss, Llama 4, ERNIE 4.5 (mixtures), DeepSeek V2/V3
and Kimi K2 (latent attention). An unknown family is read as Llama: missing fields have Llama's defaults, and sizes
come out nearly right. A mixture whose experts are spelt in another way is refused: as a dense model it would be far too
small.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cluster.errors import UsageError
from costs.hardware import Dtype
from costs.model import Experts, Latent, ModelShape

UNGATED = frozenset({"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "opt", "starcoder2"})
"""Families whose MLP has two matrices."""

TIED = frozenset(
    {
        "bloom",
        "cohere",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gpt2",
        "gpt_bigcode",
        "opt",
        "starcoder2",
    }
)
"""Families that share embedding and output layer if the file does not say otherwise (transformers' defaults)."""

LAYERNORM = frozenset({"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "starcoder2"})
"""Families whose norms have a bias beside the weight."""

BIASED = frozenset({"bloom", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "starcoder2"})
"""Families with a bias on every matrix."""

WINDOW_PATTERNS = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "gemma3": 6, "gemma3_text": 6}
"""In families with sliding windows: of so many layers the last one sees the whole context, if the file does not say
(transformers' defaults).
"""

NORMS_PER_LAYER = {"gemma2": 4, "gemma3": 4, "gemma3_text": 4, "falcon": 1}
"""Norms of one layer, for families that do not have two."""

_FP8 = (Dtype.FP8, 1.0)
_MXFP8 = (Dtype.FP8, 1.0 + 1 / 32)
_NVFP4 = (Dtype.FP4, 0.5 + 1 / 16)
"""A byte of scale per 16 weights."""

ALGORITHMS = {
    "FP8": _FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8,
    "FP8_PB_WO": (Dtype.FP8, 1.0 + 4 / 128**2),
    "FP8_BLOCK_SCALES": (Dtype.FP8, 1.0 + 4 / 128**2),
    "MXFP8": _MXFP8,
    "NVFP4": _NVFP4,
    "NVFP4_AWQ": _NVFP4,
    "W4A16_NVFP4": (Dtype.BF16, _NVFP4[1]),
}
"""The algorithms of NVIDIA's Model Optimizer: the format of the arithmetic, and bytes per weight with their scales."""

METHODS = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "ptpc_fp8", "deepseek_v4_fp8"), _FP8),
    **dict.fromkeys(("fp8_per_tensor", "fp8_per_channel", "fp8_per_block"), _FP8),
    **dict.fromkeys(("mxfp8", "modelopt_mxfp8"), _MXFP8),
    **dict.fromkeys(("nvfp4_per_token", "modelopt_fp4"), _NVFP4),
    "mxfp4": (Dtype.BF16, 0.5 + 1 / 32),  # a byte of scale per 32 weights; before Blackwell computed in bf16
}
"""As `ALGORITHMS`, for ``quant_method`` where the file names no algorithm."""

PLAIN = ("", "modelopt", "bitsandbytes")
"""``quant_method`` of weights that are not quantised if no other field says how; empty: the file does not say."""

_DTYPES = {"float32": Dtype.FP32, "float16": Dtype.BF16, "bfloat16": Dtype.BF16, "auto": Dtype.BF16}
"""fp16 counts as bf16: the same bytes and the same units."""


def read_config(
    config: Mapping[str, Any], name: str = "", *, modelopt: Mapping[str, Any] | None = None, modelopt_file: str = ""
) -> ModelShape:
    """The sizes of the model that this ``config.json`` describes.

    Args:
        config: the content of the file.
        name: the model's name.
        modelopt: the content of Model Optimizer's own file; it counts if `config` names no format of quantised weights.
        modelopt_file: that file's name, for errors.

    Raises:
        UsageError: a required field is missing, or a field is not what it must be; names the file, the field and its
            value.
    """
    with _errors_of("config.json"):
        if not isinstance(config, Mapping):
            raise UsageError(f"{config!r:.60} is no object.")
        text_config = config.get("text_config")
        config = {**config, **text_config} if isinstance(text_config, Mapping) else config
        shape = _shape(config, name)
    quantised, file = config.get("quantization_config"), "config.json, in quantization_config"
    if quantised is None and modelopt is not None:
        quantised, file = {"quant_method": "modelopt", **modelopt}, modelopt_file
    with _errors_of(file):
        return replace(shape, **_precision(config, quantised))


@contextmanager
def _errors_of(file: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def _shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """As `read_config`, without the format of the weights."""
    family = str(config.get("model_type", "llama"))
    layers = _whole(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    hidden = _whole(config, "hidden_size", "n_embd", "d_model")
    heads = _whole(config, "num_attention_heads", "n_head", "n_heads")
    head_dim = _maybe(config, "head_dim", "attention_head_dim") or hidden // heads
    widths = ("intermediate_size_mlp", "intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
    intermediate = _maybe(config, *widths) or 4 * hidden
    window, window_layers = _window(config, layers)
    return ModelShape(
        name=name or str(config.get("_name_or_path", "")),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(config, family, heads),
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=_whole(config, "vocab_size"),
        gated=family not in UNGATED,
        tied=bool(config.get("tie_word_embeddings", family in TIED)),
        latent=_latent(config),
        experts=_experts(config, layers),
        window_tokens=window,
        window_layers=window_layers,
        small_params=_small_params(config, family, layers, hidden, heads, head_dim, intermediate),
    )


def _spelt(config: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """The first of these spellings that the file has; None if it has none."""
    return next((name for name in names if config.get(name) is not None), None)


def _whole(config: Mapping[str, Any], *names: str, least: int = 1) -> int:
    name = _spelt(config, names)
    if name is None:
        raise UsageError(f"{names[0]} is missing.")
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        wanted = "positive whole number" if least == 1 else f"whole number from {least}"
        raise UsageError(f"{name} is {value!r:.60}, which is no {wanted}.")
    return value


def _maybe(config: Mapping[str, Any], *names: str) -> int:
    """The positive number of the first of these fields that the file has; 0 if it has none, for the default."""
    return _whole(config, *names) if _spelt(config, names) is not None else 0


def _part(config: Mapping[str, Any], *names: str) -> int:
    """The size of a part that a model may lack: 0 if the file has none of these fields, or says 0."""
    return _whole(config, *names, least=0) if _spelt(config, names) is not None else 0


def _kv_heads(config: Mapping[str, Any], family: str, heads: int) -> int:
    if family == "falcon" and not config.get("new_decoder_architecture"):
        return 1 if config.get("multi_query", True) else heads
    if family == "gpt_bigcode":
        return 1 if config.get("multi_query", True) else heads
    return _maybe(config, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads


def _latent(config: Mapping[str, Any]) -> Latent | None:
    rank = _part(config, "kv_lora_rank")
    if not rank:
        return None
    return Latent(
        kv_rank=rank,
        q_rank=_part(config, "q_lora_rank"),
        nope=_whole(config, "qk_nope_head_dim"),
        rope=_whole(config, "qk_rope_head_dim"),
        value=_whole(config, "v_head_dim"),
    )


def _experts(config: Mapping[str, Any], layers: int) -> Experts | None:
    count = _part(config, *EXPERTS)
    if count < 2:
        _refuse_other_experts(config)
        return None
    width = _maybe(config, "moe_intermediate_size") or _whole(config, "intermediate_size")
    shared = _part(config, "shared_expert_intermediate_size")
    shared = shared or _part(config, "n_shared_experts", "moe_num_shared_experts") * width
    if not shared and str(config.get("model_type")).startswith("llama4"):
        shared = width  # one, which the file does not mention
    return Experts(
        count=count,
        per_token=_whole(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
        intermediate=width,
        shared_intermediate=shared,
        layers=_layers_with_experts(config, layers),
    )


EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
"""Spellings of the number of routed experts."""

_LIKE_EXPERTS = re.compile(r"(\w+_)?(num|n)_(\w+_)?experts")


def _refuse_other_experts(config: Mapping[str, Any]) -> None:
    """Refuse a file that counts experts in a field that is not known, at the top or in a part such as `ffn_config`."""
    others = {"audio_config", "vision_config", "quantization_config"}
    parts = (part for name, part in config.items() if str(name).endswith("_config") and name not in others)
    for part in (config, *(part for part in parts if isinstance(part, Mapping))):
        for name, value in part.items():
            like = _LIKE_EXPERTS.fullmatch(str(name)) and "shared" not in name
            if like and isinstance(value, int) and value > 1:
                raise UsageError(
                    f"{name} is {value}, and the model's other sizes are spelt in a way that is not known. Give a copy "
                    "of config.json with n_routed_experts, num_experts_per_tok and moe_intermediate_size."
                )


def _layers_with_experts(config: Mapping[str, Any], layers: int) -> int:
    """How many layers have experts: counted from a list with an entry per layer, or from steps and exceptions."""
    listed = config.get("moe_layer_freq")
    if isinstance(listed, list):
        return sum(map(bool, listed[:layers]))
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise UsageError(f"mlp_only_layers is {dense!r:.60}, which is no list.")
    steps = ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", "moe_layer_interval")
    step = next((found for name in steps if (found := _part(config, name))), 1)
    return (layers - _part(config, "first_k_dense_replace", "moe_layer_start_index")) // step - len(dense)


def _window(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """Tokens of the sliding window, and how many layers have it."""
    tokens = _part(config, "sliding_window")
    if not tokens or config.get("use_sliding_window") is False:
        return 0, 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return tokens, sum(kind == "sliding_attention" for kind in kinds)
    every = _part(config, "sliding_window_pattern", "_sliding_window_pattern")
    every = every or WINDOW_PATTERNS.get(str(config.get("model_type")), 0)
    if every:
        return tokens, layers - layers // every
    return tokens, layers


def _small_params(
    config: Mapping[str, Any], family: str, layers: int, hidden: int, heads: int, head_dim: int, intermediate: int
) -> int:
    """Norms, biases, learned positions and the like."""
    norm = hidden * (2 if family in LAYERNORM else 1)
    params = layers * norm * NORMS_PER_LAYER.get(family, 2) + norm
    kv_heads = _kv_heads(config, family, heads)
    qkv, out = (heads + 2 * kv_heads) * head_dim, hidden
    if family in BIASED:
        params += layers * (qkv + out + intermediate + hidden)
    elif config.get("attention_bias"):
        params += layers * (qkv + (out if family in {"gpt_oss", "llama"} else 0))
    elif family in {"qwen2", "qwen2_moe"}:
        params += layers * qkv  # a bias on q, k and v that the file does not mention
    if family.startswith("qwen3") or family in {"gemma3", "gemma3_text"}:
        params += layers * 2 * head_dim  # norms of q and k
    if family == "opt":
        params += (_whole(config, "max_position_embeddings") + 2) * hidden
    if family == "bloom":
        params += norm  # after the embedding
    return params + _small_latent(config, layers) + _small_experts(config, family, layers, hidden, heads)


def _small_latent(config: Mapping[str, Any], layers: int) -> int:
    """The norms inside latent attention."""
    return layers * (_part(config, "kv_lora_rank") + _part(config, "q_lora_rank"))


def _small_experts(config: Mapping[str, Any], family: str, layers: int, hidden: int, heads: int) -> int:
    experts = _experts(config, layers)
    if experts is None:
        return 0
    if family == "gpt_oss":  # biases of router and experts, and one attention sink per head
        return layers * (heads + experts.count * (1 + 2 * experts.intermediate + hidden))
    if config.get("topk_method") == "noaux_tc":  # DeepSeek V3's correction of its router
        return experts.layers * experts.count
    return 0


def _precision(config: Mapping[str, Any], quantised: Any) -> dict[str, Any]:
    """The formats of storage and arithmetic of the weights, as fields of `ModelShape`."""
    plain = _DTYPES.get(str(config.get("torch_dtype") or config.get("dtype") or "auto").removeprefix("torch."))
    plain = plain or Dtype.BF16
    size = plain.size_bytes
    same = {"linear_dtype": plain, "linear_bytes": size, "expert_dtype": plain, "expert_bytes": size}
    if not isinstance(quantised, Mapping):
        return {**same, "rest_bytes": size}
    dtype, stored = _quantised(quantised)
    experts = {"expert_dtype": dtype, "expert_bytes": stored}
    if quantised.get("quant_method") == "mxfp4":  # gpt-oss: the experts only
        return {**same, **experts, "rest_bytes": size}
    return {"linear_dtype": dtype, "linear_bytes": stored, **experts, "rest_bytes": size}


def _quantised(config: Mapping[str, Any]) -> tuple[Dtype, float]:
    """The format that quantised matrices are computed in, and bytes per weight with their scales."""
    method, (field, algorithm) = str(config.get("quant_method", "")), _algorithm(config)
    if algorithm == "MIXED_PRECISION" or method == "modelopt_mixed":
        raise _several(field, algorithm or method)
    if algorithm and algorithm not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise UsageError(f"{field} is {algorithm!r:.60}, of which costs know no sizes. Known are {known}.")
    if algorithm == "NVFP4" and _weights_only(config):
        algorithm = "W4A16_NVFP4"
    known_format = ALGORITHMS[algorithm] if algorithm else METHODS.get(method.lower())
    if known_format is not None:
        dtype, stored = known_format
        return dtype, stored + (_block_scale(config) if stored == 1.0 else 0.0)
    if method == "compressed-tensors":
        return _compressed(config)
    if _bits(config) in {2, 3, 4, 8}:  # gptq, awq and kin: 16-bit arithmetic on unpacked weights
        bits, group = _bits(config), _group_size(config) or 128
        return Dtype.BF16, bits / 8 + (2.5 / group if group > 0 else 0.0)
    if config.get("load_in_4bit"):
        return Dtype.BF16, 0.5 + 4 / 64
    if config.get("load_in_8bit"):
        return Dtype.INT8, 1.0
    if method.lower() in PLAIN:
        return Dtype.BF16, 2.0
    raise _unknown(config, method)


def _unknown(config: Mapping[str, Any], method: str) -> UsageError:
    """Of which field and value costs know no sizes: the bits, where a method such as gptq is known by them."""
    name = _spelt(config, BITS)
    told = f"quant_method is {method!r:.60}" if name is None else f"{name} is {config[name]!r:.60}"
    known = ", ".join(each for each in (*METHODS, *PLAIN, "compressed-tensors") if each)
    return UsageError(
        f"{told}, of which costs know no sizes. Known are {known}, and any method with bits 2, 3, 4 or 8. {_COPY}"
    )


def _weights_only(config: Mapping[str, Any]) -> bool:
    """Whether none of the checkpoint's groups has ``input_activations``. vLLM then computes with activations of 16
    bits, though the file says NVFP4 (0.32, ``quantization/modelopt.py:797``, `ModelOptNvFp4Config`).
    """
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return False
    return all(isinstance(each, Mapping) and each.get("input_activations") is None for each in groups.values())


def _several(field: str, value: Any) -> UsageError:
    return UsageError(f"{field} is {value!r:.60}: its layers have several formats, and costs know one for all. {_COPY}")


_COPY = (
    "Give a copy of config.json, in a folder of its own, whose quantization_config has the format of most weights, "
    "like "
    '{"quant_method": "modelopt", "quant_algo": "FP8"}.'
)
"""The fix for weights of which costs know no sizes."""


def _algorithm(config: Mapping[str, Any]) -> tuple[str, str]:
    """The field in which the file names an algorithm of NVIDIA's Model Optimizer, and the algorithm; empty: it names
    none. As in Model Optimizer's own file, it may stand in the field `quantization`.
    """
    inner = config.get("quantization")
    if not config.get("quant_algo") and isinstance(inner, Mapping) and inner.get("quant_algo"):
        return "quantization.quant_algo", str(inner["quant_algo"]).upper()
    field = "quant_algo" if config.get("quant_algo") else "quant_method"
    return field, str(config.get("quant_algo") or "").upper()


def _block_scale(config: Mapping[str, Any]) -> float:
    """Bytes of scale per weight of fp8; 0 without blocks."""
    block = config.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2:
        return 0.0
    if not all(isinstance(side, int) and side > 0 for side in block):
        raise UsageError(f"weight_block_size is {block!r:.60}, which is no pair of whole numbers above 0.")
    return 4.0 / float(block[0] * block[1])


BITS = ("bits", "w_bit")
"""Spellings of the bits per weight."""


def _bits(config: Mapping[str, Any]) -> int:
    """Bits per weight; a mean of several formats is rounded down. 0: the file does not say."""
    name = _spelt(config, BITS)
    value = 0 if name is None else config[name]
    if not isinstance(value, int | float):
        raise UsageError(f"{name} is {value!r:.60}, which is no number.")
    return int(value)


def _group_size(config: Mapping[str, Any]) -> int:
    """Weights with one scale; -1: a whole column; 0: the file does not say."""
    names = ("group_size", "q_group_size")
    return _whole(config, *names, least=-1) if _spelt(config, names) is not None else 0


def _compressed(config: Mapping[str, Any]) -> tuple[Dtype, float]:
    """As `_quantised`, for llm-compressor's format: all groups that have weights must have one format."""
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise _no_group(groups)
    found = {each for each in (_format_of(groups, group) for group in groups.values()) if each is not None}
    if len(found) > 1:
        raise _several("config_groups", {name: each.get("weights") for name, each in groups.items()})
    return next(iter(found), (Dtype.BF16, 2.0))


def _format_of(groups: Any, group: Any) -> tuple[Dtype, float] | None:
    """The format of one of these groups; None if it has no weights."""
    weights = (group.get("weights") or {}) if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _no_group(groups)
    if not weights:
        return None
    bits = _maybe(weights, "num_bits") or 16
    dtype = Dtype.BF16
    if group.get("input_activations"):  # weights and activations: computed in that format
        dtype = {8: Dtype.FP8 if weights.get("type") == "float" else Dtype.INT8, 4: Dtype.FP4}.get(bits, Dtype.BF16)
    size = _group_size(weights)
    scale = 1 if bits == 4 and weights.get("type") == "float" else 2  # bytes: NVFP4's and MXFP4's scales have 8 bits
    return dtype, bits / 8 + (scale / size if size > 0 else 0.0)


def _no_group(groups: Any) -> UsageError:
    return UsageError(f"config_groups is {groups!r:.60}, which has no group with weights.")
