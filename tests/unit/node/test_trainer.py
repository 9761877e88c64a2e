"""What a NODE.toml sets reaches the node."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from farloop.node import trainer
from farloop.node.library import join
from farloop.node.settings import NodeConfig
from farloop.node.trainer import train

OTHER = {"hang_timeout": "hang_timeout_s", "give_up": "give_up_s"}  # settings that `join` calls otherwise


class Joined(Exception):
    """The node would join now."""


def test_every_setting_that_join_has_is_given_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def joining(*_: object, **words: object) -> None:
        given.update(words)
        raise Joined

    text = tmp_path / "text.txt"
    text.write_text("farloop " * 4000)
    monkeypatch.setattr(trainer, "join", joining)
    config = NodeConfig(
        name="oslo", data=text, hang_timeout=12.5, save_every_rounds=3, save_optimizer=False, tau=2, http="127.0.0.1:1",
        give_up=90.0, http_names="oslo.example", fingerprint="0123456789abcdef", state_dir=tmp_path, anchors="device",
        adapt_tau=True,
    )  # fmt: skip
    with pytest.raises(Joined):
        train(config)
    shared = {field.name for field in dataclasses.fields(NodeConfig)} & (join.__annotations__.keys() | OTHER.keys())
    for name in shared - {"coordinator", "data", "model"}:
        assert given[OTHER.get(name, name)] == getattr(config, name), name
