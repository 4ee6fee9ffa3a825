"""The router's table of paths, compared with the routes of the installed vLLM. vLLM's own code makes them, without an
engine.
"""

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
    """If a new vLLM moves a path, this test finds it before a client does."""
    done = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    openapi = json.loads(done.stdout.splitlines()[-1])
    catalogue = Catalogue()
    catalogue.told("engine", paths_in(openapi))  # type: ignore[arg-type]
    for row in PATHS:
        if row.how in {How.SPLIT, How.PASSTHROUGH, How.OWNER} and row.needs in {"", "a speech model"}:
            path = row.template.replace("{response_id}", "resp_1")
            assert not catalogue.lacking(path, ["engine"]), f"{path}: vLLM no longer has it"  # type: ignore[list-item]
            methods = {method.upper() for method in openapi["paths"][row.template]}
            assert methods == set(row.methods), row.template
    for gone in ("/v1/files", "/v1/batches", "/v1/embeddings"):
        assert catalogue.lacking(gone, ["engine"]), f"{gone}: docs/api.md says that a generating engine has it not"  # type: ignore[list-item]
