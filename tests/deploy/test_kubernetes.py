"""overlays/local on a real Kubernetes node: applied as k8s/README.md says, it trains, and goes on whatever is deleted.

The node is 1.20 (tests/deploy/k8s): older than policy/v1, so the disruption budget is sent as policy/v1beta1 there, and
than pod security admission. Its network plugin enforces no NetworkPolicy: only that the server takes them is tested.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from containers import Engine
from toolbox import CACHE, ROOT, root_needed, run, tool, until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(2400)]

K8S, LAB = ROOT / "k8s", ROOT / "tests" / "deploy" / "k8s" / "lab.sh"
BINARIES = Path(os.environ.get("K8SLAB_BIN", CACHE / "kubernetes"))
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
NODES = ["farloop-node-0", "farloop-node-1"]
PODS = ["farloop-coordinator-0", *NODES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One node, and kubectl against it."""

    env: dict[str, str]

    def lab(self, *words: str | Path, timeout_s: float = 120, text: str | None = None, code: int | None = 0) -> str:
        return run(LAB, *words, env=self.env, timeout_s=timeout_s, text=text, code=code)

    def kubectl(self, *words: str | Path, timeout_s: float = 120, text: str | None = None, code: int | None = 0) -> str:
        return self.lab("kubectl", "--namespace", "farloop", *words, timeout_s=timeout_s, text=text, code=code)

    def apply(self, overlay: str, *more: str) -> str:
        """As `kubectl apply -k` does, but for the one kind that 1.20 has under its older name."""
        sent = run(tool("kubectl"), "kustomize", K8S / "overlays" / overlay)
        return self.kubectl("apply", *more, "--filename", "-", text=sent.replace("policy/v1\n", "policy/v1beta1\n"))

    def pod(self, name: str) -> dict[str, Any]:
        told = self.kubectl("get", "pod", name, "--output", "json", code=None)
        return dict(json.loads(told)) if told.startswith("{") else {}

    def ready(self, name: str) -> bool:
        conditions = self.pod(name).get("status", {}).get("conditions", [])
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def status(self) -> dict[str, Any]:
        """What the coordinator's page says; empty while it does not answer."""
        page = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9700/status', timeout=5).read().decode())"
        told = self.kubectl("exec", PODS[0], "-c", "coordinator", "--", "python3", "-c", page, code=None)
        return dict(json.loads(told)) if told.startswith("{") else {}

    def committed(self) -> int:
        """Versions of all fragments together."""
        return sum(self.status().get("versions", []))

    def until(self, what: str, poll: Callable[[], object], within_s: float = 300) -> None:
        until(what, poll, within_s=within_s, tell=self.everything, every_s=3)

    def until_trained(self, since: int = 0) -> None:
        """Windows commit, more than were committed then."""
        self.until("windows commit", lambda: self.committed() > since + 5, 400)

    def restarts(self, name: str) -> int:
        return int(self.pod(name)["status"]["containerStatuses"][0]["restartCount"])

    def everything(self) -> str:
        """For a failure."""
        told = [self.kubectl("get", "all,pvc,pv", code=None), self.kubectl("get", "events", code=None)]
        told += [self.kubectl("describe", "pod", name, code=None)[-1500:] for name in PODS]
        told += [self.kubectl("logs", name, "--all-containers", "--tail", "15", code=None) for name in PODS]
        return "\n".join(told)


