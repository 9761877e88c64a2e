"""overlays/local on a real Kubernetes node: applied as k8s/README.md says, it trains, and goes on whatever is deleted.

The node is 1.20 (tests/deploy/k8s): older than the rules of Jobs on failed pods, which are left out there, and than pod
security admission. Its network plugin enforces no NetworkPolicy: only that the server takes them is tested.
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
import yaml
from containers import Engine
from manifests import K8S, RENDERED, known_to_kubernetes, objects_of
from test_commands import typed
from toolbox import CACHE, ROOT, root_needed, run, tool, until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(2400)]

LAB = ROOT / "tests" / "deploy" / "k8s" / "lab.sh"
BINARIES = Path(os.environ.get("K8SLAB_BIN", CACHE / "kubernetes"))
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
        """As `kubectl apply -k` does, but for what 1.20 does not have: of a custom resource its Job or pods."""
        sent = (one for one in objects_of(overlay) if one["kind"] != "TrainJob")  # whose pods get their image elsewhere
        objects = [known for one in sent if (known := known_to_kubernetes(one))]
        for job in (one for one in objects if one["kind"] == "Job"):
            for field in ("podFailurePolicy", "podReplacementPolicy", "completionMode"):
                job["spec"].pop(field, None)
        return self.kubectl("apply", *more, "--filename", "-", text=yaml.safe_dump_all(objects))

    def pods(self, name: str) -> list[dict[str, Any]]:
        """Of a node, whose Job names them: the newest last. Of the coordinator, its one."""
        chosen = ["--selector", f"job-name={name}"] if name in NODES else ["--field-selector", f"metadata.name={name}"]
        told = json.loads(self.kubectl("get", "pods", *chosen, "--output", "json"))["items"]
        return sorted(told, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def pod(self, name: str) -> dict[str, Any]:
        """The newest pod; empty where there is none."""
        return (self.pods(name) or [{}])[-1]

    def called(self, name: str) -> str:
        return str(self.pod(name)["metadata"]["name"])

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
        for name in (pod["metadata"]["name"] for pods in map(self.pods, PODS) for pod in pods):
            told.append(self.kubectl("describe", "pod", name, code=None)[-1500:])
            told.append(self.kubectl("logs", name, "--all-containers", "--tail", "15", code=None))
        return "\n".join(told)


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    """A node with nothing applied. Gone afterwards."""
    root_needed("a Kubernetes node makes network namespaces and mounts")
    if not (BINARIES / "kube-proxy").exists():
        pytest.skip(f"no Kubernetes in {BINARIES}: `tests/deploy/setup.sh kubernetes` builds it")
    for name in ("etcd", "containerd", "runc", "dnsmasq", "iptables", "jq", "gcc", "nsenter"):
        tool(name)
    directory = f"/run/farloop-k8slab-{os.getpid()}"
    made = Cluster(env={"K8SLAB_BIN": str(BINARIES), "K8SLAB_DIR": directory, "K8SLAB_KUBECTL": tool("kubectl")})
    try:
        made.lab("up", timeout_s=300)
        yield made
    finally:
        made.lab("down", timeout_s=900, code=None)


@pytest.fixture(scope="module")
def cluster(server: Cluster, podman: Engine, node_image: str, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The image loaded."""
    archive = tmp_path_factory.mktemp("kubernetes") / "image.tar"
    podman.podman("save", "--format", "docker-archive", "--output", archive, node_image, timeout_s=600)
    server.lab("load", archive, timeout_s=600)
    archive.unlink()
    return server


