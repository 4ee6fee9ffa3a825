"""The record of a running cluster: one for each name, and no start or end of another one removes it."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from baton import state
from baton.state import Running, born, load, must_load, recorded, save
from cluster.errors import UsageError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def running(endpoint: str = "") -> Running:
    return Running(cluster="chat", pid=os.getpid(), born=born(os.getpid()), endpoint=endpoint)


def test_of_two_clusters_of_one_name_that_start_at_once_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    both_looked = threading.Barrier(2)
    began: list[None] = []
    refused: list[str] = []

    def look(cluster: str) -> Running | None:
        found = load(cluster)
        with suppress(threading.BrokenBarrierError):
            both_looked.wait(0.5)  # only if both may look before either writes, both find nothing
        return found

    def begin(endpoint: str) -> None:
        try:
            began.append(closing.enter_context(recorded(running(endpoint))))
        except UsageError as error:
            refused.append(str(error))

    monkeypatch.setattr(state, "load", look)
    with ExitStack() as closing:
        threads = [threading.Thread(target=begin, args=[f"http://{at}"]) for at in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert (len(began), len(refused)) == (1, 1)
        assert "--cluster chat: runs already" in refused[0]


def test_the_end_of_a_cluster_removes_no_record_of_another() -> None:
    """Machines that share a home folder may each have one of this name: the later one has written the record."""
    with recorded(running()):
        later = Running(cluster="chat", pid=1, born="0")
        save(later)
    assert load("chat") == later


def test_a_record_ends_with_its_cluster() -> None:
    with recorded(running()):
        assert load("chat") == running()
    assert load("chat") is None


def test_a_command_for_a_cluster_that_does_not_run_names_those_that_do() -> None:
    save(Running(cluster="ended", pid=os.getpid(), born="0"))
    with recorded(running()), pytest.raises(UsageError, match=r"no cluster named `default` runs .*: --cluster chat$"):
        must_load("default")
    with pytest.raises(UsageError, match="no cluster named `default` runs on this machine; start one with `baton up`"):
        must_load("default")
