"""Writes k8s/chart, the Helm chart, from the overlays: `python k8s/chart.py`. Needs kubectl.

A value takes the place of something in an overlay's objects, and its default is what stood there.
"""

import argparse
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
Object = dict[str, Any]

POD = "spec/template/spec"
OPTIONS: Object = {"coordinator.enabled": True, "coordinator.kind": "single", "nodes.names": [], "nodes.env": []}
"""Values that have no place."""
VALUES = {
    # value: (what it is, kind of the object, place in it)
    "tag": ("Tag of both images. Digits alone: `--set-string`.", "", ""),
    "coordinator.enabled": ("Whether this cluster has the coordinator.", "", ""),
    "coordinator.kind": ("`single`, or `pair`: a second one stands by on another host.", "", ""),
    "coordinator.image": ("Its image, without the tag.", "StatefulSet", f"{POD}/containers/0/image"),
    "coordinator.run": ("run.toml: `--set-file coordinator.run=run.toml`.", "ConfigMap", "data/run.toml"),
    "coordinator.resources": ("Requests and limits.", "StatefulSet", f"{POD}/containers/0/resources"),
    "coordinator.storage": (
        "Size of its volume.",
        "StatefulSet",
        "spec/volumeClaimTemplates/0/spec/resources/requests/storage",
    ),
    "coordinator.addresses": (
        "Networks that may dial in, through a load balancer. Empty: there is none.",
        "Service",
        "spec/loadBalancerSourceRanges",
    ),
    "nodes.names": ("The nodes in this cluster, a Job each. A name is that of its key.", "", ""),
    "nodes.image": ("Their image, without the tag.", "Job", f"{POD}/containers/0/image"),
    "nodes.toml": ("node.toml: `--set-file nodes.toml=node.toml`.", "ConfigMap", "data/node.toml"),
    "nodes.gpus": ("NVIDIA GPUs of each; `nproc` in node.toml is the same number. 0: none.", "", ""),
    "nodes.resources": ("Other requests and limits of each.", "Job", f"{POD}/containers/0/resources"),
    "nodes.storage": ("Size of the volume of each.", "PersistentVolumeClaim", "spec/resources/requests/storage"),
    "nodes.shm": ("Size of /dev/shm.", "Job", f"{POD}/volumes/shm/emptyDir/sizeLimit"),
    "nodes.tolerations": ("Taints of hosts that they may run on.", "Job", f"{POD}/tolerations"),
    "nodes.env": ("More environment variables, as in a pod.", "", ""),
}


def _text(pattern: str) -> Object:
    return {"type": "string", "pattern": f"^{pattern}$"}


def _object(**properties: Object) -> Object:
    return {"type": "object", "properties": properties, "additionalProperties": False}


