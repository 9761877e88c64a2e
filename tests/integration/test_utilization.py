"""How busy a thin link keeps a node: what is predicted, what the flow simulator plays, and what a real run does, agree.

Real coordinator, nodes, sessions and sockets; each node is behind an emulated link. In an inner step the
node sleeps for a known time, so a loaded machine hardly changes it. The runs go on side by side.
"""

import contextlib
import dataclasses
import threading
import time
from pathlib import Path

import pytest
import tiny_run
import torch
from torch import nn

from farloop.algo.fragments import partition
from farloop.algo.spec import Identity, RunSpec
from farloop.coordinator.aggregator import first_anchor
from farloop.coordinator.storage.store import Store
from farloop.local.relay import Link, Relay, RelayThread
from farloop.node.library import join
from farloop.quant.digest import digest
from farloop.sim.bandwidth import Training, utilization
from farloop.sim.flow.scenario import FlowScenario, Group, Model, Rules, Variant, cases
from farloop.sim.flow.simulator import play

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

WIDTH = 256
"""A block is one matrix of this width: 256 KiB in fp32, so that all but its blobs is less than one percent."""

STEP_S = 0.4
WARM_ROUNDS, ROUNDS = 2, 9
"""Those before the steady state, and all; the last one, with its flush, does not count."""

PATIENCE_S = 200.0
"""For what takes 45 s where the machine has time for it."""

ATTEMPTS = 3
"""Of a point whose real run was slower than predicted: the best one counts."""

AGREE = 0.1
"""Relative: what prediction, simulation and reality may differ by."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A run, and the links of its two nodes."""

    method: str
    blocks: int
    h: int
    tau: int = 0
    lag: int = 0
    mbit_s: float
    """Of the slower link; the other one has twice that."""

    @property
    def training(self) -> Training:
        return Training(
            params=WIDTH * WIDTH * self.blocks,
            layers=self.blocks,
            step_s=STEP_S,
            method="streaming" if self.method == "streaming" else "diloco",
            h=self.h,
            bits=32.0,
            layers_per_fragment=1,
            overlap=self.tau,
            lag=self.lag,
        )


POINTS = [
    Point(method="diloco", blocks=1, h=4, mbit_s=3.75),
    Point(method="streaming", blocks=2, h=6, tau=1, mbit_s=3),
    Point(method="streaming", blocks=4, h=8, tau=3, mbit_s=2.625),
    Point(method="diloco", blocks=1, h=4, lag=1, mbit_s=1.5),
]


def predicted(point: Point) -> float:
    return float(utilization(point.training, [point.mbit_s / 1e3])[0])


def simulated(point: Point) -> float:
    """Two nodes whose links differ as in the real run."""
    training = point.training
    choice = Rules(
        method=training.method,
        h=point.h,
        tau=point.tau,
        lag=point.lag,
        fragments=training.fragments,
        bits_up=32.0,
        bits_down=32.0,
    )
    links = {"slow": point.mbit_s / 1e3, "fast": 2 * point.mbit_s / 1e3}
    scenario = FlowScenario(
        steps=ROUNDS * point.h,
        model=Model(parameters=int(training.params)),
        nodes=tuple(Group(name=n, step_s=STEP_S, up_gbit_s=rate, down_gbit_s=rate) for n, rate in links.items()),
        variants=(Variant(name="v", rules=choice),),
    )
    outcome = play(cases(scenario)[0].setting, timeline=True)
    ends = {merge.version: merge.at_s for merge in outcome.windows if merge.fragment == training.fragments - 1}
    first, last = WARM_ROUNDS, ROUNDS - 1
    return (last - first) * point.h * STEP_S / (ends[last] - ends[first])


# --- the real run


def blocks_of(point: Point) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(point.blocks)))


