"""Covers `node/model/named.py`, and what the daemon's trainer does with such a module."""

import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from stories import StoryText, all_stories, check_story, python
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from farloop.algo.fragments import kept_ties, partition, trainable_tensors, whole_shapes
from farloop.config.run_config import RunConfig
from farloop.config.run_spec import Plan, plan_run
from farloop.config.settings import load_node, load_run
from farloop.node.errors import LayoutMismatch
from farloop.node.model import named as named_model
from farloop.node.model.built_in import build
from farloop.node.model.named import (
    blocks_of,
    causal_lm_loss,
    checkpoint_blocks_,
    config_text,
    factory_model,
    fill_,
    hf_model,
    materialise_,
    model_of_run,
)
from farloop.node.model.replica import Replica, matched_parameters
from farloop.node.settings import PRESETS, DataConfig, located
from farloop.node.trainer import backward

DATA = DataConfig(max_bytes=100_000)
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 256,
}  # fmt: skip


def folder(path: Path, **values: object) -> str:
    """The name of a model that is a folder with a config.json alone."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **values}))
    return f"hf:{path}"


def plan(model: str, **settings: Any) -> Plan:
    return plan_run(RunConfig(model=model, sequence_tokens=32, **settings), DATA)


def with_anchors(module: nn.Module, plan: Plan, anchors: list[Tensor]) -> nn.Module:
    """The module with the run's first weights, as a node gets them."""
    materialise_(module, torch.device("cpu"))
    replica = Replica(module, plan.spec.identity.layout, gradients=False)
    for index, anchor in enumerate(anchors):
        replica.anchors[index].write().copy_(anchor)
        replica.merge(index, 0.0)
    return module.eval()


