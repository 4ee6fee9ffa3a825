"""The table of paths: what it matches, what it keeps out, what engines' own tables say, and the pages made from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cluster import wire
from cluster.errors import ApiError
from cluster.ids import InstanceId
from cluster.scan import run
from router.api.aliases import Aliases, in_form
from router.api.openapi import document
from router.api.paths import PATHS, How, check, find, response_id, tag_in
from router.core.eligibility import GENERATING_PATHS
from router.fleet.engine_paths import TEMPLATES_MAX, Catalogue, paths_in

DOCS = Path(__file__).resolve().parents[2] / "docs"

A, B = InstanceId("a"), InstanceId("b")


def test_every_row_is_found_by_its_own_path() -> None:
    for row in PATHS:
        found = find(row.template.replace("{response_id}", "resp_1").replace("{model}", "org/name"))
        assert found is not None
        assert found[0] is row, row.template
    assert find("/v1/responses/resp_1/cancel")[1] == {"response_id": "resp_1"}  # type: ignore[index]
    assert find("/v1/responses/a/b") is None


def test_the_split_paths_are_those_that_are_handed_over() -> None:
    assert {row.template for row in PATHS if row.how is How.SPLIT} == GENERATING_PATHS


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/v1/completions", "GET", 405),
        ("/v1/models", "DELETE", 405),
        ("/v1/realtime", "GET", 501),
        ("/v1/load_lora_adapter", "POST", 403),
        *(
            (path, "POST", 404)
            for path in ("", "/", "/v1/", "/v1//x", "/v1/../x", "/v1/x/..", "/v1/./x", "/v1/%2e", "/v1/é")
        ),
        *((path, "POST", 404) for path in ("/v1/chat/completions", "/v1/completions", "/v1/chat%2Fcompletions")),
        *((path, "POST", 404) for path in ("/v1/a b", "/v1/a\\b", "/v1/a\n", "/v1/a?b", "/v1/a#b", "v1/a")),
    ],
)
def test_paths_that_are_refused(path: str, method: str, status: int) -> None:
    with pytest.raises(ApiError) as refused:
        check(path, method)
    assert refused.value.status == status


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/made/up", "/v1/responses/resp_a-1", "/v1/a..b", "/v1/.a"])
def test_paths_that_are_passed_on(path: str) -> None:
    check(path, "GET" if "responses" in path else "POST")


def test_engines_tell_what_they_have() -> None:
    catalogue = Catalogue()
    listed = {"/v1/embeddings": {}, "/v1/responses/{response_id}": {}, "/files/{name}/{name}": {}, "/x(": {}, "bad": {}}
    catalogue.told(A, paths_in({"paths": listed}))
    catalogue.told(B, paths_in({"detail": "Not Found"}))
    assert catalogue.lacking("/v1/embeddings", [A, B]) == frozenset()
    assert catalogue.lacking("/v1/responses/resp_1", [A, B]) == frozenset()
    assert catalogue.lacking("/v1/responses/resp_1/cancel", [A, B]) == {A}
    assert catalogue.lacking("/v1/score", [A, InstanceId("never asked")]) == {A}
    catalogue.forget(A)
    assert catalogue.lacking("/v1/score", [A]) == frozenset()


@pytest.mark.parametrize("said", [None, [], {}, {"paths": []}, {"paths": {}}, {"paths": None}, "x", 7])
def test_a_page_that_is_no_openapi_gives_no_paths(said: object) -> None:
    assert paths_in(said) is None


def test_an_engines_list_of_paths_is_bounded() -> None:
    told = paths_in({"paths": {f"/p{number}": {} for number in range(TEMPLATES_MAX + 5)}})
    assert told is not None
    assert len(told) == TEMPLATES_MAX


def test_a_long_list_of_paths_is_not_looked_at_whole() -> None:
    told = Counted(f"/{number:x}{{a}}" for number in range(1_000_000))
    found = paths_in({"paths": told})
    assert found is not None and len(found) == TEMPLATES_MAX and told.looked_at < 20_000


class Counted(Mapping[str, object]):
    """A document's paths; counts how many of them are looked at."""

    def __init__(self, paths: Iterator[str]) -> None:
        self._paths, self.looked_at = paths, 0

    def __iter__(self) -> Iterator[str]:
        for path in self._paths:
            self.looked_at += 1
            yield path

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: str) -> object:
        return {}