def spec_of(point: Point) -> RunSpec:
    tensors = dict(blocks_of(point).state_dict())
    pattern = "strided" if point.method == "streaming" else "whole"
    layout = partition([(name, tuple(tensor.shape)) for name, tensor in tensors.items()], pattern=pattern,
                       fragments=point.blocks if pattern == "strided" else None)  # fmt: skip
    tiny = tiny_run.plan(steps=ROUNDS * point.h, h=point.h, nodes=2)
    identity = Identity(
        name="paced",
        model="own",
        layout=layout,
        anchor_digests=tuple(digest(first_anchor(fragment, tensors)) for fragment in layout.fragments),
        data="own",
        num_samples=0,
        evaluation_set="none",
        seed=7,
    )
    terms = tiny.terms.replace(
        method=point.method, tau=point.tau, lag=point.lag, mix=0.0, codec_up="fp32", codec_down="fp32"
    )
    return RunSpec(identity=identity, terms=terms)


def pace(endpoint: str, folder: Path, name: str, point: Point, steps: list[tuple[float, float]]) -> None:
    """A node whose steps sleep: when each began to compute, and when it had."""
    with join(endpoint, blocks_of(point), name=name, state_dir=folder) as node:
        while node.running:
            began = time.monotonic()
            for parameter in node.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            time.sleep(max(0.0, began + STEP_S - time.monotonic()))
            steps.append((began, time.monotonic()))
            node.step(loss=1.0)


def real(point: Point, folder: Path) -> float:
    """Compute share of the steady state, of the node with the slower link.

    That of the pair of rounds which went best: whatever else the machine does only takes time. Pairs, because with a
    lag the waits of a round depend on the round before the last.
    """
    spec = spec_of(point)
    tensors = dict(blocks_of(point).state_dict())
    anchors = [first_anchor(fragment, tensors) for fragment in spec.identity.layout.fragments]
    store = Store.create(folder / "state", spec, anchors)
    with contextlib.closing(store), tiny_run.serving(folder / "state", store, probe_bytes=0) as coordinator:
        port = int(coordinator.link.endpoint.rpartition(":")[2])
        links = [Link(bits_per_s=factor * point.mbit_s * 1e6, rtt_s=0.002) for factor in (1, 2)]
        with RelayThread(*(Relay(target_host="127.0.0.1", target_port=port, link=link) for link in links)) as relays:
            steps: list[list[tuple[float, float]]] = [[] for _ in relays]
            nodes = [
                threading.Thread(
                    target=pace, args=(f"tcp://127.0.0.1:{relay.port}", folder / name, name, point, at), daemon=True
                )
                for name, relay, at in zip("ab", relays, steps, strict=True)
            ]
            for node in nodes:
                node.start()
            for node in nodes:
                node.join(PATIENCE_S)
    slow = steps[0]
    assert len(slow) == ROUNDS * point.h
    pair = 2 * point.h
    shares = []
    for first in range(WARM_ROUNDS * point.h, (ROUNDS - 1) * point.h, pair):
        computed_s = sum(end - begin for begin, end in slow[first : first + pair])
        shares.append(computed_s / (slow[first + pair][0] - slow[first][0]))
    return max(shares)


@pytest.mark.slow
def test_prediction_simulation_and_a_real_run_agree(tmp_path: Path) -> None:
    found: dict[Point, float] = {}

    def measure(point: Point, folder: Path) -> None:
        found[point] = real(point, folder)

    threads = [
        threading.Thread(target=measure, args=(point, tmp_path / str(number))) for number, point in enumerate(POINTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, point in enumerate(POINTS):
        expected = [predicted(point), simulated(point)]
        for attempt in range(1, ATTEMPTS):
            if found[point] * (1 + AGREE) < max(expected):  # a busy machine only takes time
                found[point] = max(found[point], real(point, tmp_path / f"{number}-{attempt}"))
        shares = {"predicted": expected[0], "simulated": expected[1], "real": found[point]}
        assert min(shares.values()) > 0.4 and max(shares.values()) < 0.9, f"{point}: {shares} tell nothing"
        assert max(shares.values()) / min(shares.values()) < 1 + AGREE, f"{point}: {shares}"
