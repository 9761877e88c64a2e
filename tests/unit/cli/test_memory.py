"""Covers `config/memory.py`, and how `farloop config check` tells it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import stored_runs
import torch
from typer.testing import CliRunner

from farloop.algo.spec import NodeId, RunSpec
from farloop.cli.main import app
from farloop.config.memory import BESIDE_A_SNAPSHOT, JOINS, PROCESS_BYTES, TRAINING_BYTES, memory_of
from farloop.config.run_config import RunConfig
from farloop.config.run_spec import plan_run
from farloop.node.model.built_in import build
from farloop.node.model.inner_optimizer import Together, default_optimizer
from farloop.node.settings import PRESETS, DataConfig

RUN = """
[run]
model = "{model}"
outer_lr = 0.7
outer_momentum = 0.9
[data]
max_bytes = 100_000
[coordinator]
state_dir = "state"
"""

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


def spec(**settings: Any) -> RunSpec:
    defaults = {"model": "nano", "outer_lr": 0.7, "outer_momentum": 0.9}
    return plan_run(RunConfig(**{**defaults, **settings}), DataConfig(max_bytes=100_000)).spec


def checked(path: Path, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["config", "check", str(path), "--json", *options])
    assert done.exit_code == 0, done.output
    told: dict[str, Any] = json.loads(done.stdout)["memory"]
    return told


def test_a_parameter_takes_twelve_bytes_on_the_coordinator_and_twelve_on_a_node_beside_the_moments() -> None:
    run = spec()
    padded = sum(fragment.numel for fragment in run.identity.layout.fragments)
    memory = memory_of(run)
    ram = memory.coordinator_ram
    assert ram["anchors"] + ram["targets"] + ram["outer optimizer's state"] == 12 * padded
    device = memory.node_device
    assert device["parameters"] + device["gradients"] == 8 * padded
    largest = max(fragment.numel for fragment in run.identity.layout.fragments)
    assert device["two encode buffers"] == 8 * largest, "on a GPU, as `node.devices.Buffers` keeps them"
    assert memory.node_host["anchors"] == 4 * padded and "residuals" not in memory.node_host
    assert ram["process"] == PROCESS_BYTES and memory.node_host["process"] == PROCESS_BYTES + TRAINING_BYTES


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_inner_optimizer_has_the_state_that_is_predicted(optimizer: str) -> None:
    run = spec(inner_optimizer=optimizer)
    module = build(PRESETS["nano"], seed=0)
    inner = default_optimizer(module, run.terms)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    inner.step()
    parts = inner.parts if isinstance(inner, Together) else (inner,)
    tensors = [t for part in parts for state in part.state.values() for t in state.values() if t.ndim]
    device = memory_of(run).node_device
    assert device["optimizer's moments"] == sum(4 * t.numel() for t in tensors)
    assert ("muon's working memory" in device) == (optimizer == "muon")


@pytest.mark.parametrize(
    ("settings", "term"),
    [
        ({"codec_up": "q4r:rounding=nearest,beta=0.9"}, "residuals"),
        ({"method": "diloco", "control_variates": True, "outer_momentum": 0.0}, "control variates"),
        ({"method": "scafcom", "outer_momentum": 0.0}, "control variates"),
        ({"method": "diloco", "lag": 1, "eager": True, "nodes": 2}, "starts of rounds"),
    ],
)
def test_what_a_method_keeps_besides_is_counted(settings: dict[str, Any], term: str) -> None:
    run = spec(**settings)
    copies = 3 if settings.get("method") == "scafcom" else 1
    numel = sum(fragment.numel for fragment in run.identity.layout.fragments)
    assert memory_of(run).node_host[term] == 4 * copies * numel


@pytest.mark.parametrize(
    ("codecs", "has_sum", "in_place"),
    [(("q4", "q4"), False, True), (("fp32", "fp32"), False, False), (("q4", "q8"), True, False)],
)
def test_a_commit_is_told_to_be_in_place_where_it_is(
    tmp_path: Path, codecs: tuple[str, str], has_sum: bool, in_place: bool
) -> None:
    run = spec(nodes=2, codec_up=codecs[0], codec_down=codecs[1])
    store = stored_runs.begun(tmp_path, run)
    stored_runs.run_rounds(store, 1)
    before = store.buffers[0].target
    stored_runs.run_rounds(store, 1)
    assert (store.buffers[0].target is before) == in_place
    store.close()
    told = memory_of(run).coordinator_ram
    assert (BESIDE_A_SNAPSHOT in told) != in_place and ("sum of a window's deltas" in told) == has_sum


def test_at_the_end_of_a_run_all_fragments_are_on_their_way() -> None:
    run = spec(nodes=2, codec_up="fp32", codec_down="fp32")
    padded = sum(fragment.numel for fragment in run.identity.layout.fragments)
    memory = memory_of(run)
    assert memory.coordinator_ram["payloads in flight"] > 8 * padded
    assert memory.node_host["payloads in flight"] > 4 * padded


def test_a_node_saves_anchors_eight_updates_and_the_moments() -> None:
    run = spec(codec_down="fp32")
    padded = sum(fragment.numel for fragment in run.identity.layout.fragments)
    disk = memory_of(run).node_disk
    assert disk["anchors"] == 4 * padded and 4 * padded < disk["optimizer's moments"] < 8 * padded
    assert disk["updates since"] >= 8 * 4 * padded and "residuals" not in disk
    assert memory_of(spec(codec_up="topk:k=128")).node_disk["residuals"] == 4 * padded
    assert not memory_of(spec(method="data-parallel")).node_disk


def test_sharding_divides_what_a_node_keeps() -> None:
    run = spec()
    whole, parts = memory_of(run, ranks=4), memory_of(run, ranks=4, shard=True)
    assert parts.node_device["gradients"] == whole.node_device["gradients"] // 4
    assert parts.node_host["anchors"] == whole.node_host["anchors"] // 4
    assert parts.plain()["ranks"] == 4


def test_check_tells_the_memory_of_a_model_that_is_a_config_alone(tmp_path: Path) -> None:
    """8 billion parameters, none of which is read, drawn or held."""
    pytest.importorskip("transformers")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "run.toml").write_text(RUN.format(model="hf:model"))
    told = checked(tmp_path / "run.toml", "--ranks", "8", "--shard")
    terms = told["terms"]
    assert 32e9 < terms["coordinator_ram"]["anchors"] < 33e9
    assert told["coordinator_ram_bytes"] == sum(terms["coordinator_ram"].values())
    assert 96e9 < told["coordinator_ram_bytes"] - terms["coordinator_ram"][JOINS] < 120e9
    assert 14e9 < told["node_device_bytes"] < 22e9 and 12e9 < told["node_host_bytes"] < 14e9
    assert told["coordinator_disk_bytes"] > 2 * 96e9
    lines = CliRunner().invoke(app, ["config", "check", str(tmp_path / "run.toml")]).stdout
    assert "of memory, " in lines and "on its device besides activations" in lines and "fingerprint" not in lines
    assert "PCIe a round 8.16 GB (21.7%) with anchors on the device, 72.4 GB (193%) in host memory" in lines


def test_the_disk_that_was_told_holds_a_run_whose_fragments_are_saved_in_different_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fragments have a snapshot every 12 rounds and one every 11, so up to three segments of 12 rounds are kept."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(stored_runs, "NODES", tuple(NodeId(name) for name in ("bergen", "oslo", "quito")))
    run = spec(nodes=3, codec_up="bf16", codec_down="q4")
    store = stored_runs.begun(tmp_path, run)
    most = 0
    for _ in range(48):
        stored_runs.run_rounds(store, 1)
        most = max(most, sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()))
    store.close()
    told = memory_of(run).coordinator_disk
    assert 0.8 * sum(told.values()) < most + told["final model"] <= sum(told.values())
