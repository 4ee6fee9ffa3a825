"""Open-loop load on any OpenAI endpoint, and what it adds up to.

Requests leave when they are due, whatever became of the earlier ones, and latencies count from when they were due: a
server that stalls cannot hide the queue behind it. Ctrl-C ends sending and reports what was measured; once more cuts
what is still open. Ends with exit code 1 when not one request was answered. docs/load.md has formats and meanings.

examples:
  baton load http://127.0.0.1:8000 --rate 5 --requests 200
  baton load http://127.0.0.1:8000 --rate 20 --arrivals gamma --cv 3 --duration-s 60 --ttft-ms 500 --tpot-ms 40
  baton load http://127.0.0.1:8000 --input-tokens lognormal:p50=1000,p90=4000 --output-tokens uniform:50-200
  baton load http://127.0.0.1:8000 --trace conversation_trace.jsonl --speed 2 --duration-s 300 --out run.jsonl
  baton load http://127.0.0.1:8000 --trace run.jsonl --json
  baton load --trace AzureLLMInferenceTrace_conv.csv --dry-run
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Self

from baton.load_arrivals import Planned, finite, planned
from baton.load_view import Progress, need_matplotlib, plot, print_report, print_summary
from baton.output import emit, say
from cluster.errors import UsageError
from loadgen.ask import fit_of, model_of
from loadgen.body import Asking
from loadgen.http import Pool
from loadgen.prompts import Fit
from loadgen.record import Record, line_of
from loadgen.replay import Load, Replay, Sending
from loadgen.report import Report, Run, Targets, as_json, report_of
from loadgen.summary import summary_of
from loadgen.traces import FORMATS

BAD_SHOWN = 20
"""Left-out rows shown on a terminal; --json lists them all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton load`."""
    parser.add_argument("url", nargs="?", metavar="URL", help="the endpoint, like http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that the endpoint lists")
    add_load(parser.add_argument_group("what to send"))
    add_trace(parser.add_argument_group("from a trace"))
    _add_request(parser.add_argument_group("how to ask"))
    _add_result(parser.add_argument_group("what to report"))


def add_load(group: Any) -> None:
    """Flags for made-up load; `baton simulate` takes the same."""
    group.add_argument("--rate", type=finite, metavar="R", help="requests per second (default 1)")
    group.add_argument(
        "--arrivals", choices=("poisson", "constant", "gamma", "weibull"), help="how gaps vary (default poisson)"
    )
    group.add_argument(
        "--cv", type=finite, help="gaps' standard deviation over their mean, for gamma and weibull (default 2)"
    )
    lengths = "N, uniform:A-B, lognormal:p50=A,p90=B, lognormal:mean=A,cv=B or like:TRACE"
    group.add_argument("--input-tokens", metavar="N|DIST", help=f"{lengths} (default 512)")
    group.add_argument("--output-tokens", metavar="N|DIST", help="the same for answers (default 128)")
    group.add_argument("--prefix-tokens", type=_whole, metavar="N", help="prompts begin with N tokens of their group's")
    group.add_argument("--prefix-groups", type=_whole, default=1, metavar="G", help="how many groups (default 1)")
    group.add_argument(
        "--requests", type=_whole, metavar="N", help="end after so many (default 100 where none ends it)"
    )
    group.add_argument("--duration-s", type=finite, metavar="S", help="send for so long")
    group.add_argument("--speed", type=finite, default=1.0, metavar="X", help="time runs X times faster")
    group.add_argument(
        "--rate-scale", type=finite, default=1.0, metavar="X", help="X times the requests in the same time"
    )
    group.add_argument("--seed", type=_natural, default=0, help="the same seed sends the same load (default 0)")
    group.add_argument("--dry-run", action="store_true", help="say what would be sent, and send nothing")


def add_trace(group: Any) -> None:
    """Flags for a trace."""
    group.add_argument(
        "--trace", metavar="FILE", help="a trace file (also .gz), a ServeGen folder, or an --out of ours"
    )
    group.add_argument("--format", choices=(*FORMATS, "servegen"), help="default: by what is in it")
    group.add_argument("--from-s", type=_seconds, default=0.0, metavar="S", help="begin at this second of the trace")
    group.add_argument(
        "--tick-ms",
        type=_seconds,
        metavar="MS",
        help="spread stamps rounded to MS; 0 = as written (default: by format)",
    )
    group.add_argument("--skip-bad", action="store_true", help="leave bad rows out, count and list them")


def _add_request(group: Any) -> None:
    group.add_argument("--chat", action="store_true", help="chat completions instead of completions")
    group.add_argument(
        "--token-ids", type=_range, metavar="LOW-HIGH", help="send token ids of this range, for exact lengths"
    )
    group.add_argument(
        "--chars-per-token", type=finite, metavar="X", help="of this tokenizer (default: measured with two requests)"
    )
    group.add_argument(
        "--no-ignore-eos", action="store_true", help="let answers end early; needed where not vLLM serves"
    )
    group.add_argument("--extra-body", type=_mapping, default={}, metavar="JSON", help="put into every request's body")
    group.add_argument("--header", action="append", default=[], type=_header, metavar="NAME:VALUE", help="repeatable")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="sent as a bearer token")
    group.add_argument("--timeout-s", type=finite, default=600.0, metavar="S", help="per request (default %(default)g)")
    group.add_argument(
        "--drain-s", type=finite, default=10.0, metavar="S", help="after Ctrl-C wait for open answers (default 10)"
    )
    group.add_argument("--max-concurrency", type=_whole, metavar="N", help="never more open at once; no open loop then")


def _add_result(group: Any) -> None:
    for name, meaning in (
        ("ttft", "time to the first token"),
        ("tt2t", "from the first token to the second"),
        ("tpot", "time per token after the first"),
        ("e2e", "time to the end"),
    ):
        group.add_argument(f"--{name}-ms", type=finite, metavar="MS", help=f"target: {meaning}")
    group.add_argument("--out", type=Path, metavar="FILE", help="one JSON line per request; can be replayed by --trace")
    group.add_argument("--token-times", action="store_true", help="the time of every chunk in --out")
    group.add_argument("--plot", type=Path, metavar="FILE", help="a picture (PNG, SVG, PDF); needs matplotlib")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Send the load and print the report; 0 when something was answered, or nothing was to be sent."""
    if args.vllm_args:
        raise UsageError("`baton load` takes no vLLM flags")
    if args.url is None and not args.dry_run:
        raise UsageError("which endpoint? write `baton load http://HOST:PORT`")
    if args.token_ids and args.chat:
        raise UsageError("--token-ids needs completions: chat takes text only")
    if args.plot is not None:
        need_matplotlib()
    pool = Pool(args.url) if args.url else None
    if args.out is not None and args.trace is not None and args.out.exists() and args.out.samefile(args.trace):
        raise UsageError(f"--out {args.out} is the --trace itself, and would be overwritten")
    load = planned(args)
    _list_bad(load)
    if pool is None or args.dry_run:
        summary = summary_of(load.arrivals)
        emit(_json_of(summary, load)) if args.json else print_summary(summary)
        return 0
    import uvloop

    with _Out(args.out) as out:
        done, report = uvloop.run(_send(args, pool, load, out.write))
    if args.json:
        emit({**as_json(report), "bad_rows": list(load.bad)})
    else:
        print_report(report)
    if args.plot is not None:
        plot(args.plot, done.records)
    if done.stopped:
        return 130
    return 0 if report.completed or not load.arrivals else 1


