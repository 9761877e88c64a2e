"""`farloop node` trains models that a run names: of Hugging Face, and of the user's own code."""

import json
from pathlib import Path

import pytest
from loopback import NewRun, assert_all_agree
from safetensors import safe_open

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

LLAMA = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip

OWN = """
import torch
from torch import nn

class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.layers = nn.ModuleList(nn.Conv1d(32, 64, 3) for _ in range(3))
        self.head = nn.Linear(32, 256)

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2)
        for layer in self.layers:
            x = x + nn.functional.glu(layer(nn.functional.pad(x, (2, 0))), dim=1)
        return self.head(x.transpose(1, 2))

def loss(module, tokens):
    return nn.functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
"""


def test_nodes_train_a_model_of_hugging_face_that_only_the_coordinator_has_a_folder_of(
    new_run: NewRun, tmp_path: Path
) -> None:
    """One node plain, one of two processes that shard it, checkpoint its blocks and take their batch in parts."""
    pytest.importorskip("transformers")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    run = new_run(model=f"hf:{tmp_path / 'llama'}", method="streaming", h=10, tau=2, steps=40, lr=1e-2)
    run.start_coordinator()
    run.until("the coordinator is up", lambda status: True, timeout_s=240)
    (tmp_path / "llama").rename(tmp_path / "gone")
    run.start_node("plain")
    run.start_node("sharded", nproc=2, shard=True, checkpoint=True, microbatch=1)
    status = run.until_done(timeout_s=280)
    assert_all_agree(run, status, "plain", "sharded")
    losses = [event["loss"] for event in run.events("evaluation")]
    assert losses[-1] < 4.5, losses
    with safe_open(run.state_dir / "model.safetensors", "pt") as model:
        assert "lm_head.weight" not in model.keys(), "tied to the embedding"  # noqa: SIM118


def test_a_node_trains_the_user_s_own_code_by_name(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator has the code to draw the first weights; a node that does not name it is told to."""
    run = new_run(model="own_mixer:Mixer", method="streaming", h=10, tau=2, steps=40, lr=1e-2)
    (run.folder / "own_mixer.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(run.folder))
    run.start_coordinator()
    run.until("the coordinator is up", lambda status: True, timeout_s=240)
    nameless = run.start_node("nameless")
    assert run.until_ended(nameless) == 2
    assert "[node] model" in nameless.last_line
    run.daemons.remove(nameless)
    run.start_node("a", model="own_mixer:Mixer"), run.start_node("b", model="own_mixer:Mixer", compile=True)
    status = run.until_done(timeout_s=280)
    assert_all_agree(run, status, "a", "b")
    losses = [event["loss"] for event in run.events("evaluation")]
    assert losses[-1] < 4.5, losses
