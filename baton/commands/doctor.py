"""What is found and what is missing on this machine to run Baton; with --engine, in a vLLM server that already runs.

Ends with exit code 0 when nothing that is needed is missing, 1 otherwise.

examples:
  baton doctor
  baton doctor --engine http://10.0.0.1:8000
"""

from __future__ import annotations

import argparse

from baton.checks import CheckVerdict, DoctorFinding, run_checks
from baton.engine_checks import check_engine
from baton.output import emit
from cluster.errors import UsageError

_MARKS = {CheckVerdict.OK: "[green]✓[/]", CheckVerdict.NOTE: "[yellow]•[/]", CheckVerdict.MISSING: "[red]✗[/]"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton doctor`."""
    parser.add_argument(
        "--engine", metavar="URL", help="look at this vLLM server instead: can the router use it as it is?"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 when nothing needed is missing."""
    if args.vllm_args:
        raise UsageError("`baton doctor` takes no vLLM flags")
    if args.engine is not None and not args.engine.startswith(("http://", "https://")):
        raise UsageError(f"--engine {args.engine}: not a URL; write http://HOST:PORT")
    findings = run_checks() if args.engine is None else check_engine(args.engine)
    lacking = [finding for finding in findings if finding.verdict is CheckVerdict.MISSING]
    if args.json:
        listed = [{"what": f.what, "verdict": f.verdict.value, "found": f.found, "fix": f.fix} for f in findings]
        emit({"ok": not lacking, "findings": listed})
    else:
        _print(findings, lacking, "ready for `baton up`" if args.engine is None else "the router can use it")
    return 1 if lacking else 0


def _print(findings: list[DoctorFinding], lacking: list[DoctorFinding], fine: str) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    for finding in findings:
        console.print(f"{_MARKS[finding.verdict]} [bold]{finding.what:<13}[/] {escape(finding.found)}", soft_wrap=True)
        if finding.fix:
            console.print(f"{'':15} [dim]→ {escape(finding.fix)}[/]", soft_wrap=True)
    verdict = f"{len(lacking)} missing: {', '.join(f.what for f in lacking)}" if lacking else fine
    console.print(f"\n{verdict}", soft_wrap=True)
