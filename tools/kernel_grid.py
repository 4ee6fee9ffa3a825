"""Compute kernel times with NVIDIA's aiconfigurator, for tools/fit_profiles.py: PYTHON tools/kernel_grid.py OUT

PYTHON is that of an environment of its own (`pip install aiconfigurator==0.12.0`): nothing of Baton is imported. OUT
gets one CSV file for each model and GPU, in the form of the data's ``profiles/grid``. Models are from costs/models/:
mixtures, and dense ones on more than two GPUs without NVLink, both of which the data's grid lacks. A combination that
aiconfigurator's tables do not cover is left out and said.
"""

from __future__ import annotations

import csv
import importlib
import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parent.parent / "costs" / "models"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""By a configuration's ``model_type``."""

WANTED: dict[str, dict[str, tuple[int, ...]]] = {
    "mixtral-8x7b": {"h100_sxm": (2, 4), "h200_sxm": (1, 2, 4), "a100_sxm": (2, 4), "b200_sxm": (1, 2)},
    "qwen3-30b-a3b": {"h100_sxm": (1, 2), "h200_sxm": (1, 2), "a100_sxm": (1, 2), "b200_sxm": (1,), "l40s": (2, 4)},
    "qwen3-235b-a22b": {"h100_sxm": (8,), "h200_sxm": (4, 8), "b200_sxm": (4,)},
    "codellama-34b": {"l40s": (4,)},
    "llama-3.1-70b": {"l40s": (4, 8)},
}
"""Model, GPU (aiconfigurator's name), GPUs of one instance."""

PROMPTS = (
    *((batch, length, 0) for batch in (1, 2, 4, 8) for length in (128, 512, 1024, 2048, 4000, 8192)),
    *((batch, 16384, 0) for batch in (1, 2, 4)),
    (1, 16, 0),
    (1, 32, 0),
    (1, 64, 0),
    (1, 256, 0),
    (1, 32768, 0),
    (1, 8192, 2048),
    (1, 8192, 7168),
)
"""Prompts in a step, length of each, tokens of it that are cached."""

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256)
CONTEXTS = (512, 2048, 4096, 8192, 16384, 32768)
CONTEXT_MAX = 1 << 20
"""Tokens of context in a decode step of the grid: more than fits beside any of these models."""


def main() -> int:
    """Write the files; 2 without a folder to write to, or without aiconfigurator."""
    if len(sys.argv) != 2:
        print("kernel_grid: write `PYTHON tools/kernel_grid.py OUT`", file=sys.stderr)
        return 2
    try:
        engine = importlib.import_module("aiconfigurator_core.sdk.engine")
    except ImportError:
        print("kernel_grid: no aiconfigurator here: pip install aiconfigurator==0.12.0", file=sys.stderr)
        return 2
    logging.disable(logging.CRITICAL)
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, systems in WANTED.items():
        for system, sizes in systems.items():
            with tempfile.TemporaryDirectory() as folder:
                model = configured(name, Path(folder))
                rows = [row for tp in sizes for row in measured(engine.EngineHandle, model, folder, system, tp)]
            if rows:
                write(out / f"{name}_{system}_vllm.csv", rows)
    return 0


def configured(name: str, folder: Path) -> str:
    """Write the model's ``config.json`` into a folder; the model's name."""
    document = json.loads((MODELS / f"{name}.json").read_text())
    config: dict[str, Any] = document["config"]
    config["architectures"] = [ARCHITECTURES[config["model_type"]]]
    config.setdefault("max_position_embeddings", 32768)
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    (folder / "config.json").write_text(json.dumps(config))
    return str(document["name"])


def measured(handle: Any, model: str, folder: str, system: str, tp: int) -> Iterator[dict[str, object]]:
    """The rows of one combination."""
    try:
        engine = handle.compile(folder, system, "vllm", tp_size=tp, moe_tp_size=tp)
        prompts = [(*each, engine.predict_prefill_latency(*each)) for each in PROMPTS]
        answers = [
            (batch, context, 0, engine.predict_decode_latency(batch, context))
            for batch in BATCHES
            for context in CONTEXTS
            if batch * context <= CONTEXT_MAX
        ]
    except Exception as error:  # noqa: BLE001 - its errors have no common class: the combination is left out
        print(f"{model} on {system} tp{tp} left out: {type(error).__name__}: {error}"[:200], file=sys.stderr)
        return
    print(f"{model} on {system} tp{tp}: {len(prompts)} prompts, {len(answers)} decode steps")
    for kind, rows in (("prefill", prompts), ("decode", answers)):
        for batch, length, cached, ms in rows:
            yield {
                "kind": kind,
                "model": model,
                "system": system,
                "backend": "vllm",
                "tp": tp,
                "batch": batch,
                "ctx": length,
                "prefix": cached,
                "ms": ms,
            }


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """One CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
