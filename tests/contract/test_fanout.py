"""Simulations fanned out to processes or to a Ray cluster: one protocol, the same results, also if a worker dies."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from baton import compiled, fanout
from baton.cli import main
from baton.fanout import RETRIES, Fanout, ForkedProcesses, in_order
from cluster.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray warns of its own deprecations

CONTEXT = {"tens": [10 * each for each in range(100)]}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One Ray cluster for all tests: it takes 8 s to start."""
    pytest.importorskip("ray", reason="Ray is not installed: make setup")
    from support.ray_cluster import ray_cluster

    with ray_cluster(cpus=2) as started:
        yield started


@pytest.fixture(params=["processes", pytest.param("ray", marks=pytest.mark.long)])
def fan(request: pytest.FixtureRequest) -> Iterator[Fanout]:
    """A fanout to two processes, or to Ray. In `make test` only the plan, node and Ctrl-C tests below use Ray."""
    if request.param == "ray":
        request.getfixturevalue("cluster")
    with fanout.opened(CONTEXT, on="ray" if request.param == "ray" else None, processes=2) as opened:
        yield opened


def looked_up(context: dict[str, list[int]], at: int) -> int:
    return context["tens"][at]


def wrong(_context: object, what: str) -> None:
    raise ValueError(what)


def dies(_context: object, times: int, folder: str) -> int:
    """Kills its own process in the first `times` runs, then returns how often it died."""
    tries = len(list(Path(folder).iterdir()))
    if tries < times:
        (Path(folder) / f"{tries}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return tries


def lasts(_context: object, file: str) -> None:
    """Writes its process id, then sleeps until it is killed."""
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)


def test_results_come_back_in_the_order_in_which_they_are_asked_for(fan: Fanout) -> None:
    asked = [fan.submit(looked_up, at) for at in range(20)]
    assert [each.result() for each in asked] == CONTEXT["tens"][:20]
    assert fan.width == 2


def test_what_a_task_raises_is_raised_here(fan: Fanout) -> None:
    with pytest.raises(ValueError, match="no such fleet"):
        fan.submit(wrong, "no such fleet").result()
    assert fan.submit(looked_up, 3).result() == 30


def test_a_task_whose_process_died_is_run_again(fan: Fanout, tmp_path: Path) -> None:
    other = fan.submit(looked_up, 4)
    assert fan.submit(dies, 2, str(tmp_path)).result() == 2
    assert other.result() == 40
    assert fan.submit(looked_up, 5).result() == 50


