"""The vLLM versions that Baton's connector is written for. Pure: checked before the engine starts, and again
inside it.
"""

from __future__ import annotations

import re
from typing import Final

VLLM: Final = re.compile(r"0\.32\.\d+(\D.*)?")
"""Versions whose source was read for this connector."""
WIRE: Final = 14
"""vLLM's own version number of its connectors' messages."""


def is_written_for(vllm: str | None) -> bool:
    """Whether this version of vLLM can load the connector; None: there is no vLLM."""
    return vllm is not None and VLLM.fullmatch(vllm) is not None
