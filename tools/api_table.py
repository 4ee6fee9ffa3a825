"""Make docs/api.md's table and docs/openapi.json from `router.api.paths`: `.venv/bin/python tools/api_table.py`.

Of docs/api.md everything between the two marks is made here; the words around it are written by hand. A test compares.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

from router.api.openapi import document
from router.api.paths import PATHS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "api.md"
OPENAPI = DOCS / "openapi.json"
BEGIN = "<!-- made by tools/api_table.py: begin -->"
END = "<!-- made by tools/api_table.py: end -->"

_GROUPS = {
    "generate": "Text",
    "embed": "Embeddings and classes",
    "rank": "Scores",
    "audio": "Audio",
    "tokens": "Tokens",
    "about": "About the fleet",
    "operate": "Closed",
}


def made() -> str:
    """All that stands between the marks."""
    tables = []
    for group, rows in groupby(PATHS, key=lambda row: row.group):
        lines = ["| path | method | answered by | needs | |", "| --- | --- | --- | --- | --- |"]
        lines += [
            f"| `{row.template}` | {', '.join(row.methods)} | {row.how} | {row.needs} | {row.note} |" for row in rows
        ]
        tables.append(f"### {_GROUPS[group]}\n\n" + "\n".join(lines))
    return "\n\n".join([BEGIN, *tables, END])


def renew(page: str) -> str:
    """The page with the made part made again."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + made() + after


def openapi() -> str:
    """The file's text."""
    return json.dumps(document(), indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(renew(PAGE.read_text()))
    OPENAPI.write_text(openapi())
