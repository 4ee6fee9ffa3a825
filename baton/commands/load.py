"""Open-loop load on any OpenAI endpoint, and a report of it.

Requests leave when they are due, whatever became of the earlier ones, and latencies count from when they were due: a
server that stalls cannot hide the queue behind it. Ctrl-C ends sending and reports what was measured; a second one cuts
open requests. Rows of a trace that cannot be read are left out and listed at the end. docs/load.md has formats and
meanings.

exit codes: 0 some request was answered (--find-goodput: found; --compare: nothing is surely worse), 1 not (or a sender
process died), 2 wrong usage, or nothing to send or compare, 130 stopped

examples:
  baton load http://127.0.0.1:8000 --rate 5 --requests 200
  baton load http://127.0.0.1:8000 --rate 20 --arrivals gamma --cv 3 --duration-s 60 --ttft-ms 500 --tpot-ms 40
  baton load http://127.0.0.1:8000 --input-tokens lognormal:p50=1000,p90=4000 --output-tokens uniform:50-200
  baton load http://127.0.0.1:8000 --trace conversation_trace.jsonl --speed 2 --duration-s 300 --out run.jsonl
  baton load http://127.0.0.1:8000 --find-goodput --ttft-ms 500 --tpot-ms 40 --attainment 0.95 --html goodput.html
  baton load http://127.0.0.1:8000 --rate 2000 --duration-s 60 --senders 4
  baton load http://127.0.0.1:8000 --sessions 20 --think-s exponential:5 --turns 6 --duration-s 300
  baton load http://127.0.0.1:8000 --rate 5 --duration-s 90 --fault "30s kill prefill-0" --html report.html
  baton load --compare before.jsonl after.jsonl --ttft-ms 500
  baton load --trace AzureLLMInferenceTrace_conv.csv --dry-run
"""

from __future__ import annotations

import argparse
from typing import Any

from baton import load_goodput, load_sessions
from baton.load_arrivals import PlannedLoad, planned
from baton.load_compare import compare_files
from baton.load_faults import LoadFaults
from baton.load_flags import (
    add_faults,
    add_load,
    add_request,
    add_result,
    add_search,
    add_sessions,
    add_trace,
)
from baton.load_found import Goodput
from baton.load_html import goodput_page, report_page, write_page
from baton.load_plots import need_matplotlib, plot
from baton.load_run import LoadDone, Out, send
from baton.load_view import print_goodput, print_report, print_summary
from baton.output import emit, say
from baton.unused_flags import refuse_given
from baton.written import check_folders, check_picture, check_written
from cluster.errors import UsageError
from loadgen.http import LoadConnections
from loadgen.report import as_json
from loadgen.summary import summary_of