async def _send(
    args: argparse.Namespace, pool: Pool, load: Planned, on_record: Callable[[Record], None]
) -> tuple[Load, Report]:
    headers = _headers(args)
    asking, notes = await _asking(args, pool.url, headers)
    sending = Sending(
        asking=asking,
        headers=headers,
        timeout_s=args.timeout_s,
        drain_s=args.drain_s,
        concurrency_max=args.max_concurrency,
        token_times=args.token_times,
    )
    planned_count = len(load.arrivals)
    with Progress(planned_count, load.arrivals[-1].at_s if load.arrivals else 0.0) as progress:
        replay = Replay(pool, sending, on_record, progress.tick)
        _on_signals(replay)
        done = await replay.run(load.arrivals)
    run_facts = Run(
        planned=planned_count,
        elapsed_s=done.elapsed_s,
        cpu_s=done.cpu_s,
        held_back=done.held_back,
        stopped=done.stopped,
        notes=(*load.notes, *notes, *([f"{len(load.bad)} bad rows of the trace were left out"] if load.bad else ())),
    )
    targets = Targets(args.ttft_ms, args.tt2t_ms, args.tpot_ms, args.e2e_ms)
    return done, report_of(done.records, run_facts, targets, done.gaps_s)


async def _asking(args: argparse.Namespace, url: str, headers: dict[str, str]) -> tuple[Asking, tuple[str, ...]]:
    """Model and prompt lengths, asked of the endpoint where flags do not say; with notes on what it did not say."""
    asking = Asking(
        model=args.model or await model_of(url, headers),
        chat=args.chat,
        vocabulary=args.token_ids,
        ignore_eos=not args.no_ignore_eos,
        salt=f"{args.seed} {secrets.token_hex(8)}",
        extra=args.extra_body,
    )
    if args.token_ids:
        return asking, ()
    if args.chars_per_token:
        return replace(asking, fit=Fit(args.chars_per_token)), ()
    fitted = await fit_of(url, headers, asking)
    if fitted is None:
        default = Fit().chars_per_token
        return asking, (
            f"the endpoint's `usage` was not to be had: prompts are made with {default:g} characters a token",
        )
    return replace(asking, fit=fitted), ()


