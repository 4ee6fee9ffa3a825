"""Keys for tickets: their files, the owner of each file, and how an engine and a router find theirs."""

from __future__ import annotations

import argparse
import errno
import logging
import stat
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tickets import FLEET, OLD, PULL

from baton import ticket_keys
from baton.plan import PlacedEngine, WantedEngine
from baton.router_child import LocalRouter
from cluster import wire
from cluster.errors import UsageError
from cluster.ids import InstanceId, RequestId, TransferId
from cluster.instance import Role
from engine.vllm.command import GUARD, command, environment
from engine.vllm.placement import MachineShare
from engine.vllm.spec import EngineSpec
from kvtransfer import keyfile
from kvtransfer.keys import (
    FILE_VARIABLE,
    KEYS_MAX,
    NotATicketKeyFile,
    fleet_text,
    instance_key,
    instance_text,
    read_fleet,
    read_instance,
)
from kvtransfer.ticket import SigningKey
from router.http.tickets import Tickets

D = InstanceId("decode-0")
SECRET = "ab" * 32


# --- files as text ---------------------------------------------------------------------------------------------------


def test_written_key_files_are_read_back() -> None:
    assert read_fleet(fleet_text((FLEET, OLD))) == (FLEET, OLD)
    mine = read_instance(instance_text((FLEET, OLD), D))
    assert (mine.instance, [key.id for key in mine.keys]) == (D, ["k1", "k0"])
    assert mine.keys == (instance_key(FLEET, D), instance_key(OLD, D))
    assert read_fleet(f"# ours\n\nk1 {SECRET}  # since May\n")[0].secret.hex() == SECRET


def test_each_instance_has_a_key_of_its_own() -> None:
    secrets = {FLEET.secret, *(instance_key(FLEET, InstanceId(name)).secret for name in ("a", "b", "ab", ""))}
    assert len(secrets) == 5
    assert SECRET not in instance_text((SigningKey("k", bytes.fromhex(SECRET)),), D)


@pytest.mark.parametrize(
    "text",
    ["", "# only a remark", "k1", f"k1 {SECRET[:-2]}", f"k1 {SECRET.upper()}", f"k1 {SECRET} a b", f"k! {SECRET}",
     f"{'k' * 17} {SECRET}", f"k1 {SECRET}\nk1 {SECRET}", "".join(f"k{n} {SECRET}\n" for n in range(KEYS_MAX + 1))],
)  # fmt: skip
def test_a_malformed_key_file_is_refused_without_showing_it(text: str) -> None:
    for read in (read_fleet, read_instance):
        with pytest.raises(NotATicketKeyFile) as caught:
            read(text)
        assert SECRET[:8] not in str(caught.value)


def test_one_kind_of_file_is_not_taken_for_the_other() -> None:
    with pytest.raises(NotATicketKeyFile, match="one instance"):
        read_fleet(f"k1 {SECRET} decode-0")
    with pytest.raises(NotATicketKeyFile, match="baton key tickets"):
        read_instance(f"k1 {SECRET}")
    with pytest.raises(NotATicketKeyFile, match="2 instances"):
        read_instance(f"k1 {SECRET} a\nk2 {SECRET} b")


@settings(deadline=None)
@given(st.text(max_size=80))
def test_reading_any_text_ends_in_keys_or_a_refusal(text: str) -> None:
    for read in (read_fleet, read_instance):
        try:
            found = read(text)
        except NotATicketKeyFile:
            continue
        assert found


@pytest.mark.parametrize("name", ["", "a b", "a#b", "a\nk9 x", "x" * 256])
def test_a_name_that_would_break_the_file_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot stand in a key file"):
        instance_text((FLEET,), InstanceId(name))


# --- files on disk ---------------------------------------------------------------------------------------------------


def test_key_files_are_for_their_owner_alone_and_go_with_the_cluster() -> None:
    with ticket_keys.files_for(["prefill-0", "decode-0"], None) as (router, engines):
        (fleet,) = read_fleet(router.read_text())
        for name, file in engines.items():
            assert read_instance(file.read_text()).keys == (instance_key(fleet, InstanceId(name)),)
        for file in (router, *engines.values()):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert not router.parent.exists()


def test_a_fleet_of_several_machines_brings_its_own_file(tmp_path: Path) -> None:
    file = ticket_keys.write_private(tmp_path / "fleet", fleet_text((FLEET, OLD)))
    with ticket_keys.files_for(["decode-0"], file) as (router, engines):
        assert router == file
        assert read_instance(engines["decode-0"].read_text()).keys[0] == instance_key(FLEET, D)
    assert file.exists()


