"""Two ranks of one node over gloo on loopback: what rank 0 decides and merges reaches the other (protocol X)."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

Ranks = Callable[[str], tuple[dict[str, Any], dict[str, Any]]]

PRELUDE = """
import dataclasses, json, sys
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from farloop.algo.fragments import partition, trainable_tensors
from farloop.algo.spec import Identity, RunSpec
from farloop.algo.terms import LearningRate, Terms
from farloop.node.cluster import Cluster, Decision
from farloop.node.errors import DataError

torch.set_num_threads(1)
cluster = Cluster.from_torchrun()
assert not cluster.alone and cluster.size == 2 and cluster.leads == (cluster.rank == 0)
module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
with torch.no_grad():
    for number, parameter in enumerate(module.parameters()):
        parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape).sin() + number / 10)
shapes = [(name, tuple(parameter.shape)) for name, parameter in trainable_tensors(module)]
layout = partition(shapes, pattern="strided", blocks_per_fragment=1)
parameters = dict(trainable_tensors(module))
spec = RunSpec(
    identity=Identity(
        name="cluster", model="own", layout=layout, anchor_digests=(0,) * len(layout.fragments), data="own",
        num_samples=0, evaluation_set="none", seed=0,
    ),
    terms=Terms.from_flat(
        method="diloco", steps=10, h=5, tau=0, mix=0.0, codec_up="q4", codec_down="q4", outer_lr=0.7,
        outer_momentum=0.9, lr=LearningRate(), clip=1.0, weight_decay=0.1, batch_sequences=4, sequence_tokens=8,
    ),
)

def tell(**facts):
    sys.stdout.write(json.dumps(facts))
"""

# As every rank of ours ends: the interpreter's own end aborts now and then where gloo has been used.
END = """
from farloop.cli.ranks import end_rank

cluster.close()
end_rank(0)
"""


SCRIPT = """
import copy
from farloop.node.library import _check_batch
from farloop.node.model.inner_optimizer import InnerStep

begun = copy.deepcopy(module)

def shared():
    same_spec = cluster.share_spec(spec if cluster.leads else None) == spec
    decided = [
        Decision(running=True, lr=1e-3, merged=(1,), samples=(5, 6, 7, 8), ahead=(9, 10), position=0.5),
        Decision(running=True, lr=1e-4, position=1.5),
        Decision(running=False, lr=0.0),
    ]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(cluster.rank)
        # Not contiguous, as with channels-last weights.
        module[2].weight.data = module[2].weight.data.t().contiguous().t()
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    shared = cluster.share_decisions(decided if cluster.leads else ())
    mine = [cluster.mine(decision.samples) for decision in shared]
    for decision in shared:
        for index in decision.merged:
            cluster.share_weights(layout, index, parameters)
    changed = [name for name, parameter in parameters.items() if not torch.equal(parameter, before[name])]
    return dict(same_spec=same_spec, same_decisions=shared == decided, mine=mine, changed=changed,
                weights=module[2].weight.tolist(), merged=[slot.name for slot in layout.fragments[1].tensors])

def halved():
    inputs = torch.arange(48.0).view(8, 6).cos()
    targets = torch.arange(24.0).view(8, 3).sin()

    def train(model, rows):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(5):
            nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    module = copy.deepcopy(begun)
    start = torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).clone()
    alone = train(copy.deepcopy(module), list(range(8)))
    together = train(DistributedDataParallel(module), list(cluster.mine(tuple(range(8)))))
    return dict(error=(together - alone).abs().max().item(), moved=(alone - start).abs().max().item(),
                weights=together.tolist(), rows=cluster.mine(tuple(range(8))))

def skipped():
    module = copy.deepcopy(begun)
    parameters = dict(trainable_tensors(module))
    step = InnerStep(torch.optim.SGD(module.parameters(), lr=0.1), module, parameters, spec.terms,
                     all_agree=cluster.all_agree)
    before = module[0].bias.tolist()
    took = []
    for bad in (1, None, 0):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, float("inf") if bad == cluster.rank else 1.0)
        took.append(step.run(0.1))
        module.zero_grad()
    return dict(took=took, moved=module[0].bias.tolist() != before, weights=module[2].weight.tolist())

def divided():
    odd = RunSpec(
        identity=dataclasses.replace(spec.identity, num_samples=100), terms=spec.terms.replace(batch_sequences=5)
    )
    try:
        _check_batch(odd, cluster, None)
        refused = ""
    except DataError as error:
        refused = str(error)
    other = Cluster.from_torchrun()
    other.close()
    return dict(owns=(cluster.owns_group, other.owns_group), refused=refused,
                still_there=torch.distributed.is_initialized())

tell(**{one.__name__: one() for one in (shared, halved, skipped, divided)})
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What both ranks have told, by function of the script."""
    first, second = two_ranks(tmp_path_factory.mktemp("ranks"))
    return lambda name: (first[name], second[name])


def two_ranks(tmp_path: Path) -> list[dict[str, dict[str, Any]]]:
    path = tmp_path / "rank.py"
    path.write_text(PRELUDE + SCRIPT + END)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        torchrun = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, str(path)]
        ranks.append(
            subprocess.Popen(
                command, env={**os.environ, **torchrun}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (_, errors) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out) for out, _ in outputs]


def test_the_spec_the_decisions_and_the_merged_weights_of_rank_0_reach_every_rank(ranks: Ranks) -> None:
    """X."""
    first, second = ranks("shared")
    assert first["same_spec"] and second["same_spec"]
    assert first["same_decisions"] and second["same_decisions"]
    assert (first["mine"], second["mine"]) == ([[5, 7], [], []], [[6, 8], [], []])
    assert first["merged"] == ["2.weight", "2.bias"]
    assert (first["changed"], second["changed"]) == ([], first["merged"]), "the other fragment is rank 1's own"
    assert first["weights"] == second["weights"]


def test_two_ranks_with_half_the_batch_each_equal_one_process(ranks: Ranks) -> None:
    """Gradients are averaged over the ranks, whose parts are equal."""
    first, second = ranks("halved")
    assert first["weights"] == second["weights"]
    assert max(first["error"], second["error"]) <= 1e-6 < 1e-2 < first["moved"]
    assert (first["rows"], second["rows"]) == ([0, 2, 4, 6], [1, 3, 5, 7])


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(ranks: Ranks) -> None:
    """Or the ranks' weights would differ from then on."""
    first, second = ranks("skipped")
    assert first["took"] == second["took"] == [False, True, False]
    assert first["moved"] and first["weights"] == second["weights"]


def test_a_group_that_the_user_has_begun_is_left_alone_and_a_batch_that_does_not_divide_is_refused(
    ranks: Ranks,
) -> None:
    """Equal weights in the mean need equal parts."""
    first, _ = ranks("divided")
    assert first["owns"] == [True, False] and first["still_there"]
    assert first["refused"].startswith("the run's batch of 5 sequences does not divide among 2 processes")