@pytest.fixture(scope="module")
def applied(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The two commands of overlays/local, and volumes in place of a storage class."""
    here = tmp_path_factory.mktemp("keys")
    env = {**cluster.env, "KUBECTL": f"{LAB} kubectl", "FARLOOP": f"{sys.executable} -m farloop.cli.main"}
    keys, apply = typed("A Kubernetes fleet")
    assert apply == "kubectl apply -k k8s/overlays/local"
    run(ROOT / keys.split()[0], *keys.split()[1:], cwd=here, env=env, timeout_s=300)
    volumes = Path(cluster.env["K8SLAB_DIR"]) / "volumes"
    for claim in ("state-farloop-coordinator-0", *NODES):
        (volumes / claim).mkdir(parents=True)
    cluster.kubectl("apply", "-f", "-", text=(LAB.parent / "volumes.yaml").read_text().replace("FOLDER", str(volumes)))
    cluster.apply("local")
    return cluster


@pytest.mark.parametrize("name", [name for name in RENDERED if "image" not in name])
def test_the_server_takes_every_object_of_an_overlay_and_of_a_component(server: Cluster, name: str) -> None:
    """Image volumes are newer than it."""
    server.lab("kubectl", "apply", "--kustomize", K8S / "base" / "namespace")
    told = server.apply(name, "--dry-run=server")
    assert told.count("(server dry run)") == len(told.splitlines()) >= 8


def test_a_pair_may_use_its_own_lease_and_nothing_else(server: Cluster) -> None:
    rights = [one for one in objects_of("coordinator-pair") if one["kind"] in ("Namespace", "Role", "RoleBinding")]
    server.kubectl("apply", "--filename", "-", text=yaml.safe_dump_all(rights))
    who = "--as=system:serviceaccount:farloop:farloop-coordinator"
    for may, words in {
        "yes": ("create leases", "get leases/farloop", "update leases/farloop"),
        "no": ("get leases/other", "delete leases/farloop", "list leases", "get secrets", "get pods"),
    }.items():
        for asked in words:
            told = server.kubectl("auth", "can-i", *asked.split(), who, code=None)
            assert told.split()[-1] == may, asked


def test_nothing_was_sent_to_another_namespace(applied: Cluster) -> None:
    names = (
        "kubectl",
        "get",
        "networkpolicies,statefulsets,jobs",
        "-A",
        "--output",
        "custom-columns=:.metadata.namespace",
    )
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
        told = applied.kubectl("exec", applied.called(name), "--container", container, "--", "sh", "-c", script)
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
        warnings = applied.kubectl(
            "get", "events", "--field-selector", f"involvedObject.name={applied.called(name)},reason=Killing"
        )
        assert "liveness" not in warnings.lower()


def test_a_deleted_node_pod_ends_in_order_comes_back_and_the_run_goes_on(applied: Cluster) -> None:
    old, committed = applied.pod(NODES[1])["metadata"]["uid"], applied.committed()
    applied.kubectl("delete", "pod", applied.called(NODES[1]), "--wait=true", timeout_s=120)

    def back() -> bool:
        pod = applied.pod(NODES[1])
        return bool(pod) and pod["metadata"]["uid"] != old and applied.ready(NODES[1])

    applied.until("the pod is back", back)
    applied.until_trained(committed)
    (node,) = [one for one in applied.status()["nodes"] if one["name"] == NODES[1]]
    assert node["connected"] and node["incarnation"] >= 1


def test_a_deleted_coordinator_comes_back_and_the_run_goes_on(applied: Cluster) -> None:
    before = applied.status()
    names = [applied.called(name) for name in NODES]
    applied.kubectl("delete", "pod", PODS[0], "--wait=true", timeout_s=120)
    applied.until_trained(sum(before["versions"]))
    told = applied.status()
    assert told["run"]["fingerprint"] == before["run"]["fingerprint"] and told["run"]["epoch"] >= before["run"]["epoch"]
    assert names == [applied.called(name) for name in NODES], "a coordinator that is away ends no node"


@pytest.mark.parametrize("script", ["kill -TERM 1", "kill -KILL $(cat /proc/1/task/1/children)"])
def test_a_node_that_ends_before_the_run_does_is_replaced(script: str, applied: Cluster) -> None:
    """With 130 after a drain: 0 would complete its Job."""
    applied.until("it trains", lambda: applied.ready(NODES[0]))
    old = applied.called(NODES[0])
    applied.kubectl("exec", old, "--", "sh", "-c", script, code=None)
    applied.until("another pod trains", lambda: applied.called(NODES[0]) != old and applied.ready(NODES[0]), 300)
    (ended,) = [pod for pod in applied.pods(NODES[0]) if pod["metadata"]["name"] == old]
    code = ended["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
    assert code == 130 if "TERM" in script else code != 0, applied.everything()


def test_a_coordinator_that_is_killed_is_started_again_on_its_volume(applied: Cluster) -> None:
    committed, restarts = applied.committed(), applied.restarts(PODS[0])
    applied.kubectl("exec", PODS[0], "--", "sh", "-c", "kill -KILL $(cat /proc/1/task/1/children)", code=None)
    applied.until("it is started again", lambda: applied.restarts(PODS[0]) > restarts, 120)
    applied.until_trained(committed)


def test_a_drain_goes_through_and_the_run_goes_on_once_there_is_a_host(applied: Cluster) -> None:
    committed = applied.committed()
    words = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s")
    assert "drained" in applied.lab("kubectl", "drain", "node0", *words, timeout_s=200)
    applied.lab("kubectl", "uncordon", "node0")
    applied.until_trained(committed)


def test_a_node_whose_job_is_deleted_says_good_bye(applied: Cluster) -> None:
    applied.until("all pods are ready", lambda: all(map(applied.ready, PODS)))
    applied.kubectl("delete", "job", *NODES, "--wait=false")
    applied.until("no node is left", lambda: not any(map(applied.pod, NODES)), 200)
    nodes = {node["name"]: node for node in applied.status()["nodes"]}
    for name in NODES:
        assert not nodes[name]["connected"] and nodes[name]["reason"], nodes[name]
