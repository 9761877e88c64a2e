"""End to end: a real Prometheus scrapes a real run; what dashboards and rules ask for is there; the right alert fires.

One run serves all tests here; they go from a run that is well to one that is broken, in this order.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from watched_run import ALERTS, BEGINS_WITHIN_S, ROOT, WatchedRun

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.timeout(1200),
    pytest.mark.xdist_group("watched_run"),
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="Prometheus scrapes the run, and is missing (Debian: apt-get install prometheus)",
    ),
]

LIVE_S = 60.0
DASHBOARDS = {
    path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "monitoring/dashboards").glob("*.json"))
}
SLOWER = re.compile(r"FarloopQuarantine|FarloopParticipationLow|FarloopStraggler|FarloopHAtCap")
"""What a small run on a busy machine may rightly be told of beside what the tests do to it."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedRun]:
    folder = tmp_path_factory.mktemp("watched")
    (folder / "rules").mkdir()
    rules = yaml.safe_load((ALERTS / "farloop.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if rule.get("for") in ("30s", "1m", "2m"):
                rule["for"] = "5s"  # nothing is learned from waiting longer
    (folder / "rules" / "farloop.yml").write_text(yaml.safe_dump(rules))
    scene = WatchedRun(folder, rules=folder / "rules", steps=100_000)
    try:
        scene.live(LIVE_S)
        yield scene
    finally:
        scene.end()


def firing(scene: WatchedRun) -> set[str]:
    found = scene.prometheus.ask('ALERTS{alertstate="firing"}')
    return {one["metric"]["alertname"] for one in found if not SLOWER.fullmatch(one["metric"]["alertname"])}


def interpolated(expression: str, dashboard: dict[str, Any]) -> str:
    """As Grafana does it, with all of everything."""
    for variable in dashboard["templating"]["list"]:
        expression = expression.replace(f"${variable['name']}", ".*")
    return expression.replace("$__rate_interval", "10s").replace("$__range", "60s")


def test_every_target_is_scraped(scene: WatchedRun) -> None:
    scene.prometheus.until("all are up", lambda: all(one["value"][1] == "1" for one in scene.prometheus.ask("up")), 30)
    assert len(scene.prometheus.ask("up")) == 5


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_query_of_a_dashboard_returns_data(scene: WatchedRun, name: str) -> None:
    for panel in DASHBOARDS[name]["panels"]:
        for target in panel.get("targets", []):
            expression = interpolated(target["expr"], DASHBOARDS[name])
            answer = scene.prometheus.course(expression, LIVE_S)
            values = [float(value) for series in answer for _, value in series["values"]]
            assert values, f"{panel['title']}: no data: {expression}"
            assert any(value == value for value in values), f"{panel['title']}: only NaN: {expression}"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_annotation_marks_what_was_done_to_the_run(scene: WatchedRun, name: str) -> None:
    for annotation in DASHBOARDS[name]["annotations"]["list"]:
        if "restarted" in annotation["name"]:
            expression = interpolated(annotation["expr"], DASHBOARDS[name])
            assert scene.prometheus.course(expression, 120), annotation["name"]


def test_every_choice_of_a_dashboard_has_values(scene: WatchedRun) -> None:
    for dashboard in DASHBOARDS.values():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] != "query":
                continue
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            assert match
            series = scene.prometheus.get("series", **{"match[]": interpolated(match[1], dashboard)})
            assert any(match[2] in one for one in series), variable["query"]


def test_every_series_that_a_rule_looks_at_is_there(scene: WatchedRun) -> None:
    rules = yaml.safe_load((ALERTS / "farloop.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            selectors = re.findall(r"(\bfarloop_\w+(?:\{[^}]*\})?|\{__name__[^}]*\}|\bup\{[^}]*\})", rule["expr"])
            assert selectors, rule
            for selector in selectors:
                if selector.startswith(("farloop_alarm{", "farloop_anomalies", "farloop_standby_in_sync")):
                    continue  # a series that begins with what it tells, or with a standby
                assert scene.prometheus.ask(f"last_over_time({selector}[2m])"), f"{rule}: {selector}"


def test_rules_their_own_tests_and_scrape_configs_are_good(tmp_path: Path) -> None:
    scrape = yaml.safe_load((ROOT / "k8s/components/monitoring/scrape.yml").read_text())
    for job in scrape["scrape_configs"]:
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]  # which not every build of promtool knows
    (tmp_path / "scrape.yml").write_text(yaml.safe_dump(scrape))
    for words in (
        ["check", "rules", str(ALERTS / "farloop.yml")],
        ["test", "rules", str(Path(__file__).with_name("alerts_test.yml"))],
        ["check", "config", "--syntax-only", str(tmp_path / "scrape.yml")],
        ["check", "config", "--syntax-only", str(ROOT / "docker/prometheus/prometheus.yml")],
    ):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_that_is_well_has_no_alert(scene: WatchedRun) -> None:
    scene.prometheus.until("what was broken is mended", lambda: not firing(scene), BEGINS_WITHIN_S)


def test_a_node_that_dies_is_told_of_and_nothing_else(scene: WatchedRun) -> None:
    scene.nodes["porto"].kill()
    scene.prometheus.until("the alert fires", lambda: "FarloopNodeLost" in firing(scene), BEGINS_WITHIN_S)
    assert firing(scene) == {"FarloopNodeLost"}
    (lost,) = scene.prometheus.ask('ALERTS{alertname="FarloopNodeLost",alertstate="firing"}')
    assert lost["metric"]["node"] == "porto"
    scene.bring_back("porto")
    scene.prometheus.until("the alert is over", lambda: not firing(scene), BEGINS_WITHIN_S)


def test_a_node_that_leaves_on_purpose_is_not_missed(scene: WatchedRun) -> None:
    scene.nodes["porto"].end(30.0)
    scene.prometheus.until(
        "porto has no series any more",
        lambda: not scene.prometheus.ask('farloop_node_connected{node="porto"} == 0'),
        30,
    )
    assert "FarloopNodeLost" not in firing(scene)
    scene.bring_back("porto")


def test_a_coordinator_that_dies_is_told_of_and_nothing_else(scene: WatchedRun) -> None:
    scene.coordinator.kill()
    scene.prometheus.until("the alert fires", lambda: "FarloopCoordinatorDown" in firing(scene), BEGINS_WITHIN_S)
    assert firing(scene) == {"FarloopCoordinatorDown"}
