"""Writes k8s/chart, the Helm chart, from the overlays: `python k8s/chart.py`. Needs kubectl.

Every value takes the place of something in an overlay's objects, so that the chart and the overlays cannot part.
"""

import difflib
import functools
import json
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).resolve().parent
CHART = K8S / "chart"
Object = dict[str, Any]

ABOUT = {
    "tag": "Tag of both images.",
    "coordinator.enabled": "Whether this cluster has the coordinator.",
    "coordinator.kind": "`single`, or `pair`: a second one stands by on another host.",
    "coordinator.image": "Its image, without the tag.",
    "coordinator.run": "run.toml: `--set-file coordinator.run=run.toml`.",
    "coordinator.resources": "Requests and limits.",
    "coordinator.storage": "Size of its volume.",
    "coordinator.addresses": "Networks that may dial in, through a load balancer. Empty: there is none.",
    "nodes.names": "The nodes in this cluster, a Job each. A name is that of its key.",
    "nodes.image": "Their image, without the tag.",
    "nodes.toml": "node.toml: `--set-file nodes.toml=node.toml`.",
    "nodes.gpus": "NVIDIA GPUs of each; `nproc` in node.toml is the same number. 0: none.",
    "nodes.resources": "Other requests and limits of each.",
    "nodes.storage": "Size of the volume of each.",
    "nodes.shm": "Size of /dev/shm.",
    "nodes.tolerations": "Taints of hosts that they may run on.",
    "nodes.env": "More environment variables, as in a pod.",
}


@functools.cache
def _rendered(overlay: str) -> str:
    words = [os.environ.get("KUBECTL", "kubectl"), "kustomize", str(K8S / "overlays" / overlay)]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


def objects_of(overlay: str) -> list[Object]:
    """What the chart has of an overlay. keys.sh makes the namespace and its default policy."""
    found = list(yaml.safe_load_all(_rendered(overlay)))
    return [one for one in found if one["kind"] != "Namespace" and one["metadata"]["name"] != "default-deny"]


class _OneLine(yaml.SafeDumper):
    """Writes a text of several lines in one, as JSON does."""


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None)


_OneLine.add_representer(str, _quoted)


def _flow(value: object) -> str:
    text = yaml.dump(value, Dumper=_OneLine, sort_keys=False, width=10**6, default_flow_style=True)
    return text.removesuffix("...\n").strip()


def lines_of(value: Object, indent: str = "") -> list[str]:
    """YAML in which whatever fits into a line stands in one, but for what has a line that is a template's."""
    lines = []
    for key, one in value.items():
        short = f"{indent}{key}: {_flow(one)}"
        if not isinstance(one, (dict, list)) or (len(short) <= 120 and key != "spec" and LINE not in short):
            lines.append(short)
        elif isinstance(one, dict):
            lines += [f"{indent}{key}:", *lines_of(one, indent + "  ")]
        else:
            lines.append(f"{indent}{key}:")
            for item in one:
                short = f"{indent}- {_flow(item)}"
                if len(short) <= 120 or not isinstance(item, dict):
                    lines.append(short)
                else:
                    first, *rest = lines_of(item, indent + "  ")
                    lines += [f"{indent}- {first.strip()}", *rest]
    return lines


LINE = "LINE"
"""In a mark: the whole line depends on the value."""


