"""One of the processes of `baton load --senders N`: reads its part of the load on stdin, writes records to stdout.

The first line is the job; then `start MOMENT`, later perhaps `stop` or `cut`, which may also come instead of `start`.
If stdin ends, the parent is gone: open requests are cut, and this process ends.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec
import uvloop

from baton.load_sending import LINE_BYTES_MAX, Got, Job, SenderEnded, SenderReady, Stands, Told, encoded_gaps
from loadgen.http import LoadConnections
from loadgen.record import Record
from loadgen.replay import LoadShard, Replay, RunningLoad


class SenderPart:
    """This sender's part of a load."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._replay = Replay(LoadConnections(job.url), job.sending, self._record, self._tick)
        self._told = 0

    async def run(self, start: float) -> None:
        """Send this part, with second 0 of the load at `start` (`time.perf_counter`), and report its records."""
        load = await self._replay.run(self._job.arrivals, LoadShard(self._job.first, self._job.step, start))
        gaps = encoded_gaps(load.gaps_s)
        _tell(SenderEnded(load.sent, load.held_back, load.cpu_s, load.elapsed_s, gaps))

    def obey(self, word: str) -> None:
        """Obey a line of the parent: `stop` sends no more; any other line cuts open requests."""
        if word == "stop":
            self._replay.stop()
        else:
            self._replay.cut()

    def _record(self, record: Record) -> None:
        _tell(Got(record))

    def _tick(self, load: RunningLoad) -> None:
        if load.sent != self._told:
            self._told = load.sent
            _tell(Stands(load.sent))


def _tell(told: Told) -> None:
    """Write one line; this process ends if its parent is gone."""
    try:
        sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
        sys.stdout.buffer.flush()
    except OSError:
        sys.exit(1)


async def _main() -> None:
    loop = asyncio.get_running_loop()
    words = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(words), sys.stdin)
    line = await words.readline()
    if not line:
        return
    part = SenderPart(msgspec.json.decode(line, type=Job))
    _tell(SenderReady())
    first, _, moment = (await words.readline()).decode().strip().partition(" ")
    if first != "start":
        if first:  # stopped before its start: it has sent nothing, and ends in order
            _tell(SenderEnded(sent=0, held_back=0, cpu_s=0.0, elapsed_s=0.0, gaps=""))
        return
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(_listen(words, part))
        await part.run(float(moment))
        listening.cancel()


async def _listen(words: asyncio.StreamReader, part: SenderPart) -> None:
    while line := await words.readline():
        part.obey(line.decode().strip())
    part.obey("cut")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(_main())
