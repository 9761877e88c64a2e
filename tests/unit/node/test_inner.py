"""Covers `node/model/inner_optimizer.py`: the optimizers of loops that bring none of their own."""

import copy

import pytest
import torch
from plain_runs import plain_terms
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim import Muon as TorchMuon

from farloop.algo.terms import InnerOptimizer, LearningRate
from farloop.node.model.inner_optimizer import Muon, Together, default_optimizer, orthogonal


def optimizer_of(module: nn.Module, kind: InnerOptimizer = "adamw") -> Optimizer:
    terms = plain_terms(method="diloco", lr=LearningRate(peak=3e-3), weight_decay=0.2, inner_optimizer=kind)
    return default_optimizer(module, terms)


def together(module: nn.Module) -> Together:
    optimizer = optimizer_of(module, "muon")
    assert isinstance(optimizer, Together)
    return optimizer


def shapes(group: dict[str, list[Tensor]]) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in group["params"]]


def test_matrices_decay_and_vectors_do_not() -> None:
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    module[1].weight.requires_grad_(False)
    decayed, plain = optimizer_of(module).param_groups
    assert shapes(decayed) == [(5, 4)], "and what is frozen is left out"
    assert shapes(plain) == [(4,), (4,), (4,)]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.2, 0.0)
    assert (decayed["lr"], decayed["betas"], decayed["eps"]) == (3e-3, (0.9, 0.95), 1e-8)
    for one_kind, weight_decay in ((nn.Linear(4, 4, bias=False), 0.2), (nn.LayerNorm(4), 0.0)):
        (group,) = optimizer_of(one_kind).param_groups
        assert group["weight_decay"] == weight_decay


def test_tied_parameters_are_stepped_once() -> None:
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    module[1].weight = module[0].weight
    (group,) = optimizer_of(module).param_groups
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


def trained(module: Small, *optimizers: Optimizer) -> Small:
    """Three steps, of all of them."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        tokens = torch.randint(0, 7, (8, 5), generator=generator)
        module.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten()))
        for optimizer in optimizers:
            optimizer.step()
    return module


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest() -> None:
    module = Small()
    muon, adamw = together(module).parts
    assert isinstance(muon, Muon) and isinstance(adamw, AdamW)
    matrices = {id(block.weight) for block in module.blocks}
    assert {id(p) for group in muon.param_groups for p in group["params"]} == matrices
    rest = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert rest == {id(p) for p in module.parameters()} - matrices
    assert [(g["lr"], g["weight_decay"]) for g in muon.param_groups] == [(3e-3, 0.2)]
    assert [g["weight_decay"] for g in adamw.param_groups] == [0.2, 0.0]


def test_an_embedding_without_a_telling_name_is_known_by_its_kind() -> None:
    muon, adamw = together(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4, bias=False))).parts
    assert (shapes(muon.param_groups[0]), shapes(adamw.param_groups[0])) == ([(4, 4)], [(5, 4)])


def test_a_model_without_matrices_has_adamw_and_one_without_others_muon_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert isinstance(optimizer_of(nn.LayerNorm(4), "muon"), AdamW)
    assert caplog.text.count("no matrices of layers for muon here: adamw steps all of the 2 tensors") == 1
    assert isinstance(optimizer_of(nn.Linear(4, 4, bias=False), "muon"), Muon)


def test_together_they_step_as_they_do_apart_and_a_rate_that_is_set_reaches_all() -> None:
    one, other, still = Small(), Small(), Small()
    trained(one, together(one))
    trained(other, *together(other).parts)
    assert equal(one, other) and not equal(one, still)
    optimizer = together(still)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    assert equal(trained(still, optimizer), Small())


def test_a_step_of_muon_is_as_long_as_one_of_adamw() -> None:
    """0.4·√max(rows, columns) on a step that is about orthogonal: an rms of 0.34 of the rate in every element."""
    weight = nn.Parameter(torch.zeros(64, 256))
    optimizer = Muon([weight], lr=1.0, weight_decay=0.0)
    weight.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    assert 0.30 < float(weight.detach().square().mean().sqrt()) < 0.38


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_buffer_of_muon_is_the_average_of_gradients_and_not_a_direction(dtype: torch.dtype, nesterov: bool) -> None:
    """Of torch 2.13's the norm is 1 after every step, with gradients in bf16 and without Nesterov."""
    weight = nn.Parameter(torch.zeros(16, 16, dtype=dtype))
    optimizer, norms = Muon([weight], lr=0.1, weight_decay=0.0, momentum=0.95, nesterov=nesterov), []
    for _ in range(3):
        weight.grad = torch.ones(16, 16, dtype=dtype)  # of norm 16
        optimizer.step()
        norms.append(float(optimizer.state[weight]["momentum_buffer"].float().norm()))
    assert norms == pytest.approx([0.8, 1.56, 2.28], rel=0.01)


@pytest.mark.parametrize("shapes", [[(24, 8)], [(8, 24), (24, 8), (8, 24), (8, 24)]])
@pytest.mark.parametrize("at_once", [1 << 24, 300])
def test_muon_steps_as_torchs_does_in_whatever_stacks(
    shapes: list[tuple[int, int]], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for bf16, in which torch's computes on a CPU too, and for the length of a step: torch's is half as long."""
    monkeypatch.setattr("farloop.node.model.inner_optimizer.MOST_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(3)
    ours = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    still = nn.Parameter(torch.ones(8, 8))  # without a gradient
    optimizers = (
        Muon([*ours, still], lr=0.1, weight_decay=0.2),
        TorchMuon(theirs, lr=0.2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()
    assert torch.equal(still, torch.ones(8, 8)) and still not in optimizers[0].state


def test_a_direction_does_not_depend_on_the_length_of_a_gradient() -> None:
    matrices = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))
    singular = torch.linalg.svdvals(orthogonal(matrices))
    assert singular.min() > 0.5 and singular.max() < 1.3
    torch.testing.assert_close(orthogonal(1e-15 * matrices), orthogonal(matrices), rtol=1e-3, atol=1e-4)
    assert torch.equal(orthogonal(0.0 * matrices), torch.zeros(2, 6, 4)), "and of nothing it is nothing"


def test_its_state_goes_to_a_file_and_back() -> None:
    one, other = Small(), Small()
    first, second = together(one), together(other)
    trained(one, first)
    other.load_state_dict(one.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert {group["lr"] for group in second.param_groups} == {3e-3}
    assert equal(trained(one, first), trained(other, second))
