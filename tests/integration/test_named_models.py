"""`farloop node` trains models that a run names: of Hugging Face, and of the user's own code."""

import json
from pathlib import Path

import pytest
import torch
from loopback import FARLOOP, NewRun, assert_all_agree
from safetensors.torch import load_file

from farloop.node.model.named import config_text, fill_, hf_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SIZES = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
KINDS = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": False},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
}

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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral"])
def test_nodes_train_a_model_of_hugging_face_that_only_the_coordinator_has_a_folder_of(
    new_run: NewRun, tmp_path: Path, kind: str
) -> None:
    """One node plain, one of two processes that shard it, checkpoint its blocks and take their batch in parts. What is
    exported is what `from_pretrained` loads (T10)."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind, **SIZES, **KINDS[kind]}))
    run = new_run(model=f"hf:{tmp_path / 'model'}", method="streaming", h=10, tau=2, steps=40, lr=1e-2)
    run.start_coordinator()
    run.until("the coordinator is up", lambda status: True, timeout_s=240)
    (tmp_path / "model").rename(tmp_path / "gone")
    run.start_node("plain")
    run.start_node("sharded", nproc=2, shard=True, checkpoint=True, microbatch=1)
    status = run.until_done(timeout_s=280)
    assert_all_agree(run, status, "plain", "sharded")
    losses = [event["loss"] for event in run.events("evaluation")]
    assert losses[-1] < 4.5, losses
    trained = load_file(run.state_dir / "model.safetensors")
    assert ("lm_head.weight" in trained) == (kind != "llama"), "there it is tied to the embedding"
    assert run.until_ended(run.start("export", *FARLOOP, "export", "out", "--state", "state"), 240.0) == 0
    module = hf_model(config_text(f"hf:{tmp_path / 'gone'}")).module.eval()
    fill_(module, trained)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(run.folder / "out", local_files_only=True).eval()
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    weights = dict(module.named_parameters())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in loaded.named_parameters())
    with torch.no_grad():  # sums over experts may depend on where memory begins
        torch.testing.assert_close(loaded(tokens).logits, module(tokens).logits, rtol=0, atol=1e-5)


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
