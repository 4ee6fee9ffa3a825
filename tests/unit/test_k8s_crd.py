"""The custom resources: made from the settings, never stricter than `baton lint`, read like the cluster file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.k8s_schema import faults, pruned

from cluster.spec import Problem, Severity, Spec, parse
from cluster.spec.about import is_section, settings_of
from cluster.spec.example import EXAMPLE
from cluster.spec.tree import Items, Malformed, Node, Scalar, compose
from k8s.crd import CLUSTER_CRD, POOL_CRD, cluster_file, crds, read_resource
from k8s.crd.names import CONDITIONS, label_value, short
from k8s.crd.schema import section_schema
from k8s.crd.settings import Kubernetes

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "corpus"
SCHEMA = CLUSTER_CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
POOL_SCHEMA = POOL_CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
NOT_IN_JSON = {"anchors", "empty_sections", "duplicate_key", "duplicate_tenant", "merge_of_a_text"}
"""Corpus files that no resource can hold: they have ``x-`` keys, which are pruned, or nulls, equal keys or merges."""


def resource(spec: Any, name: str = "chat") -> dict[str, Any]:
    return {
        "apiVersion": "serving.baton.dev/v1alpha1",
        "kind": "BatonCluster",
        "metadata": {"name": name, "namespace": "llm", "uid": "u-1", "generation": 3},
        "spec": spec,
    }


def loaded(text: str) -> Any:
    """The value that `kubectl` sends for a cluster file. The file's own rules (YAML 1.2) decide what is text."""

    def value(node: Node) -> Any:
        if isinstance(node, Scalar):
            return node.value
        if isinstance(node, Items):
            return [value(each) for each in node.nodes]
        merged: dict[str, Any] = {}
        for key, inner in node.entries:
            if key.text == "<<":
                merged = value(inner) | merged
        return merged | {key.text: value(inner) for key, inner in node.entries if key.text != "<<"}

    root = compose(text)
    return None if root is None else value(root)


def as_resources(folder: str) -> list[Any]:
    """The files of a folder of the corpus that a resource can hold."""
    found = []
    for path in sorted((CORPUS / folder).glob("*.yaml")):
        if path.stem in NOT_IN_JSON:
            continue
        try:
            spec = loaded(path.read_bytes().decode())
        except Malformed:
            continue
        if isinstance(spec, dict):
            found.append(pytest.param(path, id=path.stem))
    assert len(found) >= 6
    return found


def words(problems: tuple[Problem, ...]) -> list[tuple[str, str, str, str, Severity]]:
    return sorted((each.field, each.value.strip('"'), each.message, each.fix, each.severity) for each in problems)


def test_generated_files_are_up_to_date() -> None:
    from tools.k8s_manifests import texts

    for path, text in texts().items():
        assert path.read_text() == text, f"{path.name}: run .venv/bin/python -m tools.k8s_manifests"


def test_every_setting_is_in_the_schema_with_its_description() -> None:
    def compare(section: type, schema: Mapping[str, Any]) -> None:
        for name, setting in settings_of(section).items():
            field = schema["properties"][name]
            assert field["description"].startswith(setting.about.text)
            if is_section(setting.kind):
                compare(setting.kind, field)

    compare(Spec, SCHEMA["properties"]["spec"])
    compare(Kubernetes, SCHEMA["properties"]["spec"]["properties"]["kubernetes"])
    known = set(SCHEMA["properties"]["spec"]["properties"])
    assert known == {*settings_of(Spec), "kubernetes"}


def _schemas(schema: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from _schemas(inner, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), Mapping):
            yield from _schemas(schema[name], f"{path}.{name}")


