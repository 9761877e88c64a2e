"""The Kubernetes manifests, rendered: they agree with the code, and ask for no right that is not needed."""

import functools
import importlib
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from manifests import ABOVE, CUSTOM, K8S, KUBECTL, OVERLAYS, RENDERED, Object, misfits, objects_of, template_of
from typer.main import get_command

from farloop.cli.main import app
from farloop.config.exit_codes import ExitCode
from farloop.config.settings import NodeFile, RunFile, load
from farloop.monitoring.addresses import parse_each_tcp
from farloop.monitoring.endpoint import HEALTH, READY
from farloop.node.library import DRAIN_S

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="kubectl renders the manifests, and is missing")


@functools.cache
def rendered(name: str) -> tuple[Object, ...]:
    return tuple(objects_of(name))


@pytest.mark.parametrize("name", ["base/namespace", *RENDERED])
def test_nothing_is_sent_to_another_namespace(name: str) -> None:
    """A policy that denies everything, sent to `default`, would cut off whatever else runs there."""
    for one in rendered(name):
        meta = one["metadata"]
        if one["kind"] != "PriorityClass":
            assert (meta["name"] if one["kind"] == "Namespace" else meta["namespace"]) == "farloop", one["kind"]


def of_kind(overlay: str, kind: str) -> list[Object]:
    return [one for one in rendered(overlay) if one["kind"] == kind]


def pods(overlay: str) -> Iterator[tuple[str, Object, Object]]:
    """Name, labels and pod specification of every workload."""
    for workload in rendered(overlay):
        if workload["kind"] != "TrainJob" and (template := template_of(workload)) is not None:
            yield workload["metadata"]["name"], template["metadata"]["labels"], template["spec"]


def containers(overlay: str) -> Iterator[tuple[str, Object]]:
    for name, _, pod in pods(overlay):
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            yield f"{name}/{container['name']}", container


def settings(overlay: str, name: str, pod: Object, folder: Path, flags: Sequence[str] = ()) -> RunFile | NodeFile:
    """What the daemon of a pod reads, through the loader that it uses: its file and its environment."""
    (container,) = pod["containers"]
    file = Path(container["args"][1])
    (mount,) = [mount for mount in container["volumeMounts"] if Path(mount["mountPath"]) == file.parent]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
    (found,) = [one for one in of_kind(overlay, "ConfigMap") if one["metadata"]["name"] == volume["configMap"]["name"]]
    path = folder / file.name
    path.write_text(found["data"][file.name])
    environ: dict[str, str] = {}
    for variable in container.get("env", []):
        value = variable.get("value", name)  # a Job gives its name to its pods, as a label
        for known, text in environ.items():
            value = value.replace(f"$({known})", text)
        environ[variable["name"]] = value
    return load(
        path, flags=flags, environ={name: value for name, value in environ.items() if name.startswith("FARLOOP_")}
    )


@pytest.mark.parametrize("overlay", RENDERED)
def test_files_in_config_maps_are_good_and_agree_with_ports_probes_and_mounts(overlay: str, tmp_path: Path) -> None:
    for name, _, pod in pods(overlay):
        file = settings(overlay, name, pod, tmp_path)
        (container,) = pod["containers"]
        assert container["args"][0] in get_command(app).commands  # type: ignore[attr-defined]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        mounts = {Path(mount["mountPath"]): mount for mount in container["volumeMounts"]}
        own = file.coordinator if isinstance(file, RunFile) else file.node
        if overlay in ("cluster-gpu", "cluster-rdma"):
            assert isinstance(file, NodeFile)
            assert container["resources"]["limits"]["nvidia.com/gpu"] == str(file.node.nproc)
        assert ports["pages"] == int(own.http.rpartition(":")[2])
        if isinstance(file, RunFile):
            assert ports["sessions"] == int(file.coordinator.bind.rpartition(":")[2])
            assert file.coordinator.allow in mounts
        for probe, page in (("startupProbe", HEALTH), ("readinessProbe", READY), ("livenessProbe", HEALTH)):
            assert container[probe]["httpGet"] == {"path": page, "port": "pages"}
        assert own.state_dir is not None and own.key is not None
        assert any(own.state_dir.is_relative_to(path) and not mount.get("readOnly") for path, mount in mounts.items())
        assert own.key.parent in mounts and "tmp" in {mount["name"] for mount in mounts.values()}
        (init,) = pod["initContainers"]  # copies the keys that the daemon reads
        script = " ".join([*init["command"], *init.get("args", [])])
        for variable in init.get("env", []):
            script = script.replace(f"${variable['name']}", variable.get("value", name))
        wanted = [own.key] if isinstance(file, RunFile) else [own.key, file.node.server_key]
        assert all(str(path) in script for path in wanted)
        assert f"0600 /run/secrets/farloop/{own.key.name}" in script.replace('"', "")


