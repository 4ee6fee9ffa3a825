"""A finding: one thing in a file that does not fit, before it has a line number. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.spec.problems import FieldPath, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule has found."""

    path: FieldPath
    message: str
    fix: str
    uses: tuple[FieldPath, ...] = ()
    """What it was concluded from, beside `path`."""
    severity: Severity = Severity.ERROR
    value: str | None = None
    """Shown instead of the file's own text, where that is a secret."""