__all__ = ["add_arguments", "add_load", "add_trace", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton load`."""
    parser.add_argument("url", nargs="?", metavar="URL", help="the endpoint, like http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that the endpoint lists")
    add_load(parser.add_argument_group("what to send"))
    trace = parser.add_argument_group("from a trace")
    add_trace(trace)
    trace.add_argument("--strict", action="store_true", help="the first bad row ends the command")
    add_search(parser.add_argument_group("find goodput"))
    add_sessions(parser.add_argument_group("conversations, in a closed loop"))
    add_faults(parser.add_argument_group("what goes wrong meanwhile"))
    add_request(parser.add_argument_group("how to ask"))
    add_result(parser.add_argument_group("what to report"))


def run(args: argparse.Namespace) -> int:
    """Send the load and print the report; the module's docstring has the exit codes."""
    if args.vllm_args:
        raise UsageError("`baton load` takes no vLLM flags")
    if args.compare is not None:
        return compare_files(args)
    if args.url is None and not args.dry_run:
        raise UsageError("which endpoint? write `baton load http://HOST:PORT`")
    _refuse_unused(args)
    if args.token_ids and args.chat:
        raise UsageError("--token-ids needs completions: chat takes text only")
    if args.plot is not None or args.html is not None:
        need_matplotlib("--plot" if args.plot is not None else "--html")
    written = {"--out": args.out, "--html": args.html, "--plot": args.plot}
    check_folders(written)
    check_picture("--plot", args.plot)
    pool = None if args.url is None else LoadConnections(args.url)
    read = ("trace", "input_tokens", "output_tokens", "faults", "api_key_file")
    check_written(written, [(f"--{name.replace('_', '-')}", getattr(args, name)) for name in read])
    if args.find_goodput:
        load_goodput.check(args)
        assert pool is not None
        return _find(args, pool.url)
    load = load_sessions.planned(args) if args.sessions is not None else planned(args, strict=args.strict)
    load_sessions.check(args)
    if args.sessions is None and not load.planned:
        left_out = f"; {load.bad[0]}" if load.bad else ""
        raise UsageError(f"the load holds no request: see --rate, --duration-s, --trace and --from-s{left_out}")
    faults = LoadFaults.of(args)
    if pool is None or args.dry_run:
        return _dry_run(args, load)
    return _send(args, pool.url, load, faults)


def _refuse_unused(args: argparse.Namespace) -> None:
    """Refuse a flag that has no effect without another one."""
    if not args.find_goodput:
        refuse_given(args, load_goodput.FLAGS, "belongs to a search: give --find-goodput")
    if args.out is None:
        refuse_given(args, ["token_times"], "writes times into the records of --out: give --out FILE")
    if not args.fault and args.faults is None:
        refuse_given(args, ["target", "cluster"], "says where faults find instances: give --fault or --faults")
    if args.dry_run:
        refuse_given(args, ["out", "html", "plot"], "writes the results of a load, and --dry-run sends none")
    if args.senders > 1:
        why = "counts the open requests of one process, and --senders makes several: leave one out"
        refuse_given(args, ["max_concurrency"], why)


def _dry_run(args: argparse.Namespace, load: PlannedLoad) -> int:
    if args.sessions is not None:
        raise UsageError("--dry-run shows a schedule, and --sessions has none: its turns follow the answers")
    summary = summary_of(load.arrivals)
    emit(_json_of(summary, load)) if args.json else print_summary(summary)
    for note in load.notes if not (args.json or load.bad) else ():  # `_list_bad` says more about bad rows
        say(note)
    _list_bad(load)
    return 0


def _send(args: argparse.Namespace, url: str, load: PlannedLoad, faults: LoadFaults) -> int:
    import uvloop

    with Out(args.out) as out:
        done: LoadDone = uvloop.run(send(args, url, load, faults, out))
    report = done.report
    try:  # files first: stdout may be closed
        _write_files(args, url, load, done)
    finally:  # a file that cannot be written costs no report
        if args.json:
            emit({**as_json(report), "bad_rows": list(load.bad)})
        else:
            print_report(report)
        _list_bad(load)
    if done.stopped:
        return 130
    if done.died:
        return 1
    return 0 if report.completed or not report.sent else 1


def _write_files(args: argparse.Namespace, url: str, load: PlannedLoad, done: LoadDone) -> None:
    """Write the page and the picture that flags ask for; a page that cannot be written costs no picture."""
    try:
        if args.html is not None:
            write_page(args.html, report_page(url, done.report, done.records, load.bad))
    finally:
        if args.plot is not None:
            plot(args.plot, done.records, done.report)


def _find(args: argparse.Namespace, url: str) -> int:
    import uvloop

    if args.dry_run:
        raise UsageError("--dry-run shows one load, and --find-goodput sends many: leave one out")
    found: Goodput = uvloop.run(load_goodput.find(args, url))
    try:
        if args.html is not None:
            write_page(args.html, goodput_page(url, found))
    finally:  # a page that cannot be written costs no result
        if args.json:
            emit(found.as_json())
        else:
            print_goodput(found)
    return found.exit_code


def _list_bad(load: PlannedLoad) -> None:
    for line in load.left_out():
        say(line)


def _json_of(summary: Any, load: PlannedLoad) -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(summary), "bad_rows": list(load.bad), "notes": list(load.notes)}