@pytest.fixture(scope="module")
def cluster(podman: Engine, node_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node with the image loaded and nothing applied. Gone afterwards."""
    root_needed("a Kubernetes node makes network namespaces and mounts")
    if not (BINARIES / "kube-proxy").exists():
        pytest.skip(f"no Kubernetes in {BINARIES}: `tests/deploy/setup.sh kubernetes` builds it")
    for name in ("kubectl", "etcd", "containerd", "runc", "dnsmasq", "iptables", "jq", "gcc", "nsenter"):
        tool(name)
    folder = tmp_path_factory.mktemp("kubernetes")
    archive = folder / "image.tar"
    podman.podman("save", "--format", "docker-archive", "--output", archive, node_image, timeout_s=600)
    made = Cluster(env={"K8SLAB_BIN": str(BINARIES), "K8SLAB_DIR": f"/run/farloop-k8slab-{os.getpid()}"})
    try:
        made.lab("up", timeout_s=300)
        made.lab("load", archive, timeout_s=600)
        archive.unlink()
        yield made
    finally:
        made.lab("down", timeout_s=900, code=None)


@pytest.fixture(scope="module")
def applied(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The two commands of overlays/local, and volumes in place of a storage class."""
    here = tmp_path_factory.mktemp("keys")
    env = {**cluster.env, "KUBECTL": f"{LAB} kubectl", "FARLOOP": f"{sys.executable} -m farloop.cli.main"}
    run(K8S / "keys.sh", *NODES, cwd=here, env=env, timeout_s=300)
    volumes = Path(cluster.env["K8SLAB_DIR"]) / "volumes"
    for pod in PODS:
        (volumes / f"state-{pod}").mkdir(parents=True)
    cluster.kubectl("apply", "-f", "-", text=(LAB.parent / "volumes.yaml").read_text().replace("FOLDER", str(volumes)))
    cluster.apply("local")
    return cluster


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_server_takes_every_object_of_an_overlay(cluster: Cluster, overlay: str) -> None:
    cluster.lab("kubectl", "apply", "--kustomize", K8S / "base" / "namespace")
    told = cluster.apply(overlay, "--dry-run=server")
    assert "(server dry run)" in told and "rror" not in told


def test_nothing_was_sent_to_another_namespace(applied: Cluster) -> None:
    names = ("kubectl", "get", "networkpolicies,statefulsets", "-A", "--output", "custom-columns=:.metadata.namespace")
    assert set(applied.lab(*names).split()) == {"farloop"}


def test_all_pods_become_ready_and_train(applied: Cluster) -> None:
    applied.until("all pods are ready", lambda: all(map(applied.ready, PODS)), 400)
    applied.until_trained()
    told = applied.status()
    assert sorted(node["name"] for node in told["nodes"] if node["connected"]) == NODES
    assert {name for window in told["windows"] for name in window["merged"]} <= set(NODES)
    for name in PODS:
        (main,) = applied.pod(name)["status"]["containerStatuses"]
        assert main["restartCount"] == 0 and main["started"], name


def test_a_pod_has_no_rights_and_reads_a_key_of_its_own(applied: Cluster) -> None:
    script = "id -u; grep CapEff /proc/1/status; ls -ln /keys; touch /x; cat /proc/mounts"
    for name in PODS:
        container = "coordinator" if name == PODS[0] else "node"
        told = applied.kubectl("exec", name, "--container", container, "--", "sh", "-c", script)
        assert re.search(r"^10001$", told, re.MULTILINE) and re.search(r"CapEff:\s+0{16}$", told, re.MULTILINE), told
        assert re.search(r"-rw------- 1 10001 10001 .*\.key", told), told
        assert "cannot touch '/x': Read-only file system" in told
        assert "/run/secrets/kubernetes.io" not in told


def test_the_probes_of_the_manifests_are_answered(applied: Cluster) -> None:
    for name in PODS:
        for page in ("healthz", "readyz"):
            port = 9700 if name == PODS[0] else 9710
            address = applied.pod(name)["status"]["podIP"]
            assert applied.lab("run", "curl", "--silent", "--fail", f"http://{address}:{port}/{page}")
        warnings = applied.kubectl("get", "events", "--field-selector", f"involvedObject.name={name},reason=Killing")
        assert "liveness" not in warnings.lower()


def test_a_deleted_node_pod_ends_in_order_comes_back_and_the_run_goes_on(applied: Cluster) -> None:
    old, committed = applied.pod(NODES[1])["metadata"]["uid"], applied.committed()
    applied.kubectl("delete", "pod", NODES[1], "--wait=true", timeout_s=120)

    def back() -> bool:
        pod = applied.pod(NODES[1])
        return bool(pod) and pod["metadata"]["uid"] != old and applied.ready(NODES[1])

    applied.until("the pod is back", back)
    applied.until_trained(committed)
    (node,) = [one for one in applied.status()["nodes"] if one["name"] == NODES[1]]
    assert node["connected"] and node["incarnation"] >= 1


def test_a_deleted_coordinator_comes_back_and_the_run_goes_on(applied: Cluster) -> None:
    before = applied.status()
    restarts = [applied.restarts(name) for name in NODES]
    applied.kubectl("delete", "pod", PODS[0], "--wait=true", timeout_s=120)
    applied.until_trained(sum(before["versions"]))
    told = applied.status()
    assert told["run"]["fingerprint"] == before["run"]["fingerprint"] and told["run"]["epoch"] >= before["run"]["epoch"]
    assert restarts == [applied.restarts(name) for name in NODES], "a coordinator that is away ends no node"


def _ended(cluster: Cluster, name: str, script: str) -> int:
    """The exit code that the kubelet saw after `script` ran in the pod's container, once it has started it again."""
    restarts = cluster.restarts(name)
    cluster.kubectl("exec", name, "--", "sh", "-c", script, code=None)
    cluster.until(f"{name} is started again", lambda: cluster.restarts(name) > restarts, 120)
    return int(cluster.pod(name)["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"])


def test_a_node_that_is_told_to_end_drains_and_ends_with_0(applied: Cluster) -> None:
    assert _ended(applied, NODES[0], "kill -TERM 1") == 0, applied.everything()


def test_a_coordinator_that_is_killed_is_started_again_on_its_volume(applied: Cluster) -> None:
    committed = applied.committed()
    assert _ended(applied, PODS[0], "kill -KILL $(cat /proc/1/task/1/children)") != 0
    applied.until_trained(committed)


def test_a_drain_does_not_evict_the_coordinator(applied: Cluster) -> None:
    words = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=20s")
    told = applied.lab("kubectl", "drain", "node0", *words, code=None, timeout_s=120)
    assert "disruption budget" in told
    assert applied.pod(PODS[0])["status"]["phase"] == "Running"
    applied.lab("kubectl", "uncordon", "node0")


def test_what_is_scaled_away_says_good_bye(applied: Cluster) -> None:
    applied.until("all pods are ready", lambda: all(map(applied.ready, PODS)))
    applied.kubectl("scale", "statefulset", "farloop-node", "--replicas=0")
    applied.until("no node is left", lambda: not any(map(applied.pod, NODES)), 200)
    nodes = {node["name"]: node for node in applied.status()["nodes"]}
    for name in NODES:
        assert not nodes[name]["connected"] and nodes[name]["reason"], nodes[name]
