"""Makes a LoRA adapter for the model that ships. Its random weights change the answers, and the keys and values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from engine.tiny import model_path

RANK, ALPHA, SCALE = 4, 16, 0.2
"""So strong that an answer differs from the plain model's after a few words."""


def make_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter in PEFT's format into a new folder. Returns the folder."""
    shape = json.loads((model_path() / "config.json").read_text())
    hidden, heads = shape["hidden_size"], shape["head_dim"]
    out = {"q_proj": heads * shape["num_attention_heads"], "k_proj": heads * shape["num_key_value_heads"]}
    out["v_proj"] = out["k_proj"]
    chance = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, width in out.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = (SCALE * chance.standard_normal((RANK, hidden))).astype(np.float32)
            weights[f"{place}.lora_B.weight"] = (SCALE * chance.standard_normal((width, RANK))).astype(np.float32)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(out),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
