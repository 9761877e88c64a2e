"""The Helm chart has the objects of the overlays, and refuses values that it does not know."""

import json
import re
from typing import Any

import pytest
import yaml
from manifests import K8S, Object, known_to_kubernetes, objects_of
from toolbox import run, tool

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(300)]

CHART = K8S / "chart"


def installed(*values: str, code: int = 0) -> str:
    """What `helm install` would send; its complaint with `code` 1."""
    return run(tool("helm"), "template", "farloop", CHART, "--namespace", "farloop", *values, code=code)


def compared(objects: list[Object]) -> list[str]:
    """Objects as texts, in one order: with the hash of a settings file, and the order of volumes, left out."""
    found = []
    for one in objects:
        if one["kind"] == "Namespace" or one["metadata"]["name"] == "default-deny":
            continue  # k8s/keys.sh makes them
        if one["kind"] in ("Job", "StatefulSet"):
            one["spec"]["template"]["spec"]["volumes"].sort(key=lambda volume: str(volume["name"]))
        text = json.dumps(one, sort_keys=True, allow_nan=False)
        found.append(re.sub(r"farloop-run-\w{10}", "farloop-run-HASH", text))
    return sorted(found)


SMALL = {"requests": {"cpu": "200m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
LOCAL = {
    "tag": "compose",
    "coordinator": {"image": "localhost/farloop", "addresses": [], "resources": SMALL, "storage": "1Gi"},
    "nodes": {
        **{"image": "localhost/farloop", "names": ["farloop-node-0", "farloop-node-1"], "gpus": 0, "tolerations": []},
        **{
            "resources": SMALL,
            "storage": "1Gi",
            "shm": "8Gi",
            "env": [{"name": "FARLOOP_NODE__THREADS", "value": "1"}],
        },
    },
}
RUN, NODE = K8S / "overlays" / "local" / "run.toml", K8S / "base" / "node" / "node.toml"


@pytest.mark.parametrize(
    ("overlay", "values"),
    [
        ("coordinator-region", ()),
        ("coordinator-pair", ("--set", "coordinator.kind=pair")),
        ("cluster-gpu", ("--set", "coordinator.enabled=false", "--set", "nodes.names={oslo}")),
        ("local", ("--set-file", f"coordinator.run={RUN}", "--set-file", f"nodes.toml={NODE}")),
    ],
)
def test_the_chart_has_the_objects_of_an_overlay(overlay: str, values: tuple[str, ...], tmp_path: Any) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(LOCAL if overlay == "local" else {}))
    values = ("--values", str(tmp_path / "values.yaml"), *values)
    made = list(yaml.safe_load_all(installed(*values)))
    assert compared(made) == compared(objects_of(overlay)) and len(made) >= 6
    file = tmp_path / "made.yaml"
    file.write_text(yaml.safe_dump_all(map(known_to_kubernetes, made)))
    run(tool("kubernetes-validate"), "--kubernetes-version", "1.36", "--strict", file)


def test_the_chart_takes_the_files_of_a_run(tmp_path: Any) -> None:
    (tmp_path / "run.toml").write_text('# {{ fail "no template" }}\n[run]\nname = "x"\n')
    values = ("--set-file", f"coordinator.run={tmp_path / 'run.toml'}", "--set", "coordinator.addresses=null")
    made = list(yaml.safe_load_all(installed(*values)))
    (settings,) = [one for one in made if one["kind"] == "ConfigMap"]
    assert settings["data"]["run.toml"] == (tmp_path / "run.toml").read_text()
    assert not [one for one in made if one["spec" if "spec" in one else "metadata"].get("type") == "LoadBalancer"]


@pytest.mark.parametrize(
    ("value", "told"),
    [("coordinator.sort=pair", "sort"), ("coordinator.kind=triple", "single"), ("nodes.names=oslo", "array")],
)
def test_a_value_that_the_chart_does_not_have_is_refused(value: str, told: str) -> None:
    assert told in installed("--set", value, code=1)


def test_helm_has_nothing_to_say_of_the_chart() -> None:
    told = run(tool("helm"), "lint", "--strict", CHART)
    assert "0 chart(s) failed" in told and "WARNING" not in told
