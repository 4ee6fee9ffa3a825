"""The registry server of one `baton up`: Redis where it is installed, else the stand-in; a child like the others."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from baton.ports import HeldPorts
from baton.ticket_keys import write_private
from cluster.errors import BatonError
from cluster.registry.launch import registry_command
from cluster.registry.redis import RedisRegistry
from cluster.registry.registry import RegistryDown
from cluster.urls import parted
from engine.vllm.child import KEEPER

READY_S = 20.0
"""Longest wait for the registry: Redis answers within a second, the stand-in within two, a busy machine needs more."""


class RegistryElsewhere:
    """A registry that runs already. Use it as a context, like `RegistryChild`."""

    argv: list[str] | None = None
    """The command that starts it; None: it runs already."""

    def __init__(self, cluster: str, url: str, password_file: Path | None, ca_file: Path | None) -> None:
        self.cluster = cluster
        self.url, password = (url, "") if password_file is not None else parted(url)
        self._private: tempfile.TemporaryDirectory[str] | None = None
        if password:  # in a flag every user of the machine would read it
            self._private = tempfile.TemporaryDirectory(prefix="baton-registry-")
            password_file = write_private(Path(self._private.name) / "password", password)
        self.password_file = password_file
        self.ca_file = ca_file
        self.say = url.rpartition("@")[2]  # never a password

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._private is not None:
            self._private.cleanup()

    def words(self) -> list[str]:
        """Flags by which Baton's other programs find the registry."""
        words = ["--registry", self.url, "--cluster", self.cluster]
        if self.password_file is not None:
            words += ["--registry-password-file", str(self.password_file)]
        return [*words, "--registry-ca-file", str(self.ca_file)] if self.ca_file is not None else words

    async def wait_ready(self) -> None:
        """Wait until the registry answers.

        Raises:
            BatonError: it does not answer within `READY_S`.
        """
        registry = RedisRegistry.open(
            self.url, cluster=self.cluster, password_file=self.password_file, ca_file=self.ca_file
        )
        deadline = time.monotonic() + READY_S
        try:
            while True:
                try:
                    await registry.read()
                except RegistryDown as down:
                    if time.monotonic() > deadline:
                        raise BatonError(f"the registry does not answer: {down}") from None
                    await asyncio.sleep(0.05)
                else:
                    return
        finally:
            await registry.close()


class RegistryChild(RegistryElsewhere):
    """A registry server of this cluster's own: its address and its command. `__exit__` removes its password file."""

    def __init__(self, cluster: str, ports: HeldPorts) -> None:
        """`ports`: holds the server's port, for its restarts too."""
        self._folder = tempfile.TemporaryDirectory(prefix="baton-registry-")
        try:
            self._command = registry_command(Path(self._folder.name), port=ports.take_any())
        except BaseException:  # an interrupt too: the folder holds a password
            self._folder.cleanup()
            raise
        super().__init__(cluster, self._command.url, self._command.password_file, None)
        self.say = f"{self._command.server} at {self.url}"
        # redis-server does not end with its parent: the engines' keeper sees to that.
        self.argv = [sys.executable, "-I", "-S", str(KEEPER), *self._command.argv]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._folder.cleanup()
