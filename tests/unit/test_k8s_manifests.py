"""Manifests, chart and images by the rules of others: published schemas, restricted profile, Helm, hadolint."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.k8s_objects import manifests
from support.k8s_restricted import broken

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
VERSIONS = ("1.30", "1.36", "1.37")
"""Of Kubernetes: the oldest that the chart takes, the one that the tests assume, the newest with published schemas."""
RICH: dict[str, Any] = {
    "models": [
        {"name": "m", "pools": {"prefill": {"shape": {"tp": 2}}, "decode": {"min": 1, "max": 4, "flips": True}}}
    ],
    "tenants": {"acme": {"key_file": "keys/acme"}},
    "slo": {"fast": {"ttft_ms": 500}},
    "kubernetes": {"rdma_resource": "rdma/hca", "env_secret": "hf", "prometheus_namespace": "monitoring"},
}


def documents(path: Path) -> list[Any]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


@functools.cache
def given() -> dict[str, Any]:
    """All manifests that a user or the operator sends to an API server, by a name."""
    found = {}
    for path in sorted((K8S / "manifests").rglob("*.yaml")):
        found |= {f"{path.stem} {each['kind']}": each for each in documents(path)}
    for size, spec in (("small", None), ("rich", RICH)):
        made = manifests(spec) if spec else manifests()
        found |= {f"{size} {kind} {name}": each for (kind, name), each in made.items()}
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid_by_the_published_schemas(version: str) -> None:
    """Strict: a field that Kubernetes does not know is a fault."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: make setup")
    wrong = []
    for name, manifest in given().items():
        try:
            validate.validate(json.loads(json.dumps(manifest)), version, strict=True)
        except validate.ValidationError as error:
            wrong.append(f"{name}: {'.'.join(map(str, error.path))}: {error.message}")
    assert wrong == []


def test_the_schemas_refuse_an_unknown_field() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: make setup")
    wrong = copy.deepcopy(given()["small Deployment chat-decode-0"])
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, "1.36", strict=True)


# -- the restricted profile --


