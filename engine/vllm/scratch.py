"""A folder for the sockets between the processes of one start of an engine. A shell.

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

from engine.vllm.keeper import SCRATCH

SOCKETS = "VLLM_RPC_BASE_PATH"
"""vLLM's variable for their folder."""

PREFIX = "baton-engine-"

BASE_BYTES_MAX = 40
"""A socket's path has 107 bytes at most, and vLLM's are the base, this folder's name (22 with a slash) and 37 more."""


@contextlib.contextmanager
def scratch(env: dict[str, str]) -> Iterator[dict[str, str]]:
    """The same environment with a folder of its own for sockets, which is removed afterwards.

    If the usual folder has too long a path for sockets below it, or cannot be written to, nothing is changed.
    """
    base = env.get(SOCKETS) or env.get("TMPDIR") or tempfile.gettempdir()
    folder = None
    if len(os.fsencode(base)) <= BASE_BYTES_MAX:
        with contextlib.suppress(OSError):
            folder = tempfile.mkdtemp(prefix=PREFIX, dir=base)
    if folder is None:
        yield env
        return
    try:
        yield {**env, SOCKETS: folder, SCRATCH: folder}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