def _on_signals(replay: Replay) -> None:
    """First Ctrl-C: send no more. Second: cut. SIGTERM counts as either."""

    def asked() -> None:
        if replay.load.stopped:
            replay.cut()
        else:
            replay.stop()
            say("stopping: open answers may still end; Ctrl-C again to cut them")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked)


class _Out:
    """The file of records: opened before the load, each line written as its request ends."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        if self._path is not None:
            try:
                self._file = self._path.open("wb")
            except OSError as error:
                raise UsageError(f"--out {self._path}: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as error:  # what was still to be written
            say(f"--out {self._path}: {error.strerror}; its last records are missing")

    def write(self, record: Record) -> None:
        """One more record. A full disk ends the file, not the load."""
        if self._file is None:
            return
        try:
            self._file.write(line_of(record))
        except OSError as error:
            say(f"--out {self._path}: {error.strerror}; no more records are written")
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # it tries to write the rest once more
                file.close()


def _headers(args: argparse.Namespace) -> dict[str, str]:
    found = dict(args.header)
    if args.api_key_file is not None:
        try:
            key = args.api_key_file.read_text().strip()
        except (OSError, UnicodeError) as error:
            raise UsageError(f"--api-key-file {args.api_key_file}: {error}") from None
        if not key.isprintable() or not key.isascii():
            raise UsageError(f"--api-key-file {args.api_key_file}: holds more than one line of printable characters")
        found["Authorization"] = f"Bearer {key}"
    return found


def _list_bad(load: Planned) -> None:
    for row in load.bad[:BAD_SHOWN]:
        say(f"left out: {row}")
    if len(load.bad) > BAD_SHOWN:
        say(f"left out: {len(load.bad) - BAD_SHOWN} more; --json lists them all")


def _json_of(summary: Any, load: Planned) -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(summary), "bad_rows": list(load.bad), "notes": list(load.notes)}


# flags' values


def _whole(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, 1 or more")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, 0 or more")
    return int(text)


def _seconds(text: str) -> float:
    return 0.0 if text.strip("0.") == "" else finite(text)


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise argparse.ArgumentTypeError(f"{text}: write the lowest and the first too high id, like 1000-30000")
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