@pytest.mark.timeout(5)
@pytest.mark.parametrize(
    ("template", "lacks"),
    [
        ("/v1/" + "".join(f"{{a{number}}}" for number in range(24)) + ".", False),
        ("/" + "/".join(f"{{model}}{number}" for number in range(12)) + "/x", True),
    ],
    ids=["ids in one segment", "names with slashes"],
)
def test_a_hostile_template_costs_no_time(template: str, lacks: bool) -> None:
    catalogue = Catalogue()
    catalogue.told(A, paths_in({"paths": {template: {}}}))
    assert catalogue.lacking("/v1/" + "a" * 60, (A,)) == ({A} if lacks else set())
    assert catalogue.lacking("/" + "a/" * 100, (A,)) == {A}


def test_ids_and_a_models_name_are_found_in_an_engines_list() -> None:
    catalogue = Catalogue()
    catalogue.told(A, paths_in({"paths": {"/v1/models/{model:path}/info": {}, "/v1/files/{id}.{kind}": {}}}))
    for path in ("/v1/models/org/name/info", "/v1/files/a.b"):
        assert not catalogue.lacking(path, (A,)), path
    for path in ("/v1/models//info", "/v1/files/a/b", "/v1/files/"):
        assert catalogue.lacking(path, (A,)) == {A}, path


def test_an_id_tells_its_owner() -> None:
    assert tag_in(response_id("c" * 32, "t" * 16)) == "t" * 16
    assert tag_in("short") == "short"


def never(_: str) -> bool:
    return False


def test_aliases() -> None:
    aliases = Aliases({"gpt": "real", "real": "other", "real2": "real"})
    body = {"model": "gpt"}
    assert not aliases.apply(body, lambda real: real == "real"), "the model does not exist for this tenant"
    assert aliases.apply(body, never)
    assert body == {"model": "real"}, "one step, never two"
    for odd in ({}, {"model": None}, {"model": ["gpt"]}, {"model": "unknown"}):
        before = dict(odd)
        assert not aliases.apply(odd, never)
        assert odd == before
    cards = aliases.cards({"real": {"id": "real", "parent": "x"}})
    assert [card["id"] for card in cards] == ["real", "gpt", "real2"], "an alias never hides a model"
    assert cards[1] == {"id": "gpt", "root": "real", "parent": None}


FORM = (
    b'--X\r\nContent-Disposition: form-data; name="model"\r\n\r\ngpt\r\n'
    b'--X\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\ngpt\r\n\r\n--Y\r\n--X--\r\n'
)
TYPE = "multipart/form-data; boundary=X"
PARTS = run(wire.form_parts(FORM, TYPE))


def test_a_forms_model_alone_is_changed() -> None:
    changed, name = in_form(Aliases({"gpt": "a-longer-name"}), FORM, PARTS, never)
    assert name == "a-longer-name"
    assert changed == FORM.replace(b'"model"\r\n\r\ngpt', b'"model"\r\n\r\na-longer-name')
    parts = run(wire.form_parts(changed, TYPE))
    assert [(part.field, changed[part.begin : part.end]) for part in parts] == [
        ("model", b"a-longer-name"),
        ("file", b"gpt\r\n\r\n--Y"),
    ]
    assert in_form(Aliases({}), FORM, PARTS, never) == (FORM, "gpt")
    assert in_form(Aliases({"gpt": "x"}), FORM, PARTS, lambda real: real == "x") == (FORM, "gpt")
    twice = FORM.replace(b'"file"', b'"model"')
    assert in_form(Aliases({"gpt": "x"}), twice, run(wire.form_parts(twice, TYPE)), never)[1] is None


def test_the_document_in_docs_is_what_the_router_answers() -> None:
    made = json.loads((DOCS / "openapi.json").read_text())
    assert made == document(), "make it again: .venv/bin/python tools/api_table.py"


def test_the_document_names_every_path_and_points_nowhere_else() -> None:
    said = document()
    assert set(said["paths"]) == {row.template for row in PATHS if row.how is not How.REFUSED}
    text = json.dumps(said)
    for kind in ("schemas", "responses"):
        for name in said["components"][kind]:
            assert f"#/components/{kind}/{name}" in text
    assert text.count("$ref") == text.count("#/components/schemas/Error") + text.count("#/components/responses/Error")
