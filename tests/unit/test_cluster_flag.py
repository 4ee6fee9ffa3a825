"""`--cluster`: every command refuses what is no name of a cluster."""

from __future__ import annotations

import pytest

from baton.cli import main


@pytest.mark.parametrize("command", ["up", "down", "logs", "scale", "status", "load http://h:1", "key registry f"])
@pytest.mark.parametrize("name", ["a/b", "../x", "", "a b"])
def test_every_command_refuses_what_is_no_name_of_a_cluster(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*command.split(), "--cluster", name])
    assert f"argument --cluster: {name!r}: write letters, digits" in capsys.readouterr().err
