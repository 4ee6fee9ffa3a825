"""Which modules may be compiled, and when they are used: only if they were made from the sources that are here."""

from __future__ import annotations

import ast
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton import compiled
from cluster.registry.membership import Heartbeat
from router.fleet import events as log_entries
from tools.compiled_modules import MODULES

SOURCES = {name: compiled.source_of(name) for name in MODULES}


def _tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text())


@pytest.mark.parametrize("module", MODULES)
def test_classes_have_no_keywords_and_no_struct_as_base(module: str) -> None:
    """mypyc ignores keywords such as `frozen=True`, and makes no native class of a subclass of msgspec's Struct."""
    for each in ast.walk(_tree(module)):
        if isinstance(each, ast.ClassDef):
            assert not each.keywords, f"{module}.{each.name}: move it to a module that is not compiled"
            assert not any(ast.unparse(base).endswith("Struct") for base in each.bases), each.name


@pytest.mark.parametrize("module", MODULES)
def test_constant_tuples_of_floats_are_annotated(module: str) -> None:
    """mypyc 2.4 takes a `Final` pair of floats for unset. Annotate it as `Final[tuple[float, ...]]`."""
    for each in _tree(module).body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.annotation, ast.Name) and each.annotation.id == "Final":
            value = each.value
            if isinstance(value, ast.Tuple) and value.elts:
                known = all(isinstance(item, ast.Constant) and isinstance(item.value, float) for item in value.elts)
                assert not known, f"{module}: {ast.unparse(each)}"


def _for_types_only(tree: ast.Module) -> set[str]:
    """Names that are imported under ``TYPE_CHECKING``."""
    tested = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    inside = [each for node in tested for each in ast.walk(node) if isinstance(each, ast.ImportFrom)]
    return {name.asname or name.name for each in inside for name in each.names}


@pytest.mark.parametrize("module", MODULES)
def test_fields_of_dataclasses_have_types_that_exist_at_run_time(module: str) -> None:
    """mypyc looks up these types when it makes the class: a type imported under `TYPE_CHECKING` is a `KeyError`."""
    tree = _tree(module)
    absent = _for_types_only(tree)
    for each in ast.walk(tree):
        if isinstance(each, ast.ClassDef) and any("dataclass" in ast.unparse(said) for said in each.decorator_list):
            types_ = [node.annotation for node in each.body if isinstance(node, ast.AnnAssign)]
            named = {node.id for said in types_ for node in ast.walk(said) if isinstance(node, ast.Name)}
            assert not named & absent, f"{module}.{each.name}"


def _within(hint: Any) -> Iterator[type]:
    """The classes in a type hint."""
    if isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
        yield hint
    for part in typing.get_args(hint):
        yield from _within(part)


def _read_by_type(root: Any, seen: set[type]) -> set[type]:
    for each in _within(root):
        if each not in seen and (is_dataclass(each) or issubclass(each, msgspec.Struct) or hasattr(each, "_fields")):
            seen.add(each)
            for hint in typing.get_type_hints(each, include_extras=True).values():
                _read_by_type(hint, seen)
    return seen


@pytest.mark.interpreted
@pytest.mark.parametrize("root", [log_entries.Entry, Heartbeat])
def test_classes_that_msgspec_decodes_keep_the_types_of_their_fields(root: Any) -> None:
    """msgspec decodes by them. Compiled classes keep only `tuple` of `tuple[int, ...]` and nothing of `int | None`."""
    found = _read_by_type(root, set())
    assert len(found) > 2
    for each in found:
        if each.__module__ in MODULES:
            plain = [field.type for field in fields(each)] if is_dataclass(each) else each.__annotations__.values()
            assert all(str(said).isidentifier() for said in plain), f"{each} belongs to router/core/values.py"


# -- when compiled modules are used --


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder whose manifest names one compiled module."""
    root, folder = tmp_path / "root", tmp_path / "compiled"
    (root / "some").mkdir(parents=True)
    folder.mkdir()
    (root / "some/where.py").write_text("x = 1\n")
    manifest = compiled.Manifest(
        python=EXTENSION_SUFFIXES[0], sources={"some.where": compiled.digest(b"x = 1\n")}, shared="abc__mypyc"
    )
    (folder / compiled.MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return folder


@pytest.fixture(autouse=True)
def finders(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [each for each in sys.meta_path if type(each).__module__ != "baton.compiled"]
    monkeypatch.setattr(sys, "meta_path", ours)


def _use(made: Path, **environ: str) -> str:
    return compiled.use(made, made.parent / "root", environ)


def test_a_compiled_module_is_taken_from_the_folder(made: Path) -> None:
    assert _use(made) == ""
    assert _use(made) == "", "once"
    (finder,) = (each for each in sys.meta_path if type(each).__module__ == "baton.compiled")
    spec = finder.find_spec("some.where")
    assert spec is not None
    assert spec.origin == str(made / f"some/where{EXTENSION_SUFFIXES[0]}")
    assert finder.find_spec("some.other") is None


def test_one_edited_line_and_no_compiled_module_is_used(made: Path) -> None:
    (made.parent / "root/some/where.py").write_text("x = 2\n")
    assert _use(made) == "some.where was edited since"
    (made.parent / "root/some/where.py").unlink()
    assert _use(made) == "some.where is not there any more"
    assert not any(type(each).__module__ == "baton.compiled" for each in sys.meta_path)


def test_nothing_compiled_is_used_if_imported_already_or_unwanted_or_of_another_python(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _use(made, BATON_COMPILED="0") == "BATON_COMPILED is 0"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "some.where", types.ModuleType("some.where"))
        assert _use(made) == "some.where is imported already"
    monkeypatch.setattr(compiled, "EXTENSION_SUFFIXES", [".other.so"])
    assert _use(made).startswith("compiled for another Python")


def test_nothing_compiled_is_used_without_a_readable_manifest(made: Path) -> None:
    (made / compiled.MANIFEST).write_text('{"python": ')
    assert "cannot be read" in _use(made)
    (made / compiled.MANIFEST).unlink()
    assert _use(made) == "nothing is compiled"