TOKENS = torch.randint(0, 256, (3, 17), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2"])
def test_a_folder_s_weights_become_the_run_s_and_a_node_builds_the_same_module_without_the_folder(
    tmp_path: Path, kind: str
) -> None:
    """Tied tensors once, in shards with an index, and with names on disk that differ from the module's (Mixtral)."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0, "vocab_size": 300}
    more = {"llama": {"tie_word_embeddings": True}, "mixtral": {"num_local_experts": 4}, "gpt2": {}}[kind]
    config = transformers.CONFIG_MAPPING[kind](**(sizes if kind == "gpt2" else SIZES), **more)
    torch.manual_seed(1)
    saved = transformers.AutoModelForCausalLM.from_config(config).eval()
    saved.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    planned = plan(f"hf:{tmp_path / 'saved'}")
    assert planned.spec.identity.layout.num_parameters == sum(p.numel() for p in saved.parameters())
    anchors = planned.anchors
    (tmp_path / "saved").rename(tmp_path / "gone")
    named = model_of_run(planned.spec.identity.model, 0)
    assert all(parameter.is_meta for parameter in named.module.parameters())
    module = with_anchors(named.module, planned, anchors)
    with torch.no_grad():
        assert torch.equal(module(TOKENS).logits, saved(TOKENS).logits)
        expected = saved(TOKENS[:, :-1], use_cache=False).logits.flatten(0, 1)
        assert named.loss(module, TOKENS) == nn.functional.cross_entropy(expected, TOKENS[:, 1:].flatten())
    assert len(blocks_of(module)) == 2


EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
WITH_BIASES: dict[str, dict[str, object]] = {
    "deepseek_v3": EXPERTS  # buffers
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    | {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    | {"v_head_dim": 8},
    "ernie4_5_moe": EXPERTS | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},  # a frozen parameter
    "gemma4_text": {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0},  # scalars of layers
    "zaya": EXPERTS | {"num_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 4, "head_dim": 8},
}


def saved_with_biases(path: Path, kind: str, **more: object) -> tuple[Any, dict[str, Tensor]]:
    """A model in a folder, and its tensors that are not trained, which are not those of a new model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[kind](**SIZES | WITH_BIASES[kind] | more)
    saved = transformers.AutoModelForCausalLM.from_config(config).eval()
    fixed = {name: t for name, t in saved.state_dict(keep_vars=True).items() if not t.requires_grad}
    for number, tensor in enumerate(fixed.values()):
        tensor.data.copy_(torch.linspace(0.3, 1.7 + number, tensor.numel()).view(tensor.shape))
    saved.save_pretrained(path)
    return saved, fixed


@pytest.mark.parametrize("kind", WITH_BIASES)
def test_a_folder_s_tensors_that_are_not_trained_are_those_of_every_node(tmp_path: Path, kind: str) -> None:
    saved, fixed = saved_with_biases(tmp_path / "saved", kind)
    by_folder, text = plan(f"hf:{tmp_path / 'saved'}"), folder(tmp_path / "text", model_type=kind, **WITH_BIASES[kind])
    save_file({name: tensor.clone() for name, tensor in saved.state_dict().items()}, tmp_path / "by_name")
    by_init = plan(text, init=tmp_path / "by_name")
    new = {name: tuple(tensor.shape) for name, tensor in trainable_tensors(hf_model(config_text(text)).module)}
    assert whole_shapes(by_folder.spec.identity.layout.fragments) == new, "with and without weights"
    for planned, own in ((by_folder, ""), (by_init, ""), (by_folder, f"hf:{tmp_path / 'saved'}")):
        module = with_anchors(model_of_run(planned.spec.identity.model, 0, own).module, planned, planned.anchors)
        held = module.state_dict()
        assert fixed and all(torch.equal(held[name], tensor) for name, tensor in fixed.items())
        assert fixed.keys().isdisjoint(name for name, _ in trainable_tensors(module))
        with torch.no_grad():
            torch.testing.assert_close(module(TOKENS).logits, saved(TOKENS).logits)


def test_the_loss_that_balances_experts_is_added_where_the_config_asks_for_it() -> None:
    transformers = pytest.importorskip("transformers")
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.1, "num_local_experts": 4}
    whole = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **asked))
    gate = whole.model.layers[0].mlp.gate.weight
    shifted = TOKENS[:, 1:].contiguous()
    whole.train()(TOKENS[:, :-1], labels=shifted, shift_labels=shifted).loss.backward()
    right, gate.grad = gate.grad, None
    named_model._loss_for(whole)(whole, TOKENS).backward()
    torch.testing.assert_close(gate.grad, right)
    alone = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))
    assert named_model._loss_for(alone) is causal_lm_loss
    with torch.no_grad():
        assert named_model._loss_for(whole)(whole, TOKENS) == causal_lm_loss(whole, TOKENS), "of an evaluation"


def test_saved_tensors_too_large_or_unused_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_model, "_MOST_FIXED", 100)
    saved_with_biases(tmp_path / "wide", "deepseek_v3", n_routed_experts=8)
    with pytest.raises(
        ValueError, match=r" has 1.. bytes in tensors that are not trained, as .*e_score_correction_bias'"
    ):
        plan(f"hf:{tmp_path / 'wide'}")
    saved, _ = saved_with_biases(tmp_path / "saved", "deepseek_v3")
    more = {"score.weight": torch.ones(2), "more": torch.ones(2)}
    on_disk, by_name = tmp_path / "saved" / "model.safetensors", tmp_path / "by_name"
    save_file(load_file(on_disk) | more, on_disk, {"format": "pt"})
    save_file({name: tensor.clone() for name, tensor in saved.state_dict().items()} | more, by_name)
    text = folder(tmp_path / "text", model_type="deepseek_v3", **WITH_BIASES["deepseek_v3"])
    for model, init in ((f"hf:{tmp_path / 'saved'}", None), (text, tmp_path / "saved"), (text, by_name)):
        with pytest.raises(ValueError, match=r"has not: 'more', 'score\.weight'"):
            plan(model, init=init)


