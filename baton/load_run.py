"""Runs one load: asks the endpoint, sends the load, reports it. Also has the parts that all ways of sending share."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol, Self

from baton.api_key_file import api_key_in
from baton.load_arrivals import PlannedLoad
from baton.load_faults import LoadFaults
from baton.load_sending import LoadSent, ManySenders, OneSender, Sender
from baton.load_sessions import conversations
from baton.load_view import LoadProgress
from baton.output import say
from cluster.errors import UsageError
from loadgen.ask import fit_of, model_of
from loadgen.body import Asking
from loadgen.prompts import Fit
from loadgen.record import Record, line_of
from loadgen.replay import RunningLoad, Sending
from loadgen.report import LoadReport, LoadRun, Targets, report_of


@dataclass(slots=True)
class LoadDone:
    """The records of a load, and its report."""

    records: list[Record]
    report: LoadReport
    stopped: bool
    died: bool
    """Whether a sender process died before its end."""


def targets_of(args: argparse.Namespace) -> Targets:
    """The targets in the flags."""
    return Targets(args.ttft_ms, args.tt2t_ms, args.tpot_ms, args.e2e_ms)


async def send(args: argparse.Namespace, url: str, load: PlannedLoad, faults: LoadFaults, out: Out) -> LoadDone:
    """Ask the endpoint, send the load with its faults, summarise it.

    Raises:
        UsageError: the endpoint does not answer, or a fault cannot be done.
    """
    headers = headers_of(args)
    asking, notes = await asking_of(args, url, headers)
    sending = sending_of(args, asking, headers)
    await faults.check(args, load.span_s)
    with LoadProgress(load.planned, load.span_s) as progress:
        sent = await _sent(args, url, load, sending, faults, out, progress)
    facts = LoadRun(
        planned=load.planned,
        elapsed_s=sent.load.elapsed_s,
        cpu_s=sent.cpu_s,
        held_back=sent.load.held_back,
        stopped=sent.load.stopped,
        senders=sent.senders,
        faults=tuple(faults.applied),
        notes=(*load.notes, *notes, *sent.notes),
    )
    report = report_of(sent.load.records, facts, targets_of(args), sent.load.gaps_s)
    return LoadDone(sent.load.records, report, sent.load.stopped, bool(sent.notes))


async def _sent(
    args: argparse.Namespace,
    url: str,
    load: PlannedLoad,
    sending: Sending,
    faults: LoadFaults,
    out: Out,
    progress: LoadProgress,
) -> LoadSent:
    """Send the load, and wait for its answers and faults."""

    def tick(now: RunningLoad) -> None:
        progress.tick(now)
        faults.tick(now.elapsed_s)

    if args.sessions is not None:
        one = OneSender(url)
        with interrupted(one):
            sent = await one.converse(conversations(args, sending.asking), sending, out.write, tick)
    else:
        sender = sender_of(args, url)
        with interrupted(sender):
            sent = await sender.send(load.arrivals, sending, out.write, tick)
    await faults.ended()
    return sent


def sender_of(args: argparse.Namespace, url: str) -> Sender:
    """One sending process, or several."""
    return OneSender(url) if args.senders == 1 else ManySenders(url, args.senders)


def sending_of(args: argparse.Namespace, asking: Asking, headers: dict[str, str]) -> Sending:
    """How requests are sent, by the flags."""
    return Sending(
        asking=asking,
        headers=headers,
        timeout_s=args.timeout_s,
        drain_s=args.drain_s,
        concurrency_max=args.max_concurrency,
        token_times=args.token_times,
        stages=not args.no_stages,
    )


async def asking_of(args: argparse.Namespace, url: str, headers: dict[str, str]) -> tuple[Asking, tuple[str, ...]]:
    """Model and prompt lengths, asked of the endpoint if flags do not give them; with notes on what is missing."""
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
        return asking, (f"the endpoint gave no `usage`: prompts are made with {default:g} characters a token",)
    return replace(asking, fit=fitted), ()


class Stoppable(Protocol):
    """A sender that Ctrl-C ends."""

    def stop(self) -> None:
        """Send no more; open answers may end."""

    def cut(self) -> None:
        """Cut open answers, and end now."""


@contextlib.contextmanager
def interrupted(sender: Stoppable) -> Iterator[None]:
    """In this block the first SIGINT or SIGTERM stops sending, and the second cuts open answers."""
    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            sender.cut()
        else:
            sender.stop()
            say("stopping: open answers may still end; Ctrl-C again to cut them")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


class Out:
    """The file of records. It is opened before the load; each line is written as its request ends. The old content
    stays until the first record: a load that never begins deletes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._begun = False

    def __enter__(self) -> Self:
        if self._path is not None:
            try:
                self._file = self._path.open("ab")
            except OSError as error:
                raise UsageError(f"--out {self._path}: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as error:  # the rest that was not written yet
            say(f"--out {self._path}: {error.strerror}; its last records are missing")

    def write(self, record: Record) -> None:
        """Write one record. A full disk ends the file, not the load."""
        if self._file is None or self._path is None:
            return
        try:
            if not self._begun:
                self._begun = True
                self._file.close()
                self._file = self._path.open("wb")
            self._file.write(line_of(record))
        except OSError as error:
            say(f"--out {self._path}: {error.strerror}; no more records are written")
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # close tries to write the rest once more
                file.close()


def headers_of(args: argparse.Namespace) -> dict[str, str]:
    """Headers of every request, by the flags.

    Raises:
        UsageError: the file of the API key cannot be used.
    """
    key = api_key_in(args.api_key_file)
    return {**dict(args.header), **({} if key is None else {"Authorization": f"Bearer {key}"})}
