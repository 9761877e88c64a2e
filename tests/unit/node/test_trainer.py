"""What a NODE.toml sets reaches the node."""

from pathlib import Path
from typing import Any

import pytest

from farloop.node import trainer
from farloop.node.settings import DataConfig, NodeConfig
from farloop.node.trainer import train
from farloop.wire.machine_info import NOTHING


class Joined(Exception):
    """The node would join now."""


def test_a_node_joins_with_all_of_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def joining(*options: object) -> None:
        given.extend(options)
        raise Joined

    text = tmp_path / "text.txt"
    text.write_text("farloop " * 4000)
    monkeypatch.setattr(trainer, "join_run", joining)
    config = NodeConfig(name="oslo", coordinator="tcp://10.0.0.1:7700", data=DataConfig(path=text))
    with pytest.raises(Joined):
        train(config)
    node, options, inventory = given
    assert node is config and options.evaluate is not None
    assert inventory != NOTHING