def test_a_folder_with_a_config_alone_begins_from_weights_of_the_seed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    name = folder(tmp_path / "model", tie_word_embeddings=True, torch_dtype="bfloat16", transformers_version="4.0")
    state = torch.get_rng_state()
    first, again, other = plan(name), plan(name), plan(name, seed=1)
    assert torch.equal(torch.get_rng_state(), state), "the global generator stays as it was"
    assert first.spec.identity == again.spec.identity
    assert first.spec.identity.anchor_digests != other.spec.identity.anchor_digests
    assert "version" not in first.spec.identity.model and "dtype" not in first.spec.identity.model
    named = hf_model(first.spec.identity.model)
    assert "lm_head.weight" not in dict(trainable_tensors(named.module)), "tied to the embedding"
    module = with_anchors(named.module, first, first.anchors)
    assert next(module.parameters()).dtype == torch.float32
    with torch.no_grad():
        assert named.loss(module, TOKENS) == pytest.approx(torch.log(torch.tensor(300.0)).item(), abs=0.1)


def test_numbers_of_a_config_that_json_has_not_reach_the_nodes(tmp_path: Path) -> None:
    """An infinite limit, as those of Mamba 2: transformers writes it as an object, and older versions as a word."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "num_hidden_layers": 1}
    transformers.Mamba2Config(**sizes).save_pretrained(tmp_path)
    of_today = config_text(f"hf:{tmp_path}")
    old = json.loads((tmp_path / "config.json").read_text()) | {"time_step_limit": [0.0, float("inf")]}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert config_text(f"hf:{tmp_path}") == of_today
    assert [*hf_model(of_today).config.time_step_limit] == [0.0, float("inf")]


def test_init_gives_the_weights_of_a_named_model_as_a_file_or_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    name = folder(tmp_path / "model")
    torch.manual_seed(2)
    saved = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    saved.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    by_folder, by_file = plan(name, init=tmp_path / "saved"), plan(name, init=file)
    assert by_folder.spec.identity == by_file.spec.identity
    assert by_folder.spec.identity.data != "own", "the run's samples, as without init"
    own = plan("tiny", init=tmp_path / "saved")
    assert (own.spec.identity.model, own.spec.identity.data) == ("own", "own")
    assert own.spec.identity.layout.num_parameters == by_file.spec.identity.layout.num_parameters
    wider = folder(tmp_path / "wider", intermediate_size=64)
    for init in (file, tmp_path / "saved"):
        with pytest.raises(ValueError, match=r"gate_proj|down_proj|up_proj"):
            plan(wider, init=init)


def test_an_output_layer_that_repeats_the_embedding_is_a_second_name(tmp_path: Path) -> None:
    rows = torch.randn(300, 32)
    tensors = {"lm_head.weight": rows.clone(), "model.embed_tokens.weight": rows, "model.layers.0.w": torch.ones(8, 8)}
    save_file(tensors, tmp_path / "model.safetensors")
    layout = plan("tiny", init=tmp_path).spec.identity.layout
    names = [slot.name for fragment in layout.fragments for slot in fragment.tensors]
    assert sorted(names) == ["model.embed_tokens.weight", "model.layers.0.w"]


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """The first of two, with collectives that exchange nothing."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def parted(whole: nn.Module, embedding: nn.Module, head: nn.Module) -> None:
    head.weight = nn.Parameter(embedding.weight.detach().clone())


def adapted(whole: nn.Module) -> None:
    """What is frozen is not exchanged."""
    whole.requires_grad_(False).model.norm.requires_grad_(True)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("read", ["named ties", "the config alone"])