def test_a_task_that_kills_every_process_ends_in_one_line(fan: Fanout, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as told:
        fan.submit(dies, 100, str(tmp_path)).result()
    assert "\n" not in str(told.value)
    assert len(list(tmp_path.iterdir())) == 1 + RETRIES


def test_a_close_at_once_ends_a_running_task(fan: Fanout, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    fan.submit(lasts, str(file))
    until(lambda: file.exists() and bool(file.read_text()))
    fan.close(at_once=True)
    until(lambda: not alive(int(file.read_text())))


def test_a_close_at_once_ends_a_running_task_though_the_parent_handles_sigterm(tmp_path: Path) -> None:
    """A controller handles SIGTERM in its event loop, and forked workers inherit the handler."""
    file = tmp_path / "pid"
    former = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        fan = fanout.ForkedProcesses(CONTEXT, 1)
        fan.submit(lasts, str(file))
        until(lambda: file.exists() and bool(file.read_text()))
        fan.close(at_once=True)
        until(lambda: not alive(int(file.read_text())))
    finally:
        signal.signal(signal.SIGTERM, former)


def test_a_node_that_is_gone_has_its_tasks_run_elsewhere(cluster: Any, tmp_path: Path) -> None:
    import ray

    node = cluster.add_node(num_cpus=1)
    until(lambda: ray.cluster_resources().get("CPU") == 3)
    with fanout.opened(CONTEXT, on="ray") as fan:
        asked = [fan.submit(waits_to_be_let_go, str(tmp_path), at) for at in range(3)]
        until(lambda: len(list(tmp_path.glob("begun-*"))) == 3)
        cluster.remove_node(node, allow_graceful=False)
        (tmp_path / "go").touch()
        assert [each.result() for each in asked] == [0, 10, 20]


def waits_to_be_let_go(context: dict[str, list[int]], folder: str, at: int) -> int:
    (Path(folder) / f"begun-{at}").touch()
    until((Path(folder) / "go").exists)
    return context["tens"][at]


def test_a_node_with_another_source_is_named(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton import fanout_ray

    monkeypatch.setattr(fanout_ray, "digest", lambda: "another")
    with (
        fanout.opened(CONTEXT, on="ray") as fan,
        pytest.raises(UsageError, match=r"runs another Baton, Python or numpy"),
    ):
        fan.submit(looked_up, 1).result()


def test_a_node_without_the_compiled_modules_that_the_driver_uses_is_named(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interpreted worker cannot read the objects that a compiled driver sends."""
    if not compiled.why_not():
        pytest.skip("compiled modules are there, for workers as well")
    monkeypatch.setattr(compiled, "in_use", lambda: True)
    with (
        fanout.opened(CONTEXT, on="ray") as fan,
        pytest.raises(UsageError, match=r"cannot use the compiled modules .*BATON_COMPILED=0"),
    ):
        fan.submit(looked_up, 1).result()


def test_a_place_that_is_no_ray_cluster_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: make setup")

    def found_none(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nPlease specify one.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", found_none)
    for on, told in (
        ("kubernetes", "--on kubernetes: write ray"),
        ("ray", "--on ray: no Ray cluster there (Could not"),
    ):
        with pytest.raises(UsageError) as error, fanout.opened(CONTEXT, on=on):
            pass
        assert str(error.value).startswith(told)
        assert "\n" not in str(error.value)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"Ray is not installed here: pip install 'baton-serve\[ray\]'"):
        fanout.opened(CONTEXT, on="ray").__enter__()


CLUSTER = """
models:
  - name: meta-llama/Llama-3.1-8B
slo:
  interactive: {ttft_ms: 300, tpot_ms: 30, attainment: 0.9}
hardware:
  H100-SXM: {count: 2}
  L40S: {count: 2, price_per_hour: 1.0}
"""
LOAD = ["--input-tokens", "1500", "--output-tokens", "60", "--json"]


def test_a_plan_is_the_same_byte_for_byte_wherever_it_is_made(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the field `seconds`, the time that the plan took."""
    file = tmp_path / "baton.yaml"
    file.write_text(CLUSTER.replace("H100-SXM: {count: 2}", "H100-SXM: {count: 1}"))  # it is made three times
    told = []
    for number, where in enumerate((["--processes", "1"], ["--processes", "3"], ["--on", "ray"])):
        out = tmp_path / f"planned-{number}.yaml"
        assert main(["plan", str(file), *LOAD, "--rate", "3", "--requests", "20", *where, "--out", str(out)]) == 0
        told.append((without_seconds(capsys.readouterr().out), out.read_bytes()))
    assert told[0] == told[1]
    assert told[0] == told[2]
    assert b"fleets_simulated" in told[0][0]


def without_seconds(said: str) -> bytes:
    """The answer without the field `seconds`, which differs from run to run. Ray's client in this process may say
    more: on a machine under load that a node has missed heartbeats.
    """
    (line,) = [each for each in said.splitlines() if each.startswith('{"event": "planned"')]
    assert line.count('"seconds": ') == 1
    return re.sub(r'"seconds": [0-9.]+', "", line).encode()


def test_ctrl_c_on_a_cluster_gives_the_best_so_far_and_frees_it(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from baton.plan_view import PlanProgress

    def ticked(_self: object, found: Any, *_: object) -> None:
        if found.best is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr(PlanProgress, "tick", ticked)
    file = tmp_path / "baton.yaml"
    file.write_text(CLUSTER)
    assert main(["plan", str(file), *LOAD, "--rate", "6", "--requests", "100", "--on", "ray"]) == 0
    # Ray's log is on in this process, unlike in a user's: it may tell of the killed worker when stdout is back.
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["stopped"]
    assert told["best"]["holds"]
    until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU"))


def test_a_search_learns_in_the_order_of_one_process() -> None:
    """However many tasks run at once, the search learns the same results in the same order."""
    learned = {width: [*walk(width)] for width in (1, 2, 5, 64)}
    assert len({tuple(each) for each in learned.values()}) == 1
    assert len(learned[1]) > 10


class Counted:
    """Runs each task at once in this process, and notes which tasks were started."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.started: list[int] = []

    def submit(self, call: Callable[..., Any], *args: Any) -> Any:
        self.started.append(args[0])
        return Done(call(CONTEXT, *args))

    def close(self, *, at_once: bool = False) -> None:
        """Nothing is open."""


class Done:
    """A task that is over."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value

    def cancel(self) -> bool:
        return False


def walk(width: int) -> Iterator[tuple[int, int]]:
    """A search whose later tasks depend on the results of earlier ones."""
    seen: list[tuple[int, int]] = []

    def search() -> Generator[Sequence[int], int, None]:
        todo = list(range(50))
        while todo:
            value = yield tuple(todo)
            seen.append((todo[0], value))
            todo = [each for each in todo[1:] if (each * value) % 3 != 1]

    fan = Counted(width)
    in_order(fan, search(), lambda at: fan.submit(looked_up, at), lambda: None)
    assert len(fan.started) == len(set(fan.started))
    return iter(seen)


def test_closed_processes_take_no_task() -> None:
    fan = ForkedProcesses(CONTEXT, 2)
    assert fan.submit(looked_up, 1).result() == 10
    fan.close()
    with pytest.raises(RuntimeError):
        fan.submit(looked_up, 1)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(holds: Callable[[], bool], within_s: float = 90.0) -> None:
    """Wait until another process has made the condition true."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)
