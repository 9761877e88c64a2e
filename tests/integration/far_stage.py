"""A stage's daemon at a distance that is emulated, and changes while it runs: far_stage.py NODE.toml DELAYS.json

DELAYS.json has seconds by sender and receiver, and is looked at for every frame.
"""

import json
import sys
import time
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

from farloop.cli.main import app
from farloop.pipeline import executor
from farloop.pipeline.link import PeerLink


def far_link(file: Path, sender: str) -> type[PeerLink]:
    """Links whose frames are held back, in order, for as long as the file has it."""

    class FarLink(PeerLink):
        def _send(self, to: str, parts: list[Any]) -> None:
            delay_s = json.loads(file.read_text()).get(sender, {}).get(to, 0.0)
            due[to] = max(due[to], time.monotonic() + delay_s)
            self._loop.call_at(self._loop.time() + due[to] - time.monotonic(), super()._send, to, parts)

    due = defaultdict[str, float](float)
    return FarLink


def main(node: str, delays: str) -> None:
    name = tomllib.loads(Path(node).read_text())["node"]["name"]
    executor.PeerLink = far_link(Path(delays), name)  # type: ignore[misc]
    app(["node", node], standalone_mode=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
