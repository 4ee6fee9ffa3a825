"""The files of a measured run, read from their text. A wrong row is left out and reported by file and line; a file that
is wrong as a whole raises a UsageError.

A *stamped* run is a folder of LLMServingSim's ``bench/examples``: ``requests.jsonl`` (one request a line, with the
engine's own stamps), ``meta.json`` (vLLM's settings) and ``timeseries.csv``. A *steady* run is one row of a table of
means and percentiles (inference-sim's evaluation of vLLM 0.15.1).
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from cluster.errors import UsageError
from loadgen.traces.fields import cells, shown

_Raw = TypeVar("_Raw")
_Read = TypeVar("_Read")


class BadMeasurement(UsageError):
    """A row with a value that is not possible: its file and line, the field, the value, and what is wrong with it."""

    def __init__(self, where: str, field: str, value: object, why: str) -> None:
        super().__init__(f"{where}: {field} is {value}; {why}" if field else f"{where}: {why}")
        self.where, self.field, self.value, self.why = where, field, value, why

    def as_json(self) -> dict[str, str]:
        """The same as a JSON object."""
        return {"where": self.where, "field": self.field, "value": str(self.value), "reason": self.why}


@dataclass(frozen=True, slots=True)
class Stamps:
    """One request of a stamped run. Seconds since the first arrival, on the engine's clock."""

    input_tokens: int
    output_tokens: int
    arrived_s: float
    """When it reached the process: the wall clock's stamp, moved to the engine's clock (`read_requests`)."""
    queued_s: float
    scheduled_s: float
    first_token_s: float
    last_token_s: float


@dataclass(frozen=True, slots=True)
class Requests:
    """All requests of a stamped run, in order of arrival."""

    rows: tuple[Stamps, ...]
    began_unix_s: float
    """The first arrival, in Unix seconds of the wall clock."""
    left_out: tuple[BadMeasurement, ...] = ()
    """Rows of the file that are no valid requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSettings:
    """The engine's settings in a stamped run, from its ``meta.json``: many attributes, each of which the twin needs."""

    model: str
    vllm: str
    started_at: str
    """When the benchmark began, ISO 8601; empty where the file does not say."""
    gpu: str | None
    """Name of the device; None where the file does not say."""
    tp: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    memory_share: float
    num_blocks: int | None
    """Blocks of `block_size` tokens, with the one that is never given out; None where the file does not say."""
    block_size: int
    prefix_caching: bool
    async_scheduling: bool
    reserve_full_prompt: bool

    @property
    def longest(self) -> int | None:
        """Tokens of a prompt and its answer that the engine takes; None where the file does not say."""
        if self.max_model_len is not None or self.num_blocks is None:
            return self.max_model_len
        return (self.num_blocks - 1) * self.block_size


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a stamped run's time series."""

    at_s: float
    """Seconds since the benchmark's start, which is a little before the first arrival."""
    running: int
    waiting: int
    kv_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """One row of the table of steady runs, with many attributes, as the table has many columns. Times in ms."""

    number: str
    model: str
    gpu: str
    tp: int
    workload: str
    max_num_batched_tokens: int
    offload: bool
    """The table's ``cpu_offload``."""
    e2e_mean: float
    e2e_p90: float
    e2e_p99: float
    itl_mean: float
    """Published as inter-token latency: whole latency over output tokens, as the client counted these."""
    ttft_mean: float
    ttft_p90: float
    ttft_p99: float
    where: str = ""
    """File and line."""


MEMORY_SHARE_THEN = 0.9
"""Default of ``gpu_memory_utilization`` in vLLM 0.15 and 0.19: 0.19's resolved configuration shows it."""


RESOLUTION_S = 1e-6
"""The resolution in seconds of a wall clock's stamp in a double."""


RUN_S_MAX: Final = 30 * 86_400.0
"""No run lasts so many seconds: a larger time is in milliseconds, or counts from another moment."""


def read_requests(text: str, file: str, longest: int | None = None) -> Requests:
    """The requests in order of arrival, without the rows that are no valid requests.

    Arrivals are stamped by the wall clock, everything else by a monotonic one. The offset between the two is taken from
    the request that reached the engine fastest, which counts as having taken no time.

    Args:
        text: the file's text.
        file: its path, for errors.
        longest: tokens of a prompt and its answer that the engine takes (`MeasuredSettings.longest`); None: unknown.

    Raises:
        UsageError: the file has no valid request.
    """
    left_out: list[BadMeasurement] = []
    read = partial(_stamped, longest=longest)
    rows = _of_one_clock(_good(_json_lines(text, file), read, left_out), left_out)
    if not rows:
        raise left_out[0] if left_out else UsageError(f"{file}: no requests")
    offset = min(queued - arrived for _, (arrived, queued, *_), _ in rows)
    origin = min(arrived for _, (arrived, *_), _ in rows) + offset
    found = [
        Stamps(*tokens, *(stamp - origin for stamp in (arrived + offset, *rest)))
        for tokens, (arrived, *rest), _ in rows
    ]
    return Requests(tuple(sorted(found, key=lambda one: one.arrived_s)), origin - offset, tuple(left_out))


