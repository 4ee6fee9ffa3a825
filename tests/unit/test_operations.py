"""The dashboard, the alerts and the page for operators name metrics that exist, and each alert has its paragraph."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from router.journey import OUTCOMES
from router.meters import Meters
from router.promises import COUNTED

ROOT = Path(__file__).resolve().parents[2]
RULES = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/baton.json").read_text())
PAGE = (ROOT / "docs/operations.md").read_text()
NAME = re.compile(r"\bbaton_[a-z0-9_]+")


def existing() -> dict[str, set[str]]:
    """Names of samples as Prometheus has them, with their labels as far as they are known beforehand."""
    found: dict[str, set[str]] = {}
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    for family in Meters().registry.collect():
        found |= {family.name + suffix: set() for suffix in suffixes[family.type] if "_created" not in family.name}
    agent = (ROOT / "engine/agent/agent.py").read_text()
    return found | {name: set() for name in re.findall(r'"(baton_agent_[a-z_]+)":', agent)}


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


def test_values_of_labels_exist() -> None:
    text = "\n".join(expressions())
    outcomes = {each for found in re.findall(r'outcome=~?"([^"]+)"', text) for each in found.split("|")}
    assert outcomes
    assert outcomes <= set(OUTCOMES)
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
