"""Dashboards, alerts and runbooks agree with the code and with each other; what Kubernetes gets is made of them."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import KUBECTL, OVERLAYS, objects_of
from plain_runs import PLAIN_PROGRESS
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from farloop.algo.spec import NodeId
from farloop.cli.main import app
from farloop.coordinator.observe.metrics import Metrics, standby_metrics
from farloop.monitoring.endpoint import METRICS
from farloop.node.metrics import Metrics as NodeMetrics

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "monitoring"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((MONITORING / "dashboards").glob("*.json"))}
RULES = yaml.safe_load((MONITORING / "alerts" / "farloop.yml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
COMPONENT = ROOT / "k8s" / "components" / "monitoring"
SITE = re.findall(r"^site_url: (\S+)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)[0]
RUNBOOK_URL = f"{SITE}monitoring/runbooks/"


def shown_by_the_daemons() -> set[str]:
    """Every name that a page of theirs can have, with the endings that counters and histograms get."""
    node = NodeMetrics(NodeId("a"))
    node.update(PLAIN_PROGRESS, versions={0: 1}, connected=True)
    node.lost_by_codec(0, 0.1)
    node.piped({"completed": 1}, 1, 1)
    coordinator = Metrics()
    coordinator.scored(1.0)
    names: set[str] = set()
    standby = standby_metrics(in_sync=True, in_memory=True)
    for text in (node.exposition(), coordinator.exposition(), standby):
        for family in text_string_to_metric_families(text.decode()):
            match family.type:
                case "counter":
                    names.add(f"{family.name}_total")
                case "histogram":
                    names |= {f"{family.name}_{ending}" for ending in ("bucket", "sum", "count")}
                case _:
                    names.add(family.name)
    return names


def asked_of(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]
    for annotation in dashboard["annotations"]["list"]:
        if annotation.get("expr"):
            yield annotation["expr"]


def names_in(expression: str) -> set[str]:
    """The metrics of ours, and of a process, that it speaks of."""
    found = set(re.findall(r"\b(?:farloop|process)_\w+", re.sub(r'"[^"]*"', "", expression)))
    for listed in re.findall(r'__name__=~"farloop_\(([\w|]+)\)_held"', expression):
        found |= {f"farloop_{one}_held" for one in listed.split("|")}
    return found


def test_dashboards_ask_only_for_metrics_of_the_daemons_mark_restarts_and_link_to_each_other() -> None:
    known = shown_by_the_daemons()
    for dashboard in DASHBOARDS.values():
        for expression in asked_of(dashboard):
            assert names_in(expression) <= known, expression
        assert {one["name"] for one in dashboard["annotations"]["list"]} >= {"Coordinator restarted", "Node restarted"}
        assert any(link["tags"] == dashboard["tags"] == ["farloop"] for link in dashboard["links"])
    assert {dashboard["uid"] for dashboard in DASHBOARDS.values()} == {f"farloop-{name}" for name in DASHBOARDS}


def links_in(value: Any) -> Iterator[str]:
    """The addresses of the links of panels and of what they show."""
    if isinstance(value, dict):
        if isinstance(url := value.get("url"), str):
            yield url
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from links_in(one)


def test_panels_lead_from_run_to_node_to_network_to_coordinator_and_an_alert_to_its_runbook() -> None:
    links = {name: set(links_in(dashboard["panels"])) for name, dashboard in DASHBOARDS.items()}
    inside = re.compile(r"/d/farloop-(\w+)\?(?:var-node=\$\{__\S+\}&)?\$\{__all_variables\}&\$\{__url_time_range\}")
    found = {name: {match[1] for url in urls if (match := inside.fullmatch(url))} for name, urls in links.items()}
    assert found["run"] == {"node", "network", "coordinator"} and found["node"] == {"network"}
    assert found["network"] == {"node", "coordinator"}
    outside = {url for urls in links.values() for url in urls if not inside.fullmatch(url)}
    assert outside == {f"{RUNBOOK_URL}${{__value.raw}}/"}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_panel_says_what_it_shows_and_in_which_unit_and_covers_no_other(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARDS[name]["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])
        }  # fmt: skip
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] in ("row", "text"):
            continue
        assert panel["title"] and len(panel["description"]) > 5, panel["title"]
        overridden = [one["id"] for rule in panel["fieldConfig"]["overrides"] for one in rule["properties"]]
        assert panel["fieldConfig"]["defaults"].get("unit") or "unit" in overridden, panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
    ids = [panel["id"] for panel in DASHBOARDS[name]["panels"]]
    assert len(set(ids)) == len(ids)


def test_an_alert_asks_for_metrics_of_the_daemons_is_tested_and_has_a_runbook() -> None:
    known, tests = shown_by_the_daemons(), (ROOT / "tests" / "deploy" / "alerts_test.yml").read_text()
    assert set(re.findall(r"name: (Farloop\w+) fires", tests)) == {rule["alert"] for rule in ALERTS}
    for rule in ALERTS:
        check_alert(rule, known)


def check_alert(rule: dict[str, Any], known: set[str]) -> None:
    assert names_in(rule["expr"]) <= known
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert rule["annotations"]["runbook_url"] == f"{RUNBOOK_URL}{rule['alert']}/"
    text = (MONITORING / "runbooks" / f"{rule['alert']}.md").read_text()
    assert re.findall(r"^#+ (.*)$", text, re.MULTILINE) == [rule["alert"], "Meaning", "First look", "Fix"]


def test_every_runbook_has_its_alert_and_names_commands_files_and_panels_that_exist() -> None:
    found = sorted((MONITORING / "runbooks").glob("*.md"))
    assert {path.stem for path in found} == {rule["alert"] for rule in ALERTS}
    titles = {panel["title"] for dashboard in DASHBOARDS.values() for panel in dashboard["panels"]}
    titles |= {dashboard["title"].removeprefix("farloop / ") for dashboard in DASHBOARDS.values()}
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for path in found:
        text = path.read_text()
        for word in re.findall(r"`farloop (\w+)", text):
            assert word in commands, f"{path.name}: farloop {word}"
        for name in re.findall(r"\bdocs/[\w-]+\.md|\bk8s/\w+", text):
            assert (ROOT / name).exists(), f"{path.name}: {name}"
        for title in re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", text):
            assert title in titles, f"{path.name}: {title}"
        for other in re.findall(r"\bFarloop\w+", text):
            assert (MONITORING / "runbooks" / f"{other}.md").exists(), f"{path.name}: {other}"


def test_the_page_speaks_of_metrics_and_alerts_that_exist() -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    known = shown_by_the_daemons() | {name.removesuffix("_bucket") for name in shown_by_the_daemons()}
    assert {name for name in re.findall(r"`((?:farloop|process)_\w+)`", text) if not name.endswith("_")} <= known
    assert set(re.findall(r"\[(Farloop\w+)\]", text)) == {rule["alert"] for rule in ALERTS}


def test_the_operator_gets_the_same_rules() -> None:
    assert yaml.safe_load((COMPONENT / "prometheusrule.yaml").read_text())["spec"] == RULES


needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="kubectl renders the manifests: missing")


@needs_kubectl
def test_an_overlay_sets_the_host_of_every_runbook_as_the_page_says(tmp_path: Path) -> None:
    (told,) = re.findall(r"```yaml\n(replacements:.*?)```", (ROOT / "docs/monitoring.md").read_text(), re.DOTALL)
    shutil.copy(COMPONENT / "prometheusrule.yaml", tmp_path)
    (tmp_path / "kustomization.yaml").write_text(f"resources: [prometheusrule.yaml]\n{told}")
    done = subprocess.run([str(KUBECTL), "kustomize", str(tmp_path)], capture_output=True, text=True, timeout=60)
    if "sourceValue" in done.stderr:
        pytest.skip("kubectl is older than 1.35")
    groups = yaml.safe_load(done.stdout)["spec"]["groups"]
    found = [rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"] if "alert" in rule]
    assert found == [f"https://docs.my.org/monitoring/runbooks/{rule['alert']}/" for rule in ALERTS]


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_with_the_component_pods_are_scraped_where_they_serve_and_grafana_gets_the_dashboards(overlay: str) -> None:
    objects = objects_of(f"{overlay}+monitoring")
    maps = {one["metadata"]["name"]: one for one in objects if one["kind"] == "ConfigMap"}
    for name, dashboard in DASHBOARDS.items():
        one = maps[f"farloop-dashboard-{name}"]
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(one["data"][f"{name}.json"]) == dashboard
    monitors = [one["spec"] for one in objects if one["kind"] == "PodMonitor"]
    for workload in (one for one in objects if one["kind"] in ("StatefulSet", "Deployment", "Job")):
        pod = workload["spec"]["template"]
        labels = pod["metadata"]["labels"]
        (monitor,) = [one for one in monitors if one["selector"]["matchLabels"].items() <= labels.items()]
        ports = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
        (endpoint,) = monitor["podMetricsEndpoints"]
        assert endpoint["port"] in ports and endpoint["path"] == METRICS
        assert labels["app.kubernetes.io/part-of"] == "farloop"  # by which scrape.yml finds it
    (rules,) = [one for one in objects if one["kind"] == "PrometheusRule"]
    assert rules["spec"] == RULES
