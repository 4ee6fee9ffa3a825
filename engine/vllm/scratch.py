"""Folders of one start of an engine: for the sockets between its processes, and for a tier of its KV cache. A shell.

vLLM puts these sockets where temporary files go, and never removes them, even if it ends in order (0.32:
`utils/network_utils.get_open_zmq_ipc_path`). In a folder of their own the keeper removes them at the end, whichever
process died first; `child` does so if the keeper was killed. `TMPDIR` stays unchanged: engines of one machine share it,
for locks on downloads and for weights that a daemon keeps.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cluster.errors import UsageError
from engine.vllm.keeper import SCRATCH
from engine.vllm.tiers import FOLDER_PREFIX

SOCKETS = "VLLM_RPC_BASE_PATH"
"""vLLM's variable for their folder."""

PREFIX = "baton-engine-"

BASE_BYTES_MAX = 40
"""A socket's path has 107 bytes at most, and vLLM's are the base, this folder's name (22 with a slash) and 37 more."""


@contextlib.contextmanager
def scratch(env: dict[str, str], kept: str = "") -> Iterator[dict[str, str]]:
    """Give `env` with a folder of its own for sockets, which is removed afterwards.

    If the usual folder's path is too long for sockets below it, or cannot be written to, `SOCKETS` stays as it is.

    Args:
        env: the environment.
        kept: the folder of a tier on disk, which is emptied before and removed afterwards; empty: none.

    Raises:
        UsageError: the name of `kept` does not begin with `FOLDER_PREFIX`.
        OSError: `kept` cannot be made.
    """
    if kept:
        _empty(kept)
    base = env.get(SOCKETS) or env.get("TMPDIR") or tempfile.gettempdir()
    folder = None
    if len(os.fsencode(base)) <= BASE_BYTES_MAX:
        with contextlib.suppress(OSError):
            folder = tempfile.mkdtemp(prefix=PREFIX, dir=base)
    own = [each for each in (folder, kept) if each]
    try:
        yield {**env, **({SOCKETS: folder} if folder else {}), **({SCRATCH: os.pathsep.join(own)} if own else {})}
    finally:
        for each in own:
            shutil.rmtree(each, ignore_errors=True)


def _empty(folder: str) -> None:
    """Make this folder private and empty: files that an earlier start has left may be of other weights."""
    if not Path(folder).name.startswith(FOLDER_PREFIX):
        raise UsageError(f"{folder} would be emptied: its name does not begin with {FOLDER_PREFIX}")
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(mode=0o700, parents=True)
