"""The inner optimizers of loops that bring none of their own."""

import copy

import pytest
import torch
from plain_runs import plain_terms
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from farloop.algo.terms import InnerOptimizer, LearningRate, Terms
from farloop.node.inner_optimizer import Together, default_optimizer
from farloop.node.model import PRESETS, build


def terms(weight_decay: float = 0.2, inner_optimizer: InnerOptimizer = "adamw") -> Terms:
    return plain_terms(
        method="diloco",
        steps=10,
        h=5,
        lr=LearningRate(peak=3e-3),
        weight_decay=weight_decay,
        batch_sequences=4,
        sequence_tokens=8,
        inner_optimizer=inner_optimizer,
    )


def test_matrices_decay_and_vectors_do_not() -> None:
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    module[1].weight.requires_grad_(False)
    decayed, plain = default_optimizer(module, terms()).param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(5, 4)], "and what is frozen is left out"
    assert [tuple(p.shape) for p in plain["params"]] == [(4,), (4,), (4,)]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.2, 0.0)
    assert (decayed["lr"], decayed["betas"], decayed["eps"]) == (3e-3, (0.9, 0.95), 1e-8)


def test_a_model_of_one_kind_of_parameters_has_one_group() -> None:
    [group] = default_optimizer(nn.Linear(4, 4, bias=False), terms()).param_groups
    assert group["weight_decay"] == 0.2
    [group] = default_optimizer(nn.LayerNorm(4), terms()).param_groups
    assert group["weight_decay"] == 0.0


def test_tied_parameters_are_stepped_once() -> None:
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    module[1].weight = module[0].weight
    [group] = default_optimizer(module, terms()).param_groups
    assert [id(parameter) for parameter in group["params"]] == [id(module[0].weight)]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 4)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def trained(module: Small, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        tokens = torch.randint(0, 7, (8, 5), generator=generator)
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten()))
        optimizer.step()


def together(module: nn.Module) -> Together:
    optimizer = default_optimizer(module, terms(inner_optimizer="muon"))
    assert isinstance(optimizer, Together)
    return optimizer


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest() -> None:
    module = Small()
    muon, adamw = together(module).parts
    assert isinstance(muon, Muon) and isinstance(adamw, AdamW)
    assert [id(p) for group in muon.param_groups for p in group["params"]] == [id(b.weight) for b in module.blocks]
    rest = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert rest == {
        id(p) for name, p in module.named_parameters() if name not in ("blocks.0.weight", "blocks.1.weight")
    }
    assert [(g["lr"], g["weight_decay"]) for g in muon.param_groups] == [(3e-3, 0.2)]
    assert [g["weight_decay"] for g in adamw.param_groups] == [0.2, 0.0]


def test_an_embedding_without_a_telling_name_is_known_by_its_kind() -> None:
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4, bias=False))
    muon, adamw = together(module).parts
    assert [tuple(p.shape) for p in muon.param_groups[0]["params"]] == [(4, 4)]
    assert [tuple(p.shape) for p in adamw.param_groups[0]["params"]] == [(5, 4)]


def test_in_the_built_in_model_muon_has_all_matrices_of_the_blocks() -> None:
    module = build(PRESETS["nano"], seed=1)
    muon, adamw = together(module).parts
    count = sum(p.numel() for group in muon.param_groups for p in group["params"])
    assert count == sum(p.numel() for name, p in module.named_parameters() if name.startswith("blocks") and p.ndim == 2)
    assert all(p.ndim < 2 or p.shape[0] == 256 for group in adamw.param_groups for p in group["params"])


def test_a_model_without_hidden_matrices_is_not_for_muon() -> None:
    with pytest.raises(ValueError, match="this model has none; take adamw"):
        default_optimizer(nn.LayerNorm(4), terms(inner_optimizer="muon"))
    only = default_optimizer(nn.Linear(4, 4, bias=False), terms(inner_optimizer="muon"))
    assert isinstance(only, Muon)


def test_together_they_step_as_they_do_apart() -> None:
    one, other = Small(), Small()
    trained(one, together(one), steps=3)
    muon, adamw = together(other).parts
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        tokens = torch.randint(0, 7, (8, 5), generator=generator)
        other.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(other(tokens).flatten(0, 1), tokens.flatten()))
        muon.step()
        adamw.step()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one.parameters(), Small().parameters(), strict=True))


def test_a_learning_rate_that_is_set_reaches_all() -> None:
    """As `Node.step` sets it."""
    module = Small()
    optimizer = together(module)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [parameter.detach().clone() for parameter in module.parameters()]
    trained(module, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))


def test_a_step_of_muon_is_as_long_as_one_of_adamw() -> None:
    """0.2·√max(rows, columns) on an orthogonal step: an RMS of about 0.2 lr in every element, which AdamW comes to."""
    weight = nn.Parameter(torch.zeros(64, 256))
    [group] = default_optimizer(nn.Linear(256, 64, bias=False), terms(0.0, "muon")).param_groups
    optimizer: Optimizer = Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.9, adjust_lr_fn=group["adjust_lr_fn"])
    weight.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    rms = float(weight.detach().square().mean().sqrt())
    assert 0.1 < rms < 0.3


def test_its_state_goes_to_a_file_and_back() -> None:
    one, other = Small(), Small()
    first, second = together(one), together(other)
    trained(one, first)
    other.load_state_dict(one.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for group in second.param_groups:
        assert group["lr"] == 3e-3
        group["lr"] = 1e-3
    for group in first.param_groups:
        group["lr"] = 1e-3
    trained(one, first)
    trained(other, second)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