@pytest.mark.parametrize(
    ("prepare", "fix"),
    [
        (lambda whole, embedding, head: None, ""),
        (lambda whole, embedding, head: fully_shard(whole), ""),
        (lambda whole, embedding, head: [fully_shard([embedding, head]), fully_shard(whole)], ""),
        (lambda whole, embedding, head: [parted(whole, embedding, head), whole.tie_weights()], ""),
        (lambda whole, embedding, head: [parted(whole, embedding, head), adapted(whole)], ""),
        (parted, r"call model\.tie_weights\(\), or build the model with tie_word_embeddings=False"),
        *(
            (
                lambda whole, embedding, head, order=order: [
                    fully_shard((whole, embedding, head)["weh".index(one)]) for one in order
                ],
                r"in one call, as fully_shard\(\[model\.model\.embed_tokens, model\.lm_head\]\)",
            )
            for order in ("ew", "hw", "ehw", "hew")
        ),
    ],
)
def test_a_tied_head_that_has_become_a_parameter_of_its_own_is_refused(
    prepare: Callable[[nn.Module, nn.Module, nn.Module], object], fix: str, read: str
) -> None:
    """torch 2.13 unties what is sharded in two calls, in either order, and says so at the first forward pass."""
    transformers = pytest.importorskip("transformers")
    whole = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))
    if read == "the config alone":
        del whole.all_tied_weights_keys  # transformers 4 has none
    prepare(whole, whole.model.embed_tokens, whole.lm_head)
    run = partition([(name, tuple(tensor.shape)) for name, tensor in trainable_tensors(whole)], pattern="whole")
    for module in (whole, nn.ModuleDict({"inner": whole})) if fix else (whole,):
        with pytest.raises(LayoutMismatch, match=f"is tied to .*embed_tokens.*{fix}") if fix else nullcontext():
            matched_parameters(module, run)


FACTORIES = """
from torch import nn

def small():
    return nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 256))

def needs(size):
    return small()

def number():
    return 5
"""


def planned(**values: object) -> None:
    plan(folder(Path("model"), **values))


def refuses(words: str, **values: object) -> None:
    """The words of transformers that follow are not the test's."""
    with pytest.raises(ValueError, match=words):
        planned(**values)