@pytest.mark.parametrize("schema", [SCHEMA, POOL_SCHEMA], ids=["cluster", "pool"])
def test_schemas_are_structural(schema: Mapping[str, Any]) -> None:
    """The rules of "Specifying a structural schema": a type everywhere, and none beside int-or-string."""
    for path, each in _schemas(schema):
        if each.get("x-kubernetes-int-or-string"):
            assert "type" not in each, path
            continue
        assert each.get("type") in {"object", "array", "string", "integer", "number", "boolean"}, path
        assert not ("properties" in each and "additionalProperties" in each), path
        assert not {"$ref", "definitions", "dependencies", "patternProperties", "nullable"} & each.keys(), path
        if each["type"] == "array":
            assert "items" in each, path
        if "pattern" in each:
            assert not re.search(r"\(\?[^:]", each["pattern"]), f"{path}: RE2 has no lookaround"


def test_everything_in_spec_is_bounded() -> None:
    """Unbounded lists and maps make the API server's estimate of a rule's cost as large as a request can be."""
    for path, each in _schemas(SCHEMA["properties"]["spec"]):
        if each.get("type") == "array":
            assert "maxItems" in each, path
        if isinstance(each.get("additionalProperties"), Mapping):
            assert "maxProperties" in each, path
        if each.get("type") == "string" and "enum" not in each:
            assert "maxLength" in each, path


def test_rules_stay_within_the_cost_budget() -> None:
    """An upper bound of the cost that the API server estimates for the rules.

    Every operator and name of a rule counts once for each place where the rule may run; a comparison of texts costs a
    tenth of their length. A rule over a mapping (`all`) counts 32 times, as the mapping has at most 32 entries.
    Limits: 10 million a rule, 100 million a schema (`apiserver/schema/cel/model`).
    """
    total = 0.0

    def walk(schema: Mapping[str, Any], times: int) -> None:
        nonlocal total
        for each in schema.get("x-kubernetes-validations", ()):
            inner = 32 if ".all(" in each["rule"] else 1
            steps = len(re.findall(r"[\w']+|[^\w\s]", each["rule"])) + each["rule"].count("==") * 103
            assert steps * inner * times < 10_000_000, each["rule"]
            total += steps * inner * times
        for inner_schema in schema.get("properties", {}).values():
            walk(inner_schema, times)
        if isinstance(schema.get("items"), Mapping):
            walk(schema["items"], times * schema.get("maxItems", 1_000_000))
        if isinstance(schema.get("additionalProperties"), Mapping):
            walk(schema["additionalProperties"], times * schema.get("maxProperties", 1_000_000))

    walk(SCHEMA["properties"]["spec"], 1)
    assert 0 < total < 100_000_000


@pytest.mark.parametrize("path", as_resources("right"))
def test_the_api_server_takes_every_file_that_lint_takes(path: Path) -> None:
    assert faults(resource(loaded(path.read_bytes().decode())), SCHEMA) == []


@pytest.mark.parametrize("path", as_resources("wrong"))
def test_the_api_server_refuses_nothing_that_lint_takes(path: Path) -> None:
    """The files of this corpus have faults. If the schema refuses a file, lint must report an error, too."""
    text = path.read_bytes().decode()
    spec = loaded(text)
    cut = pruned(resource(spec), SCHEMA)
    if faults(cut, SCHEMA):
        assert read_resource(cut).errors or parse(text, "f").errors


def test_the_schema_refuses_files_that_lint_refuses() -> None:
    refused = [
        path.values[0].name
        for path in as_resources("wrong")
        if faults(pruned(resource(loaded(path.values[0].read_bytes().decode())), SCHEMA), SCHEMA)
    ]
    assert len(refused) > 10, refused


