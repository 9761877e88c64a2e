"""The smallest whole run: 512 parameters in 2 fragments, a coordinator and its nodes in this process, over loopback.

For recordings of what is on the wire and on the disk: see the golden folders of the wire and of the coordinator.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from farloop.algo.spec import Fragment, Identity, Layout, RunSpec, TensorSlot
from farloop.algo.terms import LearningRate, Terms
from farloop.coordinator.aggregator import first_anchor
from farloop.coordinator.daemon import Coordinator
from farloop.coordinator.settings import CoordinatorConfig
from farloop.coordinator.storage.store import Store
from farloop.node.library import join
from farloop.quant.digest import digest

PATIENCE_S = 60.0

LAYOUT = Layout(
    slots=2,
    fragments=(
        Fragment(index=0, slot=0, numel=256, tensors=(TensorSlot(name="0.weight", shape=(16, 16), offset=0),)),
        Fragment(index=1, slot=1, numel=256, tensors=(TensorSlot(name="1.weight", shape=(16, 16), offset=0),)),
    ),
)


def model() -> nn.Sequential:
    """The same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))


def plan(*, steps: int, h: int, nodes: int) -> RunSpec:
    """A run of samples that are granted, with both fragments overlapped and mixed."""
    tensors = dict(model().state_dict())
    identity = Identity(
        name="tiny",
        model="own",
        layout=LAYOUT,
        anchor_digests=tuple(digest(first_anchor(fragment, tensors)) for fragment in LAYOUT.fragments),
        data="own",
        num_samples=64,
        evaluation_set="own",
        seed=7,
    )
    terms = Terms.from_flat(
        method="streaming",
        steps=steps,
        h=h,
        tau=1,
        mix=0.5,
        codec_up="q4",
        codec_down="q8",
        outer_lr=0.6,
        outer_momentum=0.9,
        lr=LearningRate(peak=1e-2, minimum=1e-3, warmup_steps=4),
        clip=1.0,
        weight_decay=0.1,
        batch_sequences=2,
        sequence_tokens=16,
        min_nodes=nodes,
    )
    return RunSpec(identity=identity, terms=terms)


def begin(directory: Path, spec: RunSpec) -> Store:
    """The run's state, at its beginning."""
    tensors = dict(model().state_dict())
    return Store.create(
        directory, spec, [first_anchor(fragment, tensors) for fragment in spec.identity.layout.fragments]
    )


@contextmanager
def serving(directory: Path, store: Store, **settings: Any) -> Iterator[Coordinator]:
    """A coordinator in a thread of its own, with these `settings`: to the run's end, or until the block is left."""
    started, made = threading.Event(), list[Coordinator]()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        config = CoordinatorConfig(state_dir=directory, bind="tcp://127.0.0.1:0", http="", **settings)
        made.append(Coordinator(config, store))
        started.set()
        await made[0].run(stop)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="coordinator")
    thread.start()
    try:
        assert started.wait(PATIENCE_S)
        yield made[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)
        loop.close()


def train(
    endpoint: str,
    folder: Path,
    name: str,
    *,
    pace_s: float = 0.0,
    steps: int | None = None,
    hold: threading.Event | None = None,
    over: threading.Event | None = None,
    evaluate: Callable[[nn.Module], float] | None = lambda module: 1.0,
    save_optimizer: bool = False,
) -> None:
    """One node: to the run's end; or after so many steps it leaves, or holds still until it may go without a word.

    Once it is `over`, it goes without a word too."""
    with join(endpoint, model(), name=name, state_dir=folder, evaluate=evaluate, save_optimizer=save_optimizer) as node:
        torch.manual_seed(sum(name.encode()))
        done = 0
        while node.running and done != steps and not (over and over.is_set()):
            time.sleep(pace_s)
            x = torch.randn(len(node.samples), 16)
            loss = nn.functional.mse_loss(node.model(x), 2 * x)
            torch.autograd.backward(loss)
            node.step(loss=loss.item())
            done += 1
        if hold is not None:
            hold.wait(PATIENCE_S)
        if hold is not None or over is not None:
            node.abandon()


def until(condition: Callable[[], bool]) -> None:
    """Wait for it. Raises AssertionError where it does not come."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
