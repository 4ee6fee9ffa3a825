"""Replay measured runs of real engines through the twin, and show what it predicts beside what was measured.

PATH is a folder of one run (requests.jsonl, meta.json, timeseries.csv), a table of steady runs (a .csv), or a folder
that holds some of these. Costs come from the shipped profiles. One number is fitted to published steady runs: how many
steps a busy server delays an answer (docs/validation.md, which also lists where to get such runs, and the results).

examples:
  baton validate $BATON_DATA/measured
  baton validate $BATON_DATA/measured/vllm-0.19-rtx4090-llama-3.1-8b --series series.csv
  baton validate $BATON_DATA/measured/vllm-0.15-h100.csv --row 16 --seeds 3
  baton validate $BATON_DATA/measured/vllm-0.15-h100.csv --row 16 --no-profiles
  baton validate runs/mine --profile costs/profiles/llmservingsim.json --json
  baton validate runs/mine --config acme/chat-moe=models/chat-moe/config.json
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from baton.file_kinds import exists, is_file, is_folder
from baton.output import emit, say
from baton.written import check_folders, check_written
from cluster.errors import UsageError
from cluster.text_file import rows_in, text_in

if TYPE_CHECKING:
    from costs.model import ModelShape
    from costs.profile import Profile
    from sim.validate.figures import RunComparison
    from sim.validate.measured import Steady
    from sim.validate.stamped import Stamped
    from sim.validate.steady import SteadyLoad

Replay = Callable[[], "RunComparison"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `baton validate`."""
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="a run's folder, a table, or a folder of them"
    )
    parser.add_argument("--row", action="append", metavar="ID", help="only this row of a table (exp_id); repeatable")
    costs = parser.add_mutually_exclusive_group()
    costs.add_argument(
        "--profile", type=Path, metavar="FILE", help="fits to use instead of the shipped ones, as in costs/profiles/"
    )
    costs.add_argument(
        "--no-profiles", action="store_true", help="predict as for models without a profile: by the roofline of the GPU"
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="MODEL=FILE",
        help="config.json of a model that does not ship, by its name in the runs; repeatable",
    )
    parser.add_argument(
        "--seeds", type=_whole, default=5, metavar="N", help="loads drawn for each row of a table (default %(default)s)"
    )
    parser.add_argument(
        "--share", type=_share, default=0.1, metavar="X", help="part of each row's load to replay (default %(default)s)"
    )
    parser.add_argument("--new-prompts", action="store_true", help="a table's loads never send the same question twice")
    parser.add_argument("--first-token-ms", type=_ms, metavar="MS", help="CPU time of a first token, in a table's runs")
    parser.add_argument("--series", type=Path, metavar="FILE", help="write the time series of both sides (CSV)")
    parser.add_argument("--markdown", action="store_true", help="tables in Markdown")
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")


def run(args: argparse.Namespace) -> int:
    """Replay and compare: 0, however far off predictions are. Bad runs are left out with a warning.

    Raises:
        UsageError: no run is left.
    """
    if args.vllm_args:
        raise UsageError("`baton validate` takes no vLLM flags")
    _check_series(args)
    left_out: list[UsageError] = []
    replays = _of_all(args.paths, args, left_out)
    if not replays and not left_out:
        raise UsageError(f"no row {', '.join(args.row)} in {', '.join(map(str, args.paths))}")
    found = list(_progress(replays, left_out))
    if not found:
        more = f" (nothing could be replayed; {len(left_out) - 1} more are wrong)" if len(left_out) > 1 else ""
        raise UsageError(f"{left_out[0]}{more}")
    try:  # the file first: stdout may be closed
        _write_series(args.series, found)
    finally:  # a file that cannot be written costs no answer
        _warn(left_out)
        _show(args, found, left_out)
    return 0


def _show(args: argparse.Namespace, found: Sequence[RunComparison], left_out: Sequence[UsageError]) -> None:
    """Print the comparisons in the form that flags ask for."""
    if args.json:
        _show_json(found, left_out)
    elif args.markdown:
        from sim.validate.tables import markdown

        with contextlib.suppress(BrokenPipeError):
            print("\n".join(markdown(found)).rstrip())
    else:
        from baton.validate_view import show

        show(found)


def _warn(left_out: Sequence[UsageError]) -> None:
    """Say on stderr which rows and files are left out of the figures."""
    if left_out:
        say(f"warning: {len(left_out)} left out:")
    for each in left_out:
        say(f"  {each}")


