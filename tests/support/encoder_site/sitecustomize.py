"""Start-up patch for tests: an engine writes down each run of its model's image encoder.

The file has the name that `ENCODER_RUNS` gives, and a line for each run: how many images it encoded. vLLM calls
`embed_multimodal` also at the engine's start, to measure memory, so that tests compare counts. Whatever model runner
is in use, it has no other way to the encoder on CPU.
"""

from __future__ import annotations

import functools
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


sys.meta_path.insert(0, AfterImport(frozenset(MODELS), write_down_runs))
