"""The dashboard, the alerts and the page for operators name metrics that exist, and each alert has its paragraph."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.ids import InstanceId
from engine.agent.meetings import HandoffReport, PullState, exposition
from k8s.operator.hands import OperatorCounters
from router.core.events import BROKEN
from router.core.journey import OUTCOMES
from router.core.slo import COUNTED
from router.telemetry.metrics import RouterMetrics

ROOT = Path(__file__).resolve().parents[2]
RULE_FILES = ("alerts", "operator")
RULES = [
    rule
    for name in RULE_FILES
    for rule in yaml.safe_load((ROOT / f"deploy/prometheus/{name}.yml").read_text())["groups"][0]["rules"]
]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/baton.json").read_text())
PAGE = (ROOT / "docs/operations.md").read_text()
NAME = re.compile(r"\bbaton_[a-z0-9_]+")


def existing() -> dict[str, set[str]]:
    """Names of samples as Prometheus has them, each with its labels."""
    found: dict[str, set[str]] = {}
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    for collector in RouterMetrics().registry._collector_to_names:
        for family in collector.collect():
            if family.name.endswith("_created"):
                continue
            labels = set(getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ()))
            for suffix in suffixes[family.type]:
                found[family.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    agent = (ROOT / "engine/agent/rank.py").read_text()
    one = HandoffReport({"held": 1}, (PullState("e", InstanceId("prefill-0"), "met", 1, 0, aside=False),))
    for name, labels in re.findall(r"^(baton_\w+)\{(.*)\}", exposition({InstanceId("decode-0"): one}), re.MULTILINE):
        found[name] = set(re.findall(r"(\w+)=", labels))
    for name in re.findall(r"# TYPE (baton_agent_\w+) ", agent):
        found[name] = {"instance", "role", "tier"}
    operator = {f"baton_operator_{name}_total": set[str]() for name in asdict(OperatorCounters())}
    operator["baton_operator_leading"] = set()
    return found | operator | {name: {"instance", "role"} for name in re.findall(r'"(baton_agent_[a-z_]+)":', agent)}


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return [*(rule["expr"] for rule in RULES), *panels]


def test_every_metric_that_is_asked_for_exists() -> None:
    known = existing()
    asked = {name for text in expressions() for name in NAME.findall(text)}
    assert len(asked) > 25
    assert asked <= set(known), asked - set(known)


def test_every_metric_is_explained() -> None:
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in existing()}
    named = set(NAME.findall(PAGE))
    assert families <= named, families - named
    assert {name for name in named - families if name != "baton_routers_silent"} == set()


def misnamed(expression: str, known: dict[str, set[str]]) -> set[str]:
    """Labels that an expression asks for and that its metrics do not have; Prometheus adds two of its own, and one to
    what runs on Kubernetes alone.
    """
    of_target = {"job", "instance"} | ({"namespace"} if "baton_operator_" in expression else set())
    wrong: set[str] = set()
    for name, _, matchers in re.findall(r"\b(baton_[a-z0-9_]+|up)\b(\{([^}]*)\})?", expression):
        wrong |= set(re.findall(r"(\w+)\s*[=!]~?", matchers)) - known.get(name, set()) - of_target
    anywhere = of_target.union(*(known.get(name, set()) for name in NAME.findall(expression)))
    for listed in re.findall(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)", expression):
        wrong |= {label.strip() for label in listed.split(",")} - anywhere
    return wrong


def test_every_label_that_is_asked_for_exists() -> None:
    known = existing()
    assert known["baton_requests_total"] == {"path", "way", "outcome"}
    assert misnamed('sum by (role) (rate(baton_requests_total{way="x",tenant="y"}[5m]))', known) == {"role", "tenant"}
    wrong = {text: found for text in expressions() if (found := misnamed(text, known))}
    assert not wrong


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    files = [yaml.safe_load((ROOT / f"deploy/prometheus/{name}_test.yml").read_text()) for name in RULE_FILES]
    cases = [case for file in files for test in file["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == {rule["alert"] for rule in RULES}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="apt install prometheus")
def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    words = ["promtool", "test", "rules", *(f"{name}_test.yml" for name in RULE_FILES)]
    done = subprocess.run(words, cwd=ROOT / "deploy/prometheus", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_values_of_labels_exist() -> None:
    text = "\n".join(expressions())
    outcomes = {each for found in re.findall(r'outcome=~?"([^"]+)"', text) for each in found.split("|")}
    assert outcomes
    assert outcomes <= {*OUTCOMES, BROKEN}
    results = {each for found in re.findall(r'baton_slo_\w+\{result=~?"([^"]+)"', text) for each in found.split("|")}
    assert results == set(COUNTED)


def test_each_alert_says_what_to_do() -> None:
    headings = {line[4:]: at for at, line in enumerate(PAGE.splitlines()) if line.startswith("### ")}
    lines = PAGE.splitlines()
    assert set(headings) == {rule["alert"] for rule in RULES}
    for rule in RULES:
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert len(" ".join(lines[headings[rule["alert"]] + 1 : headings[rule["alert"]] + 4])) > 100


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
