"""Models to compare connectors with: a configuration, random weights, the tokenizer of the model that ships."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.tiny import model_path

LENGTHS: Final = (250, 1000, 1900)
"""Tokens of prompts."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model, and its engines' settings."""

    name: str
    shape: Mapping[str, Any] | None = None
    """Differences of its `config.json` from that of the model that ships; None: that model itself."""
    dtype: str = "float32"
    kv_gib: int = 1
    """KV memory of an engine on CPU."""
    weights_gib: float = 0.1

    @property
    def flags(self) -> tuple[str, ...]:
        """vLLM's flags for this model."""
        return () if self.shape is None else ("--load-format", "dummy")

    def path(self, folder: Path) -> str:
        """The model's folder; for a model that does not ship, a new one is made in `folder`."""
        if self.shape is None:
            return str(model_path())
        made = folder / self.name
        made.mkdir(parents=True, exist_ok=True)
        for path in model_path().iterdir():
            if path.suffix != ".safetensors":
                shutil.copy(path, made)
        config = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps({**config, **self.shape, "dtype": self.dtype}))
        return str(made)


_FAT = {"hidden_size": 128, "num_hidden_layers": 16, "num_attention_heads": 4, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 256, "max_position_embeddings": 4096}  # fmt: skip
_LAYERS_OF_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "head_dim": 128, "intermediate_size": 14336, "max_position_embeddings": 8192,
                 "tie_word_embeddings": False}  # fmt: skip

TINY: Final = Model("tiny")
"""The model that ships: 2 KB of KV a token."""
FAT: Final = Model("fat", _FAT, kv_gib=2)
"""64 KB of KV a token in float32 (2 × 16 layers × 4 heads × 128 × 4 bytes)."""
EIGHT_B: Final = Model("8B", _LAYERS_OF_8B, dtype="bfloat16", weights_gib=13.1)
"""The layers of Llama-3.1-8B (its published config.json): 7.0 of its 8.0 billion parameters, and all of its 128 KB of
KV a token in bfloat16. The rest are embeddings: vocabulary and tokenizer are those of the model that ships."""

MODELS: Final = {model.name: model for model in (TINY, FAT, EIGHT_B)}
