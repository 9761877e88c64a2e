"""Covers `farloop export`: what it writes is what other tools load."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import error_line, farloop, found
from safetensors.torch import load_file
from stored_runs import run_rounds

from farloop.config.run_config import RunConfig
from farloop.config.run_spec import plan_run
from farloop.coordinator.storage.store import Store
from farloop.node.data.corpus import EvaluationSet, load_corpus
from farloop.node.model.named import fill_, model_of_run
from farloop.node.settings import DataConfig

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64,
}  # fmt: skip

ADAPTED = """
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

def adapted():
    torch.manual_seed(3)
    base = nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 8), nn.Linear(8, 256))
    return get_peft_model(base, LoraConfig(r=2, target_modules=["1"]))
"""


def state_of(path: Path, model: str, **settings: Any) -> Store:
    """A run of this model whose coordinator committed twice, and was stopped."""
    plan = plan_run(RunConfig(model=model, sequence_tokens=32, **settings), DataConfig(max_bytes=100_000))
    store = Store.create(path, plan.spec, plan.anchors)
    run_rounds(store, 2)
    store.close()
    return store


@pytest.fixture
def llama(tmp_path: Path) -> Store:
    pytest.importorskip("transformers")
    (tmp_path / "llama").mkdir()
    config = {"model_type": "llama", **SIZES, "tie_word_embeddings": True}
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    return state_of(tmp_path / "state", f"hf:{tmp_path / 'llama'}")


def loaded(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options).eval()


def test_transformers_loads_a_model_of_hugging_face_with_the_run_s_weights(llama: Store, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    told = found(
        "export", str(tmp_path / "out"), "--state", str(tmp_path / "state"), "--shard-size", "20KB",
        "--tokenizer", str(tmp_path / "tokenizer.json"),
    )  # fmt: skip
    assert told["versions"] == [2] * len(llama.buffers)
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json"} <= set(told["files"])
    module = loaded(tmp_path / "out")
    assert module.config.use_cache and module.lm_head.weight is module.model.embed_tokens.weight
    anchors = llama.named_anchors()
    named = dict(module.named_parameters())
    assert named.keys() == anchors.keys()
    assert all(torch.equal(parameter, anchors[name]) for name, parameter in named.items())

    halved = farloop("export", str(tmp_path / "bf16"), "--state", str(tmp_path / "state"), "--dtype", "bfloat16")
    assert halved.exit_code == 0 and "in bfloat16" in halved.stdout
    for name, parameter in loaded(tmp_path / "bf16", dtype=torch.bfloat16).named_parameters():
        assert torch.equal(parameter, anchors[name].bfloat16())


@pytest.mark.parametrize(
    ("kind", "settings", "stay"),
    [
        (
            "ernie4_5_moe",
            {"moe_num_experts": 4, "moe_layer_start_index": 1},
            {"gate.weight", "e_score_correction_bias"},
        ),
        ("lfm2_moe", {"num_experts": 4, "num_dense_layers": 1, "layer_types": ["conv"] * 2}, {"expert_bias"}),
    ],
)
def test_what_an_architecture_keeps_in_fp32_and_does_not_train_is_written_as_the_folder_has_it(
    tmp_path: Path, kind: str, settings: dict[str, object], stay: set[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[kind](**SIZES, moe_intermediate_size=16, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    fixed = {name: t for name, t in model.state_dict(keep_vars=True).items() if not t.requires_grad}
    for tensor in fixed.values():
        tensor.data.copy_(torch.linspace(0.3, 1.7, tensor.numel()).view(tensor.shape))
    model.save_pretrained(tmp_path / "model")
    state_of(tmp_path / "state", f"hf:{tmp_path / 'model'}")
    for dtype in ("float32", "bfloat16"):
        found("export", str(tmp_path / dtype), "--state", str(tmp_path / "state"), "--dtype", dtype)
        held = loaded(tmp_path / dtype, dtype=getattr(torch, dtype)).state_dict()
        assert fixed and all(torch.equal(held[name], tensor) for name, tensor in fixed.items())
    written = load_file(tmp_path / "bfloat16" / "model.safetensors")
    loaded(tmp_path / "float32", dtype=torch.bfloat16).save_pretrained(tmp_path / "right")
    right = load_file(tmp_path / "right" / "model.safetensors")
    assert {name: t.dtype for name, t in written.items()} == {name: t.dtype for name, t in right.items()}
    assert all(torch.equal(written[name], tensor) for name, tensor in right.items())
    assert {name for name, t in right.items() if t.dtype == torch.float32} == {
        name for name in right if name.endswith(tuple(stay))
    }


def test_a_built_in_model_is_one_file(tmp_path: Path) -> None:
    store = state_of(tmp_path / "state", "nano")
    told = found("export", str(tmp_path / "out"), "--state", str(tmp_path / "state"))
    assert list(told["files"]) == ["model.safetensors"]
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], anchor) for name, anchor in store.named_anchors().items())


def test_an_adapter_is_written_as_one_by_its_own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    (tmp_path / "adapters.py").write_text(ADAPTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    store = state_of(tmp_path / "state", "adapters:adapted")
    out = str(tmp_path / "out")
    told = found("export", out, "--state", str(tmp_path / "state"), "--model", "adapters:adapted")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(told["files"])
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    anchors = store.named_anchors()
    assert sorted(tensor.shape for tensor in written.values()) == sorted(anchor.shape for anchor in anchors.values())
    assert sum(tensor.double().sum() for tensor in written.values()) == sum(a.double().sum() for a in anchors.values())


NORMED = """
from torch import nn

