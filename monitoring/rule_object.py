"""`python -m farloop.monitoring.rule_object [--check]`: the alerts as an object for the Prometheus operator.

The operator takes the same groups as a rule file, one level deeper: the text is moved, comments and all, and not
understood. Standard library only.
"""

import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "monitoring" / "alerts" / "farloop.yml"
OBJECT = ROOT / "k8s" / "components" / "monitoring" / "prometheusrule.yaml"

_HEAD = """\
# Made from monitoring/alerts/farloop.yml by `python -m farloop.monitoring.rule_object`.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: farloop
  labels: {app.kubernetes.io/part-of: farloop}
spec:
"""


def text_of(rules: str) -> str:
    """The object's file."""
    return _HEAD + textwrap.indent(rules[rules.index("groups:") :], "  ")


def main(words: list[str]) -> int:
    """The exit code."""
    if set(words) - {"--check"}:
        sys.stderr.write("usage: python -m farloop.monitoring.rule_object [--check]\n")
        return 2
    text = text_of(RULES.read_text())
    if words:
        return int(not OBJECT.exists() or OBJECT.read_text() != text)
    OBJECT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
