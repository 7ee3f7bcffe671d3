"""Alerts and dashboard: they ask for metrics that there are, and each alert has an entry in the runbook."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deployment.files import KUBERNETES, ROOT, read_yaml
from tests.deployment.metric_names import (
    FLEET_WIDE,
    FROM_PROMETHEUS,
    LABELS,
    OF_OTHERS,
    VALUES,
    grouping_labels,
    selectors,
)
from tests.deployment.rendering import overlay
from tests.deployment.rules import TESTS, alerts, write_rules

ALERTS = alerts()
DASHBOARD: dict[str, Any] = json.loads((KUBERNETES / "overlays/scale-out/dashboard.json").read_text())
RUNBOOK = {
    page.name: re.findall(r"(?ms)^## ([^\n]+)\n(.*?)(?=^## |\Z)", page.read_text())
    for page in (ROOT / "docs/runbook").glob("*.md")
}
"""The entries of each page: heading and text."""
VARIABLES = {"$namespace", "$kind"}


def panel_expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield f"panel {panel['title']}", target["expr"]


EXPRESSIONS = [
    *((f"alert {name}", rule["expr"]) for name, rule in ALERTS.items()),
    *panel_expressions(),
]


@pytest.mark.parametrize(("place", "expression"), EXPRESSIONS)
def test_expression_asks_for_metrics_and_labels_that_there_are(place: str, expression: str) -> None:
    asked = list(selectors(expression))
    assert asked
    labels: set[str] = set()
    for metric, matchers in asked:
        if metric in OF_OTHERS:
            known = OF_OTHERS[metric]
            labels |= FROM_PROMETHEUS | set(known)
            assert set(matchers) <= set(known)
        else:
            assert metric in LABELS
            known = VALUES
            labels |= LABELS[metric]
            assert set(matchers) <= LABELS[metric]
        for label, value in matchers.items():
            assert value in VARIABLES or value in known[label], f"{label}={value}"
    assert grouping_labels(expression) <= labels


@pytest.mark.parametrize(("place", "expression"), EXPRESSIONS)
def test_figures_of_the_fleet_are_never_added_up_over_pods(place: str, expression: str) -> None:
    for metric in FLEET_WIDE:
        for found in re.finditer(rf"\b{metric}\b", expression):
            before = expression[: found.start()]
            assert re.search(r"\bmax(?: by \([^)]*\) )?\($", before), f"{metric} in {expression}"


def test_every_kind_of_figure_is_on_the_dashboard() -> None:
    shown = {metric for _, expression in panel_expressions() for metric, _ in selectors(expression)}
    assert shown == set(LABELS)


@pytest.mark.parametrize("name", ALERTS)
def test_alert_says_how_bad_it_is_and_where_to_read_on(name: str) -> None:
    rule = ALERTS[name]
    assert name.startswith("Jsworker")
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "runbook_url"}
    used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert used <= grouping_labels(rule["expr"])
    [page] = [page for page, entries in RUNBOOK.items() if name in dict(entries)]
    assert rule["annotations"]["runbook_url"] == f"docs/runbook/{page}#{name.lower()}"


WITHOUT_ALERT = [("servers.md", "the-clock-of-postgresql-was-ahead"), ("jobs.md", "a-job-hangs")]


def test_each_entry_of_the_runbook_says_what_there_is_to_say_and_is_listed() -> None:
    headings = {page: [heading for heading, _ in entries] for page, entries in RUNBOOK.items()}
    listed = re.findall(r"\]\(runbook/(\w+\.md)#([\w-]+)\)", (ROOT / "docs/runbook.md").read_text())
    of_alerts = [rule["annotations"]["runbook_url"].split("/")[-1].split("#") for rule in ALERTS.values()]
    assert [list(each) for each in listed if each not in WITHOUT_ALERT] == of_alerts
    assert [each for each in listed if each in WITHOUT_ALERT] == WITHOUT_ALERT
    for page, named in headings.items():
        assert [heading.lower().replace(" ", "-") for heading in named] == [
            anchor for on, anchor in listed if on == page
        ]
    for entries in RUNBOOK.values():
        for heading, text in entries:
            assert all(word in text for word in ("**Means**", "notice", "**Repair**", "```")), heading


def asked_of(alert: str, metric: str) -> dict[str, str]:
    """What an alert asks of the labels of a metric."""
    [asked] = {
        tuple(matchers.items()) for name, matchers in selectors(ALERTS[alert]["expr"]) if name == metric
    }
    return dict(asked)


def test_alerts_by_metrics_of_others_ask_for_what_the_manifests_make() -> None:
    manifests = overlay("scale-out")
    monitor = f"jsworker/{manifests['PodMonitor', 'jsworker']['metadata']['name']}"
    assert re.fullmatch(asked_of("JsworkerPodDown", "up")["job"], monitor)
    workers = manifests["StatefulSet", "jsworker"]["metadata"]["name"]
    for metric in (name for name in OF_OTHERS if name.startswith("kube_statefulset")):
        assert re.fullmatch(asked_of("JsworkerPodsMissing", metric)["statefulset"], workers)
    scaler = f"keda-hpa-{manifests['ScaledObject', 'jsworker']['metadata']['name']}"
    [metric] = (name for name in OF_OTHERS if "autoscaler" in name)
    assert re.fullmatch(asked_of("JsworkerScalingFails", metric)["horizontalpodautoscaler"], scaler)


def test_dashboard_is_a_config_map_that_grafana_finds() -> None:
    manifest = overlay("scale-out")["ConfigMap", "jsworker-dashboard"]
    assert manifest["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(manifest["data"]["dashboard.json"]) == DASHBOARD


def test_dashboard_fits_together() -> None:
    panels = DASHBOARD["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        cells |= own
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["datasource"]["uid"] == "${datasource}"
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert names == {"datasource"} | {variable.removeprefix("$") for variable in VARIABLES}


def test_each_alert_fires_in_a_situation() -> None:
    cases = [case for test in read_yaml(TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(ALERTS)


def promtool(*arguments: str | Path) -> str:
    """Return what promtool (Debian package: prometheus) says; it must be content."""
    said = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout


@pytest.mark.verify
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    write_rules(tmp_path)
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", tmp_path / "rules.yaml")


@pytest.mark.verify
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    write_rules(tmp_path)
    promtool("test", "rules", tmp_path / TESTS.name)


@pytest.mark.verify
def test_expressions_of_the_dashboard_are_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, (_, expression) in enumerate(panel_expressions())
    ]
    file = tmp_path / "panels.yaml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", "--lint=none", file)
