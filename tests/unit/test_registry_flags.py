"""The registry of a command that reads a cluster file: the file's values, unless a flag overrides them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from baton.commands import controller, router
from baton.registry import add_registry_arguments, cluster_of, fill_from_file
from cluster.errors import UsageError
from cluster.spec import Spec, parse

FILE = """
models: [{name: m}]
registry: {url: rediss://file:1, cluster: files, password_file: keys/file, ca_file: keys/ca}
"""


def spec(text: str = FILE) -> Spec:
    return parse(text, "f").usable()


def filled(*words: str, text: str = FILE) -> list[str]:
    """The registry of a command with these flags and this file, as flags."""
    parser = argparse.ArgumentParser()
    add_registry_arguments(parser)
    args = parser.parse_args(words)
    fill_from_file(args, spec(text), "there/baton.yaml")
    found = ["--registry", args.registry, "--cluster", cluster_of(args)]
    for flag in ("registry_password_file", "registry_ca_file"):
        if getattr(args, flag) is not None:
            found += [f"--{flag.replace('_', '-')}", str(getattr(args, flag))]
    return found


def words(url: str, cluster: str, password: str, ca: str) -> list[str]:
    return [
        "--registry", url, "--cluster", cluster, "--registry-password-file", password, "--registry-ca-file", ca,
    ]  # fmt: skip


def test_the_file_alone() -> None:
    assert filled() == words("rediss://file:1", "files", "there/keys/file", "there/keys/ca")


def test_flags_alone() -> None:
    given = words("rediss://flag:1", "flags", "p", "c")
    assert filled(*given, text="models: [{name: m}]") == given


def test_each_flag_wins_over_the_file() -> None:
    assert filled("--cluster", "flags") == words("rediss://file:1", "flags", "there/keys/file", "there/keys/ca")
    assert filled("--registry-password-file", "p", "--registry-ca-file", "c") == words(
        "rediss://file:1", "files", "p", "c"
    )
    assert filled("--cluster", "default") == words("rediss://file:1", "default", "there/keys/file", "there/keys/ca")


def test_a_registry_from_a_flag_gets_none_of_the_files_registry_settings() -> None:
    assert filled("--registry", "redis://flag:1") == ["--registry", "redis://flag:1", "--cluster", "default"]


@pytest.mark.parametrize("command", [router, controller])
def test_the_commands_leave_the_cluster_open_until_the_file_is_read(command: object) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)  # type: ignore[attr-defined]
    given = ["baton.yaml"] if command is controller else []
    assert parser.parse_args(given).cluster is None


def test_a_controller_without_a_registry(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("models: [{name: m}]")
    parser = argparse.ArgumentParser()
    controller.add_arguments(parser)
    args = parser.parse_args([str(file)])
    args.vllm_args = []
    with pytest.raises(UsageError, match="neither this flag nor the file names one"):
        controller.run(args)