class Template:
    """Objects in which places are taken by expressions; and the values that they had."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._expressions: list[str] = []

    def mark(self, expression: str) -> str:
        self._expressions.append(expression)
        return f"{'' if expression.startswith('{{') else LINE}MARK{len(self._expressions) - 1}MARK"

    def take(self, holder: Any, key: Any, value: str, how: str = "{{ toJson $.Values.%s }}") -> None:
        """The place `holder[key]` is that of the value from now on."""
        self.values.setdefault(value, holder[key])
        holder[key] = self.mark(how % value)

    def text(self, one: Object) -> str:
        one["metadata"]["namespace"] = self.mark("{{ $.Release.Namespace }}")
        for subject in one.get("subjects", []):
            subject["namespace"] = one["metadata"]["namespace"]
        text = "\n".join(lines_of(one)) + "\n"
        return text.replace("k8s://farloop/", "k8s://{{ $.Release.Namespace }}/")

    def finish(self, text: str) -> str:
        def line(found: re.Match[str]) -> str:
            indent, before, number = found.groups()
            how, _, value = self._expressions[int(number)].partition(" ")
            if how == "each":
                return f"{indent}{{{{- range {value} }}}}\n{indent}- {{{{ toJson . }}}}\n{indent}{{{{- end }}}}"
            return f"{indent}{{{{- with {value} }}}}\n{indent}{before}{{{{ toJson . }}}}\n{indent}{{{{- end }}}}"

        text = re.sub(rf"^( *)(.*){LINE}MARK(\d+)MARK$", line, text, flags=re.MULTILINE)
        return re.sub(r"MARK(\d+)MARK", lambda found: self._expressions[int(found[1])], text)


def coordinator(made: Template, overlay: str) -> dict[str, str]:
    """`kind name` → text."""
    found = {}
    for one in objects_of(overlay):
        kind, name = one["kind"], one["metadata"]["name"]
        if kind == "ConfigMap":
            made.take(one["data"], "run.toml", "coordinator.run")
            one["metadata"]["name"] = name = "farloop-run-{{ sha256sum $.Values.coordinator.run | trunc 10 }}"
        if kind == "StatefulSet":
            pod = one["spec"]["template"]["spec"]
            containers(made, pod, "coordinator")
            for volume in pod["volumes"]:
                if volume["name"] == "run":
                    volume["configMap"]["name"] = "farloop-run-{{ sha256sum $.Values.coordinator.run | trunc 10 }}"
            requests = one["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]
            made.take(requests, "storage", "coordinator.storage")
        text = f"---\n{made.text(one)}" if name != "farloop-sessions" else sessions(made, one)
        found[f"{kind} {name}"] = text
    return found


def sessions(made: Template, one: Object) -> str:
    made.take(one["spec"], "loadBalancerSourceRanges", "coordinator.addresses")
    return f"{{{{- if $.Values.coordinator.addresses }}}}\n---\n{made.text(one)}{{{{- end }}}}\n"


def containers(made: Template, pod: Object, daemon: str) -> None:
    (main,) = pod["containers"]
    if daemon == "node":
        gpus = {main["resources"][one].pop("nvidia.com/gpu") for one in ("requests", "limits")}
        made.values["nodes.gpus"] = int(*gpus)
        made.take(main, "resources", "nodes.resources", WITH_GPUS)
    else:
        made.take(main, "resources", "coordinator.resources")
    where = "coordinator" if daemon == "coordinator" else "nodes"
    image, _, tag = main["image"].rpartition(":")
    made.values.update({f"{where}.image": image, "tag": tag})
    for container in (main, *pod["initContainers"]):
        container["image"] = made.mark(f'{{{{ printf "%s:%s" $.Values.{where}.image $.Values.tag | toJson }}}}')


def nodes(made: Template) -> str:
    shared, each = [], []
    for one in objects_of("cluster-gpu"):
        kind = one["kind"]
        if kind == "ConfigMap":
            made.take(one["data"], "node.toml", "nodes.toml")
        if kind in ("Job", "PersistentVolumeClaim"):
            one["metadata"]["name"] = made.mark("{{ toJson $name }}")
        if kind == "PersistentVolumeClaim":
            made.take(one["spec"]["resources"]["requests"], "storage", "nodes.storage")
        if kind == "Job":
            pod = one["spec"]["template"]["spec"]
            containers(made, pod, "node")
            made.take(pod, "tolerations", "nodes.tolerations", "with $.Values.%s")
            made.values["nodes.env"] = []
            pod["containers"][0]["env"].append(made.mark("each $.Values.nodes.env"))
            for volume in pod["volumes"]:
                if volume["name"] == "shm":
                    made.take(volume["emptyDir"], "sizeLimit", "nodes.shm")
                if volume["name"] == "state":
                    volume["persistentVolumeClaim"]["claimName"] = made.mark("{{ toJson $name }}")
        (each if kind in ("Job", "PersistentVolumeClaim") else shared).append(made.text(one))
    body = "---\n".join(["", *shared]) + "{{- range $name := $.Values.nodes.names }}\n---\n" + "---\n".join(each)
    return f"{{{{- if $.Values.nodes.names }}}}\n{body}{{{{- end }}}}\n{{{{- end }}}}\n"


def either(single: str, pair: str) -> str:
    """One text of two: lines that only one has are below a condition."""
    a, b = single.splitlines(), pair.splitlines()
    lines: list[str] = []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind == "equal":
            lines += a[i:j]
        elif i == j:
            lines += ["{{- if $pair }}", *b[k:m], "{{- end }}"]
        elif k == m:
            lines += ["{{- if not $pair }}", *a[i:j], "{{- end }}"]
        else:
            lines += ["{{- if $pair }}", *b[k:m], "{{- else }}", *a[i:j], "{{- end }}"]
    return "\n".join(lines) + "\n"


def coordinators(made: Template) -> str:
    single, pair = (coordinator(made, f"coordinator-{kind}") for kind in ("region", "pair"))
    texts = []
    for key in pair:
        if key in single:
            texts.append(either(made.finish(single[key]), made.finish(pair[key])))
        else:
            texts.append(f"{{{{- if $pair }}}}\n{pair[key]}{{{{- end }}}}\n")
    assert set(single) <= set(pair)
    head = '{{- $pair := eq $.Values.coordinator.kind "pair" }}\n{{- if $.Values.coordinator.enabled }}\n'
    return head + "".join(texts) + "{{- end }}\n"


def values_of(made: Template) -> Object:
    flat = {"coordinator.enabled": True, "coordinator.kind": "single", "nodes.names": [], **made.values}
    assert set(flat) == set(ABOUT)
    tree: Object = {}
    for key in ABOUT:
        *groups, last = key.split(".")
        holder = tree
        for group in groups:
            holder = holder.setdefault(group, {})
        holder[last] = flat[key]
    return tree


def schema_of(value: object, path: str = "") -> Object:
    """Every key of the values and its type; below resources, tolerations and env whatever a pod may have."""
    types: dict[type, str] = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    found: Object = {"type": types[type(value)]}
    if path in ABOUT:
        found["description"] = ABOUT[path]
    if path == "coordinator.kind":
        found["enum"] = ["single", "pair"]
    if path in ("nodes.names", "coordinator.addresses"):
        found["items"] = {"type": "string"}
    if path == "nodes.names":
        found |= {"uniqueItems": True}
    if isinstance(value, dict) and path not in ABOUT:
        inner = {key: schema_of(one, f"{path}.{key}".lstrip(".")) for key, one in value.items()}
        found |= {"properties": inner, "additionalProperties": False}
    return found


def values_text(values: Object) -> str:
    """values.yaml: what each value is for stands above it."""
    lines = ["# Made by k8s/chart.py."]

    def put(tree: Object, path: str, indent: str) -> None:
        for key, one in tree.items():
            at = f"{path}.{key}".lstrip(".")
            if at in ABOUT:
                lines.append(f"{indent}# {ABOUT[at]}")
            if at not in ABOUT:
                lines.append(f"{indent}{key}:")
                put(one, at, indent + "  ")
            elif isinstance(one, str) and "\n" in one:
                lines.append(f"{indent}{key}: |")
                lines.extend(f"{indent}  {line}".rstrip() for line in one.rstrip("\n").split("\n"))
            else:
                lines.append(f"{indent}{key}: {json.dumps(one, allow_nan=False)}")

    put(values, "", "")
    return "\n".join(lines) + "\n"


WITH_GPUS = (
    '{{ $gpus := dict "nvidia.com/gpu" (toString $.Values.nodes.gpus) }}'
    "{{ toJson (ternary $.Values.%s (mergeOverwrite (deepCopy $.Values.nodes.resources)"
    ' (dict "limits" $gpus "requests" $gpus)) (eq 0 (int $.Values.nodes.gpus))) }}'
)

README = """# Helm chart