RULES = {
    "pool_min_above_max": {"models": [{"name": "m", "pools": {"decode": {"min": 3, "max": 2}}}]},
    "pool_default_min_above_start": {"models": [{"name": "m", "pools": {"decode": {"start": 0}}}]},
    "pool_start_above_max": {"models": [{"name": "m", "pools": {"decode": {"start": 4, "max": 2}}}]},
    "pool_never": {"models": [{"name": "m", "pools": {"decode": {"min": 0}}}]},
    "experts": {"models": [{"name": "m", "pools": {"both": {"shape": {"tp": 2, "ep": 3}}}}]},
    "no_pool": {"models": [{"name": "m", "pools": {}}]},
    "stages": {"models": [{"name": "m", "pools": {"prefill": {}, "decode": {"shape": {"pp": 2}}}}]},
    "stages_to_give": {"models": [{"name": "m", "pools": {"prefill": {"shape": {"pp": 2}}, "both": {}}}]},
    "tp": {"models": [{"name": "m", "pools": {"prefill": {"shape": {"tp": 2}}, "decode": {"shape": {"tp": 3}}}}]},
    "promises_nothing": {"models": [{"name": "m"}], "slo": {"a": {"attainment": 0.5}}},
    "second_token": {"models": [{"name": "m"}], "slo": {"a": {"tt2t_ms": 10, "tpot_ms": 20.5}}},
    "end": {"models": [{"name": "m"}], "slo": {"a": {"ttft_ms": 10, "e2e_ms": 9}}},
    "degrade_to_nothing": {"models": [{"name": "m"}], "slo": {"a": {"ttft_ms": 10, "when_missed": "degrade"}}},
    "degrade_unasked": {"models": [{"name": "m"}], "slo": {"a": {"ttft_ms": 10, "degrade_to": "a"}}},
    "no_such_class": {
        "models": [{"name": "m"}],
        "slo": {"a": {"ttft_ms": 10, "when_missed": "degrade", "degrade_to": "b"}},
    },
    "digests": {"models": [{"name": "m"}], "transfer": {"digests": True}},
    "disk_alone": {"models": [{"name": "m"}], "kv": {"disk_gib": 4}},
    "folder_alone": {"models": [{"name": "m"}], "kv": {"host_gib": 4, "disk_folder": "/kv"}},
    "password": {"models": [{"name": "m"}], "registry": {"password_file": "keys/r"}},
    "ca": {"models": [{"name": "m"}], "registry": {"ca_file": "keys/r"}},
    "tls": {"models": [{"name": "m"}], "router": {"tls_key_file": "keys/r"}},
    "ports": {"models": [{"name": "m"}], "router": {"port": 8001}},
}


@pytest.mark.parametrize("spec", RULES.values(), ids=RULES)
def test_a_rule_between_fields_is_also_a_rule_of_lint(spec: dict[str, Any]) -> None:
    refused = faults(resource(spec), SCHEMA)
    assert len([each for each in refused if "Invalid value" in each]) == 1, refused
    assert read_resource(resource(spec)).errors


def test_every_rule_refuses_something() -> None:
    refused = {
        each.rpartition("Invalid value: ")[2] for spec in RULES.values() for each in faults(resource(spec), SCHEMA)
    }
    written = [rule["message"] for _, each in _schemas(SCHEMA) for rule in each.get("x-kubernetes-validations", ())]
    pairs = [each for each in written if "multiple of the other" in each]
    assert set(written) - set(pairs) == refused - set(pairs)
    assert refused & set(pairs)


@pytest.mark.parametrize("path", as_resources("wrong"))
def test_a_file_and_its_resource_get_the_same_problems(path: Path) -> None:
    text = path.read_bytes().decode()
    spec = loaded(text)
    from_file = words(parse(text, "f").problems)
    said = read_resource(resource(spec))
    ours = [each for each in said.problems if "on Kubernetes" not in each.message and "the Secret" not in each.message]
    as_words = words(tuple(ours))
    plain = [(field, message, fix, severity) for field, _, message, fix, severity in as_words]
    assert plain == [(field, message, fix, severity) for field, _, message, fix, severity in from_file]


def test_the_example_is_read_with_its_addresses_ignored() -> None:
    spec = loaded(EXAMPLE)
    read = read_resource(resource(spec))
    assert read.spec == parse(EXAMPLE, "f").spec
    ignored = {each.field for each in read.problems}
    assert {"router.host", "router.port", "router.admin_host", "router.admin_port"} <= ignored
    assert all(each.severity is Severity.WARNING for each in read.problems)
    assert read.files["keys.acme"] == "keys/acme"
    assert read.files_secret == "chat-files"
    assert cluster_file(spec) == spec


def test_routers_on_kubernetes_are_one_process_each() -> None:
    """Ports, network policies and the PodMonitor know one admin side of a pod."""
    read = read_resource(resource({"models": [{"name": "m"}], "router": {"processes": 4}}))
    (problem,) = read.problems
    assert (problem.field, problem.value, problem.severity) == ("router.processes", "4", Severity.WARNING)
    assert "kubernetes.routers" in problem.message


def test_an_instance_over_several_nodes_is_an_error() -> None:
    pools = {
        "prefill": {},
        "decode": {"shape": {"tp": 4, "dp": 2}},
        "extra": {"big": {"role": "both", "shape": {"tp": 16}}},
    }
    spec = {"models": [{"name": "m", "pools": pools}]}
    (problem,) = read_resource(resource(spec)).errors
    assert (problem.field, problem.value) == ("models[0].pools.extra.big.shape", "16 GPUs")
    assert "8" in problem.message
    assert "kubernetes.node_gpus" in problem.fix
    assert read_resource(resource({**spec, "kubernetes": {"node_gpus": 16}})).spec is not None
    small = read_resource(resource({**spec, "kubernetes": {"node_gpus": 4}}))
    assert [each.field for each in small.errors] == ["models[0].pools.decode.shape", "models[0].pools.extra.big.shape"]


@pytest.mark.parametrize("path", ["/etc/key", "../key", "~/key", "a b", "keys/ä"])
def test_a_file_outside_the_secret_is_an_error(path: str) -> None:
    read = read_resource(resource({"models": [{"name": "m"}], "tenants": {"acme": {"key_file": path}}}))
    assert [each.field for each in read.errors] == ["tenants.acme.key_file"]
    assert "outside the Secret" in read.errors[0].message


@pytest.mark.parametrize("url", ["redis://user:hunter2@r:6379", "rediss://:hunter2@r"])
def test_a_password_in_the_registrys_address_is_an_error(url: str) -> None:
    """Pods' commands and a ConfigMap have the address."""
    read = read_resource(resource({"models": [{"name": "m"}], "registry": {"url": url}}))
    (problem,) = read.errors
    assert (problem.field, problem.value) == ("registry.url", "***")
    assert "password_file" in problem.fix
    assert "hunter2" not in "".join(map(str, read.problems))
    kept = {"url": url.replace(":hunter2@", "@"), "password_file": "keys/registry"}
    assert read_resource(resource({"models": [{"name": "m"}], "registry": kept})).errors == ()


def test_two_files_of_one_key_are_an_error() -> None:
    tenants = {"a": {"key_file": "keys/x"}, "b": {"key_file": "keys.x"}}
    read = read_resource(resource({"models": [{"name": "m"}], "tenants": tenants}))
    assert [each.field for each in read.errors] == ["tenants.b.key_file"]


def test_a_pool_name_too_long_for_a_label_and_one_equal_to_the_routers_are_errors() -> None:
    models = [{"name": f"org/m{number}" + "x" * 40, "pools": {"both": {}}} for number in range(2)]
    models[1]["pools"]["extra"] = {"q" * 55: {"role": "both"}}  # type: ignore[index]
    read = read_resource(resource({"models": models}))
    assert [(each.field, each.fix) for each in read.errors] == [
        ("models[1].pools.extra." + "q" * 55, "shorten the name by 33"),
    ]
    one = {"name": "m", "pools": {"both": {}, "extra": {"router": {"role": "both"}}}}
    assert [each.field for each in read_resource(resource({"models": [one]})).errors] == [
        "models[0].pools.extra.router"
    ]
    assert not read_resource(resource({"models": [one, {"name": "n"}]})).errors, "with two models it is `m-router`"


