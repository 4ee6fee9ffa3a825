"""Classes, tenants and targets of an edited cluster file apply without a restart; a bad file changes nothing."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.scaling import FILE as RESIZED

from baton.changing import Changing
from baton.cli import main
from baton.commands import controller, router, up
from baton.commands.router import _renewed
from cluster.errors import ApiError
from cluster.spec import SloClass, Spec
from router.api.config import Renewed, RouterConfig
from router.api.server import Router

FILE = """\
models:
  - name: tiny
    pools: {both: {min: 1}}
slo:
  chat: {ttft_ms: 500, tpot_ms: 50}
tenants:
  a: {key_file: a.key, classes: [chat], default_class: chat}
"""


def write(path: Path, text: str) -> None:
    """Replace the file by another one, as editors do."""
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.replace(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / f"{name}.key").write_text(f"{name * 64}\n".replace("b" * 64, "b" * 64))
    path = tmp_path / "baton.yaml"
    path.write_text(FILE)
    return path


def test_a_file_is_read_when_it_has_changed_and_only_then(file: Path) -> None:
    changing = Changing(str(file))
    assert changing.look() is None
    write(file, FILE)
    assert changing.look() is None, "the same words"
    write(file, FILE.replace("500", "700"))
    found = changing.look()
    assert isinstance(found, Spec)
    assert found.slo["chat"].ttft_ms == 700
    assert changing.look() is None
    file.unlink()
    assert changing.look() is None


def edits(path: Path, then: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `then`, which a command calls after it has read the file: the file is edited first, then `then` runs."""

    def edited(*given: Any, **named: Any) -> Any:
        write(path, path.read_text().replace("6000", "2500"))
        return then(*given, **named)

    return edited


class Reached(Exception):
    """Stops a command at the step that a test waits for."""


def test_an_edit_while_a_controller_starts_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found = tmp_path / "baton.yaml", list[Changing]()
    path.write_text(RESIZED)

    def shell(*_: object, changing: Changing, **__: object) -> None:
        found.append(changing)
        raise Reached

    monkeypatch.setattr(controller, "plan_of", edits(path, controller.plan_of))
    monkeypatch.setattr(controller, "ScalingShell", shell)
    with pytest.raises(Reached):
        main(["controller", str(path), "--registry", "redis://there:1"])
    spec = found[0].look()
    assert isinstance(spec, Spec)
    assert spec.slo["chat"].ttft_ms == 2500


def test_an_edit_while_up_looks_for_gpus_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found = tmp_path / "baton.yaml", list[Changing]()
    path.write_text(RESIZED)

    def scaling(*given: object) -> None:
        found.extend(each for each in given if isinstance(each, Changing))
        raise Reached

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(up, "find_hardware", edits(path, up.find_hardware))
    monkeypatch.setattr("baton.local_fleet.LocalScaling", scaling)
    with pytest.raises(Reached):
        main(["up", str(path), "--engine", "mock"])
    spec = found[0].look()
    assert isinstance(spec, Spec)
    assert spec.slo["chat"].ttft_ms == 2500


