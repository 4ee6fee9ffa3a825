"""The arguments that `baton up` gives its router: the path of the cluster file, and no secret."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from baton.commands import router, up
from baton.plan import from_counts
from cluster.errors import UsageError
from cluster.instance import Role
from cluster.spec import parse

FILE = """
models: [{name: m}]
slo: {fast: {ttft_ms: 500}}
tenants: {acme: {key_file: keys/acme}}
router: {port: 9000, policy: least_load}
limits: {stall_s: 7}
"""


def words(*given: str, text: str | None = FILE) -> list[str]:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    spec = None if text is None else parse(text, "f").usable()
    return up._front(parser.parse_args(given), spec).words()


def routers(said: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    router.add_arguments(parser)
    return parser.parse_args(said[1:])


def test_the_router_reads_the_file_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    args = routers(words("some.yaml"))
    assert args.config == str(tmp_path / "some.yaml")
    assert (args.port, args.policy, args.stall_s) == (9000, "least_load", 7)
    assert not any("acme" in word for word in words("some.yaml"))


def test_without_a_file_the_router_gets_no_config_and_no_policy() -> None:
    args = routers(words(text=None))
    assert (args.config, args.policy, args.port) == (None, None, 8000)


def test_flags_win_over_the_file_and_the_file_over_defaults() -> None:
    parser = argparse.ArgumentParser()
    router.add_arguments(parser)
    spec = parse(FILE, "f").usable()
    found = router._settings(parser.parse_args(["--port", "5", "--drain-s", "2"]), spec)
    assert (found["port"], found["drain_s"], found["stall_s"], found["policy"]) == (5, 2, 7, "least_load")
    assert found["host"] == "127.0.0.1"
    bare = router._settings(parser.parse_args([]), None)
    assert bare == {}, "the router's own defaults"


@pytest.mark.parametrize("role", Role)
def test_no_pool_has_more_instances_than_a_file_allows(role: Role) -> None:
    with pytest.raises(UsageError, match=f"--{role.value} is 1000000: it must be at most 1000; write a number"):
        from_counts({role: 1_000_000}, None, None, [])
    assert len(from_counts({role: 1000}, None, None, [])) == 1000
