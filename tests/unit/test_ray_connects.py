"""The connection to a Ray cluster: a failed start of the server's client process is tried again."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import UsageError
from goodput.actuate import ray_connection
from goodput.actuate.ray_connection import CONNECT_TRIES, RayConnection


class FakeRay(SimpleNamespace):
    """A `ray` module whose `init` fails the first `refusals` times."""

    def __init__(self, refusals: int, error: type[Exception] = ConnectionAbortedError) -> None:
        super().__init__(refusals=refusals, error=error, tries=0, left=0)

    def init(self, **_: Any) -> None:
        self.tries += 1
        if self.tries <= self.refusals:
            raise self.error("Initialization failure from server:\nTraceback")

    def shutdown(self) -> None:
        self.left += 1


async def connect(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_connection, "CONNECT_AGAIN_S", 0.0)
    connection = RayConnection("ray://head:10001", "baton-c")
    try:
        await connection.connect()
    finally:
        connection.close()


async def test_a_connection_is_tried_again_if_the_client_process_dies_at_its_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ray = FakeRay(2)
    await connect(ray, monkeypatch)
    assert ray.tries == 3
    assert [each.message for each in caplog.records] == ["ray: Initialization failure from server; trying again"] * 2


@pytest.mark.parametrize(("error", "tries"), [(ConnectionAbortedError, CONNECT_TRIES), (ConnectionError, 1)])
async def test_the_error_names_a_ray_cluster_that_does_not_answer(
    error: type[Exception], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = FakeRay(99, error)
    with pytest.raises(UsageError, match="no Ray cluster at ray://head:10001"):
        await connect(ray, monkeypatch)
    assert ray.tries == tries
