"""`python -m farloop.monitoring.dashboards.generate [--check]`: write the JSON of every dashboard beside this file.

With --check nothing is written, and the exit code says whether all of it is fresh. Needs grafana-foundation-sdk (the
extra `deploy`).
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from farloop.monitoring.dashboards.coordinator import coordinator
from farloop.monitoring.dashboards.network import network
from farloop.monitoring.dashboards.node import node
from farloop.monitoring.dashboards.panels import Page
from farloop.monitoring.dashboards.run import run

HERE = Path(__file__).parent


def pages() -> dict[str, Page]:
    """By the name of their file."""
    return {"run": run(), "network": network(), "node": node(), "coordinator": coordinator()}


def text_of(page: Page) -> str:
    """The file that Grafana reads."""
    model = json.loads(JSONEncoder(sort_keys=True, indent=1).encode(page.build()))
    for number, panel in enumerate(model["panels"], start=1):
        panel["id"] = number
    return json.dumps(_without_nulls(model), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _without_nulls(value: Any) -> Any:
    """The encoder writes fields that are not set; Grafana would take some of them for a choice. A threshold's first
    step has a null that means minus infinity."""
    if isinstance(value, Mapping):
        threshold = {"value", "color"} <= value.keys()
        return {k: _without_nulls(v) for k, v in value.items() if v is not None or (threshold and k == "value")}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def main(words: list[str]) -> int:
    """The exit code."""
    if set(words) - {"--check"}:
        sys.stderr.write("usage: python -m farloop.monitoring.dashboards.generate [--check]\n")
        return 2
    stale = 0
    for name, page in pages().items():
        path, text = HERE / f"{name}.json", text_of(page)
        if not path.exists() or path.read_text() != text:
            stale += 1
            if words:
                sys.stderr.write(f"{path} is not what the code makes: run without --check\n")
            else:
                path.write_text(text)
    return 1 if words and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
