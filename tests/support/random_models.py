"""Models of several architectures with random weights, a few megabytes each, and LoRA adapters for them.

Their answers are nonsense, but follow exactly from the prompt: wrong blocks, a lost state or an early token change them
at once. The tokenizer is the one that ships (`engine/tiny/model`): one token per byte.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.tiny import model_path

VOCABULARY = 260
SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
    "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256, "initializer_range": 0.15,
    "tie_word_embeddings": False,
}  # fmt: skip
OF_PICTURES = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
"""Special tokens of models that read images; the first marks the place of an image's own tokens."""
IMAGE = VOCABULARY
LETTERS = list(range(97, 123))
"""Token ids whose texts are whole characters, so that an answer's tokens follow from its text."""
OF_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def _llama(**more: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{**SHARED, **more})


def _dense() -> Any:
    """As many key/value heads as query heads."""
    return _llama(num_key_value_heads=SHARED["num_attention_heads"])


def _deepseek_v2() -> Any:
    """Multi-head latent attention. vLLM's CPU build supports no smaller latent."""
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **{**SHARED, "head_dim": 64, "num_key_value_heads": 4}, kv_lora_rank=512, q_lora_rank=None,
        qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64, n_routed_experts=4, first_k_dense_replace=4,
        rope_theta=10000.0,
    )  # fmt: skip


def _idefics3() -> Any:
    """A small image encoder in front of the model with grouped queries. An image has 16 patches of 14 × 14 pixels, and
    they become four tokens. Few of vLLM's models with images run without torchvision; this one does
    (docs/exactness.md).
    """
    from transformers import Idefics3Config
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

    vision = Idefics3VisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, image_size=56, patch_size=14
    )
    return Idefics3Config(
        vision_config=vision, text_config=_llama(vocab_size=VOCABULARY + len(OF_PICTURES)), image_token_id=IMAGE,
        scale_factor=2, tie_word_embeddings=False,
    )  # fmt: skip


def _llava() -> Any:
    """Another image encoder, of a model that puts no tokens around an image's 16: a prompt can end in one of them."""
    from transformers import CLIPVisionConfig, LlavaConfig

    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, image_size=56,
        patch_size=14, projection_dim=64,
    )  # fmt: skip
    return LlavaConfig(
        vision_config=vision, text_config=_llama(vocab_size=VOCABULARY + len(OF_PICTURES)), image_token_index=IMAGE,
        image_seq_length=16, tie_word_embeddings=False,
    )  # fmt: skip


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    return Gemma3TextConfig(**SHARED, sliding_window=64, layer_types=kinds, query_pre_attn_scalar=32)


def _falcon_h1() -> Any:
    from transformers import FalconH1Config

    return FalconH1Config(
        **SHARED, mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=16,
        mamba_d_conv=4, mamba_expand=1, mamba_chunk_size=256,
    )  # fmt: skip


def _mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**SHARED, num_local_experts=4, num_experts_per_tok=2)


def _larger() -> Any:
    """Grouped queries again, large enough that a long prompt takes a CPU core about a second."""
    wide = {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 12, "num_key_value_heads": 4}
    return _llama(**wide, num_hidden_layers=8)


def _wide_cache() -> Any:
    """64 KB of KV a token in float32: a long prompt's blocks take longer on the way than the engines' steps."""
    return _llama(num_key_value_heads=4, head_dim=128, num_hidden_layers=16)


_OLDER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_layer": 4, "n_head": 4,
    "initializer_range": 0.15, "bos_token_id": None, "eos_token_id": 256,
}  # fmt: skip
"""What models of before Llama have in common, by the names that their configs have for it."""


def _bloom() -> Any:
    """Positions by a slope on attention (ALiBi), and no rotary embedding."""
    from transformers import BloomConfig

    return BloomConfig(**_OLDER, hidden_size=128)


def _gpt2() -> Any:
    """Positions that are learned, and no rotary embedding."""
    from transformers import GPT2Config

    return GPT2Config(**_OLDER, n_embd=128, n_positions=2048)


KINDS: dict[str, Callable[[], Any]] = {
    "dense": _dense, "gqa": _llama, "mla": _deepseek_v2, "experts": _mixtral, "sliding": _gemma3,
    "mamba": _falcon_h1, "vision": _idefics3, "bare vision": _llava, "larger": _larger, "wide cache": _wide_cache,
    "alibi": _bloom, "learned positions": _gpt2,
}  # fmt: skip


def write_model(kind: str, folder: Path, seed: int = 1) -> Path:
    """Write a model of this kind into a folder, as vLLM loads it. Returns the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    loader = AutoModelForImageTextToText if kind.endswith("vision") else AutoModelForCausalLM
    model = loader.from_config(KINDS[kind](), dtype=torch.float32)
    model.save_pretrained(folder)
    for name in OF_TOKENIZER:
        shutil.copyfile(model_path() / name, folder / name)
    if kind.endswith("vision"):
        _add_images(folder, kind)
    if kind == "bare vision":
        _name_as_vllm(folder / "model.safetensors")
    return folder


def _name_as_vllm(weights: Path) -> None:
    """Name the image encoder's weights as vLLM 0.32 loads them, and as transformers before 5 saved them."""
    from safetensors.torch import load_file, save_file

    of_encoder, named = "vision_tower.", load_file(weights)
    as_before = {name.replace(of_encoder, f"{of_encoder}vision_model."): each for name, each in named.items()}
    save_file(as_before, weights, metadata={"format": "pt"})


def picture(seed: int) -> str:
    """An image of coloured squares, as a URL that holds all of it."""
    from PIL import Image

    image, held = Image.new("RGB", (56, 56)), io.BytesIO()
    for at in range(64):
        value = (at * 37 + seed * 91) % 256
        image.paste(
            (value, (value * 5) % 256, (value * 11) % 256), (at % 8 * 7, at // 8 * 7, at % 8 * 7 + 7, at // 8 * 7 + 7)
        )
    image.save(held, "PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


def _add_images(folder: Path, kind: str) -> None:
    """Add the image processor, which turns an image into patches, and the special tokens for images."""
    from transformers import AutoTokenizer, Idefics3Processor, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(OF_PICTURES)})
    assert tokenizer.convert_tokens_to_ids(OF_PICTURES[0]) == IMAGE
    template = (folder / "chat_template.jinja").read_text()
    if kind == "bare vision":
        pixels = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
        LlavaProcessor(
            pixels, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
            image_token=OF_PICTURES[0], chat_template=template,
        ).save_pretrained(folder)  # fmt: skip
        return
    edge = {"longest_edge": 56}
    pictures = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    Idefics3Processor(pictures, tokenizer, image_seq_len=4, chat_template=template).save_pretrained(folder)


def write_adapter(folder: Path, seed: int, rank: int = 8) -> Path:
    """Write a LoRA adapter of the dense model in PEFT's format. Returns the folder."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    sizes = {"q_proj": 128, "v_proj": 64}
    weights = {}
    for layer in range(SHARED["num_hidden_layers"]):
        for name, wide in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(rank, SHARED["hidden_size"]) * 0.3
            weights[f"{at}.lora_B.weight"] = torch.randn(wide, rank) * 0.3
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0,
            "target_modules": sorted(sizes), "bias": "none", "base_model_name_or_path": "dense"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder
