"""The operator's Role, manifests, chart, images and commands."""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import yaml
from support.idle_connections import oldest_make_room

from baton.cli import main
from baton.commands import operator
from engine.agent import http
from k8s.crd import read_resource
from k8s.plan import Desired, Images, ObservedCluster, PlanLimits, plan
from k8s.plan.install import operator_objects
from k8s.plan.rights import RIGHTS, rules

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
EXAMPLES = sorted((K8S / "examples").glob("*.yaml"))


def documents(path: Path) -> list[Any]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def test_the_role_has_no_wildcard_and_no_right_over_the_resources_spec() -> None:
    for rule in rules():
        assert not {"*"} & {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}
    assert set(RIGHTS["serving.baton.dev", "batonclusters"]) == {"list", "watch"}, "the operator never writes a spec"
    assert "get" not in RIGHTS["", "secrets"]


def test_the_manifests_role_is_namespaced_and_has_the_rights_of_the_table() -> None:
    kinds = {each["kind"]: each for each in documents(K8S / "manifests" / "operator.yaml")}
    assert set(kinds) == {"ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "Deployment"}
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for rule in kinds["Role"]["rules"]:
        found[rule["apiGroups"][0], rule["resources"][0]] |= set(rule["verbs"])
    assert found == {key: set(verbs) for key, verbs in RIGHTS.items()}


def test_the_operators_pod_keeps_the_restricted_profile() -> None:
    made = operator_objects("ns", image="i", engine="e", router="r", redis="d")
    pod = made[-1]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]


@pytest.mark.parametrize(("prometheus_in", "named"), [(None, "ns"), ("monitoring", "monitoring")])
def test_only_its_own_namespace_and_prometheus_reach_the_operator(prometheus_in: str | None, named: str) -> None:
    *_, policy, deployment = operator_objects(
        "ns", image="i", engine="e", router="r", redis="d", prometheus_in=prometheus_in
    )
    spec = policy["spec"]
    assert (policy["kind"], spec["policyTypes"]) == ("NetworkPolicy", ["Ingress"])
    assert spec["podSelector"] == deployment["spec"]["selector"]
    (rule,) = spec["ingress"]
    assert rule["from"] == [
        {"podSelector": {}},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": named}}},
    ]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert [each["port"] for each in rule["ports"]] == [each["containerPort"] for each in container["ports"]]


@pytest.mark.sockets
async def test_connections_that_ask_nothing_keep_no_probe_from_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECTIONS_MAX", 4)
    parser = argparse.ArgumentParser()
    operator.add_arguments(parser)
    told = SimpleNamespace(counted=dict, holds=lambda: True)
    runner = await operator._serve_metrics(parser.parse_args(["--port", "0"]), told, told)
    try:
        host, port = runner.addresses[0]

        async def healthy() -> int:
            async with aiohttp.request("GET", f"http://{host}:{port}/health") as answer:
                return answer.status

        assert await oldest_make_room(host, port, 4, healthy) == 16
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_right_and_makes_a_cluster(path: Path) -> None:
    (thing,) = documents(path)
    read = read_resource(thing)
    assert read.problems == ()
    actions = plan(
        Desired(resource=read, images=Images(engine="e", router="r", redis="d")), ObservedCluster(), PlanLimits(), 0.0
    )
    assert len(actions) >= 14


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} == {"mocks", "one-node", "two-nodes-rdma"}


def test_a_dry_run_prints_a_plan_for_people_and_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operator", "--once", "--dry-run", "-f", str(K8S / "examples" / "mocks.yaml")]) == 0
    out = capsys.readouterr().out
    assert "# mocks: apply Deployment mocks-prefill-0: starts with 1" in out
    made = [each for each in yaml.safe_load_all(out) if each]
    assert {"Deployment", "NetworkPolicy", "PodDisruptionBudget"} <= {each["kind"] for each in made}


def test_a_dry_run_quotes_text_that_kubectl_would_read_as_another_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "quoted.yaml"
    labels = {
        "rev": "1e5",
        "hex": "0X1F",
        "low": "-0o17",
        "big": "1_0e3",
        "mode": "0o17",
        "answer": "y",
        "day": "2026-11-26",
    }
    patch = {"pod_template": {"metadata": {"labels": labels}}}
    spec = {"models": [{"name": "m", "pools": {"both": {}}}], "kubernetes": {"pools": {"both": patch}}}
    file.write_text(yaml.safe_dump({"kind": "BatonCluster", "metadata": {"name": "chat"}, "spec": spec}))
    assert main(["operator", "--once", "--dry-run", "-f", str(file)]) == 0
    out = capsys.readouterr().out
    for name, text in labels.items():
        assert f"{name}: '{text}'\n" in out


def test_a_dry_run_of_a_wrong_spec_names_the_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("kind: BatonCluster\nmetadata: {name: a}\nspec: {models: [{name: m, pools: {decode: {max: 0}}}]}\n")
    assert main(["operator", "--once", "--dry-run", "--json", "-f", str(file)]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["field"] == "models[0].pools.decode.max"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--once"], "go together"),
        (["--once", "--dry-run", "-f", "nowhere.yaml"], "nowhere.yaml"),
        (["--once", "--dry-run", "-f", str(ROOT / "pyproject.toml")], "pyproject.toml"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["operator", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("path", sorted((K8S / "images").glob("*.Dockerfile")), ids=lambda path: path.stem)
def test_images_are_built_in_stages_pinned_and_run_without_root(path: Path) -> None:
    text = path.read_text()
    stages = re.findall(r"^FROM (\S+)", text, flags=re.MULTILINE)
    assert len(stages) == 2
    for stage in stages:
        name, _, tag = stage.rpartition(":")
        assert name
        assert re.search(r"\d", tag), f"{stage}: pin a version"
        assert tag != "latest"
    assert re.search(r"^USER 65532:65532$", text, flags=re.MULTILINE)
    if path.stem == "router":
        assert "vllm/" not in text
        assert "torch" not in re.sub(r"#.*", "", text)
