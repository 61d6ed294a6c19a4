"""Alert rules, the dashboard and autoscaling use metrics that the service exports."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from autoshard_server.problems import ProblemType
from autoshard_server.telemetry import process_metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
PAGE = Path(__file__).parents[2] / "docs" / "operating.md"
OF_PROMETHEUS = {"up"}
OF_WORKERS = {"autoshard_worker_alive"}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DEPLOY / "grafana" / "autoshard.json").read_text())[
        "panels"
    ]
    return found


@pytest.fixture(scope="module")
def exported(service: Any) -> dict[str, set[str]]:
    """Names of the exported series, with the labels of those that have values."""
    text = service.http.get("/metrics").text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    for metric in process_metrics().collect():
        # Without values yet.
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}
        for ending in endings.get(metric.type, [""]):
            found.setdefault(metric.name + ending, set())
    return found


def expressions() -> list[str]:
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    scaled = yaml.safe_load((DEPLOY / "keda" / "worker.yaml").read_text())
    asked = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    return [*(rule["expr"] for rule in rules()), *shown, *asked]


def test_every_metric_is_exported(exported: dict[str, set[str]]) -> None:
    assert len(expressions()) > 20
    for expression in expressions():
        bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", expression)
        named = set(re.findall(r"\b(?:autoshard|process)_\w+\b", bare)) or {"up"}
        grouped = set(re.findall(r"by \(([^)]*)\)", expression))
        labels = {label.strip() for labels in grouped for label in labels.split(",")} - {"le"}
        assert named - OF_WORKERS - OF_PROMETHEUS <= exported.keys() | labels, expression


def test_the_page_lists_metrics_that_are_exported(exported: dict[str, set[str]]) -> None:
    listed = set(re.findall(r"`((?:autoshard|process)_\w+)`", PAGE.read_text("utf-8")))
    assert len(listed) > 10
    for name in listed - OF_WORKERS:
        assert {name, f"{name}_count"} & exported.keys(), name


def test_every_alert_says_what_to_do() -> None:
    for rule in rules():
        assert rule["alert"].startswith("Autoshard")
        assert {"summary", "action"} <= rule["annotations"].keys()
    named = re.findall(r'problem=~"([^"]+)"', " ".join(rule["expr"] for rule in rules()))
    assert set("|".join(named).split("|")) <= {kind.slug for kind in ProblemType}


def test_panels_do_not_overlap() -> None:
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels()]
    assert len(set(places)) == len(places) >= 12
    assert len({p["id"] for p in panels()}) == len(places)
