"""The objects that `kubectl apply -k` would send: of every overlay, and of every component above one."""

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml
from toolbox import CACHE, ROOT

K8S = ROOT / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
ABOVE = {
    "allow-api-server": "coordinator-region", "allow-https": "coordinator-region",
    "code-from-configmap": "cluster-gpu", "data-from-pvc": "local", "gpu-product": "cluster-gpu",
    "jobset": "cluster-hosts", "kueue": "cluster-gpu", "leaderworkerset": "cluster-hosts", "mig": "cluster-gpu",
    "model-from-image": "coordinator-region", "model-from-pvc": "coordinator-recover", "monitoring": "local",
    "priority": "local", "runtime-class": "cluster-hosts", "trainjob": "cluster-hosts", "zone-spread": "local",
}  # fmt: skip
"""Component → an overlay that it is for. coordinator-pair and coordinator-recover have overlays of their own."""
RENDERED = [*OVERLAYS, *(f"{overlay}+{component}" for component, overlay in ABOVE.items())]

KUBECTL = shutil.which("kubectl", path=f"{CACHE / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}")
Object = dict[str, Any]


@functools.cache
def text_of(name: str, extra: str = "") -> str:
    """`name`: a folder of k8s/, or OVERLAY, or OVERLAY+COMPONENT+…. `extra`: lines for its kustomization."""
    overlay, *components = name.split("+")
    folder = K8S / overlay if "/" in overlay else K8S / "overlays" / overlay
    with tempfile.TemporaryDirectory() as made:
        here = Path(made).resolve()
        if components or extra:
            up = "../" * (len(here.parts) - 1)
            kustomization = {
                "namespace": "farloop",
                "resources": [f"{up}{folder}"],
                "components": [f"{up}{K8S}/components/{one}" for one in components],
            }
            (here / "kustomization.yaml").write_text(yaml.safe_dump(kustomization) + extra)
            folder = here
        done = subprocess.run([KUBECTL or "kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects_of(name: str, extra: str = "") -> list[Object]:
    return list(yaml.load_all(text_of(name, extra), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


CUSTOM: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "k8s" / "custom.yaml").read_text())
"""`apiVersion kind` → the fields of spec."""


def misfits(value: object, schema: object, at: str = "spec") -> list[str]:
    """What in an object is not as custom.yaml says: unknown and missing fields, types, words."""
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{at}: no list"]
        return [found for number, one in enumerate(value) for found in misfits(one, schema[0], f"{at}[{number}]")]
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{at}: no object"]
        fields = {key.removeprefix("*"): one for key, one in schema.items()}
        missing = [f"{at}.{key[1:]}: missing" for key in schema if key.startswith("*") and key[1:] not in value]
        if "<any>" in fields:
            fields = dict.fromkeys(value, fields["<any>"])
        found = [
            one
            for key, inner in value.items()
            for one in (misfits(inner, fields[key], f"{at}.{key}") if key in fields else [f"{at}.{key}: unknown"])
        ]
        return [*missing, *found]
    types = {"string": str, "integer": int, "boolean": bool}
    if schema in types:
        return [] if type(value) is types[str(schema)] else [f"{at}: {value!r} is no {schema}"]
    if isinstance(schema, str) and "|" in schema:
        return [] if value in schema.split("|") else [f"{at}: {value!r} is none of {schema}"]
    return [] if schema == "any" or isinstance(value, dict) else [f"{at}: no {schema}"]


def template_of(one: Object) -> Object | None:
    """The pods of a workload, custom resources included; None of anything else."""
    if one["kind"] in ("StatefulSet", "Deployment", "Job"):
        return dict(one["spec"]["template"])
    if one["kind"] == "JobSet":
        return dict(one["spec"]["replicatedJobs"][0]["template"]["spec"]["template"])
    if one["kind"] == "LeaderWorkerSet":
        return dict(one["spec"]["leaderWorkerTemplate"]["workerTemplate"])
    if one["kind"] == "TrainJob":
        (patch,) = one["spec"]["runtimePatches"]
        (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        return dict(job["template"]["spec"]["template"])
    return None


def known_to_kubernetes(one: Object) -> Object | None:
    """The part of an object that Kubernetes itself can check: the Job or the pods in a custom resource."""
    kind, meta = one["kind"], one["metadata"]
    if kind in ("PodMonitor", "PrometheusRule"):
        return None
    if kind == "JobSet":
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": meta,
            **one["spec"]["replicatedJobs"][0]["template"],
        }
    if kind in ("LeaderWorkerSet", "TrainJob"):
        return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": meta, "template": template_of(one)}
    return one