def test_a_file_that_changed_while_no_descriptor_was_free_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keyfile, "AGAIN_S", 0.0)
    file = ticket_keys.write_private(tmp_path / "fleet", fleet_text((OLD,)))
    kept = keyfile.KeyFile(file, read_fleet)
    ticket_keys.write_private(file, fleet_text((FLEET, OLD)))
    with monkeypatch.context() as limited:
        limited.setattr(Path, "open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        assert [kept.get(), kept.get()] == [(OLD,), (OLD,)]
    assert kept.get() == (FLEET, OLD)
    assert [each.levelname for each in caplog.records if each.levelno >= logging.WARNING] == ["WARNING"], (
        "it is said once"
    )


def test_a_new_key_is_appended_after_the_signing_key(tmp_path: Path) -> None:
    file = tmp_path / "keys" / "tickets"
    first = ticket_keys.add_fleet_key(file)
    both = ticket_keys.add_fleet_key(file)
    assert both[0] == first[0]
    assert [key.id for key in both] == ["k1", "k2"]
    assert read_fleet(file.read_text()) == both
    mine = ticket_keys.write_instance_file(file, "decode-0")
    assert mine == file.with_name("tickets.decode-0")
    assert len(read_instance(mine.read_text()).keys) == 2
    for _ in range(KEYS_MAX - 2):
        ticket_keys.add_fleet_key(file)
    with pytest.raises(UsageError, match="remove those"):
        ticket_keys.add_fleet_key(file)
    with pytest.raises(UsageError, match="routers need"):
        ticket_keys.add_fleet_key(mine)


def test_an_engine_takes_only_its_own_file(tmp_path: Path) -> None:
    file = ticket_keys.write_private(tmp_path / "k", instance_text((FLEET,), D))
    ticket_keys.check_instance_keys(file, D)
    ticket_keys.check_instance_keys(None, D)
    with pytest.raises(UsageError, match=r"keys of decode-0, and this is decode-1; see --name"):
        ticket_keys.check_instance_keys(file, InstanceId("decode-1"))
    with pytest.raises(UsageError, match=r"--ticket-keys-file .*nowhere: no such file"):
        ticket_keys.check_instance_keys(tmp_path / "nowhere", D)
    with pytest.raises(UsageError, match="routers need the fleet's"):
        ticket_keys.open_fleet_keys(file)


def test_the_flag_wins_over_the_environment() -> None:
    parser = argparse.ArgumentParser()
    ticket_keys.add_ticket_keys_argument(parser, "the fleet's")
    environ = {FILE_VARIABLE: "/from/env"}
    assert ticket_keys.named_file(parser.parse_args([]), {}) is None
    assert ticket_keys.named_file(parser.parse_args([]), environ) == Path("/from/env")
    assert ticket_keys.named_file(parser.parse_args(["--ticket-keys-file", "/f"]), environ) == Path("/f")


# --- how engines and routers find their file -------------------------------------------------------------------------


def test_an_engine_with_a_key_file_loads_the_guard_beside_the_users_middleware() -> None:
    spec = EngineSpec(
        instance=D, role=Role.DECODE, model="m", python="python", device="gpu", port=1, side_channel_port=2,
        ticket_keys_file="/keys/decode-0", extra_args=("--middleware", "their.own"),
    )  # fmt: skip
    argv = command(spec)
    assert [argv[at + 1] for at, word in enumerate(argv) if word == "--middleware"] == [GUARD, "their.own"]
    assert environment(spec, {FILE_VARIABLE: "/keys/fleet"}, "")[FILE_VARIABLE] == "/keys/decode-0"
    without = replace(spec, ticket_keys_file=None, extra_args=())
    assert "--middleware" not in command(without)
    assert FILE_VARIABLE not in environment(without, {}, "")


def test_argument_lists_name_the_key_files() -> None:
    wanted = WantedEngine(name="decode-0", role=Role.DECODE, model=None, ticket_keys_file="/keys/tickets.decode-0")
    planned = PlacedEngine(wanted=wanted, port=1, agent_port=2, side_channel_port=3, placed=MachineShare())
    front = LocalRouter(title="", host="h", port=1, admin_host="h", admin_port=2, ticket_keys_file="/keys/tickets")
    for words, file in ((planned.words([]), "/keys/tickets.decode-0"), (front.words(), "/keys/tickets")):
        assert words[words.index("--ticket-keys-file") + 1] == file
    assert "--ticket-keys-file" not in replace(planned, wanted=replace(wanted, ticket_keys_file=None)).words([])
    assert "--ticket-keys-file" not in replace(front, ticket_keys_file=None).words()


# --- the router's side -----------------------------------------------------------------------------------------------


def stamped(tickets: Tickets) -> str:
    transfer = TransferId(RequestId("r"), 1, 1)
    leg = tickets.stamp({"kv_transfer_params": PULL}, D, transfer, producer=InstanceId("p"))
    return str(leg["kv_transfer_params"][wire.TICKET])


def test_no_two_tickets_are_alike_also_for_the_same_leg_at_the_same_time() -> None:
    tickets = Tickets(lambda: (FLEET,), clock=lambda: 0.0)
    assert len({stamped(tickets) for _ in range(100)}) == 100


def test_a_new_key_signs_from_the_next_leg_on() -> None:
    keys = [FLEET]
    tickets = Tickets(lambda: tuple(keys), clock=lambda: 0.0)
    before = stamped(tickets)
    keys.insert(0, OLD)
    after = stamped(tickets)
    assert before[:6] != after[:6], "a ticket begins with its version and the name of its key"


def test_a_leg_that_transfers_nothing_needs_no_ticket() -> None:
    body = {"prompt": "x"}
    tickets = Tickets(lambda: (FLEET,))
    assert tickets.stamp(body, D, TransferId(RequestId("r"), 1, 1), producer=D) is body