def _progress(replays: Sequence[tuple[str, Replay]], left_out: list[UsageError]) -> Iterator[RunComparison]:
    """Replay each run, with a live line or plain lines on stderr. Runs that cannot be replayed go to `left_out`."""
    from rich.console import Console
    from rich.text import Text

    from sim.validate.measured import BadMeasurement

    console = Console(stderr=True, highlight=False)
    with console.status("replaying") if sys.stderr.isatty() else contextlib.nullcontext() as status:
        for number, (name, replay) in enumerate(replays, 1):
            line = f"replaying {number} of {len(replays)}: {name}"
            status.update(Text(line)) if status is not None else say(line)
            try:
                found = replay()
            except UsageError as error:  # that of a row names its file and line
                left_out.append(error if isinstance(error, BadMeasurement) else UsageError(f"{name}: {error}"))
                continue
            except (ValueError, ArithmeticError) as error:  # settings that contradict each other, impossible sizes
                left_out.append(UsageError(f"{name}: {error}"))
                continue
            yield found


# -- the runs to replay --


def _replays(path: Path, args: argparse.Namespace, left_out: list[UsageError]) -> list[tuple[str, Replay]]:
    """Every run at a path, in order of name, read and ready. Entries of a folder that are no runs are left out."""
    try:
        if path.is_file():
            return _rows(path, args, left_out)
        if (path / "requests.jsonl").is_file():
            return [] if args.row else [_folder(path, args, left_out)]
        if not path.is_dir():
            raise UsageError(f"{path}: no such file or folder")
        inside = sorted(each for each in path.iterdir() if each.suffix == ".csv" or _may_be_run(each))
    except OSError as error:  # a folder that may not be entered, or a name that is too long
        raise UsageError(f"{path}: {error.strerror}") from None
    if not inside:
        raise UsageError(f"{path}: neither a run (requests.jsonl, meta.json) nor a folder of runs and tables (.csv)")
    return _of_all(inside, args, left_out)


def _may_be_run(folder: Path) -> bool:
    """Whether a folder is a run's, or may not be entered: such a folder is left out by its name."""
    try:
        return (folder / "requests.jsonl").is_file()
    except OSError:
        return True


def _of_all(paths: Sequence[Path], args: argparse.Namespace, left_out: list[UsageError]) -> list[tuple[str, Replay]]:
    """The runs at several paths; a path with none never keeps the others from being replayed."""
    found = []
    for path in paths:
        try:
            found += _replays(path, args, left_out)
        except UsageError as error:
            left_out.append(error)
    return found


def _rows(path: Path, args: argparse.Namespace, left_out: list[UsageError]) -> list[tuple[str, Replay]]:
    from sim.validate.measured import read_steady
    from sim.validate.steady import SteadyLoad

    load = SteadyLoad(
        seeds=args.seeds, share=args.share, repeated=not args.new_prompts, first_token_ms=args.first_token_ms
    )
    profiles = _profiles(args)
    rows, bad = read_steady(_rows_of(path), str(path))
    left_out += bad
    must_fit, named = args.profile is not None, _models(args.config)
    return [
        (f"{path.name} row {row.number}", partial(_replay_row, row, named, profiles, load, must_fit=must_fit))
        for row in rows
        if not args.row or row.number in args.row
    ]


ModelNamed = Callable[[str], "ModelShape"]


def _models(given: Sequence[str]) -> ModelNamed:
    """Finds models by name: those of `--config`, then those that ship.

    Raises:
        UsageError: a text that is not MODEL=FILE, or a file that is no model's configuration.
    """
    from baton.model_sizes import sizes_of
    from costs.shipped import model_named

    files: dict[str, ModelShape] = {}
    for text in given:
        name, separator, file = text.partition("=")
        if not separator or not name or not exists(Path(file)):
            raise UsageError(f"--config {text}: write MODEL=FILE, with the path of an existing config.json")
        files[name] = sizes_of(file)
    return lambda name: files[name] if name in files else model_named(name)


def _replay_row(
    row: Steady, named: ModelNamed, profiles: tuple[Profile, ...], load: SteadyLoad, *, must_fit: bool
) -> RunComparison:
    """Replay one row of a table.

    Raises:
        BadMeasurement: the row cannot be replayed; it names what is unknown.
    """
    from costs.hardware import gpu_named
    from sim.validate.measured import BadMeasurement
    from sim.validate.steady import replay_steady
    from sim.validate.workloads import workload_named

    known: dict[str, Callable[[str], object]] = {"model": named, "gpu": gpu_named, "workload": workload_named}
    for name, find in known.items():
        value = getattr(row, name)
        try:
            find(value)
        except UsageError as error:
            raise BadMeasurement(row.where, "hardware" if name == "gpu" else name, repr(value), str(error)) from None
    try:
        return replay_steady(row, named(row.model), profiles, load, must_fit=must_fit)
    except UsageError as error:
        raise BadMeasurement(row.where, "", "", str(error)) from None


