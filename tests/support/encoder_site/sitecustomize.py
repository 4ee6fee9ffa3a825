"""Start-up patch for tests: an engine writes down each run of its model's image encoder.

The file has the name that `ENCODER_RUNS` gives, and a line for each run: how many images it encoded. vLLM calls
`embed_multimodal` also at the engine's start, to measure memory, so that tests compare counts. Whatever model runner
is in use, it has no other way to the encoder on CPU.

vLLM's LLaVA imports Pixtral's image processor, which needs torchvision, and uses it only for Pixtral's image encoder.
An empty module stands in for it.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.vllm.cpu_site.sitecustomize import AfterImport

MODELS = {
    "vllm.model_executor.models.idefics3": "Idefics3ForConditionalGeneration",
    "vllm.model_executor.models.llava": "LlavaForConditionalGeneration",
}


OF_PIXTRAL = "transformers.models.pixtral.image_processing_pixtral"


class StandIn:
    """Finds and loads a module for `OF_PIXTRAL` that has the one name that vLLM imports."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """The stand-in's spec; None for every other module."""
        return importlib.machinery.ModuleSpec(name, self) if name == OF_PIXTRAL else None

    def create_module(self, _: importlib.machinery.ModuleSpec) -> None:
        """Let Python make an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Add the name. A call of it would raise TypeError."""
        vars(module)["_num_image_tokens"] = None


def write_down_runs(module: ModuleType) -> None:
    """Make this module's model write a line for each run of its encoder."""
    model: Any = getattr(module, MODELS[module.__name__])
    real = model.embed_multimodal

    @functools.wraps(real)
    def embed_multimodal(self: Any, **given: Any) -> Any:
        made = real(self, **given)
        with Path(os.environ["ENCODER_RUNS"]).open("a", encoding="ascii") as runs:
            runs.write(f"{len(made)}\n")
        return made

    model.embed_multimodal = embed_multimodal


sys.meta_path[:0] = [AfterImport(frozenset(MODELS), write_down_runs), StandIn()]
