"""Simulations on a Ray cluster (`--on ray`): `baton.fanout.Fanout` by Ray's tasks.

Ray places the tasks, runs a task again if its worker or node died, and carries data by its own transport; Baton opens
no connection of its own. The cluster may have other users: Baton starts nothing there, and ends only its own tasks. The
cluster is as trusted as this machine: any client of a Ray cluster may run code on it (docs/security.md).

A node must run the very source that this process runs, compiled if this process is (`baton.fanout_there`). Each task
carries the source's digest and fails if the node's differs: an older Baton on one node would silently simulate by other
rules.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from baton import compiled
from baton.fanout import RETRIES, Pending
from baton.fanout_there import OtherSource, digest, there
from baton.output import say
from baton.packing import packed, unpacked
from cluster.errors import UsageError

T = TypeVar("T")

SILENT_S: Final = 30.0
"""After this long without a result a line on stderr says so: other work may use the cluster's CPUs."""


class RayCluster:
    """`Fanout` on a Ray cluster that runs already."""

    def __init__(self, context: Any, on: str) -> None:
        """Connect. `context`: the first argument of every call; `on`: `ray`, or `ray://HOST:PORT`.

        Raises:
            UsageError: Ray is not installed, or there is no such cluster.
        """
        self._others_words: Final = contextlib.ExitStack()
        """Sends Ray's messages about its workers from stdout to stderr, until `close`."""
        self._others_words.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            self._ray: Final = _connected(on)
        except BaseException:  # an interrupt too: stdout is put back
            self._others_words.close()
            raise
        self.width: Final = max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        held = self._ray.put(packed(context))
        self._key: Final = held.hex()
        self._held: Final = [held]
        """In a list: Ray would fetch and unpack a bare reference for every task."""
        self._there: Final = self._ray.remote(num_cpus=1, max_retries=RETRIES)(there)
        self._open: Final[set[Any]] = set()

    def submit(self, call: Callable[..., T], *args: Any) -> Pending[T]:
        """As `Fanout.submit`."""
        asked = self._there.remote(digest(), compiled.in_use(), self._key, self._held, packed((call, args)))
        self._open.add(asked)
        return _RayTask(self, asked)

    def fetched(self, asked: Any) -> Any:
        """Wait for a task's result. An exception of the task itself is raised as Ray's RayTaskError.

        Raises:
            UsageError: Ray cannot run the task, or its node has another source.
        """
        errors = self._ray.exceptions
        while not self._ray.wait([asked], timeout=SILENT_S)[0]:
            say(f"Ray has given no result for {SILENT_S:g} s: its CPUs may be taken, or its nodes gone (`ray status`)")
        try:
            return unpacked(self._ray.get(asked))
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, OtherSource):
                raise UsageError(f"--on ray: node {cause}") from None
            raise
        except errors.RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            told = (
                f"Ray gave a task up, after {RETRIES} more tries where its process died: {lines[0] if lines else error}"
            )
            raise UsageError(f"--on ray: {told}") from None
        finally:
            self._open.discard(asked)

    def cancel(self, asked: Any, *, force: bool = False) -> bool:
        """Forget the task, and end it if it has not begun; `force` ends it in any case. Always True: Ray does not say
        whether it had begun.
        """
        with contextlib.suppress(Exception):  # the task may be over, or the cluster gone
            self._ray.cancel(asked, force=force)
        self._open.discard(asked)
        return True

    def close(self, *, at_once: bool = False) -> None:
        """As `Fanout.close`. The cluster runs on."""
        for asked in tuple(self._open):
            self.cancel(asked, force=at_once)
        self._others_words.close()


class _RayTask(Generic[T]):
    """One task on the cluster."""

    def __init__(self, owner: RayCluster, asked: Any) -> None:
        self._owner: Final = owner
        self._asked: Final = asked

    def result(self) -> T:
        """As `Pending.result`."""
        found: T = self._owner.fetched(self._asked)
        return found

    def cancel(self) -> bool:
        """As `Pending.cancel`."""
        return self._owner.cancel(self._asked)


def _connected(on: str) -> Any:
    if on != "ray" and (not on.startswith("ray://") or on == "ray://"):
        raise UsageError(f"--on {on}: write ray (the cluster that this machine is part of) or ray://HOST:PORT")
    try:
        import ray
    except ImportError:
        raise UsageError(f"--on {on}: Ray is not installed here: pip install 'baton-serve[ray]'") from None
    if ray.is_initialized():
        return ray
    try:
        ray.init(
            address="auto" if on == "ray" else on,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = lines[0] if lines else type(error).__name__
        raise UsageError(f"--on {on}: no Ray cluster there ({told}): start one with `ray start --head`") from None
    return ray
