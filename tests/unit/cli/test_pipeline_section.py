"""The section [pipeline] of a NODE.toml."""

from pathlib import Path

import pytest
from pipeline_layouts import layout_of

from farloop.config.settings import NodeFile, load_node
from farloop.config.sources import ConfigError
from farloop.node.pipeline.layout import layout_json

LAYOUT = layout_of(["ab", ("rome", "d")], [("a", "rome"), "bd"])


def load(folder: Path, pipeline: str, node: str = "", host: str = "127.0.0.1") -> NodeFile:
    addresses = {name: f"tcp://{host}:7800" for name in ("a", "b", "rome", "d")}
    (folder / "layout.json").write_text(layout_json(LAYOUT, addresses))
    (folder / "node.toml").write_text(f'[node]\nname = "rome"\n{node}\n[pipeline]\n{pipeline}\n')
    return load_node(folder / "node.toml", flags=(), environ={})


def test_without_a_layout_a_node_trains_all_of_the_model(tmp_path: Path) -> None:
    assert load(tmp_path, "").pipeline.layout is None


def test_a_layout_is_found_beside_the_file_that_names_it(tmp_path: Path) -> None:
    pipeline = load(tmp_path, 'layout = "layout.json"\ncodec = "q8"\nmicrobatches = 2').pipeline
    assert (pipeline.layout, pipeline.codec, pipeline.microbatches) == (tmp_path / "layout.json", "q8", 2)


@pytest.mark.parametrize(
    ("pipeline", "node", "said"),
    [
        ('codec = "q9"', "", "there is no 'q9'"),
        ('normalise = "mean"', "", "there is no 'mean'"),
        ("credit = 0", "", "the least is 1, not 0"),
        ("patience_s = 0.0", "", "seconds above 0 are wanted"),
        ('peers = "keys"', "", "goes with [node] key"),
        ('bind = "tcp://0.0.0.0:7800"', "", "so peers and [node] key are required"),
        ("", "nproc = 2", "a stage of a pipeline is one process"),
        ('layouts = "x"', "", "there is no such key"),
    ],
)
def test_what_cannot_be_is_told_of_in_one_line(tmp_path: Path, pipeline: str, node: str, said: str) -> None:
    with pytest.raises(ConfigError) as told:
        load(tmp_path, f'layout = "layout.json"\n{pipeline}', node)
    assert said in str(told.value) and "\n" not in str(told.value)


def test_a_stage_beyond_this_machine_listens_with_keys_or_when_told_so(tmp_path: Path) -> None:
    beyond = 'layout = "layout.json"\nbind = "tcp://0.0.0.0:7800"'
    assert load(tmp_path, beyond, "insecure = true").pipeline.bind == "tcp://0.0.0.0:7800"
    assert load(tmp_path, 'layout = "layout.json"', "insecure = true", host="10.0.0.1").pipeline.bind == ""
    with pytest.raises(ConfigError, match="goes beyond this machine, so peers"):
        load(tmp_path, 'layout = "layout.json"', host="10.0.0.1")


def test_a_layout_without_this_node_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the layout"):
        load(tmp_path, 'layout = "other.json"')
    (tmp_path / "node.toml").write_text('[node]\nname = "kyiv"\n[pipeline]\nlayout = "layout.json"\n')
    with pytest.raises(ConfigError, match="no stage of it has a node kyiv"):
        load_node(tmp_path / "node.toml", flags=(), environ={})
