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
RUN, NODE = K8S / "overlays" / "local" / "run.toml", K8S / "overlays" / "local" / "node.toml"


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


GOOD = (
    *(
        "tag=v0.1.0-rc.1",
        "coordinator.image=localhost:5000/a/b_c",
        "nodes.image=farloop-node",
        "nodes.names={oslo,n-0}",
    ),
    *("coordinator.storage=1.5Ti", "nodes.storage=0.5G", "nodes.shm=64000M", "coordinator.resources.requests.cpu=500m"),
    *("coordinator.resources.limits.memory=2e11", "coordinator.addresses={10.0.0.0/8,2001:db8::/32}", "nodes.gpus=0"),
    *("nodes.resources.requests.cpu=8", "nodes.env[0].name=NCCL_DEBUG", "nodes.env[0].value=INFO"),
)
BAD = {
    "coordinator.sort=pair": "sort",
    "coordinator.kind=triple": "single",
    "tag=": "/tag",
    "tag=20260101": "got number, want string",
    "tag=v1+build": "/tag",
    "coordinator.image=registry.example/farloop-coordinator:1": "/coordinator/image",
    "nodes.image=Registry/Node": "/nodes/image",
    "nodes.names=oslo": "array",
    "nodes.names={Oslo}": "/nodes/names/0",
    "nodes.names={oslo,oslo}": "/nodes/names",
    "nodes.names={n_0}": "/nodes/names/0",
    "nodes.names={oslo-}": "/nodes/names/0",
    f"nodes.names={{{'n' * 64}}}": "/nodes/names/0",
    "coordinator.storage=500GB": "/coordinator/storage",
    "coordinator.storage=0": "/coordinator/storage",
    "nodes.storage=-1Gi": "/nodes/storage",
    "nodes.shm=64 Gi": "/nodes/shm",
    "coordinator.resources.requests.cpu=8 cores": "/coordinator/resources/requests/cpu",
    "nodes.resources.limits.memory=64gi": "/nodes/resources/limits/memory",
    "nodes.resources.limit.memory=64Gi": "limit",
    "nodes.gpus=-1": "/nodes/gpus",
    "coordinator.addresses={192.0.2.1}": "/coordinator/addresses/0",
    "coordinator.addresses={192.0.2.256/24}": "/coordinator/addresses/0",
    "nodes.tolerations[0].effect=NoRun": "/nodes/tolerations/0/effect",
    "nodes.env[0].value=x": "name",
    "nodes.env[0].name=1ST": "/nodes/env/0/name",
}
"""Value → what the complaint names."""


def test_values_that_kubernetes_takes_are_taken() -> None:
    made = installed(*(word for value in GOOD for word in ("--set", value)))
    assert made.count("kind: Job") == 2 and "localhost:5000/a/b_c:v0.1.0-rc.1" in made


@pytest.mark.parametrize("value", BAD)
def test_a_value_that_the_chart_does_not_have_or_kubernetes_does_not_take_is_refused(value: str) -> None:
    words = ("--set-string" if "value=" in value or value == "coordinator.storage=0" else "--set", value)
    assert BAD[value] in installed(*words, code=1)


def test_helm_has_nothing_to_say_of_the_chart() -> None:
    told = run(tool("helm"), "lint", "--strict", CHART)
    assert "0 chart(s) failed" in told and "WARNING" not in told
