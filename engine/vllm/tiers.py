"""Tiers below an engine's KV cache: vLLM's own offloading to host memory and disk, beside the connector. Pure.

vLLM copies the blocks of prompts into host memory as they are computed, and from there into files. It brings them back
when a prompt needs them (`OffloadingConnector` with its tiers, vLLM 0.32). It runs inside vLLM's `MultiConnector`
behind the connector that hands over. `engine.vllm.connector.tiers` has what vLLM lacks: a fence against pulls, copies
on CPUs, a bound for the files, and the removal of the shared memory's name.

A tier lives as long as one start of its engine. vLLM's file names contain the model's name and the prompt, but not its
weights, so files of an earlier start could be of other weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cluster.errors import UsageError

GIB: Final = 1 << 30

SPEC_MODULE: Final = "engine.vllm.connector.tiers"
"""The module from which vLLM imports `CONNECTOR`, `SPEC` and `FILES`."""
CONNECTOR: Final = "BatonOffloading"
SPEC: Final = "BatonTiers"
FILES: Final = "BoundedFiles"

FOLDER_PREFIX: Final = "baton-kv-"
"""Begins the name of a folder of files, which is emptied when its engine starts."""

MACHINE_MARK: Final = "@"
"""Stands before the machine in such a name, and in no name of an instance or a machine."""

_NO_MACHINE: Final = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The tiers of one engine. `UsageError`: a tier on disk without host memory or without a folder."""

    host_bytes: int
    """Bytes of host memory, of all ranks of the engine together."""
    disk_bytes: int = 0
    """Bytes of files, of all ranks of the engine together; 0: no tier on disk."""
    folder: str = ""
    """The files' folder, absolute. It belongs to this engine alone, and is removed with it."""

    def __post_init__(self) -> None:
        if self.host_bytes <= 0:
            raise UsageError("a tier on disk needs one in host memory, through which vLLM moves all blocks")
        if self.disk_bytes and not self.folder:
            raise UsageError("a tier on disk needs a folder")


def folder_name(engine: str, port: int, host: str) -> str:
    """The name of an engine's folder of files. Some machines share a disk, so the machine's own name is part of it."""
    return f"{FOLDER_PREFIX}{engine}-{port}{machine_part(host)}"


def machine_part(host: str) -> str:
    """What the names of all folders of a machine end with, given the machine's name."""
    return MACHINE_MARK + _NO_MACHINE.sub("_", host)


def beside(own: Mapping[str, Any], tiers: Tiers, ranks: int = 1) -> dict[str, Any]:
    """vLLM's `--kv-transfer-config` for a connector (`own`, its whole configuration) with tiers beside it. Each data
    parallel rank has its part of them.

    The connector comes first: vLLM loads a prompt from the first connector that has any of it. So a decode leg pulls
    its hold, and a tier serves only what no hold has.
    """
    files = {"type": FILES, "module_path": SPEC_MODULE, "root_dir": tiers.folder,
             "limit_bytes": tiers.disk_bytes // ranks, "enable_kv_events": True}  # fmt: skip
    extra = {"spec_name": SPEC, "spec_module_path": SPEC_MODULE, "cpu_bytes_to_use": tiers.host_bytes // ranks,
             "secondary_tiers": [files] if tiers.disk_bytes else []}  # fmt: skip
    offloading = {"kv_connector": CONNECTOR, "kv_connector_module_path": SPEC_MODULE, "kv_role": "kv_both",
                  "kv_connector_extra_config": extra}  # fmt: skip
    return {
        "kv_connector": "MultiConnector",
        "kv_role": own["kv_role"],
        "kv_load_failure_policy": own["kv_load_failure_policy"],
        "kv_connector_extra_config": {"connectors": [dict(own), offloading]},
    }