def pods() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every pod template: of the operator, routers, registries and engines."""
    for name, each in given().items():
        if each["kind"] == "Deployment":
            yield name, each["spec"]["template"]


def test_every_pod_keeps_the_restricted_profile() -> None:
    found = dict(pods())
    kinds = Counter(name.rpartition("-")[0] or name for name in found)
    assert len(found) == 9, kinds
    for name, pod in found.items():
        assert broken(pod) == set(), name
        assert all(each["securityContext"]["readOnlyRootFilesystem"] for each in pod["spec"]["containers"]), name
        assert name.startswith("operator") or pod["spec"]["automountServiceAccountToken"] is False, name


def at(pod: Any, path: str, value: Any) -> None:
    *steps, last = path.split(".")
    for step in steps:
        pod = pod[int(step)] if step.isdecimal() else pod.setdefault(step, {})
    pod[last] = value


BREAKS: dict[str, tuple[str, Any]] = {
    "HostProcess": ("spec.securityContext.windowsOptions", {"hostProcess": True}),
    "host namespaces": ("spec.hostNetwork", True),
    "privileged containers": ("spec.containers.0.securityContext.privileged", True),
    "capabilities added": ("spec.containers.0.securityContext.capabilities", {"drop": ["ALL"], "add": ["IPC_LOCK"]}),
    "hostPath volumes": ("spec.volumes", [{"name": "a", "hostPath": {"path": "/"}}]),
    "host ports": ("spec.containers.0.ports", [{"containerPort": 1, "hostPort": 1}]),
    "AppArmor": ("spec.containers.0.securityContext.appArmorProfile", {"type": "Unconfined"}),
    "SELinux": ("spec.securityContext.seLinuxOptions", {"type": "spc_t"}),
    "/proc mount type": ("spec.containers.0.securityContext.procMount", "Unmasked"),
    "seccomp": ("spec.containers.0.securityContext.seccompProfile", {"type": "Unconfined"}),
    "sysctls": ("spec.securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}]),
    "host probes and lifecycle hooks": ("spec.containers.0.livenessProbe", {"httpGet": {"host": "a", "port": 1}}),
    "volume types": ("spec.volumes", [{"name": "a", "nfs": {"server": "a", "path": "/"}}]),
    "privilege escalation": ("spec.containers.0.securityContext.allowPrivilegeEscalation", None),
    "running as non-root": ("spec.containers.0.securityContext.runAsNonRoot", False),
    "running as non-root user": ("spec.securityContext.runAsUser", 0),
    "capabilities dropped": ("spec.containers.0.securityContext.capabilities", {"drop": ["NET_RAW"]}),
}
"""For each rule, a field and a value that break it, in the order of the page on Pod Security Standards."""


@pytest.mark.parametrize("rule", BREAKS)
def test_each_rule_of_the_profile_is_checked(rule: str) -> None:
    pod = copy.deepcopy(given()["small Deployment chat-decode-0"]["spec"]["template"])
    at(pod, *BREAKS[rule])
    assert rule in broken(pod)


# -- Helm --


def helm() -> str:
    fetched = ROOT / ".bench" / "helm" / "helm"
    found = str(fetched) if fetched.exists() else shutil.which("helm")
    if found is None:
        pytest.skip("helm is not there: make helm")
    return found


def run_helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm(), *words], capture_output=True, text=True, check=False, timeout=60)


def test_the_chart_renders_the_manifests() -> None:
    rendered = run_helm("template", "x", str(K8S / "chart"), "--namespace", "baton")
    assert rendered.returncode == 0, rendered.stderr
    made = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(rendered.stdout) if each}
    plain = [each for path in (K8S / "manifests").rglob("*.yaml") for each in documents(path)]
    assert len(plain) == len(made) == 7
    for each in plain:
        rendered_one = made[each["kind"], each["metadata"]["name"]]
        rendered_one["metadata"].pop("annotations", None)
        assert rendered_one == each


def test_the_chart_without_definitions_has_none() -> None:
    rendered = run_helm("template", "x", str(K8S / "chart"), "--set", "crds.install=false").stdout
    assert "CustomResourceDefinition" not in rendered
    assert "kind: Role" in rendered


@pytest.mark.parametrize(
    ("values", "code"),
    [("replicas=0", 1), ("replicas=two", 1), ("imags.engine=x", 1), ("images.engine=", 1), ("images.engine=r/e:2", 0)],
)
def test_the_chart_refuses_values_that_it_does_not_know(values: str, code: int) -> None:
    for words in (("lint", "--strict", str(K8S / "chart")), ("template", "x", str(K8S / "chart"))):
        done = run_helm(*words, "--set", values)
        assert done.returncode == code, done.stdout + done.stderr


def test_the_chart_becomes_a_package(tmp_path: Path) -> None:
    """`helm push` sends this file to a registry of images (OCI)."""
    done = run_helm("package", str(K8S / "chart"), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (made,) = tmp_path.glob("baton-*.tgz")
    assert run_helm("show", "values", str(made)).stdout.startswith("# Made by")


# -- images --


def hadolint() -> str:
    found = Path(sys.executable).with_name("hadolint")
    if not found.exists() and shutil.which("hadolint") is None:
        pytest.skip("hadolint is not installed: make setup")
    return str(found) if found.exists() else "hadolint"


def test_hadolint_finds_nothing_in_the_images(tmp_path: Path) -> None:
    files = sorted(map(str, (K8S / "images").glob("*.Dockerfile")))
    assert len(files) == 2
    words = [hadolint(), "--no-color"]
    done = subprocess.run([*words, *files], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    bad = tmp_path / "bad.Dockerfile"
    bad.write_text("FROM python:latest\nRUN cd /tmp && pip install x\n")
    assert subprocess.run([*words, str(bad)], capture_output=True, check=False, timeout=60).returncode == 1
