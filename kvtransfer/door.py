"""The agent socket ("door") of an engine: a Unix socket through which only the engine's own agent speaks to its
connector. A shell.

The socket stands in a folder that only this user may enter, and the connecting process must belong to this user. File
permissions and the user that the kernel reports (`SO_PEERCRED`) are the whole protection. Threads of the engine's
scheduler process serve the socket. They answer questions (`kvtransfer.asks`) from memory or queue them for the engine's
next step, so no thread waits for a forward pass. Lines are bounded, parsers are total, a silent client is disconnected
after a while, and clients above the limit are turned away: no client can end or delay the engine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvtransfer.asks import DTYPE, LEFT, LINE_BYTES_MAX, Ask, HeldState, Metadata, parse

CLIENTS_MAX: Final = 16
"""One agent, the processes of its guards, and one more reader of the state."""
SILENCE_S: Final = 60.0
"""A client that sends nothing for this long is disconnected."""
PATH_BYTES_MAX: Final = 107
"""Linux' limit for the path of a Unix socket."""

logger = logging.getLogger("baton.door")


class DoorTaken(OSError):
    """Another engine answers at this path."""


class Door:
    """Serves one socket until it is closed."""

    def __init__(self, path: Path, answer: Callable[[Ask], dict[str, Any]]) -> None:
        """Open the socket. The socket of an engine that has ended is replaced.

        Raises:
            DoorTaken: another engine answers there.
            OSError: the socket cannot be opened there.
            ValueError: the path is too long, or other users may enter its folder.
        """
        self.path = path
        self._answer = answer
        self._closed = threading.Event()
        self._clients = 0
        self._lock = threading.Lock()
        _check_folder(path)
        if _answers(path):
            raise DoorTaken(
                f"another engine answers at {path}: give each engine a door of its own (`baton engine --door`, or "
                "`door` in kv_connector_extra_config)"
            )
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(path))
            path.chmod(0o600)
            self._socket.listen(CLIENTS_MAX)
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="baton-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the socket. Open connections end with the process."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                if self._closed.wait(0.1):  # or out of descriptors: an immediate retry would not help
                    return
                continue
            with self._lock:
                full = self._clients >= CLIENTS_MAX
                self._clients += not full
            if full or _user_of(client) != os.getuid():
                client.close()
                self._left(not full)
                continue
            try:
                threading.Thread(target=self._attend, args=(client,), name="baton-door-client", daemon=True).start()
            except RuntimeError:  # no thread can be started now: this client is turned away, and the door stays open
                client.close()
                self._left(counted=True)

    def _left(self, counted: bool) -> None:  # noqa: FBT001
        with self._lock:
            self._clients -= counted

    def _attend(self, client: socket.socket) -> None:
        """Serve one client, question by question."""
        try:
            with client, client.makefile("rb") as lines:
                client.settimeout(SILENCE_S)
                while (line := lines.readline(LINE_BYTES_MAX + 1)) and not self._closed.is_set():
                    client.sendall(json.dumps(self._reply(line)).encode() + b"\n")
                    if not line.endswith(b"\n"):
                        return  # cut off, or longer than a line may be: the next question's start is unknown
        except OSError:
            pass  # the client left
        finally:
            self._left(counted=True)

    def _reply(self, line: bytes) -> dict[str, Any]:
        ask = parse(line)
        if isinstance(ask, str):
            return {"error": ask}
        try:
            return self._answer(ask)
        except Exception as error:  # any error: answer the client, and keep the engine running
            logger.exception("the agent socket could not answer %s", type(ask).__name__)
            return {"error": f"{type(error).__name__}: {error}"}


def _check_folder(path: Path) -> None:
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise ValueError(f"{path} is too long for a socket: at most {PATH_BYTES_MAX} bytes")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.parent.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ValueError(f"{path.parent} must be this user's and closed to others (chmod 700)")


def _answers(path: Path) -> bool:
    """Whether a process listens there now."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(1.0)
        try:
            caller.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return True  # the socket's queue is full, or it is not a Baton socket: do not replace it
    return True


def _user_of(client: socket.socket) -> int | None:
    """The user id of the process at the other end, by the kernel; None: the kernel does not tell it."""
    try:
        raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return None
    _, user, _ = struct.unpack("3i", raw)
    return int(user)


def left_to_vllm(path: Path, why: str, dtype: str = "") -> Door | None:
    """The agent socket of an engine whose KV cache is handed over by vLLM's own connector: every answer says so, and
    why. `dtype`: the engine's number format.

    None: another rank of this engine already serves the socket.

    Raises:
        OSError: the socket cannot be opened there.
        ValueError: as `Door`.
    """

    def answer(question: Ask) -> dict[str, Any]:
        if isinstance(question, Metadata | HeldState):
            return {LEFT: why, DTYPE: dtype}
        return {"error": f"vLLM's own connector hands over here: {why}"}

    try:
        return Door(path, answer)
    except DoorTaken:
        return None


def ask(path: Path, question: dict[str, Any], *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Ask one question at an agent socket. Blocks.

    Raises:
        OSError: no process answers, or not in time.
        ValueError: the answering process is not a Baton connector.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        connection.sendall(json.dumps(question).encode() + b"\n")
        with connection.makefile("rb") as lines:
            line = lines.readline(LINE_BYTES_MAX)
    try:
        told = json.loads(line)
    except RecursionError:
        told = None
    if not isinstance(told, dict):
        raise ValueError("not a door's answer")  # noqa: TRY004
    return told


def introduce_each_other(*paths: tuple[str, Path]) -> None:
    """Introduce a few engines on one machine without agents to each other, as agents would: `paths` are name and socket
    path.

    Raises:
        OSError: a socket does not exist, or does not answer in time.
        ValueError: an engine refuses.
    """
    told = {name: ask(path, {"ask": "metadata"}) for name, path in paths}
    for name, said in told.items():
        if "engine_id" not in said:
            raise ValueError(f"{name}: {said.get('error', said)}")
        question = {"ask": "introduce", "instance": name} | {key: said[key] for key in ("engine_id", "payloads")}
        for other, path in paths:
            if other != name and (answer := ask(path, question)).get("ok") is not True:
                raise ValueError(f"{other} does not take {name}: {answer}")
