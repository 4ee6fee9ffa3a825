"""The table of paths beside the routes of the vLLM that is installed: made by its own code, without an engine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from router.api.paths import PATHS, How
from router.fleet.engine_paths import Catalogue, paths_in

TASKS = ["generate", "transcription"]
LIST = f"""
import json, sys
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
sys.stdout.write("\\n" + json.dumps(build_app(args, supported_tasks={tuple(TASKS)!r}).openapi()))
"""


@pytest.mark.long
def test_vllm_has_what_the_table_says_of_engines() -> None:
    """A new vLLM that moves a path is found here, and not by a client."""
    done = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    openapi = json.loads(done.stdout.splitlines()[-1])
    catalogue = Catalogue()
    catalogue.told("engine", paths_in(openapi))  # type: ignore[arg-type]
    for row in PATHS:
        if row.how in {How.SPLIT, How.PASSTHROUGH, How.OWNER} and row.needs in {"", "a speech model"}:
            path = row.template.replace("{response_id}", "resp_1")
            assert not catalogue.lacking(path, ["engine"]), f"{path}: vLLM has it no more"  # type: ignore[list-item]
            methods = {method.upper() for method in openapi["paths"][row.template]}
            assert methods == set(row.methods), row.template
    for gone in ("/v1/files", "/v1/batches", "/v1/embeddings"):
        assert catalogue.lacking(gone, ["engine"]), f"{gone}: docs/api.md says that a generating engine has it not"  # type: ignore[list-item]
