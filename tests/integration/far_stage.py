"""A stage's daemon at a distance that is emulated, and changes while it runs: far_stage.py NODE.toml DELAYS.json

DELAYS.json has seconds by sender and receiver, and is looked at for every frame.
"""

import functools
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from farloop.cli.main import app
from farloop.pipeline import trainer
from farloop.pipeline.link import PeerConfig


class Delays(Mapping[str, float]):
    """Of one sender, as the file has them now."""

    def __init__(self, file: Path, sender: str) -> None:
        self._file, self._sender = file, sender

    def _now(self) -> dict[str, float]:
        told: dict[str, float] = json.loads(self._file.read_text()).get(self._sender, {})
        return told

    def __getitem__(self, receiver: str) -> float:
        return self._now()[receiver]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


def main(node: str, delays: str) -> None:
    name = tomllib.loads(Path(node).read_text())["node"]["name"]
    trainer.PeerConfig = functools.partial(PeerConfig, delays_s=Delays(Path(delays), name))  # type: ignore[assignment, misc]
    app(["node", node], standalone_mode=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