SIZE = _text(r"([1-9][0-9]*(\.[0-9]+)?|0?\.[0-9]+)([kMGTPE]|[KMGTPE]i)?")
AMOUNT: Object = {"anyOf": [{"type": "number", "minimum": 0}, _text(r"[0-9]*\.?[0-9]+(m|[kMGTPE]|[KMGTPE]i|e[0-9]+)?")]}
AMOUNTS: Object = {"type": "object", "additionalProperties": AMOUNT}
RESOURCES = _object(requests=AMOUNTS, limits=AMOUNTS, claims={"type": "array"})
BYTE, PART = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])", r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
IMAGE = _text(rf"([A-Za-z0-9.-]+(:[0-9]+)?/)?{PART}(/{PART})*")
NETWORK = _text(
    rf"({BYTE}(\.{BYTE}){{3}}/([12]?[0-9]|3[0-2])|[0-9a-fA-F:]*:[0-9a-fA-F:]*/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))"
)
TEXT: Object = {"type": "string"}
RULES: dict[str, Object] = {
    # What Kubernetes would refuse otherwise, or an image that no host could pull.
    "tag": _text("[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"),
    "coordinator.kind": {"enum": ["single", "pair"]},
    "coordinator.image": IMAGE,
    "coordinator.resources": RESOURCES,
    "coordinator.storage": SIZE,
    "coordinator.addresses": {"items": NETWORK, "uniqueItems": True},
    "nodes.names": {"items": _text("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"), "uniqueItems": True},
    "nodes.image": IMAGE,
    "nodes.gpus": {"minimum": 0},
    "nodes.resources": RESOURCES,
    "nodes.storage": SIZE,
    "nodes.shm": SIZE,
    "nodes.tolerations": {
        "items": _object(
            key=TEXT,
            operator={"enum": ["Exists", "Equal"]},
            value=TEXT,
            effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
            tolerationSeconds={"type": "integer"},
        )
    },
    "nodes.env": {
        "items": _object(name=_text("[A-Za-z_.-][A-Za-z0-9_.-]*"), value=TEXT, valueFrom={"type": "object"})
        | {"required": ["name"]}
    },
}
HASHED = "farloop-run-{{ sha256sum $.Values.coordinator.run | trunc 10 }}"
WITH_GPUS = (
    '{{ $gpus := dict "nvidia.com/gpu" (toString $.Values.nodes.gpus) }}'
    "{{ toJson (ternary $.Values.nodes.resources (mergeOverwrite (deepCopy $.Values.nodes.resources)"
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


@functools.cache
def _rendered(overlay: str) -> str:
    words = [os.environ.get("KUBECTL", "kubectl"), "kustomize", str(K8S / "overlays" / overlay)]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


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
        if not isinstance(one, (dict, list)) or (len(short) <= 120 and key != "spec" and "LINE" not in short):
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


class Chart:
    """Templates, and the values that stood in their places."""

    def __init__(self) -> None:
        self.values = dict(OPTIONS)
        self._expressions: list[str] = []

    def mark(self, expression: str) -> str:
        """What stands in an object for an expression; `LINE`: it decides over its whole line."""
        self._expressions.append(expression)
        return f"{'' if expression.startswith('{{') else 'LINE'}MARK{len(self._expressions) - 1}MARK"

    def objects(self, overlay: str) -> dict[str, str]:
        """`kind name` → template. keys.sh makes the namespace and its default policy."""
        found = {}
        for one in yaml.safe_load_all(_rendered(overlay)):
            key = f"{one['kind']} {one['metadata']['name']}"
            if key not in ("Namespace farloop", "NetworkPolicy default-deny"):
                found[re.sub(r"(farloop-run)-\w+", r"\1", key)] = self._template(one)
        return found

    def _template(self, one: Object) -> str:
        kind, meta = one["kind"], one["metadata"]
        if kind == "Job":
            (main,) = one["spec"]["template"]["spec"]["containers"]
            self.values["nodes.gpus"] = int(main["resources"]["limits"].pop("nvidia.com/gpu"))
            del main["resources"]["requests"]["nvidia.com/gpu"]
            main["env"].append(self.mark("each $.Values.nodes.env"))
        for value, (_, of_kind, place) in VALUES.items():
            if kind == of_kind:
                self._take(one, place, value)
        for mine in (meta, *one.get("subjects", [])):
            mine["namespace"] = self.mark("{{ $.Release.Namespace }}")
        if kind in ("Job", "PersistentVolumeClaim"):
            name, meta["name"] = meta["name"], self.mark("{{ toJson $name }}")
        text = "".join(f"{line}\n" for line in ("---", *lines_of(one)))
        if kind == "Job":
            text = text.replace(f"claimName: {name}", f"claimName: {meta['name']}")
        text = text.replace("k8s://farloop/", "k8s://{{ $.Release.Namespace }}/")
        return self._filled(re.sub(r"farloop-run-[0-9a-z]{10}", HASHED, text))

    def _take(self, one: Object, place: str, value: str) -> None:
        """The place is that of the value from now on; an object without the place is left alone."""
        *path, last = place.split("/")
        at: Any = one
        for step in path:
            if isinstance(at, list):
                at = at[int(step)] if step.isdigit() else next(item for item in at if item["name"] == step)
            else:
                at = at.get(step, {})
        if last not in at:
            return
        expression = f"{{{{ toJson $.Values.{value} }}}}"
        if value.endswith(".image"):
            at[last], _, self.values["tag"] = at[last].rpartition(":")
            expression = f'{{{{ printf "%s:%s" $.Values.{value} $.Values.tag | toJson }}}}'
            for init in one["spec"]["template"]["spec"]["initContainers"]:
                init["image"] = self.mark(expression)
        elif value == "nodes.resources":
            expression = WITH_GPUS
        elif value == "nodes.tolerations":
            expression = f"with $.Values.{value}"
        self.values[value], at[last] = at[last], self.mark(expression)

    def _filled(self, text: str) -> str:
        def line(found: re.Match[str]) -> str:
            indent, before, number = found.groups()
            how, _, value = self._expressions[int(number)].partition(" ")
            begin = "range" if how == "each" else "with"
            return f"{indent}{{{{- {begin} {value} }}}}\n{indent}{before}{{{{ toJson . }}}}\n{indent}{{{{- end }}}}"

        text = re.sub(r"^( *)(.*)LINEMARK(\d+)MARK$", line, text, flags=re.MULTILINE)
        return re.sub(r"MARK(\d+)MARK", lambda found: self._expressions[int(found[1])], text)


def below(condition: str, text: str) -> str:
    return f"{{{{- {condition} }}}}\n{text}{{{{- end }}}}\n"


def either(single: str, pair: str) -> str:
    """One template of two: lines that only one has are below a condition."""
    a, b = single.splitlines(keepends=True), pair.splitlines(keepends=True)
    text = ""
    for kind, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        only_a, only_b = "".join(a[i:j]), "".join(b[k:m])
        if kind == "equal":
            text += only_a
        elif not only_b:
            text += below("if not $pair", only_a)
        else:
            text += below("if $pair", only_b + (f"{{{{- else }}}}\n{only_a}" if only_a else ""))
    return text


def templates(chart: Chart) -> dict[str, str]:
    single, pair = chart.objects("coordinator-region"), chart.objects("coordinator-pair")
    assert set(single) <= set(pair)
    key = "Service farloop-sessions"
    single[key] = pair[key] = below("if $.Values.coordinator.addresses", pair[key])
    coordinator = "".join(either(single.get(key, ""), text) for key, text in pair.items())
    nodes = chart.objects("cluster-gpu")
    each = "".join(nodes.pop(key) for key in [*nodes] if key.split()[0] in ("Job", "PersistentVolumeClaim"))
    every = "".join(nodes.values()) + below("range $name := $.Values.nodes.names", each)
    return {
        "templates/coordinator.yaml": '{{- $pair := eq $.Values.coordinator.kind "pair" }}\n'
        + below("if $.Values.coordinator.enabled", coordinator),
        "templates/nodes.yaml": below("if $.Values.nodes.names", every),
    }


def schema_of(value: object, path: str = "") -> Object:
    """Every value with its type and its rules."""
    types: dict[type, str] = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    found: Object = {"type": types[type(value)]} | RULES.get(path, {})
    if isinstance(value, dict) and path not in VALUES:
        inner = {key: schema_of(one, f"{path}.{key}".lstrip(".")) for key, one in value.items()}
        found |= {"properties": inner, "additionalProperties": False}
    return found


def files() -> dict[str, str]:
    """Path below k8s/chart → content."""
    chart = Chart()
    written = templates(chart)
    assert set(chart.values) == set(VALUES)
    values, lines, tree = "# Made by k8s/chart.py.\n", "", Object()
    for key, (about, _, _) in VALUES.items():
        group, _, last = key.rpartition(".")
        one = chart.values[key]
        if group and group not in tree:
            values += f"{group}:\n"
        (tree.setdefault(group, {}) if group else tree)[last] = one
        indent, text = "  " * bool(group), json.dumps(one, allow_nan=False)
        if many := isinstance(one, str) and "\n" in one:
            text = "|" + "".join(f"\n{indent}  {line}".rstrip(" ") for line in one.rstrip("\n").split("\n"))
        values += f"{indent}# {about}\n{indent}{last}: {text}\n"
        lines += f"| `{key}` | {about} | {'that of the overlay' if many else f'`{text}`'} |\n"
    version = tomllib.loads((K8S.parent / "pyproject.toml").read_text())["project"]["version"]
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema_of(tree)}
    return written | {
        "Chart.yaml": f"""apiVersion: v2
name: farloop
description: Trains one model on GPU clusters joined by thin links
type: application
version: {version}
appVersion: {version}
kubeVersion: '>=1.29.0-0'
""",
        "values.yaml": values,
        "values.schema.json": json.dumps(schema, allow_nan=False).replace('}, "', '},\n"') + "\n",
        "README.md": README + lines,
    }


if __name__ == "__main__":
    argparse.ArgumentParser(description="Write k8s/chart anew from the overlays.").parse_args()
    for path, text in files().items():
        file = K8S / "chart" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
