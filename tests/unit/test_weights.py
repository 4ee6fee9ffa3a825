"""The names (digests) of weights and of machines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.agent.node import this_node
from engine.vllm.weights import SAMPLE_BYTES, SAMPLES, weights_of

SIZE = 4 * SAMPLES * SAMPLE_BYTES


def folder(at: Path, *, config: str = '{"layers": 2}', fill: bytes = b"w", name: str = "model.safetensors") -> Path:
    at.mkdir(parents=True)
    (at / "config.json").write_text(config)
    (at / name).write_bytes(fill * SIZE)
    return at


def named(model: Path | str, revision: str | None = None, **environ: str) -> str:
    return weights_of(str(model), revision, environ)


def test_the_same_files_have_one_name_wherever_they_are(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "a"), folder(tmp_path / "b" / "c")
    (second / "README.md").write_text("a copy")
    assert named(first) == named(second) != ""


@pytest.mark.parametrize(
    "changed",
    [{"config": '{"layers": 3}'}, {"fill": b"x"}, {"name": "other.safetensors"}],
    ids=lambda one: next(iter(one)),
)
def test_other_files_have_another_name(tmp_path: Path, changed: dict[str, str]) -> None:
    assert named(folder(tmp_path / "a")) != named(folder(tmp_path / "b", **changed))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "chat_template.jinja"])
def test_another_tokenizer_template_or_generation_config_has_another_name(tmp_path: Path, name: str) -> None:
    first, second = folder(tmp_path / "a"), folder(tmp_path / "b")
    (first / name).write_text("{}")
    assert named(first) != named(second)
    (second / name).write_text("{}")
    assert named(first) == named(second)
    (second / name).write_text('{"temperature": 0.6}')
    assert named(first) != named(second)


@pytest.mark.parametrize("at", [0, SIZE - 1, SIZE], ids=["first byte", "last byte", "one byte more"])
def test_both_ends_and_the_size_of_a_file_count(tmp_path: Path, at: int) -> None:
    first, second = folder(tmp_path / "a"), folder(tmp_path / "b")
    weights = bytearray((second / "model.safetensors").read_bytes())
    weights[at : at + 1] = b"!"
    (second / "model.safetensors").write_bytes(weights)
    assert named(first) != named(second)


def test_a_model_on_the_hub_is_named_by_its_commit(tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--org--tiny"
    home = {"HF_HOME": str(tmp_path)}
    assert named("org/tiny", **home) == "", "the model is not downloaded yet"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("4f2a\n")
    (cache / "refs" / "next").write_text("77b0")
    (cache / "snapshots" / "beef").mkdir(parents=True)
    assert named("org/tiny", **home) == "org/tiny@4f2a"
    assert named("org/tiny", "next", **home) == "org/tiny@77b0"
    assert named("org/tiny", "beef", **home) == "org/tiny@beef"
    assert named("org/tiny", "gone", **home) == ""
    assert named("org/tiny", HF_HUB_CACHE=str(tmp_path / "hub")) == "org/tiny@4f2a"


def broken(at: Path) -> Path:
    at.mkdir()
    (at / "model.bin").symlink_to(at / "nothing")
    return at


def empty(at: Path) -> Path:
    at.mkdir()
    return at


@pytest.mark.parametrize("made", [broken, empty])
def test_a_broken_or_empty_folder_has_no_name(tmp_path: Path, made: Callable[[Path], Path]) -> None:
    assert named(made(tmp_path / "model")) == ""


def test_a_machine_is_named_by_its_kernels_id(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("2b4c\n")
    other.write_text("9a77\n")
    assert this_node(one) == this_node(one) != this_node(other)
    assert "2b4c" not in this_node(one), "the name does not reveal the kernel's id"
    assert this_node(tmp_path / "none") == ""
