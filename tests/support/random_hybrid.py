"""A Mamba hybrid of a few megabytes with random weights: attention and a state-space model in every layer (Falcon-H1).

Prompts may have at most 250 tokens: with 268, vLLM 0.32's CPU build crashes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from engine.tiny import model_path

PROMPT_TOKENS_MAX = 250


def random_hybrid(folder: Path) -> Path:
    """Write the model into a folder, with the tokenizer of the model that ships. Its weights are the same each time."""
    import torch
    from transformers import FalconH1Config, FalconH1ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 260, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
        "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 64,
        "mamba_d_conv": 4, "mamba_chunk_size": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    ends = {"eos_token_id": 256, "pad_token_id": 256, "bos_token_id": None}
    torch.manual_seed(7)
    model = FalconH1ForCausalLM(FalconH1Config(**sizes, **ends)).to(torch.float32)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.normal_(0, 0.3)  # wide, so that the likeliest token is far ahead of the next
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_path() / name, folder / name)
    return folder