@all_stories(__file__, "models")
def test_stories(path: Path, story: StoryText, rewrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setitem(sys.modules, "transformers", sys.modules["transformers"])
    check_story(path, story, python(globals()), rewrite=rewrite)


def test_weights_that_are_not_whole_or_no_floating_point_are_refused(tmp_path: Path) -> None:
    """A download that was interrupted has the index before the files: without them a model of the seed would begin."""
    transformers = pytest.importorskip("transformers")
    name = folder(tmp_path / "model")
    saved = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    saved.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    tensors = load_file(files[0])
    save_file({key: tensor.to(torch.int8) for key, tensor in tensors.items()}, files[0], {"format": "pt"})
    with pytest.raises(ValueError, match=r"as I8: expected weights in floating point$"):
        plan(name)
    save_file(tensors, files[0], {"format": "pt"})
    for count in (1, len(files)):
        for file in files[-count:]:
            file.unlink(missing_ok=True)
        with pytest.raises(ValueError, match=r"the weights in .*model cannot be read: .*-of-.*\.safetensors$"):
            plan(name)


def test_code_that_a_config_names_is_never_loaded(tmp_path: Path) -> None:
    """Nor kernels, whose name would download them: what the wire brings is filtered again."""
    pytest.importorskip("transformers")
    foreign = {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "_attn_implementation": "somebody/kernel"}
    name = folder(tmp_path / "model", **foreign)
    (tmp_path / "model" / "evil.py").write_text("raise SystemExit('loaded')")
    text = plan(name).spec.identity.model
    assert "evil" not in text and "kernel" not in text
    hf_model(text[:-1] + "," + json.dumps(foreign)[1:])


def test_a_factory_s_module_and_loss_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(256, 8)
                self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
                self.head = nn.Linear(8, 256)

            def forward(self, tokens):
                x = self.embed(tokens)
                for block in self.blocks:
                    x = x + block(x)
                return self.head(x)

        def odd():
            return Model()

        odd.loss = lambda module, tokens: module(tokens).square().mean()
    """
    (tmp_path / "mine_of_the_test.py").write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(body))
    monkeypatch.syspath_prepend(str(tmp_path))
    first, again = plan("mine_of_the_test:Model"), plan("mine_of_the_test:Model")
    assert first.spec.identity == again.spec.identity
    assert (first.spec.identity.model, first.spec.identity.data) == ("own", again.spec.identity.data)
    assert factory_model("mine_of_the_test:Model").loss is causal_lm_loss
    assert factory_model("mine_of_the_test:odd").loss(lambda tokens: torch.full((2,), 3.0), TOKENS) == 9.0  # type: ignore[arg-type]
    assert model_of_run("own", 0, "mine_of_the_test:Model").vocabulary == 256


def test_a_path_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    folder(tmp_path / "model")
    (tmp_path / "run.toml").write_text('[run]\nmodel = "hf:model"\n[coordinator]\nstate_dir = "state"\n')
    (tmp_path / "node.toml").write_text('[node]\nname = "a"\nmodel = "hf:./other"\n')
    assert load_run(tmp_path / "run.toml", flags=[], environ={}).run.model == f"hf:{tmp_path / 'model'}"
    assert load_node(tmp_path / "node.toml", flags=[], environ={}).node.model == f"hf:{tmp_path / 'other'}"
    assert located("hf:somebody/model", tmp_path) == "hf:somebody/model"


# --- What the trainer does with a module


def gradients(change: Callable[[nn.Module], object], microbatch: int = 0) -> dict[str, torch.Tensor]:
    module = build(PRESETS["nano"], 0)
    change(module)
    tokens = torch.randint(0, 256, (5, 17), generator=torch.Generator().manual_seed(1))
    whole = causal_lm_loss(module, tokens).item()
    assert backward(module, tokens, causal_lm_loss, torch.autocast("cpu", enabled=False), microbatch) == pytest.approx(
        whole
    )
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def test_parts_of_a_batch_add_up_to_its_gradient() -> None:
    """Also where the last part is smaller."""
    whole, parts = gradients(lambda module: None), gradients(lambda module: None, microbatch=2)
    for name, gradient in whole.items():
        assert torch.allclose(parts[name], gradient, atol=1e-6), name


def test_checkpointed_blocks_have_the_gradients_and_names_of_plain_ones() -> None:
    plain, checkpointed = gradients(lambda module: None), gradients(checkpoint_blocks_)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_checkpointed_blocks_are_computed_again_in_the_backward_pass() -> None:
    module, calls = build(PRESETS["nano"], 0), list[int]()
    for block in blocks_of(module):
        block.register_forward_pre_hook(lambda *_: calls.append(1))
        block.get_submodule("attention_norm").register_forward_hook(lambda *_: calls.append(10))
    checkpoint_blocks_(module)
    torch.autograd.backward(causal_lm_loss(module, TOKENS))
    assert calls.count(10) == 2 * len(blocks_of(module))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["object", "memory", "frozen first", "transposed"])
def test_ties_by_memory_compute_as_ties_of_one_object(kind: str, dtype: torch.dtype) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.scaled = nn.Parameter(torch.ones(8))
            if kind == "transposed":
                self.head.weight.data = self.embed.weight.data.view(8, 16).t()  # covers the same memory otherwise
            elif kind == "object":
                self.head.weight = self.embed.weight
            else:
                self.head.weight.data = self.embed.weight.data
            self.embed.weight.requires_grad_(kind != "frozen first")

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens) * self.scaled)

    module = Tied()
    with kept_ties(module):
        module.to(dtype)
    names = dict(trainable_tensors(module))
    weights = {name: torch.randn(tensor.shape) for name, tensor in names.items()}
    fill_(module, weights)
    rows = next(tensor for name, tensor in weights.items() if name != "scaled")
    head = rows.view(8, 16).t() if kind == "transposed" else rows
    right = nn.functional.linear(nn.functional.embedding(TOKENS % 16, rows) * weights["scaled"], head)
    assert torch.equal(module(TOKENS % 16), right)
    with kept_ties(module):  # as a move to another device
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
    assert dict(trainable_tensors(module)).keys() == names.keys()
    assert torch.equal(module(TOKENS % 16), right)


def test_meta_parameters_get_memory_and_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.register_buffer("kept", torch.arange(3.0))

    with named_model._parameters_on_meta():
        module = Tied()
    assert module.first.weight is module.second.weight and module.first.weight.is_meta
    materialise_(module, torch.device("cpu"))
    assert module.first.weight is module.second.weight and not module.first.weight.any()
    assert torch.equal(module.get_buffer("kept"), torch.arange(3.0))
