"""Which vLLM Baton's connector is written for. Pure: asked before there is an engine, and again inside it."""

from __future__ import annotations

import re
from typing import Final

VLLM: Final = re.compile(r"0\.32\.\d+(\D.*)?")
"""Versions whose source was read for this."""
WIRE: Final = 14
"""vLLM's own number for what its connectors say to each other."""


def is_written_for(vllm: str | None) -> bool:
    """Whether it is loaded by this version of vLLM; None: there is none."""
    return vllm is not None and VLLM.fullmatch(vllm) is not None