@pytest.mark.parametrize("overlay", [*OVERLAYS, "cluster-hosts+jobset"])
def test_after_the_run_nodes_are_complete_and_the_coordinator_serves(overlay: str, tmp_path: Path) -> None:
    """A finished coordinator is not started again and again, and finished nodes hold no GPUs; a drained node comes back
    on its volume, and one that is refused does not."""
    claims = {claim["metadata"]["name"] for claim in of_kind(overlay, "PersistentVolumeClaim")}
    jobs = {job["metadata"]["name"]: job["spec"] for job in of_kind(overlay, "Job")}
    for one in of_kind(overlay, "JobSet"):
        jobs[one["metadata"]["name"]] = one["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert len(jobs) == (2 if overlay == "local" else not overlay.startswith("coordinator")) and claims == set(jobs)
    for name, _, pod in pods(overlay):
        file = settings(overlay, name, pod, tmp_path)
        if isinstance(file, RunFile):
            assert file.coordinator.after_end == "serve" and name not in jobs
            continue
        fails, left, evicted = jobs[name]["podFailurePolicy"]["rules"]
        assert (fails["action"], fails["onExitCodes"]["values"]) == ("FailJob", [ExitCode.USAGE, ExitCode.REFUSED])
        assert (left["action"], left["onExitCodes"]["values"]) == ("Ignore", [file.node.leave_code])
        assert file.node.leave_code == ExitCode.INTERRUPTED and evicted["onPodConditions"]
        assert pod["restartPolicy"] == "Never" and jobs[name]["podReplacementPolicy"] == "Failed"
        assert {"name": "state", "persistentVolumeClaim": {"claimName": name}} in pod["volumes"]


@pytest.mark.parametrize("overlay", RENDERED)
def test_a_pod_has_no_rights_that_it_does_not_need(overlay: str) -> None:
    for _, _, pod in pods(overlay):
        assert pod["automountServiceAccountToken"] is (overlay == "coordinator-pair"), "the Lease alone needs a token"
        assert pod["enableServiceLinks"] is False
        security = pod["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] == security["fsGroup"] == 10001
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod.get("hostNetwork") and not pod.get("hostPID") and not pod.get("hostIPC")
        assert pod["terminationGracePeriodSeconds"] > DRAIN_S + 5, "a drain fits into the grace period"
    for name, container in containers(overlay):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and security["allowPrivilegeEscalation"] is False, name
        assert security["capabilities"]["drop"] == ["ALL"], name
        added = security["capabilities"].get("add", [])
        assert added == (["IPC_LOCK"] if overlay == "cluster-rdma" and name.endswith("/node") else []), name
        assert container["resources"]["requests"] and "memory" in container["resources"]["limits"], name
    for account in of_kind(overlay, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    (namespace,) = of_kind(overlay, "Namespace")
    level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert level == ("privileged" if overlay == "cluster-rdma" else "restricted")


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether pods of these labels are meant."""
    listed = selector.get("matchExpressions", [])
    assert all(one["operator"] == "In" for one in listed)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in listed
    )


@pytest.mark.parametrize("overlay", RENDERED)
def test_services_and_policies_select_pods_and_ports_that_are_there_and_no_budget_refuses_a_drain(overlay: str) -> None:
    found = {name: (labels, pod) for name, labels, pod in pods(overlay)}
    if not found:
        pytest.skip("a TrainJob's ports are those of its runtime")
    for service in of_kind(overlay, "Service"):
        chosen = [pod for labels, pod in found.values() if service["spec"]["selector"].items() <= labels.items()]
        assert chosen, service["metadata"]["name"]
        for pod in chosen:
            names = {port["name"] for port in pod["containers"][0]["ports"]}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    assert not of_kind(overlay, "PodDisruptionBudget")
    policies = of_kind(overlay, "NetworkPolicy")
    for selector in (one["spec"]["podSelector"] for one in policies if one["spec"]["podSelector"]):
        assert any(selects(selector, labels) for labels, _ in found.values())
    (deny,) = [one for one in policies if not one["spec"]["podSelector"]]
    assert sorted(deny["spec"]["policyTypes"]) == ["Egress", "Ingress"] and "ingress" not in deny["spec"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_daemon_may_dial_what_its_settings_name_its_pages_are_for_prometheus(overlay: str, tmp_path: Path) -> None:
    for name, labels, pod in pods(overlay):
        file = settings(overlay, name, pod, tmp_path)
        policies = [
            one["spec"]
            for one in of_kind(overlay, "NetworkPolicy")
            if one["spec"]["podSelector"] and selects(one["spec"]["podSelector"], labels)
        ]
        if overlay == "cluster-hosts":  # and hosts of nodes one another, by all ports
            (hosts,) = [policy for policy in policies if "ports" not in policy["egress"][0]]
            policies.remove(hosts)
            for (peers,) in (hosts["ingress"][0]["from"], hosts["egress"][0]["to"]):
                assert peers["podSelector"]["matchLabels"] == hosts["podSelector"]["matchLabels"]
        out = {port["port"] for policy in policies for rule in policy["egress"] for port in rule["ports"]}
        rules = [rule for policy in policies for rule in policy.get("ingress", [])]
        come_in = {port["port"]: rule.get("from") for rule in rules for port in rule["ports"]}
        (prometheus,) = come_in.pop("pages")
        assert "monitoring" in prometheus["namespaceSelector"]["matchLabels"].values()
        if isinstance(file, NodeFile):
            assert out == {int(file.node.coordinator.rpartition(":")[2]), 53} and not come_in
            continue
        own, wanted = file.coordinator, set[int | str]()
        wanted |= {443, 53} if own.copy_to else set()
        wanted |= {443, 6443, 53} if own.leads_by.startswith("k8s:") else set()
        wanted |= {"mirror"} if own.mirror else set()
        assert out == wanted and come_in.pop("sessions") is None
        if own.mirror:
            (peer,) = come_in.pop("mirror")
            assert peer["podSelector"]["matchLabels"].items() <= labels.items()
        assert not come_in


def test_a_pair_names_its_own_pods_and_its_own_lease(tmp_path: Path) -> None:
    overlay = "coordinator-pair"
    (pair,) = of_kind(overlay, "StatefulSet")
    ((name, labels, pod),) = pods(overlay)
    file = settings(overlay, name, pod, tmp_path)
    assert isinstance(file, RunFile)
    spec, own = pair["spec"], file.coordinator
    assert (spec["replicas"], spec["podManagementPolicy"], spec["updateStrategy"]["type"]) == (
        2,
        "Parallel",
        "OnDelete",
    )
    (service,) = [one["spec"] for one in of_kind(overlay, "Service") if one["metadata"]["name"] == spec["serviceName"]]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"], "a standby is not ready"
    assert [f"{one.host}:{one.port}" for one in parse_each_tcp(own.peers)] == [
        f"{name}-{number}.{spec['serviceName']}:{own.mirror.rpartition(':')[2]}" for number in range(spec["replicas"])
    ]
    (container,) = pod["containers"]
    assert {"name": "mirror", "containerPort": int(own.mirror.rpartition(":")[2])} in container["ports"]
    fields = {one["name"]: one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") for one in container["env"]}
    assert fields["FARLOOP_COORDINATOR__NAME"] == "metadata.name"
    (role,) = of_kind(overlay, "Role")
    begin, change = role["rules"]
    assert (begin["verbs"], change["verbs"]) == (["create"], ["get", "update"])
    assert own.leads_by == f"k8s://{pair['metadata']['namespace']}/{change['resourceNames'][0]}"
    (bound,) = of_kind(overlay, "RoleBinding")
    assert [one["name"] for one in bound["subjects"]] == [pod["serviceAccountName"]]
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"]["matchLabels"].items() <= labels.items()


def test_a_coordinator_without_a_volume_recovers_and_is_replaced_wherever_its_host_is(tmp_path: Path) -> None:
    overlay = "coordinator-recover"
    (workload,) = of_kind(overlay, "Deployment")
    ((name, _, pod),) = pods(overlay)
    file = settings(overlay, name, pod, tmp_path)
    assert isinstance(file, RunFile) and file.coordinator.recover == "auto"
    assert workload["spec"]["replicas"] == 1 and not of_kind(overlay, "StatefulSet")
    assert {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume} >= {"state", "tmp"}
    assert {one["key"].partition("/")[2] for one in pod["tolerations"]} == {"unreachable", "not-ready"}


def keys_made(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "KUBECTL": "true", "FARLOOP": f"{sys.executable} -m farloop.cli.main"}
    return subprocess.run(
        [K8S / "keys.sh", *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=100
    )


def test_the_allow_list_is_not_replaced_from_a_wrong_folder(tmp_path: Path) -> None:
    done = keys_made(tmp_path, "--allow")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "there is no ./allowed here" in done.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("words", [["n-0", "n-1"], ["--coordinator"], ["--node", "n-0", "server.pub"]], ids="-".join)
def test_the_script_that_makes_the_keys_begins_in_an_empty_folder(words: list[str], tmp_path: Path) -> None:
    """What it tells kubectl is tried on a real server by tests/deploy; here kubectl is a command that does nothing."""
    (tmp_path / "server.pub").touch()
    done = keys_made(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    nodes = [word for word in words if word.startswith("n-")]
    made = {path.stem for path in tmp_path.glob("keys/*.key")}
    assert made == {*nodes, *([] if "--node" in words else ["coordinator"])}
    allowed = [] if words[0].startswith("--") else [f"{name}.pub" for name in nodes]
    assert sorted(path.name for path in tmp_path.glob("allowed/*")) == allowed


def test_every_overlay_and_component_is_in_the_readme_and_rendered() -> None:
    text = (K8S / "README.md").read_text()
    folders = {path.name for path in (K8S / "components").iterdir()}
    assert all(f"`{name}`" in text for name in (*OVERLAYS, *folders))
    assert folders - set(ABOVE) == {"allow-hosts", "coordinator-pair", "coordinator-recover"}, "parts of overlays"


MADE_BY_HAND = {
    *("farloop-coordinator-key", "farloop-node-keys", "farloop-allowed", "farloop-object-store"),
    *("farloop-model", "farloop-data"),
}
"""By keys.sh, or yours (k8s/README.md)."""


def named_by(pod: Object) -> Iterator[tuple[str, str]]:
    """Kind and name of every object that pods need."""
    yield "ServiceAccount", pod["serviceAccountName"]
    for volume in pod["volumes"]:
        for key, kind, field in (
            ("configMap", "ConfigMap", "name"),
            ("secret", "Secret", "secretName"),
            ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
        ):
            if key in volume:
                yield kind, volume[key][field]
    if "priorityClassName" in pod:
        yield "PriorityClass", pod["priorityClassName"]


LABELLED = """
namePrefix: my-
labels: [{pairs: {team: blue}, includeSelectors: true}]
"""


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        *((name, "") for name in RENDERED),
        *((name, LABELLED) for name in ("coordinator-pair", *(one for one in RENDERED if "hosts" in one))),
    ],
)
def test_what_pods_refer_to_is_there_and_policies_select_them(name: str, extra: str) -> None:
    """Also in custom resources, and once the overlay above renames and labels everything."""
    objects = objects_of(name, extra)
    there = {(one["kind"], one["metadata"]["name"]) for one in objects}
    templates = [template for one in objects if (template := template_of(one)) is not None]
    assert templates
    for template in templates:
        missing = set(named_by(template["spec"])) - there
        assert {named for _, named in missing} <= MADE_BY_HAND, missing
    for one in objects:
        selector = one["spec"]["podSelector"] if one["kind"] == "NetworkPolicy" else {}
        if selector:
            assert any(selects(selector, template["metadata"]["labels"]) for template in templates), one["metadata"]


@pytest.mark.parametrize("component", ["jobset", "leaderworkerset", "trainjob"])
def test_a_custom_resource_has_the_fields_of_its_definition_and_the_hosts_of_the_job(component: str) -> None:
    (job,) = of_kind("cluster-hosts", "Job")
    (one,) = [one for one in rendered(f"cluster-hosts+{component}") if f"{one['apiVersion']} {one['kind']}" in CUSTOM]
    assert not misfits(one["spec"], CUSTOM[f"{one['apiVersion']} {one['kind']}"])
    assert not of_kind(f"cluster-hosts+{component}", "Job") and one["metadata"]["name"] == job["metadata"]["name"]
    spec = one["spec"]
    hosts = {
        "jobset": lambda: spec["replicatedJobs"][0]["template"]["spec"]["completions"],
        "leaderworkerset": lambda: spec["leaderWorkerTemplate"]["size"],
        "trainjob": lambda: spec["trainer"]["numNodes"],
    }[component]()
    assert hosts == job["spec"]["completions"] == 4
    wrong = {**spec, "replicasss": 1}
    assert misfits(wrong, CUSTOM[f"{one['apiVersion']} {one['kind']}"]) == ["spec.replicasss: unknown"]


@pytest.mark.parametrize("name", ["cluster-hosts", "cluster-hosts+jobset", "cluster-hosts+leaderworkerset"])
def test_the_hosts_of_a_node_meet_at_the_first_of_them(name: str) -> None:
    ((node, _, pod),) = pods(name)
    env = {one["name"]: one for one in pod["containers"][0]["env"]}
    assert list(env).index("FARLOOP_NODE__NAME") < list(env).index("FARLOOP_NODE__RENDEZVOUS"), "which names it"
    at = env["FARLOOP_NODE__RENDEZVOUS"]["value"].replace("$(FARLOOP_NODE__NAME)", node)
    service = {one["metadata"]["name"] for one in of_kind(name, "Service")}.pop()
    assert (
        at
        == {
            "cluster-hosts": f"{node}-0.{service}:29500",
            "cluster-hosts+jobset": f"{node}-hosts-0-0.{node}:29500",  # JobSet's service has the JobSet's name
            "cluster-hosts+leaderworkerset": "$(LWS_LEADER_ADDRESS):29500",
        }[name]
    )
    (claim,) = of_kind(name, "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"] and env["FARLOOP_NODE__HOSTS"]["value"] == "3:4"


OWN = {
    "model-from-pvc": ("coordinator", {"run.model": "hf:/model"}),
    "model-from-image": ("coordinator", {"run.model": "hf:/model"}),
    "code-from-configmap": ("node", {"node.model": "own_model:build"}),
    "data-from-pvc": ("coordinator node", {"data.path": "/data"}),
}


@pytest.mark.parametrize("component", OWN)
def test_the_settings_beside_a_component_name_what_it_mounts(component: str, tmp_path: Path) -> None:
    daemons, lines = OWN[component]
    overlay = f"{ABOVE[component]}+{component}"
    text = (K8S / "components" / component / "kustomization.yaml").read_text()
    found = set()
    for name, _, pod in pods(overlay):
        (container,) = pod["containers"]
        mounts = {one["mountPath"] for one in container["volumeMounts"]} & {"/model", "/data", "/code"}
        assert bool(mounts) == (container["name"] in daemons)
        if not mounts:
            continue
        found.add(container["name"])
        for key, value in lines.items():
            assert f'{key.partition(".")[2]} = "{value}"' in text
            assert value.removeprefix("hf:") in mounts or mounts == {"/code"}
        file = settings(overlay, name, pod, tmp_path, [f"{key}={value}" for key, value in lines.items()])
        assert str(file)
    assert found == set(daemons.split())


def test_the_example_of_own_code_is_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(K8S / "components" / "code-from-configmap")
    module = importlib.import_module("own_model").build()
    assert module(torch.zeros(2, 3, dtype=torch.int64, device="cpu")).shape == (2, 3, 256)


def test_the_chart_is_what_the_overlays_make_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python k8s/chart.py` writes it anew. tests/deploy compares its objects."""
    monkeypatch.setenv("KUBECTL", str(KUBECTL))
    files = runpy.run_path(str(K8S / "chart.py"))["files"]()
    there = {path.relative_to(K8S / "chart").as_posix(): path.read_text() for path in (K8S / "chart").rglob("*.*")}
    assert there == files