def _folder(path: Path, args: argparse.Namespace, left_out: list[UsageError]) -> tuple[str, Replay]:
    from sim.validate.stamped import replay_stamped

    read, profiles = _stamped(path, left_out), _profiles(args)
    model = _models(args.config)(read.settings.model)
    return read.name, partial(replay_stamped, read, model, profiles, must_fit=args.profile is not None)


def _stamped(path: Path, left_out: list[UsageError]) -> Stamped:
    from sim.validate.measured import read_gpu, read_requests, read_series, read_settings
    from sim.validate.stamped import Stamped

    settings = read_settings(_text(path / "meta.json"), str(path / "meta.json"))
    requests = read_requests(_rows_of(path / "requests.jsonl"), str(path / "requests.jsonl"), settings.longest)
    series, offset_s = path / "timeseries.csv", 0.0
    samples, bad = read_series(_rows_of(series), str(series)) if is_file(series) else ([], [])
    left_out += [*requests.left_out, *bad]
    with contextlib.suppress(ValueError, OverflowError):
        offset_s = requests.began_unix_s - datetime.fromisoformat(settings.started_at).timestamp()
    return Stamped(
        name=(path if path.name.strip(".") else path.resolve()).name,  # `.` has no name
        settings=settings,
        requests=requests,
        samples=samples,
        gpu=settings.gpu or read_gpu(_text(path / "config.json"), str(path / "config.json")),
        offset_s=max(0.0, offset_s),
    )


def _profiles(args: argparse.Namespace) -> tuple[Profile, ...]:
    from costs import shipped
    from costs.profile import read_profiles

    path: Path | None = args.profile
    if args.no_profiles:
        return ()
    if path is None:
        return shipped.profiles()
    text = text_in(path, "--profile", "give a file of fits like those in costs/profiles/")
    try:
        return read_profiles(json.loads(text))
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise UsageError(f"--profile {path}: not a file of fits like those in costs/profiles/ ({error!r})") from None


RUN_FIX = "give the folder of a run, or a folder of runs and tables"


def _rows_of(path: Path) -> str:
    """The text of a file of rows. A byte that is not UTF-8 stays visible, so that it spoils its own row alone."""
    return rows_in(path, "", RUN_FIX)


def _text(path: Path) -> str:
    return text_in(path, "", RUN_FIX)


# -- the results --

SERIES = (
    "run",
    "at_s",
    "running",
    "running_predicted",
    "waiting",
    "waiting_predicted",
    "kv_percent",
    "kv_percent_predicted",
)


def _check_series(args: argparse.Namespace) -> None:
    """Refuse --series over an input or without its folder. A file that already has its heading, from an earlier run, is
    overwritten.
    """
    check_folders({"--series": args.series})
    if args.series is None or _is_series(args.series):
        return
    read = [("--profile", args.profile), *(("--config", each.partition("=")[2]) for each in args.config)]
    for path in args.paths:
        read += [(f"PATH {path}", path), *((f"{each.name} of {path}", each) for each in _files_of(path))]
    check_written({"--series": args.series}, read)


def _is_series(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.readline(1000).strip() == ",".join(SERIES).encode()
    except OSError:
        return False


def _files_of(path: Path) -> Iterator[Path]:
    """The files of a run's folder, or of the runs and tables in a folder."""
    if is_folder(path):
        yield from (*path.glob("*.*"), *path.glob("*/*.*"))


def _write_series(path: Path | None, found: Sequence[RunComparison]) -> None:
    """Write --series; an earlier file stays as it is until the runs are replayed. None: the flag is not given.

    Raises:
        UsageError: it cannot be written; names the flag, the path and what the system says.
    """
    if path is None:
        return
    rows = [(comparison.name, *asdict(row).values()) for comparison in found for row in comparison.series]
    try:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([SERIES, *rows])
    except OSError as error:
        raise UsageError(f"--series {path}: {error.strerror}; name a file that can be written") from None


def _show_json(found: Sequence[RunComparison], left_out: Sequence[UsageError]) -> None:
    from sim.validate.figures import totals
    from sim.validate.measured import BadMeasurement

    for each in left_out:
        told_of = each.as_json() if isinstance(each, BadMeasurement) else {"reason": str(each)}
        emit({"event": "left_out", **told_of})

    for comparison in found:
        told = asdict(comparison)
        for figure, as_told in zip(comparison.figures, told["figures"], strict=True):
            as_told["error"] = figure.error
        emit({"event": "run", **told})
    emit({"event": "totals", "totals": [asdict(each) for each in totals(found)]})


# -- flags' values --


def _whole(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number from 1 to 1000")
    return int(text)


def _share(text: str) -> float:
    value = _float(text)
    if not 0.02 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be from 0.02 to 1, like 0.1")
    return value


def _ms(text: str) -> float:
    value = _float(text)
    if not 0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} must be milliseconds, 0 or more")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} must be a number") from None
