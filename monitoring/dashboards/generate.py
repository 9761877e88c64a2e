"""`python -m farloop.monitoring.dashboards.generate [--check]`: write the dashboards, and the alerts for Kubernetes.

The dashboards are JSON beside this file; they need grafana-foundation-sdk (the extra `dashboards`). The Prometheus
operator takes the groups of `alerts/farloop.yml` one level deeper: the text is indented, comments included.

With --check nothing is written, and the exit code says whether all files are up to date.
"""

import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RULES = ROOT / "monitoring" / "alerts" / "farloop.yml"
RULE_OBJECT = ROOT / "k8s" / "components" / "monitoring" / "prometheusrule.yaml"

_HEAD = """\
# Made from monitoring/alerts/farloop.yml by `python -m farloop.monitoring.dashboards.generate`.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: farloop
  labels: {app.kubernetes.io/part-of: farloop}
spec:
"""


def rule_object() -> str:
    """The alerts as an object for the Prometheus operator."""
    rules = RULES.read_text()
    return _HEAD + textwrap.indent(rules[rules.index("groups:") :], "  ")


def dashboards() -> dict[Path, str]:
    """The files that Grafana reads."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    from farloop.monitoring.dashboards.pages import DASHBOARDS

    texts = {}
    for dashboard in DASHBOARDS:
        model = json.loads(JSONEncoder(sort_keys=True, indent=1).encode(dashboard.build()))
        for number, panel in enumerate(model["panels"], start=1):
            panel["id"] = number
        text = json.dumps(_without_nulls(model), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
        texts[HERE / f"{dashboard.name}.json"] = f"{text}\n"
    return texts


def _without_nulls(value: Any) -> Any:
    """The encoder writes unset fields as null; Grafana would take some of them for a choice. The null of a threshold's
    first step stays: it means minus infinity."""
    if isinstance(value, Mapping):
        threshold = {"value", "color"} <= value.keys()
        return {k: _without_nulls(v) for k, v in value.items() if v is not None or (threshold and k == "value")}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def main(words: list[str]) -> int:
    """The exit code."""
    if set(words) - {"--check"}:
        sys.stderr.write("usage: python -m farloop.monitoring.dashboards.generate [--check]\n")
        return 2
    stale = {
        path: text
        for path, text in {**dashboards(), RULE_OBJECT: rule_object()}.items()
        if not path.exists() or path.read_text() != text
    }
    for path, text in stale.items():
        if words:
            sys.stderr.write(f"{path} is not what the code makes: run without --check\n")
        else:
            path.write_text(text)
    return int(bool(words and stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
