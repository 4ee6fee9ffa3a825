"""Make docs/exactness.md's table from `router.core.eligibility.RULES`: `.venv/bin/python tools/exact_table.py`.

Everything between the two marks is made here; the words around it are written by hand. A test compares.
"""

from __future__ import annotations

from pathlib import Path

from router.core.eligibility import RULES, Way

PAGE = Path(__file__).resolve().parents[1] / "docs" / "exactness.md"
BEGIN = "<!-- made by tools/exact_table.py: begin -->"
END = "<!-- made by tools/exact_table.py: end -->"


def made() -> str:
    """All that stands between the marks."""
    lines = ["| parameter | when | served | resumed | because |", "| --- | --- | --- | --- | --- |"]
    for way in (Way.AGGREGATED, Way.PLAIN, Way.SEEDED):
        for rule in (rule for rule in RULES if rule.way is way):
            resumed = "yes" if rule.resumable else "no"
            lines.append(f"| {rule.parameter} | {rule.form} | **{rule.way}** | {resumed} | {rule.why} |")
    return "\n\n".join([BEGIN, "\n".join(lines), END])


def renew(page: str) -> str:
    """The page with the made part made again."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + made() + after


if __name__ == "__main__":
    PAGE.write_text(renew(PAGE.read_text()))
