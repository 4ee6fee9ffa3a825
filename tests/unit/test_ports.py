"""Ports that Baton chooses: held by name until their programs listen."""

from __future__ import annotations

import socket

import pytest

from baton.ports import FREE_PORTS, TRIES, HeldPorts

pytestmark = pytest.mark.sockets


def test_any_port_is_free_held_and_below_the_ports_of_outgoing_connections() -> None:
    with HeldPorts() as one, HeldPorts() as other:
        port = one.take_any()
        assert port in FREE_PORTS
        assert not other.hold(port)
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_any_port_is_another_one_if_a_server_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with HeldPorts() as ports, socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        drawn = iter([server.getsockname()[1], 19411])
        monkeypatch.setattr("secrets.choice", lambda _: next(drawn))
        assert ports.take_any() == 19411


def test_no_port_is_an_error_after_a_number_of_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process of Baton may hold some of them meanwhile, as test runs beside this one do: those count, too."""
    drawn = iter(FREE_PORTS[: TRIES + 1])
    monkeypatch.setattr("secrets.choice", lambda _: next(drawn))
    looked_at: list[int] = []
    with HeldPorts() as other, HeldPorts() as ports:
        other.hold(FREE_PORTS[7])
        with pytest.raises(OSError, match="no free port from 20000 to 31999"):
            ports.take_any(lambda port: bool(looked_at.append(port)))
    assert next(drawn) == FREE_PORTS[TRIES]
    assert FREE_PORTS[7] not in looked_at
    assert set(looked_at) < set(FREE_PORTS[:TRIES])