_Stamped = tuple[tuple[int, int], tuple[float, ...], str]
"""A row's tokens, its stamps, and where it stands."""

APART_S: Final = 60.0
"""A request cannot reach the engine so many seconds sooner than most others: its arrival is stamped wrongly."""

STUCK_S: Final = 600.0
"""Nor does it take so many seconds longer than most others: clients give up by then, and an unset stamp is 0."""


def _of_one_clock(rows: Iterable[_Stamped], left_out: list[BadMeasurement]) -> list[_Stamped]:
    """The rows whose arrivals are of one clock. One arrival that is an hour late would be the fastest request, and make
    all others an hour slower; one that is years early would be the first, and put the others years after the start.
    """
    found = list(rows)
    usual = statistics.median([queued - arrived for _, (arrived, queued, *_), _ in found] or [0.0])
    kept = []
    for each in found:
        arrived, queued, *_ = each[1]
        slower_s = queued - arrived - usual
        if not -APART_S <= slower_s <= STUCK_S:
            than = "sooner" if slower_s < 0 else "later"
            why = f"it would have reached the engine {abs(slower_s):.0f} s {than} than others do"
            left_out.append(BadMeasurement(each[2], "arrival_time", arrived, why))
        else:
            kept.append(each)
    return kept


_STAMPS = ("arrival_time", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")


def _stamped(row: Mapping[str, Any], where: str, longest: int | None) -> _Stamped:
    """A row's tokens and stamps. The engine's stamps must follow one another; the first is the wall clock's."""
    stamps = tuple(_number(row, name, where) for name in _STAMPS)
    if any(later < earlier - RESOLUTION_S for earlier, later in itertools.pairwise(stamps[1:])):
        why = f"{', '.join(_STAMPS)} must follow one another"
        raise BadMeasurement(where, "", "", f"stamps run backwards: {why}")
    if stamps[-1] - stamps[1] > RUN_S_MAX:
        why = f"write seconds on the clock of queued_ts, at most {RUN_S_MAX:.0f} after it"
        raise BadMeasurement(where, _STAMPS[-1], stamps[-1], why)
    prompt, answer = _whole(row, "input_toks", where), _whole(row, "output_toks", where)
    if longest is not None and prompt >= longest:
        why = f"the engine took at most {longest} tokens with the answer: see max_model_len and kv_cache in meta.json"
        raise BadMeasurement(where, "input_toks", prompt, why)
    return (prompt, answer), stamps, where


def read_settings(text: str, file: str) -> MeasuredSettings:
    """The settings in ``meta.json``; vLLM's defaults where it has none.

    Raises:
        UsageError: it is no JSON, or a field is missing or wrong.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: no JSON ({error})") from None
    if not isinstance(document, dict) or not isinstance(document.get("engine_kwargs"), dict):
        raise UsageError(f"{file}: engine_kwargs is missing: this is not the meta.json of a measured run")
    engine, kv = document["engine_kwargs"], _mapping(document, "kv_cache", file)
    scheduler = _mapping(_mapping(document, "resolved_config", file), "scheduler_config", file)
    gpu = _mapping(document, "hardware", file).get("device_name")
    if not isinstance(gpu, str | None):
        raise BadMeasurement(file, "hardware.device_name", shown(gpu), "write a text")
    for field in ("model", "max_num_seqs", "max_num_batched_tokens"):
        if not engine.get(field):
            raise UsageError(f"{file}: engine_kwargs.{field} is missing")
    return MeasuredSettings(
        model=str(engine["model"]),
        vllm=str(document.get("vllm_version", "?")),
        started_at=str(document.get("started_at") or ""),
        gpu=gpu,
        tp=_whole(engine, "tensor_parallel_size", file) if engine.get("tensor_parallel_size") else 1,
        max_num_seqs=_whole(engine, "max_num_seqs", file),
        max_num_batched_tokens=_whole(engine, "max_num_batched_tokens", file),
        max_model_len=_whole(engine, "max_model_len", file) if engine.get("max_model_len") else None,
        memory_share=_number(kv, "gpu_memory_utilization", file)
        if kv.get("gpu_memory_utilization")
        else MEMORY_SHARE_THEN,
        num_blocks=_whole(kv, "num_gpu_blocks", file) if kv.get("num_gpu_blocks") else None,
        block_size=_whole(kv, "block_size", file) if kv.get("block_size") else 16,
        prefix_caching=bool(kv.get("enable_prefix_caching", True)),
        async_scheduling=bool(scheduler.get("async_scheduling", True)),  # default on GPUs since vLLM 0.14
        reserve_full_prompt=bool(scheduler.get("scheduler_reserve_full_isl", True)),
    )


def read_gpu(text: str, file: str) -> str:
    """The device's name in LLMServingSim's ``config.json``, for runs whose meta.json does not have it.

    Raises:
        UsageError: there is no such field.
    """
    try:
        return str(json.loads(text)["nodes"][0]["instances"][0]["hardware"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UsageError(f"{file}: nodes[0].instances[0].hardware is missing") from None


def read_series(text: str, file: str) -> tuple[list[Sample], list[BadMeasurement]]:
    """The rows of ``timeseries.csv``, one a second; and those that are left out.

    Raises:
        UsageError: a column is missing.
    """
    left_out: list[BadMeasurement] = []
    rows = _table(text, file, ("t", "running", "waiting", "kv_cache_pct"))
    return list(_good(rows, _sample, left_out)), left_out


def _sample(row: Mapping[str, str], where: str) -> Sample:
    running, waiting = (round(_cell(row, name, where)) for name in ("running", "waiting"))
    at_s = _cell(row, "t", where)
    if abs(at_s) > RUN_S_MAX:
        why = f"write seconds since the run's start, at most {RUN_S_MAX:.0f}"
        raise BadMeasurement(where, "t", row["t"], why)
    return Sample(at_s, running, waiting, _cell(row, "kv_cache_pct", where))


TIMES = ("e2e_mean", "e2e_p90", "e2e_p99", "itl_mean", "ttft_mean", "ttft_p90", "ttft_p99")
SETTINGS = ("exp_id", "model", "hardware", "tp", "workload", "max_num_batched_tokens", "cpu_offload")


def read_steady(text: str, file: str) -> tuple[list[Steady], list[BadMeasurement]]:
    """The rows of the table of steady runs, and those that are left out.

    Raises:
        UsageError: the table has no row, or a column is missing.
    """
    left_out: list[BadMeasurement] = []
    found = list(_good(_table(text, file, (*SETTINGS, *TIMES)), _steady, left_out))
    if not found and not left_out:
        raise UsageError(f"{file}: no rows")
    return found, left_out


def _steady(row: Mapping[str, str], where: str) -> Steady:
    times = {name: _cell(row, name, where) for name in TIMES}
    wrong = next((name for name, value in times.items() if value <= 0), None)
    if wrong:
        raise BadMeasurement(where, wrong, row[wrong], "a time in ms is more than 0")
    return Steady(
        number=_number_of(row, where),
        model=row["model"],
        gpu=row["hardware"],
        tp=_positive(row, "tp", where),
        workload=row["workload"],
        max_num_batched_tokens=_positive(row, "max_num_batched_tokens", where),
        offload=_cell(row, "cpu_offload", where) != 0,
        where=where,
        **times,
    )


def _number_of(row: Mapping[str, str], where: str) -> str:
    """A row's ``exp_id``: `16` for 16.0; what is no whole number, or too large for a double, as it is written."""
    value = _cell(row, "exp_id", where)
    return str(int(value)) if value.is_integer() and abs(value) <= EXACT_MAX else row["exp_id"].strip()


EXACT_MAX: Final = 1 << 53
"""The largest whole number up to which a double holds each one."""


# -- fields --


def _good(
    rows: Iterable[tuple[str, _Raw | BadMeasurement]],
    read: Callable[[_Raw, str], _Read],
    left_out: list[BadMeasurement],
) -> Iterator[_Read]:
    """The rows that can be read; bad ones go to `left_out` and never stop the others."""
    for where, row in rows:
        try:
            if isinstance(row, BadMeasurement):
                raise row
            found = read(row, where)
        except BadMeasurement as error:
            left_out.append(error)
            continue
        yield found


def _json_lines(text: str, file: str) -> Iterator[tuple[str, dict[str, Any] | BadMeasurement]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        where = f"{file}:{number}"
        yield where, row if isinstance(row, dict) else BadMeasurement(where, "", "", "not a JSON object")


def _number(row: Mapping[str, Any], name: str, where: str) -> float:
    value = row.get(name)
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadMeasurement(where, name, shown(value), "write a number")
    return number


def _mapping(document: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """A section of ``meta.json``; empty if it is missing."""
    value = document.get(name) or {}
    if not isinstance(value, dict):
        raise BadMeasurement(where, name, shown(value), "write a mapping")
    return value


def _whole(row: Mapping[str, Any], name: str, where: str) -> int:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadMeasurement(where, name, repr(value), "write a whole number, 1 or more")
    return value


def _table(text: str, file: str, columns: tuple[str, ...]) -> list[tuple[str, dict[str, str] | BadMeasurement]]:
    header, *rows = text.splitlines() or [""]
    names = cells(header)
    missing = [name for name in columns if name not in names]
    if missing:
        raise UsageError(f"{file}:1: no column {missing[0]!r}; there must be {', '.join(columns)}")
    found: list[tuple[str, dict[str, str] | BadMeasurement]] = []
    for number, line in enumerate(rows, 2):
        where, values = f"{file}:{number}", cells(line)
        if not line.strip():
            continue
        if len(values) != len(names):
            why = f"{len(values)} columns where the header has {len(names)}"
            found.append((where, BadMeasurement(where, "", "", why)))
        else:
            found.append((where, dict(zip(names, values, strict=True))))
    return found


def _cell(row: Mapping[str, str], name: str, where: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadMeasurement(where, name, repr(row[name]), "write a number")
    return value


def _positive(row: Mapping[str, str], name: str, where: str) -> int:
    value = _cell(row, name, where)
    if value < 1 or value != int(value):
        raise BadMeasurement(where, name, row[name], "write a whole number, 1 or more")
    return int(value)
