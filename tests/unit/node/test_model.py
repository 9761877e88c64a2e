"""Covers `node/model/built_in.py`."""

import dataclasses
import hashlib
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from stories import StoryText, all_stories, check_story, python

from farloop.node.model import built_in
from farloop.node.model.built_in import GPT, build, config_json, from_json, rope_tables, rotate
from farloop.node.settings import PRESETS, ModelConfig

NANO = PRESETS["nano"]
SMALLEST = ModelConfig(layers=2, dim=16, heads=2, hidden=24, context=32)


def random_tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(0))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def weights_digest(model: GPT) -> str:
    content = hashlib.sha256()
    for name, parameter in model.named_parameters():
        content.update(name.encode() + parameter.detach().numpy().tobytes())
    return content.hexdigest()[:16]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("nano", 217_664), ("tiny", 836_736), ("small", 10_720_128), ("medium", 19_110_400), ("base", 122_318_592)],
)
def test_a_preset_has_the_parameters_it_promises(name: str, parameters: int) -> None:
    config = PRESETS[name]
    per_block = 4 * config.dim**2 + 3 * config.dim * config.hidden + 2 * config.dim
    assert 256 * config.dim + config.layers * per_block + config.dim == parameters
    assert name != "nano" or sum(parameter.numel() for parameter in build(config, 0).parameters()) == parameters


def test_names_group_by_layer_and_a_tied_head_is_the_embedding() -> None:
    per_block = ["attention_norm", "attention.qkv", "attention.out", "mlp_norm", "mlp.gate_up", "mlp.down"]
    names = ["embed.weight", *(f"blocks.{i}.{part}.weight" for i in range(2) for part in per_block), "norm.weight"]
    tied, untied = build(SMALLEST, 0), build(dataclasses.replace(SMALLEST, tied=False), 0)
    assert list(tied.state_dict()) == names, "no buffer, and no second name for a tied tensor"
    assert list(untied.state_dict()) == [*names, "head.weight"]


def test_initial_weights_are_those_of_the_seed_for_ever_and_leave_the_global_generator_alone() -> None:
    """Version 0 of the anchors is part of a run's identity: every machine has to build these bytes."""
    state = torch.random.get_rng_state()
    assert weights_digest(build(NANO, 0)) == "b11926f28f3df071" != weights_digest(build(NANO, 1))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_loss_predicts_each_token_from_those_before_it() -> None:
    """In bf16 the loss is fp32 all the same."""
    model, tokens = build(SMALLEST, 0), random_tokens(3, 17)
    log_p = model(tokens[:, :-1]).log_softmax(-1)
    by_hand = -sum(log_p[b, t, tokens[b, t + 1]].item() for b in range(3) for t in range(16)) / (3 * 16)
    assert model.loss(tokens).item() == pytest.approx(by_hand, rel=1e-5)
    half = model.to(torch.bfloat16)
    assert (half(tokens).dtype, half.loss(tokens).dtype) == (torch.bfloat16, torch.float32)


def test_turning_is_a_complex_product_by_the_angles_of_the_paper() -> None:
    """(x[i] + j·x[i + H/2]) · e^(jθ): the direction of the turn is part of what a trained model's weights mean."""
    cos, sin = rope_tables(2048, 8)
    for i, theta in enumerate((1.0, 0.1, 0.01, 0.001)):
        assert cos[2047, i].item() == cos[2047, i + 4].item() == pytest.approx(math.cos(2047 * theta), abs=1e-6)
        assert sin[2047, i].item() == sin[2047, i + 4].item() == pytest.approx(math.sin(2047 * theta), abs=1e-6)
    x = random(2048, 8)
    product = torch.complex(x[:, :4], x[:, 4:]) * torch.complex(cos[:, :4], sin[:, :4])
    torch.testing.assert_close(rotate(x, cos, sin), torch.cat((product.real, product.imag), dim=-1))


def test_attention_and_the_mlp_equal_their_definitions() -> None:
    """Fused kernel against softmax(q·kᵀ/√H)·v written out, with a causal mask."""
    block, x, (cos, sin) = build(SMALLEST, 2).blocks[0], random(2, 5, 16), rope_tables(5, 8)
    attention, mlp = block.get_submodule("attention"), block.get_submodule("mlp")
    q, k, v = (
        part.view(2, 5, 2, 8).transpose(1, 2)
        for part in F.linear(x, attention.get_parameter("qkv.weight")).chunk(3, dim=-1)
    )
    scores = rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2) / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 16)
    torch.testing.assert_close(attention(x, cos, sin), F.linear(mixed, attention.get_parameter("out.weight")))
    gate, up = (x @ half.T for half in mlp.get_parameter("gate_up.weight").chunk(2))
    torch.testing.assert_close(mlp(x), (gate * gate.sigmoid() * up) @ mlp.get_parameter("down.weight").T)


def test_sizes_survive_json_and_their_spelling_never_changes() -> None:
    for config in (*PRESETS.values(), dataclasses.replace(NANO, tied=False)):
        assert from_json(config_json(config)) == config
    assert config_json(NANO) == '{"context":1024,"dim":64,"heads":2,"hidden":176,"layers":4,"tied":true}'


@all_stories(__file__, "sizes")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(vars(built_in), globals()), rewrite=rewrite)
