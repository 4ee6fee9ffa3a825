"""What `baton up` refuses before it starts anything: addresses of the router, folders of models."""

from __future__ import annotations

import pytest

from baton.cli import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "9000", "--admin-port", "9000"], "--admin-port 9000: the same as --port; give another one"),
        (["--host", "203.0.113.7"], "--host '203.0.113.7': cannot assign requested address; give an address of this"),
        (["--host", "no host"], "--host 'no host': "),
        (["./nowhere"], "MODEL ./nowhere: no such folder"),
    ],
)
def test_up_refuses_before_it_starts_anything(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.commands.up._registry", lambda *_: pytest.fail("a registry was started"))
    assert main(["up", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
