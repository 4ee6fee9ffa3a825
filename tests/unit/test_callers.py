"""Callers of an admin port: this machine, a page of another site, another machine; and where an agent listens."""

from __future__ import annotations

import pytest

from baton.commands.engine import agent_host
from cluster.callers import from_another_site, from_here, is_loopback, names_this_machine
from cluster.errors import UsageError


@pytest.mark.parametrize(
    ("asked", "engine", "guarded", "found"),
    [
        (None, "127.0.0.1", False, "127.0.0.1"), (None, "localhost", False, "localhost"), (None, "::1", False, "::1"),
        (None, "10.0.0.1", False, "127.0.0.1"), (None, "0.0.0.0", False, "127.0.0.1"),
        (None, "node-1.internal", False, "127.0.0.1"), ("127.0.0.1", "10.0.0.1", False, "127.0.0.1"),
        (None, "10.0.0.1", True, "10.0.0.1"), ("10.0.0.2", "10.0.0.1", True, "10.0.0.2"),
        ("127.0.0.1", "10.0.0.1", True, "127.0.0.1"),
    ],
)  # fmt: skip
def test_an_agent_listens_where_it_can_tell_who_asks(asked: str | None, engine: str, guarded: bool, found: str) -> None:
    assert agent_host(asked, engine, guarded=guarded) == found


@pytest.mark.parametrize("asked", ["10.0.0.1", "0.0.0.0", "::", "node-1", ""])
def test_an_agent_that_cannot_tell_who_asks_is_not_opened(asked: str) -> None:
    with pytest.raises(UsageError, match=r"--agent-host .*--ticket-keys-file.*--admin-key-file"):
        agent_host(asked, "127.0.0.1", guarded=False)


@pytest.mark.parametrize(
    ("host", "yes"),
    [
        ("127.0.0.1:8200", True), ("127.0.0.1", True), ("[::1]:8200", True), ("10.0.0.1:8200", True),
        ("localhost", True),
        ("x.localhost:1", True), ("evil.example", False), ("127.0.0.1.evil.example:8200", False), ("", False),
        ("localhost.evil.example", False), ("[", False), ("node-1:8200", False), ("1", False),
    ],
)  # fmt: skip
def test_names_that_no_other_site_can_have(host: str, yes: bool) -> None:
    assert names_this_machine(host) is yes


def test_the_name_that_a_port_is_bound_to_is_its_own() -> None:
    assert names_this_machine("Node-1.internal:8200", "node-1.internal")
    assert not names_this_machine("node-2.internal:8200", "node-1.internal")


@pytest.mark.parametrize(
    ("headers", "looks", "changes"),
    [
        ({}, False, False),
        ({"Origin": "http://here:1"}, False, False), ({"Sec-Fetch-Site": "same-origin"}, False, False),
        ({"Sec-Fetch-Site": "none"}, False, False), ({"Origin": "http://here:2"}, True, True),
        ({"Origin": "null"}, True, True), ({"Origin": "http://["}, True, True), ({"Origin": ""}, True, True),
        ({"Sec-Fetch-Site": "cross-site"}, True, True), ({"Sec-Fetch-Site": "same-site"}, True, True),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, False, True),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Origin": "http://evil"}, True, True),
    ],
)  # fmt: skip
def test_pages_of_other_sites_show_themselves(headers: dict[str, str], looks: bool, changes: bool) -> None:
    assert from_another_site(headers, "here:1", changes=False) is looks
    assert from_another_site(headers, "here:1", changes=True) is changes


def test_this_machine_is_loopback() -> None:
    assert from_here("127.0.0.1") and from_here("::1") and from_here("::ffff:127.0.0.1")
    assert not from_here(None) and not from_here("10.0.0.1") and not from_here("127.0.0.2")
    assert is_loopback("127.0.0.5") and not is_loopback("nowhere") and not is_loopback("")