The objects of [the overlays](../README.md) `coordinator-region`, `coordinator-pair`, `cluster-gpu` and `local`, made of
them by `k8s/chart.py`. `k8s/keys.sh` makes the namespace, keys and the allow list first.

```sh
k8s/keys.sh --coordinator
helm install farloop k8s/chart --namespace farloop --set-file coordinator.run=run.toml
# in each of the other clusters
k8s/keys.sh --node oslo coordinator.pub
helm install farloop k8s/chart --namespace farloop --set coordinator.enabled=false \\
    --set 'nodes.names={oslo}' --set-file nodes.toml=node.toml
```

| value | content | default |
| --- | --- | --- |
"""


def readme(values: Object) -> str:
    rows = []
    for key, about in ABOUT.items():
        one: Any = functools.reduce(lambda tree, part: tree[part], key.split("."), values)
        text = json.dumps(one, allow_nan=False)
        default = "the overlay's" if "\\n" in text else f"`{text}`"
        rows.append(f"| `{key}` | {about} | {default} |\n")
    return README + "".join(rows)


def files() -> dict[str, str]:
    """Path below k8s/chart → content."""
    made = Template()
    written = {"templates/coordinator.yaml": coordinators(made), "templates/nodes.yaml": nodes(made)}
    written = {path: made.finish(text) for path, text in written.items()}
    values = values_of(made)
    version = tomllib.loads((K8S.parent / "pyproject.toml").read_text())["project"]["version"]
    chart = {
        "apiVersion": "v2",
        "name": "farloop",
        "description": "Trains one model on GPU clusters joined by thin links",
        "type": "application",
        "version": version,
        "appVersion": version,
        "kubeVersion": ">=1.29.0-0",
    }
    written["Chart.yaml"] = yaml.safe_dump(chart, sort_keys=False)
    written["values.yaml"] = values_text(values)
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema_of(values)}
    written["values.schema.json"] = json.dumps(schema, allow_nan=False).replace('}, "', '},\n"') + "\n"
    written["README.md"] = readme(values)
    return written


if __name__ == "__main__":
    for path, text in files().items():
        file = CHART / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
