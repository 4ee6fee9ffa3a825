"""Write k8s/manifests and k8s/chart from their one source: settings, rights, the operator's objects.

A test notices a forgotten run. The definitions of resources are templates of the chart, not files of `crds/`, because
Helm never upgrades what lies there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from baton import __version__
from k8s.crd import crds
from k8s.plan.install import operator_objects

ROOT = Path(__file__).resolve().parent.parent / "k8s"
HEAD = "# Made by `.venv/bin/python -m tools.k8s_manifests`; do not edit.\n"
NAMESPACE = "baton"
VALUES: dict[str, Any] = {
    "replicas": 2,
    "images": {
        "operator": f"baton/router:{__version__}",
        "engine": f"baton/engine:{__version__}",
        "router": f"baton/router:{__version__}",
        "redis": "redis:8",
    },
    "crds": {"install": True},
    "prometheusNamespace": "",
}


def texts() -> dict[Path, str]:
    """Every file and its content."""
    files: dict[Path, str] = {}
    for crd in crds():
        name = f"{crd['spec']['names']['plural']}.yaml"
        files[ROOT / "manifests" / "crds" / name] = HEAD + _yaml(crd)
        files[ROOT / "chart" / "templates" / f"crd-{name}"] = _chart_crd(crd)
    images = VALUES["images"]
    plain = operator_objects(
        NAMESPACE, image=images["operator"], engine=images["engine"], router=images["router"], redis=images["redis"]
    )
    files[ROOT / "manifests" / "operator.yaml"] = HEAD + "---\n".join(_yaml(each) for each in plain)
    files[ROOT / "chart" / "templates" / "operator.yaml"] = _chart_operator()
    files[ROOT / "chart" / "Chart.yaml"] = HEAD + _yaml(_chart())
    files[ROOT / "chart" / "values.yaml"] = HEAD + _yaml(VALUES)
    return files


def _yaml(thing: Any) -> str:
    text: str = yaml.safe_dump(thing, sort_keys=False, width=120, allow_unicode=True)
    return text


def _chart() -> dict[str, Any]:
    chart = {"apiVersion": "v2", "name": "baton", "type": "application", "version": __version__}
    text = "LLM serving on separate prefill and decode pools: the operator and its resources"
    return {**chart, "appVersion": __version__, "description": text, "kubeVersion": ">=1.30.0-0"}


def _chart_crd(crd: dict[str, Any]) -> str:
    """Kept when the chart is uninstalled: with the definition every cluster would be deleted."""
    metadata = {**crd["metadata"], "annotations": {"helm.sh/resource-policy": "keep"}}
    return HEAD + "{{- if .Values.crds.install }}\n" + _yaml({**crd, "metadata": metadata}) + "{{- end }}\n"


def _chart_operator() -> str:
    marks = {
        "IMAGE": "{{ .Values.images.operator | quote }}",
        "ENGINE": "{{ .Values.images.engine | quote }}",
        "ROUTER": "{{ .Values.images.router | quote }}",
        "REDIS": "{{ .Values.images.redis | quote }}",
        "REPLICAS": "{{ .Values.replicas }}",
        "NAMESPACE": "{{ .Release.Namespace }}",
        "PROMETHEUS": "{{ .Values.prometheusNamespace | default .Release.Namespace | quote }}",
    }
    made = operator_objects(
        "@NAMESPACE@",
        image="@IMAGE@",
        engine="@ENGINE@",
        router="@ROUTER@",
        redis="@REDIS@",
        prometheus_in="@PROMETHEUS@",
        replicas="@REPLICAS@",
    )
    text = "---\n".join(_yaml(each) for each in made)
    return HEAD + re.sub(r"'@([A-Z]+)@'", lambda found: marks[found[1]], text)


def main() -> None:
    """Write the files."""
    for path, text in texts().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
