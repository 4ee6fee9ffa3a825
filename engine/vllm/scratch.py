"""A folder for what one start of an engine leaves where temporary files go. A shell.

vLLM makes files there that nobody removes, even where it ends in order: the sockets between its processes and the file
that torch's processes meet by (vLLM 0.32: `utils/network_utils.py`). So each start has a folder of its own as `TMPDIR`,
and the keeper removes it at the end, whoever died before; `child` does where the keeper was killed.
"""

from __future__ import annotations

import contextlib
import getpass
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from engine.vllm.keeper import SCRATCH

PREFIX = "baton-engine-"

BASE_MAX = 40
"""Characters: a socket's path has 107 at most, and vLLM's are the base, this folder's name (21) and 37 more."""


@contextlib.contextmanager
def scratch(env: dict[str, str]) -> Iterator[dict[str, str]]:
    """The same environment with a temporary folder of its own, which is gone afterwards.

    Where the usual one has too long a path for sockets below it, or cannot be written to, nothing is changed.
    """
    base = env.get("TMPDIR") or tempfile.gettempdir()
    folder = None
    if len(base) <= BASE_MAX:
        with contextlib.suppress(OSError):
            folder = tempfile.mkdtemp(prefix=PREFIX, dir=base)
    if folder is None:
        yield env
        return
    try:
        # Ours last: vLLM's processes find their arguments, to rename themselves, by the place of the first variable;
        # one that is set anew, as torch does with the one it reads, has left its place.
        yield {
            **env,
            "TMPDIR": folder,
            SCRATCH: folder,
            **{name: path for name, path in _kept(base).items() if name not in env},
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _kept(base: str) -> dict[str, str]:
    """What goes where it always does: what torch compiles, for the next start, and Ray's files, which tell of its
    cluster.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "uid"
    compiled = Path(base) / f"torchinductor_{re.sub(r'[^A-Za-z0-9_.-]', '_', user)}"
    return {"TORCHINDUCTOR_CACHE_DIR": str(compiled), "RAY_TMPDIR": base}
