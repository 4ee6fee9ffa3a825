"""`baton operator --once --dry-run`: what it says of resources with errors, and of files that it cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.cli import main

DRY = ("operator", "--once", "--dry-run", "-f")
WRONG = """
apiVersion: serving.baton.dev/v1alpha1
kind: BatonCluster
metadata: {name: chat, namespace: here}
spec: {models: [{name: m}], limits: {stall_s: -1}}
"""


def test_a_resource_with_errors_is_not_acted_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(WRONG)
    assert main([*DRY, str(file)]) == 1
    told = capsys.readouterr()
    assert told.out == "# chat: not acted on, because of 1 error: correct what stands on stderr, and run this again\n"
    assert "limits.stall_s" in told.err


def test_a_resource_with_errors_is_not_acted_on_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(WRONG)
    assert main([*DRY, str(file), "--json"]) == 1
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["event"] for each in events] == ["problem", "refused"]
    assert events[1] == {"event": "refused", "cluster": "chat", "errors": 1}
