"""Covers `node/library.py` as far as it needs no coordinator."""

from torch import nn

from farloop.algo.spec import LearningRate, Terms
from farloop.node.library import default_optimizer


def terms(weight_decay: float = 0.2) -> Terms:
    return Terms(
        method="diloco",
        steps=10,
        h=5,
        tau=0,
        mix=0.0,
        codec_up="q4",
        codec_down="q4",
        outer_lr=0.7,
        outer_momentum=0.9,
        lr=LearningRate(peak=3e-3),
        clip=1.0,
        weight_decay=weight_decay,
        batch_sequences=4,
        sequence_tokens=8,
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
