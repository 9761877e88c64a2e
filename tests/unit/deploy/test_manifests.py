"""The Kubernetes manifests, rendered: they agree with the code, and ask for no right that is not needed."""

import functools
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from farloop.cli.main import app
from farloop.config.exit_codes import ExitCode
from farloop.config.settings import NodeFile, RunFile, load
from farloop.monitoring.addresses import parse_each_tcp
from farloop.monitoring.endpoint import HEALTH, READY
from farloop.node.library import DRAIN_S

K8S = Path(__file__).resolve().parents[3] / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the manifests, and is missing")

Object = dict[str, Any]


@functools.cache
def rendered(folder: str) -> tuple[Object, ...]:
    """Every object that `kubectl apply -k` would send."""
    done = subprocess.run(["kubectl", "kustomize", K8S / folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("folder", ["base/namespace", *(f"overlays/{name}" for name in OVERLAYS)])
def test_nothing_is_sent_to_another_namespace(folder: str) -> None:
    """A policy that denies everything, sent to `default`, would cut off whatever else runs there."""
    for one in rendered(folder):
        meta = one["metadata"]
        assert (meta["name"] if one["kind"] == "Namespace" else meta["namespace"]) == "farloop", one["kind"]


def of_kind(overlay: str, kind: str) -> list[Object]:
    return [one for one in rendered(f"overlays/{overlay}") if one["kind"] == kind]


def pods(overlay: str) -> Iterator[tuple[str, Object, Object]]:
    """Name, labels and pod specification of every workload."""
    for workload in [one for kind in ("StatefulSet", "Deployment", "Job") for one in of_kind(overlay, kind)]:
        template = workload["spec"]["template"]
        yield workload["metadata"]["name"], template["metadata"]["labels"], template["spec"]


def containers(overlay: str) -> Iterator[tuple[str, Object]]:
    for name, _, pod in pods(overlay):
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            yield f"{name}/{container['name']}", container


def settings(overlay: str, name: str, pod: Object, folder: Path) -> RunFile | NodeFile:
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
    return load(path, flags=[], environ={name: value for name, value in environ.items() if name.startswith("FARLOOP_")})


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_files_in_the_config_maps_are_good_and_agree_with_ports_probes_and_mounts(
    overlay: str, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_after_the_run_nodes_are_complete_and_the_coordinator_serves(overlay: str, tmp_path: Path) -> None:
    """A finished coordinator is not started again and again, and finished nodes hold no GPUs; a drained node comes back
    on its volume, and one that is refused does not."""
    claims = {claim["metadata"]["name"] for claim in of_kind(overlay, "PersistentVolumeClaim")}
    jobs = {job["metadata"]["name"]: job["spec"] for job in of_kind(overlay, "Job")}
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


@pytest.mark.parametrize("overlay", OVERLAYS)
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


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_and_policies_select_pods_and_ports_that_are_there_and_no_budget_refuses_a_drain(overlay: str) -> None:
    found = {name: (labels, pod) for name, labels, pod in pods(overlay)}
    for service in of_kind(overlay, "Service"):
        chosen = [pod for labels, pod in found.values() if service["spec"]["selector"].items() <= labels.items()]
        assert chosen, service["metadata"]["name"]
        for pod in chosen:
            names = {port["name"] for port in pod["containers"][0]["ports"]}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    assert not of_kind(overlay, "PodDisruptionBudget")
    policies = of_kind(overlay, "NetworkPolicy")
    for selector in (one["spec"]["podSelector"]["matchLabels"] for one in policies if one["spec"]["podSelector"]):
        assert any(selector.items() <= labels.items() for labels, _ in found.values())
    (deny,) = [one for one in policies if not one["spec"]["podSelector"]]
    assert sorted(deny["spec"]["policyTypes"]) == ["Egress", "Ingress"] and "ingress" not in deny["spec"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_daemon_may_dial_what_its_settings_name_and_its_pages_are_for_prometheus_alone(
    overlay: str, tmp_path: Path
) -> None:
    for name, labels, pod in pods(overlay):
        file = settings(overlay, name, pod, tmp_path)
        policies = [
            one["spec"]
            for one in of_kind(overlay, "NetworkPolicy")
            if one["spec"]["podSelector"] and one["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        ]
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


@pytest.mark.parametrize("words", [["n-0", "n-1"], ["--coordinator"], ["--node", "n-0", "server.pub"]], ids="-".join)
def test_the_script_that_makes_the_keys_begins_in_an_empty_folder(words: list[str], tmp_path: Path) -> None:
    """What it tells kubectl is tried on a real server by tests/deploy; here kubectl is a command that does nothing."""
    (tmp_path / "server.pub").touch()
    environ = {**os.environ, "KUBECTL": "true", "FARLOOP": f"{sys.executable} -m farloop.cli.main"}
    done = subprocess.run(
        [K8S / "keys.sh", *words], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    nodes = [word for word in words if word.startswith("n-")]
    made = {path.stem for path in tmp_path.glob("keys/*.key")}
    assert made == {*nodes, *([] if "--node" in words else ["coordinator"])}
    allowed = [] if words[0].startswith("--") else [f"{name}.pub" for name in nodes]
    assert sorted(path.name for path in tmp_path.glob("allowed/*")) == allowed


def test_every_overlay_is_in_the_readme() -> None:
    text = (K8S / "README.md").read_text()
    assert all(f"overlays/{overlay}" in text for overlay in OVERLAYS)
    assert tomllib.loads((K8S / "base/coordinator/run.toml").read_text())["run"]["nodes"] == 2