def test_an_edit_while_a_router_starts_is_taken(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = list[RouterConfig]()

    def processes(*given: Any) -> None:
        configs.append(given[2])
        raise Reached

    monkeypatch.setattr(router, "instances", edits(file, router.instances))
    monkeypatch.setattr(router, "_processes", processes)
    file.write_text(FILE.replace("500", "6000"))
    with pytest.raises(Reached):
        main(["router", "--config", str(file), "--both-url", "http://127.0.0.1:9"])
    assert configs[0].classes["chat"].ttft_ms == 6000
    assert configs[0].renewed is not None
    renewed = configs[0].renewed()
    assert isinstance(renewed, Renewed)
    assert renewed.classes["chat"].ttft_ms == 2500


def test_a_bad_file_says_what_is_wrong_once(file: Path) -> None:
    changing = Changing(str(file))
    write(file, FILE.replace("ttft_ms: 500", "ttft_mss: 500"))
    said = changing.look()
    assert isinstance(said, str)
    assert "ttft_mss" in said
    assert changing.look() is None
    write(file, FILE.replace("500", "600"))
    assert isinstance(changing.look(), Spec), "mended"


def test_a_file_that_was_edited_while_no_descriptor_was_free_is_read_later(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = Changing(str(file))
    write(file, FILE.replace("500", "600"))
    with monkeypatch.context() as limited:
        limited.setattr(Path, "read_bytes", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        assert "cannot be opened" in str(changing.look())
        assert changing.look() is None, "it is said once"
    assert isinstance(changing.look(), Spec)


def test_a_tenant_without_its_key_file_leaves_all_as_it_is(file: Path) -> None:
    look = _renewed(Changing(str(file)), str(file))
    assert look is not None
    write(file, FILE + "  c: {key_file: missing.key, classes: [chat]}\n")
    said = look()
    assert isinstance(said, str)
    assert "missing.key" in said


def promise(ttft_ms: float) -> SloClass:
    return SloClass(ttft_ms=ttft_ms)


async def test_a_router_goes_by_the_new_classes_and_counts_its_open_requests_on() -> None:
    router = Router(RouterConfig(classes={"chat": promise(500)}, proves=False, has_registry=True))
    router.parts.clients.enter("", 1)
    before = router.parts.clients.client("", {"x-slo-class": "chat"})
    assert router.renew(Renewed(classes={"chat": promise(900), "new": promise(100)}, tenants={}, tenant_keys={})) == ""
    assert before.slo is not None
    assert before.slo.ttft_ms == 500, "a request under way keeps the targets that it came with"
    after = router.parts.clients.client("", {"x-slo-class": "chat"})
    assert after.slo is not None
    assert after.slo.ttft_ms == 900
    assert router.generation.promises["new"].ttft_ms == 100
    router.parts.clients.leave("")


async def test_a_class_that_is_gone_is_refused_by_name() -> None:
    router = Router(RouterConfig(classes={"chat": promise(500), "old": promise(9)}, proves=False, has_registry=True))
    assert router.renew(Renewed(classes={"chat": promise(500)}, tenants={}, tenant_keys={})) == ""
    with pytest.raises(ApiError, match="no such class"):
        router.parts.clients.client("", {"x-slo-class": "old"})


@pytest.mark.parametrize(("had", "has"), [({}, {"chat": promise(5)}), ({"chat": promise(5)}, {})])
async def test_an_edit_that_takes_a_restart_says_so_and_changes_nothing(
    had: dict[str, SloClass], has: dict[str, SloClass]
) -> None:
    router = Router(RouterConfig(classes=had, proves=False, has_registry=True))
    said = router.renew(Renewed(classes=has, tenants={}, tenant_keys={}))
    assert "takes a restart" in said
    assert set(router.generation.promises) == set(had)


def test_an_edit_whose_key_file_comes_later_is_taken_then(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lint` only warns of a key file that is not there, and says how to make it: the YAML stays as it is."""
    changing = Changing(str(file))
    changing.read()
    renewed = router._renewed(changing, str(file))
    assert renewed is not None and renewed() is None
    write(file, FILE.replace("tenants:", "tenants:\n  later: {key_file: later}"))
    assert "is tried again" in str(renewed()) and renewed() is None, "it is said once"
    assert main(["key", "new", "later", "--file", str(file.parent / "later")]) == 0
    found = renewed()
    assert isinstance(found, Renewed) and "later" in found.tenants
    assert renewed() is None


def test_engines_elsewhere_need_a_registry_that_they_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text(RESIZED)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert main(["up", str(path), "--engine", "mock", "--on", "ray://10.0.0.5:10001"]) == 2
    assert "cannot reach a registry of this command's own" in capsys.readouterr().err
