"""Texts about a cluster file: its explanation as golden text, and the page about its settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from cluster.spec import as_json, as_text, explain, parse
from cluster.spec.about import settings_of
from cluster.spec.example import EXAMPLE
from cluster.spec.page import SECTIONS, page
from cluster.spec.settings import MEANINGS, Spec
from cluster.spec.units import spelling

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "corpus"
GOLDEN = sorted((CORPUS / "explain").glob("*.txt"))
ALL = [(section, name) for _, section in SECTIONS for name in settings_of(section)]


def source(name: str) -> str:
    return EXAMPLE if name == "example" else (CORPUS / "right" / f"{name}.yaml").read_bytes().decode()


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_explanation(path: Path) -> None:
    assert as_text(explain(parse(source(path.stem), "baton.yaml"))) == path.read_text()


def test_there_are_golden_texts() -> None:
    assert {path.stem for path in GOLDEN} == {"bare", "design", "example", "promises"}


def test_the_explanation_as_json_has_the_same_parts() -> None:
    parts = explain(parse(EXAMPLE, "f"))
    listed = as_json(parts)
    assert [each["title"] for each in listed] == [part.title for part in parts]
    assert all(each["lines"] for each in listed)


def test_the_explanation_hides_secrets() -> None:
    text = """
models: [{name: m, pools: {both: {engine_args: {api-key: sk-1, watermark-config.key: sk-2},
  env: {HF_TOKEN: hf_1, A: b}}}}]
registry: {url: "rediss://user:s3cret@redis:6379"}
"""
    told = as_text(explain(parse(text, "f")))
    assert not re.search(r"sk-1|sk-2|hf_1|s3cret", told)
    assert "HF_TOKEN=*** A=b" in told
    assert "rediss://redis:6379" in told


def test_the_page_is_made_from_the_settings() -> None:
    committed = (ROOT / "docs" / "cluster-file.md").read_text()
    assert committed == page(), "run .venv/bin/python tools/cluster_file.py"


def test_the_example_lints_clean() -> None:
    assert parse(EXAMPLE, "f").problems == ()


def test_the_example_names_every_setting() -> None:
    parsed = parse(EXAMPLE, "f")
    named: set[tuple[type, str]] = set()
    for path in parsed.places:
        kind: Any = Spec
        for part in path:
            if is_dataclass(kind):
                assert isinstance(kind, type)
                named.add((kind, str(part)))
                kind = settings_of(kind)[str(part)].kind
            elif get_origin(kind) is not None:
                kind = get_args(kind)[0 if get_origin(kind) is tuple else 1]
    assert named == set(ALL)


def test_every_section_is_on_the_page() -> None:
    def below(section: type) -> Iterator[type]:
        yield section
        for setting in settings_of(section).values():
            for kind in (setting.kind, *get_args(setting.kind)):
                if isinstance(kind, type) and is_dataclass(kind):
                    yield from below(kind)

    assert {section for _, section in SECTIONS} == set(below(Spec))


@pytest.mark.parametrize(("section", "name"), ALL, ids=lambda value: getattr(value, "__name__", value))
def test_every_setting_has_a_description_and_a_reason(section: type, name: str) -> None:
    said = settings_of(section)[name].about
    assert said.text.endswith(".")
    assert said.text[0].isupper() or said.text.startswith("`")
    assert said.why
    assert not said.why.endswith(".")
    assert "|" not in said.text + said.why, "would break the table"
    assert len(said.text) < 200
    spelled = name.rsplit("_", maxsplit=1)[-1]
    if spelling(name).unit:
        assert spelled in {"ms", "s", "max", "gib", "w"}


def test_no_alias_of_a_setting_is_a_setting_itself() -> None:
    for _, section in SECTIONS:
        known = settings_of(section)
        words = [word for setting in known.values() for word in setting.about.aka]
        assert not set(words) & set(known)
        assert len(words) == len(set(words)), f"{section.__name__}: one word for two settings"


def test_every_choice_has_a_meaning() -> None:
    for kind, meanings in MEANINGS.items():
        assert list(meanings) == [each.value for each in kind]