@pytest.mark.parametrize(
    ("name", "fix"),
    [("decode_", "decode-extra"), ("decode-H100", "decode-h100"), ("a.b", "a-b"), ("long_", "long")],
)
def test_a_pool_name_that_is_no_name_on_kubernetes_is_an_error(name: str, fix: str) -> None:
    """The API server refuses the label value ``decode_``; `kubernetes.pools` and a `BatonPool` take no capitals."""
    model = {"name": "m", "pools": {"prefill": {}, "decode": {}, "extra": {name: {"role": "decode"}}}}
    (problem,) = read_resource(resource({"models": [model]})).errors
    assert (problem.field, problem.value, problem.fix) == (f"models[0].pools.extra.{name}", name, f"write `{fix}`")
    model["pools"]["extra"] = {fix: {"role": "decode"}}  # type: ignore[index]
    section = {"pools": {fix: {"pod_template": {}}}}
    assert read_resource(resource({"models": [model], "kubernetes": section})).errors == ()


def test_the_kubernetes_section_has_the_same_checks() -> None:
    wrong = {"models": [{"name": "m"}], "kubernetes": {"routers": 0, "puased": True, "pools": {"decod": {}}}}
    read = read_resource(resource(wrong))
    fixes = {each.field: each.fix for each in read.problems}
    assert fixes["kubernetes.puased"] == "did you mean `paused`?"
    assert fixes["kubernetes.pools.decod"] == "did you mean `decode`?"
    assert fixes["kubernetes.routers"].startswith("write a number that is at least 1")
    assert read.spec is None


@pytest.mark.parametrize(
    "value", [None, 3, "x", [], {}, {"spec": None}, {"spec": {"models": 3}}, {"spec": {"models": [None]}}]
)
def test_any_resource_is_read(value: Any) -> None:
    read = read_resource(value if isinstance(value, dict) else {"spec": value})
    assert read.spec is None
    assert read.errors


def test_conditions_status_and_columns() -> None:
    version = CLUSTER_CRD["spec"]["versions"][0]
    assert version["subresources"] == {"status": {}}
    status = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    assert status["conditions"]["x-kubernetes-list-map-keys"] == ["type"]
    for name in CONDITIONS:
        assert name in status["conditions"]["items"]["properties"]["type"]["description"]
    columns = [each["name"] for each in version["additionalPrinterColumns"]]
    assert columns[:3] == ["Model", "Prefill", "Decode"]
    for each in version["additionalPrinterColumns"]:
        first = re.match(r"\.status\.(\w+)", each["jsonPath"])
        assert first is None or first[1] in status
    pool = POOL_CRD["spec"]["versions"][0]
    assert pool["subresources"]["scale"]["labelSelectorPath"] == ".status.selector"
    assert len(crds()) == 2


@pytest.mark.parametrize(
    ("cluster", "fits"),
    [("chat", True), ("chat.v2", True), ("x" * 63 + "." + "x" * 63, True), (".chat", False), ("chat..v2", False)],
)
def test_a_batonpool_takes_any_valid_cluster_name(cluster: str, fits: bool) -> None:
    """A cluster's name is a subdomain (RFC 1123), as the name of every custom resource."""
    pool = {"spec": {"cluster": cluster, "pool": "decode", "replicas": 1}}
    assert bool(faults(pool, POOL_SCHEMA, None)) is not fits


@pytest.mark.parametrize("name", ["a", "x" * 200, "Ünï/cødé", "a-" * 40, "A.B"])
def test_names_fit(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", short(name))
    assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", label_value(name))
    assert short("x" * 60 + "a", 46) != short("x" * 60 + "b", 46)


def test_a_section_without_rules_has_none() -> None:
    assert "x-kubernetes-validations" not in section_schema(Kubernetes)


def test_yaml_files_are_yaml() -> None:
    for path in (ROOT / "k8s" / "manifests" / "crds").glob("*.yaml"):
        assert yaml.safe_load(path.read_text())["kind"] == "CustomResourceDefinition"
