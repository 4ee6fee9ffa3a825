"""The flags of `baton load`, and their values. `baton simulate` and `baton plan` take those of load and trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from baton.cluster_flag import cluster_name
from baton.load_arrivals import scale
from baton.number_flags import above_zero, zero_or_more
from cluster.registry.registry import DEFAULT_CLUSTER
from loadgen.traces import FORMATS


def add_load(group: Any, *, sends: bool = True) -> None:
    """Flags for made-up load. Commands that send nothing take the same; they refuse --dry-run, and do not list it."""
    group.add_argument("--rate", type=above_zero, metavar="R", help="requests per second (default 1)")
    group.add_argument(
        "--arrivals", choices=("poisson", "constant", "gamma", "weibull"), help="how gaps vary (default poisson)"
    )
    group.add_argument(
        "--cv", type=above_zero, help="gaps' standard deviation over their mean, for gamma and weibull (default 2)"
    )
    dry = "say what would be sent, and send nothing" if sends else argparse.SUPPRESS
    lengths = "N, uniform:A-B, lognormal:p50=A,p90=B, lognormal:mean=A,cv=B or like:TRACE"
    group.add_argument("--input-tokens", metavar="N|DIST", help=f"{lengths} (default 512)")
    group.add_argument("--output-tokens", metavar="N|DIST", help="the same for answers (default 128)")
    group.add_argument("--prefix-tokens", type=_whole, metavar="N", help="prompts of a group share N first tokens")
    group.add_argument("--prefix-groups", type=_whole, metavar="G", help="how many groups (default 1)")
    group.add_argument(
        "--requests", type=_whole, metavar="N", help="end after N requests (without --trace or --duration-s: 100)"
    )
    group.add_argument("--duration-s", type=above_zero, metavar="S", help="send for S seconds")
    group.add_argument("--speed", type=above_zero, default=1.0, metavar="X", help="time runs X times faster")
    group.add_argument(
        "--rate-scale", type=scale, default=1.0, metavar="X", help="X times the requests in the same time"
    )
    group.add_argument("--seed", type=_natural, default=0, help="the same seed sends the same load (default 0)")
    group.add_argument("--dry-run", action="store_true", help=dry)


def add_trace(group: Any) -> None:
    """Flags for a trace."""
    group.add_argument(
        "--trace", metavar="FILE", help="a trace file (also .gz), a ServeGen folder, or an --out of ours"
    )
    group.add_argument("--format", choices=(*FORMATS, "servegen"), help="its format (default: by its content)")
    group.add_argument(
        "--from-s", type=zero_or_more, default=0.0, metavar="S", help="begin at this second of the trace"
    )
    group.add_argument(
        "--tick-ms",
        type=zero_or_more,
        metavar="MS",
        help="spread stamps rounded to MS; 0 = as written (default: by format)",
    )
    group.add_argument("--skip-bad", action="store_true", help="bad rows are left out anyway; kept for old scripts")


def add_request(group: Any) -> None:
    """Flags that say how requests are written and sent."""
    group.add_argument("--chat", action="store_true", help="chat completions instead of completions")
    group.add_argument(
        "--token-ids", type=_range, metavar="LOW-HIGH", help="send token ids of this range, for exact lengths"
    )
    group.add_argument(
        "--chars-per-token",
        type=above_zero,
        metavar="X",
        help="of this tokenizer (default: measured with two requests)",
    )
    group.add_argument(
        "--no-ignore-eos", action="store_true", help="let answers end early; needed with servers other than vLLM"
    )
    group.add_argument("--extra-body", type=_mapping, default={}, metavar="JSON", help="put into every request's body")
    group.add_argument("--header", action="append", default=[], type=_header, metavar="NAME:VALUE", help="repeatable")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="sent as a bearer token")
    group.add_argument(
        "--timeout-s", type=above_zero, default=600.0, metavar="S", help="per request (default %(default)g)"
    )
    group.add_argument(
        "--drain-s", type=above_zero, default=10.0, metavar="S", help="after Ctrl-C wait for open answers (default 10)"
    )
    group.add_argument(
        "--max-concurrency",
        type=_whole,
        metavar="N",
        help="at most N requests open at once; the load is then not open-loop",
    )
    group.add_argument(
        "--senders", type=_senders, default=1, metavar="N", help="processes that share the load (default 1)"
    )
    group.add_argument("--no-stages", action="store_true", help="do not ask for the router's timing parts")


def add_search(group: Any) -> None:
    """Flags of `--find-goodput`."""
    group.add_argument(
        "--find-goodput",
        action="store_true",
        help="find the highest open-loop rate at which attainment holds; the search begins at --rate",
    )
    group.add_argument(
        "--attainment",
        type=_share,
        metavar="SHARE",
        help="share that must meet all targets (default 0.95)",
    )
    group.add_argument("--precision", type=_share, metavar="P", help="each load is bisected this finely (default 0.04)")
    group.add_argument(
        "--repeats", type=_whole, metavar="K", help="loads drawn; under 6 there is no interval (default 6)"
    )
    group.add_argument("--trial-s", type=above_zero, metavar="S", help="length of a trial near goodput (default 30)")
    group.add_argument("--top-rate", type=above_zero, metavar="R", help="try no higher rate")
    group.add_argument("--search-s", type=above_zero, metavar="S", help="end after S seconds with the result so far")


def add_sessions(group: Any) -> None:
    """Flags of conversations in a closed loop."""
    group.add_argument("--sessions", type=_whole, metavar="N", help="users at a time, each waiting for its answers")
    group.add_argument(
        "--think-s",
        metavar="S|DIST",
        help="from an answer to the next message: 2, uniform:1-5, exponential:3 (default 1)",
    )
    group.add_argument("--turns", type=_whole, metavar="N", help="messages of a conversation (default 4)")


def add_faults(group: Any) -> None:
    """Flags of faults during the load."""
    group.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="TEXT",
        help='repeatable: "30s kill prefill-0", "30s drain decode-1", "20s slow decode-0 factor=3 seconds=10"',
    )
    group.add_argument("--faults", type=Path, metavar="FILE", help="the same, one a line")
    group.add_argument(
        "--target",
        action="append",
        default=[],
        type=_target,
        metavar="NAME=URL",
        help="repeatable: an instance that is not of `baton up`: a mock's own URL, or an agent's",
    )
    group.add_argument(
        "--cluster",
        type=cluster_name,
        metavar="NAME",
        help=f"name of the cluster that `--fault` takes instances of (default: {DEFAULT_CLUSTER})",
    )


def add_result(group: Any) -> None:
    """Flags of targets, and of files and forms of the result."""
    for name, meaning in (
        ("ttft", "time to the first token"),
        ("tt2t", "from the first token to the second"),
        ("tpot", "time per token after the first"),
        ("e2e", "time to the end"),
    ):
        group.add_argument(f"--{name}-ms", type=above_zero, metavar="MS", help=f"target: {meaning}")
    group.add_argument("--out", type=Path, metavar="FILE", help="one JSON line per request; can be replayed by --trace")
    group.add_argument("--token-times", action="store_true", help="the time of every chunk in --out")
    group.add_argument("--plot", type=Path, metavar="FILE", help="a picture (PNG, SVG, PDF); needs matplotlib")
    group.add_argument("--html", type=Path, metavar="FILE", help="the whole report as one page; needs matplotlib")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout")
    group.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="send nothing: what B's --out file changes against A's",
    )


# flags' values


SENDERS_MAX = 256
"""Most processes that share a load."""

WHOLE_MAX = 10**15
"""The largest whole number of a flag: it has room to be multiplied in 64 bits."""


def _whole(text: str) -> int:
    return _number(text, 1)


def _senders(text: str) -> int:
    number = _whole(text)
    if number > SENDERS_MAX:
        raise argparse.ArgumentTypeError(f"{text} is more than {SENDERS_MAX}; each is a process that keeps a core busy")
    return number


def _natural(text: str) -> int:
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    if not text.isdecimal() or len(text) > len(str(WHOLE_MAX)) or not least <= int(text) <= WHOLE_MAX:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, {least} or more, up to {WHOLE_MAX:,}")
    return int(text)


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise argparse.ArgumentTypeError(f"{text}: write the lowest id and the first above the range, like 1000-30000")
    return int(low), int(high)


def _mapping(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text}: not a JSON object")
    return found


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not text.isprintable() or not text.isascii():
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME:VALUE")
    return name.strip(), value.strip()


def _share(text: str) -> float:
    value = above_zero(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text} must lie between 0 and 1")
    return value


def _target(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not name or not equals or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=URL, like prefill-0=http://127.0.0.1:9000")
    return name, url.rstrip("/")
