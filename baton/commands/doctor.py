"""What is found and what is missing on this machine to run Baton.

Ends with exit code 0 when `baton up` can work, 1 when something it needs is missing.

example:
  baton doctor
  baton doctor --json
"""

from __future__ import annotations

import argparse

from baton.checks import Finding, Verdict, run_checks
from baton.output import emit
from cluster.errors import UsageError

_MARKS = {Verdict.OK: "[green]✓[/]", Verdict.NOTE: "[yellow]•[/]", Verdict.MISSING: "[red]✗[/]"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton doctor`."""
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 when nothing needed is missing."""
    if args.vllm_args:
        raise UsageError("`baton doctor` takes no vLLM flags")
    findings = run_checks()
    lacking = [finding for finding in findings if finding.verdict is Verdict.MISSING]
    if args.json:
        listed = [{"what": f.what, "verdict": f.verdict.value, "found": f.found, "fix": f.fix} for f in findings]
        emit({"ok": not lacking, "findings": listed})
    else:
        _print(findings, lacking)
    return 1 if lacking else 0


def _print(findings: list[Finding], lacking: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    for finding in findings:
        console.print(f"{_MARKS[finding.verdict]} [bold]{finding.what:<11}[/] {escape(finding.found)}", soft_wrap=True)
        if finding.fix:
            console.print(f"{'':13} [dim]→ {escape(finding.fix)}[/]", soft_wrap=True)
    verdict = f"{len(lacking)} missing: {', '.join(f.what for f in lacking)}" if lacking else "ready for `baton up`"
    console.print(f"\n{verdict}", soft_wrap=True)