class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(256, 8), nn.BatchNorm1d(8), nn.Linear(8, 256))
"""


def test_buffers_that_a_run_does_not_hold_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of batch normalisation are each node's own."""
    (tmp_path / "normed.py").write_text(NORMED)
    monkeypatch.syspath_prepend(str(tmp_path))
    state_of(tmp_path / "state", "normed:Normed")
    given = ("--state", str(tmp_path / "state"), "--model", "normed:Normed")
    assert found("export", str(tmp_path / "one"), *given)["not_of_the_run"] == ["1.running_mean", "1.running_var"]
    shown = farloop("export", str(tmp_path / "two"), *given).stdout
    assert "a run holds no buffers: 2 of the model, as '1.running_mean', are not its nodes'" in shown


def test_statistics_that_the_run_averages_are_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "normed.py").write_text(NORMED)
    monkeypatch.syspath_prepend(str(tmp_path))
    store = state_of(tmp_path / "state", "normed:Normed", buffers="average")
    told = found("export", str(tmp_path / "out"), "--state", str(tmp_path / "state"), "--model", "normed:Normed")
    assert told["not_of_the_run"] == []
    written, anchors = load_file(tmp_path / "out" / "model.safetensors"), store.named_anchors()
    assert {"1.running_mean", "1.running_var"} < written.keys() == anchors.keys()
    assert all(torch.equal(written[name], anchors[name]) for name in anchors)
    filled = model_of_run("own", 0, "normed:Normed").module
    fill_(filled, written)
    assert torch.equal(filled.get_buffer("1.running_var"), anchors["1.running_var"])


SAMPLED = f"""
from transformers import LlamaConfig, LlamaForCausalLM

def made(**settings):
    model = LlamaForCausalLM(LlamaConfig(**{SIZES}))
    model.generation_config.update(temperature=0.6, **settings)
    return model

def greedy():
    return made(do_sample=False)
"""


def test_settings_of_sampling_are_written_with_sampling_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "sampled.py").write_text(SAMPLED)
    monkeypatch.syspath_prepend(str(tmp_path))
    state_of(tmp_path / "state", "sampled:made")
    given = ("export", str(tmp_path / "out"), "--state", str(tmp_path / "state"), "--model")
    assert "'sampled' is neither hf:FOLDER nor package" in error_line(*given, "sampled")
    refused = error_line(*given, "sampled:greedy")
    assert "generation_config cannot be saved: `temperature`: `do_sample` is not set to `True`" in refused
    found(*given, "sampled:made")
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert settings.do_sample is True and settings.temperature == 0.6
    assert loaded(tmp_path / "out").generation_config.temperature == 0.6


def test_the_loss_of_the_newest_model_is_that_of_the_run_s_evaluation(tmp_path: Path) -> None:
    store = state_of(tmp_path / "state", "nano")
    plan = plan_run(RunConfig(model="nano", sequence_tokens=32), DataConfig(max_bytes=16_000_000))
    state = ("--state", str(tmp_path / "state"))
    told = found("lab", "eval", *state, "--sequences", "8")
    module = model_of_run(plan.spec.identity.model, 0).module
    fill_(module, store.named_anchors())
    expected = EvaluationSet(load_corpus(None), sequences=8, sequence_tokens=32).loss(module, 8)
    assert told["loss"] == pytest.approx(expected, rel=1e-5) and told["versions"] == list(store.ledger.versions)
    (tmp_path / "text.txt").write_text("words " * 4000)
    shown = farloop("lab", "eval", *state, "--data", str(tmp_path / "text.txt"), "--sequences", "2")
    assert shown.exit_code == 0 and "2 sequences of 32 tokens, another set than the run's" in shown.stdout
    (tmp_path / "short.txt").write_text("ab")
    assert f"{tmp_path}/short.txt: the validation text has" in error_line(
        "lab", "eval", *state, "--data", f"{tmp_path}/short.txt"
    )
    absent = ["nowhere", "cuda:99"] if torch.cuda.is_available() else ["nowhere", "cuda"]
    for device in absent:
        assert f"--device {device}: " in error_line("lab", "eval", *state, "--sequences", "2", "--device", device)
    assert "the run alone has" in error_line("lab", "eval", *state, "--sequences", "2", "--model", "torch.nn:Identity")


def test_what_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    state_of(tmp_path / "state", "nano")
    state, taken = ("--state", str(tmp_path / "state")), tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("mine")
    assert "is not an empty folder" in error_line("export", str(taken), *state)
    assert "as 5GB" in error_line("export", str(tmp_path / "out"), *state, "--shard-size", "five")
    assert "there is no tokenizer" in error_line("export", str(tmp_path / "out"), *state, "--tokenizer", "nowhere")
    assert "the run alone has" in error_line("export", str(tmp_path / "out"), *state, "--model", "torch.nn:Identity")
    missing = error_line("export", str(tmp_path / "out"), "--state", str(tmp_path / "no"))
    assert "there is no such folder" in missing
    (tmp_path / ".out-abcd1234.part").mkdir()
    (tmp_path / ".out-abcd1234.part" / "model.safetensors").write_text("of an export that was killed")
    assert "the run alone has" in error_line("export", str(tmp_path / "out"), *state, "--model", "torch.nn:Identity")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state", "taken"]
