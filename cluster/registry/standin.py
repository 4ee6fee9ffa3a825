"""A stand-in for redis-server: fakeredis behind Redis' wire protocol, for one machine where no Redis is installed.

    python -P -m cluster.registry.standin --host 127.0.0.1 --port 0 [--password-file FILE] [--lifeline]

Prints one JSON line on stdout when it listens, ``{"event": "ready", "host": …, "port": …}``, and ends on SIGTERM or
SIGINT. With ``--lifeline`` it also ends when its stdin ends, that is, with the parent that holds the other end. It
keeps all data in memory and is slow: about 4,000 commands a second; a heartbeat takes 8. That is enough for a fleet on
one machine.

It adds three things to fakeredis' own server. It demands passwords (fakeredis only compares passwords that are
offered). It writes long answers whole (fakeredis' sockets do not block, and a full buffer would cut a reading of many
members short). Its threads end with the process.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from fakeredis import TcpFakeServer
from fakeredis._clients import _tcp_server
from fakeredis._helpers import SimpleError
from fakeredis.model import AccessControlList

WRITE_MAX_S = 10.0
"""A client that reads nothing for this long is dropped: else its thread would wait for ever."""

PUSH_EVERY_S = 0.05
"""Seconds by which a published message may be late. fakeredis polls every idle connection 100 times a second, which
takes processor time from the engines of a small machine."""

ENDING = (signal.SIGTERM, signal.SIGINT)

NOBODY = "nobody-yet"
"""The user of a client that has not given the password yet."""

BEFORE_PASSWORD = frozenset({b"AUTH", b"QUIT"})
"""Commands that Redis takes before the password."""


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal or the lifeline ends the server; the exit code."""
    parser = argparse.ArgumentParser(prog="cluster.registry.standin", description="speaks Redis' protocol")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--password-file", type=Path)
    parser.add_argument("--lifeline", action="store_true", help="end when stdin ends")
    args = parser.parse_args(argv)
    password = args.password_file.read_text().strip() if args.password_file else ""
    try:
        server = Server((args.host, args.port), password)
    except OSError as error:
        _say(f"--port {args.port}: {error.strerror}")
        return 2
    wakeups = _listen_to_signals()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.5}, daemon=True).start()
    host, port = server.server_address[:2]
    sys.stdout.write(json.dumps({"event": "ready", "host": host, "port": port}) + "\n")
    sys.stdout.flush()
    _wait_for_end(wakeups, lifeline=args.lifeline)
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)  # a second signal must not turn an orderly end into a killed process
    return 0


class Server(TcpFakeServer):
    """fakeredis' TCP server with the three additions that the module's docstring names."""

    request_queue_size = 128

    def __init__(self, address: tuple[str, int], password: str) -> None:
        _tcp_server._POLL_INTERVAL = PUSH_EVERY_S  # noqa: SLF001 - a constant with no other way in
        super().__init__(address)
        self.daemon_threads = True
        self.RequestHandlerClass = StandinClient
        # fakeredis makes a database when it is first asked for, without a lock. Two clients that came first at the same
        # moment got one each, and one of them was alone in the registry, without an error.
        self.fake_server.dbs[0]
        self.demands_password = bool(password)
        if password:
            self.fake_server.config[b"requirepass"] = password.encode()
            self.fake_server.acl = Doorkeeper(password.encode())

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that broke off; report anything else in one line, without a traceback."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            _say(f"a client's connection failed: {error!r}")


class StandinClient(_tcp_server.TCPFakeRequestHandler):
    """One connection. It sends small answers at once: Nagle's algorithm would delay each by 40 ms."""

    server: Server
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.writer.writer = Unhurried(self.connection)  # type: ignore[assignment] # only `write` and `flush` are used
        if self.server.demands_password:
            self.current_client.get_socket()._client_info["user"] = NOBODY  # noqa: SLF001 - fakeredis has no setting for it


class Unhurried:
    """Writes the whole answer to a socket that does not block."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        """Write all of `data`.

        Raises:
            OSError: the client is gone or reads nothing.
        """
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._connection.send(rest) :]
            except BlockingIOError:
                if not select.select([], [self._connection], [], WRITE_MAX_S)[1]:
                    raise TimeoutError("the client takes nothing") from None

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""


class Doorkeeper(AccessControlList):
    """Allows no command before the password."""

    def __init__(self, password: bytes) -> None:
        super().__init__()
        self.get_user_acl(b"default").add_password(password)

    def validate_command(self, username: bytes, client_info: Any, fields: list[bytes]) -> None:
        """Check that this user may run this command.

        Raises:
            SimpleError: the user may not; the text is the answer to the client.
        """
        if username == NOBODY.encode() and fields[0].upper() not in BEFORE_PASSWORD:
            raise SimpleError("NOAUTH Authentication required.")
        super().validate_command(username, client_info, fields)


def _say(line: str) -> None:
    sys.stderr.write(f"the registry's stand-in: {line}\n")
    sys.stderr.flush()


def _listen_to_signals() -> int:
    """Turn SIGTERM and SIGINT into bytes on a pipe. Returns its reading end."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in ENDING:
        signal.signal(number, lambda *_: None)
    return reader


def _wait_for_end(wakeups: int, *, lifeline: bool) -> None:
    """Wait for a signal or, if stdin is the lifeline, for the end of stdin."""
    watched = [wakeups, 0] if lifeline else [wakeups]
    while True:
        readable, _, _ = select.select(watched, [], [])
        if wakeups in readable or not os.read(0, 4096):
            return


if __name__ == "__main__":
    sys.exit(main())
