"""The HTML page that reports share: text, tables and pictures in one file that loads nothing from elsewhere."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence

from baton import __version__

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; border-bottom: 1px solid #e4e4e4; vertical-align: top; }
th { color: #666; font-weight: normal; }
td:first-child, th:first-child, td.words, th.words { text-align: left; }
.note { color: #8a5a00; } .error { color: #a40000; } .faint { color: #666; }
img { max-width: 100%; height: auto; }
"""

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(title: str, parts: Iterable[str], command: str, note: str) -> str:
    """The whole page.

    Args:
        title: plain text.
        parts: HTML; empty ones are left out.
        command: the command that made the page, for its last line.
        note: plain text, also for the last line.
    """
    name = html.escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{name}</title>\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n<h1>{name}</h1>\n" + "\n".join(each for each in parts if each) + "\n"
        f'<p class="faint">{html.escape(command)} {html.escape(__version__)}. {html.escape(note)}</p>\n'
        "</body>\n</html>\n"
    )


def section(title: str, inside: str) -> str:
    """A heading with HTML below it; empty without that HTML."""
    return f"<h2>{html.escape(title)}</h2>\n{inside}" if inside else ""


def lines(texts: Sequence[str]) -> str:
    """A paragraph of plain lines."""
    return f"<p>{'<br>'.join(map(html.escape, texts))}</p>" if texts else ""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], words: Iterable[int] | None = ()) -> str:
    """A table of plain texts. The first column and the columns `words` (None: all) are left-aligned, others right.

    Empty without rows; without columns it has no heading.
    """
    left = None if words is None else frozenset(words)

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="words"' if left is None or at in left else "" for at in range(len(cells))]
        told = (f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(told)}</tr>"

    if not rows:
        return ""
    head = [row(columns, "th")] if columns else []
    return "<table>\n" + "\n".join([*head, *(row(cells, "td") for cells in rows)]) + "\n</table>"


def picture(alt: str, svg: bytes) -> str:
    """A picture as an image of its own: its ids cannot meet another picture's, and no script in it can run."""
    return f'<img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}">'
