"""Make docs/exactness.md's tables: `.venv/bin/python tools/exact_table.py`.

What a request may ask for is from `router.core.eligibility.RULES`; kinds of models are from docs/benchmarks/kinds.json,
which live tests write (`pytest -m long tests/live/test_architectures.py --publish-kinds`). Everything between two marks
is made here; the words around them are written by hand. A test compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from router.core.eligibility import RULES, Way

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "exactness.md"
SEEN = DOCS / "benchmarks" / "kinds.json"
BEGIN = "<!-- made by tools/exact_table.py: begin -->"
END = "<!-- made by tools/exact_table.py: end -->"
BEGIN_KINDS = "<!-- kinds, made by tools/exact_table.py: begin -->"
END_KINDS = "<!-- kinds, made by tools/exact_table.py: end -->"

KINDS: Final = {
    "dense": "dense, every head with keys and values of its own (Llama), float32",
    "gqa": "grouped queries (Llama), float32",
    "mla": "latent attention (DeepSeek-V2), float32",
    "experts": "mixture of experts, one rank (Mixtral), float32",
    "sliding": "sliding windows among full attention (Gemma 3), float32",
    "mamba": "Mamba hybrid in float32 (Falcon-H1)",
    "mamba 16 bits": "Mamba hybrid in vLLM's own choice of the type, 16 bits",
    "vision": "pictures (Idefics3)",
    "adapter": "a LoRA adapter of which both agents tell one digest",
    "adapter unknown": "a LoRA adapter of which they tell two, or none",
    "tp 1 to 2": "tensor parallel: P on one rank, D on two (grouped queries, float32)",
    "tp 2 to 1": "tensor parallel: P on two ranks, D on one",
    "fp8": "keys and values in fp8 (`--kv-cache-dtype fp8_e5m2`, grouped queries)",
    "speculation": "speculation by n-grams",
    "parsers": "reasoning and tool parsers, chats with and without tools",
}
"""The rows, in order, and what was run for each. Where no type is named, vLLM chose it."""


COLUMNS: Final = (
    "kind",
    "served, engines by URL with vLLM's connector",
    "served, as `baton up` starts: Baton's connector",
    "because",
    "answers compared",
)
AS_IT_STARTS: Final = ", as `baton up` starts"
"""The end of the name of a row whose engines `baton up` started."""


def made() -> str:
    """All that stands between the marks of requests."""
    lines = ["| parameter | when | served | resumed | because |", "| --- | --- | --- | --- | --- |"]
    for way in (Way.AGGREGATED, Way.PLAIN, Way.SEEDED):
        for rule in (rule for rule in RULES if rule.way is way):
            resumed = "yes" if rule.resumable else "no"
            lines.append(f"| {rule.parameter} | {rule.form} | **{rule.way}** | {resumed} | {rule.why} |")
    return "\n\n".join([BEGIN, "\n".join(lines), END])


def made_kinds() -> str:
    """All that stands between the marks of kinds."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    rows = json.loads(SEEN.read_text())
    for kind, words in KINDS.items():
        two = [rows.get(kind), rows.get(kind + AS_IT_STARTS)]
        told = [words, *(f"**{row['way']}**" if row else "not run" for row in two), _because(*two)]
        told.append(str(sum(row["answers"] for row in two if row)))
        lines.append("| " + " | ".join(each.replace("|", "/") for each in told) + " |")
    versions = ", ".join(sorted({f"vLLM {row['vllm']}" for row in rows.values()}))
    return "\n\n".join([BEGIN_KINDS, "\n".join(lines), f"Seen with {versions}.", END_KINDS])


def _because(by_url: Mapping[str, Any] | None, started: Mapping[str, Any] | None) -> str:
    """Why requests went that way; twice, if the reasons differ."""
    first, second = (str(row["because"]) if row else "" for row in (by_url, started))
    return f"{first}; `baton up`: {second}" if first and second and first != second else first or second


def renew(page: str) -> str:
    """The page with the made parts made again."""
    page = _with(page, BEGIN_KINDS, END_KINDS, made_kinds())
    return _with(page, BEGIN, END, made())


def _with(page: str, begin: str, end: str, text: str) -> str:
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return before + text + after


if __name__ == "__main__":
    PAGE.write_text(renew(PAGE.read_text()))
