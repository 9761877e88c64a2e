"""A real node and a real coordinator, with the model on the pretend CUDA device (`tests/cases/pretend_cuda.py`)."""

import logging
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from cuda_branches import branches, traced
from pretend_cuda import CUDA, Device
from safetensors.torch import load_file

from farloop.lab.bench.loop import Loop, coordinator
from farloop.lab.bench.processes import FIRST
from farloop.node.library import Node, join
from farloop.node.model.built_in import build
from farloop.node.model.inner_optimizer import orthogonal
from farloop.node.settings import ModelConfig
from farloop.node.trainer import backward, mixed_precision
from farloop.quant.codec import flat
from farloop.quant.registry import codec_named
from farloop.quant.self_test import describe

pytestmark = pytest.mark.integration

H = 12
CONFIG = ModelConfig(layers=1, dim=256, heads=2, hidden=256, context=16)


def trained(loop: Loop, node: Node, steps: int, cuda: Device) -> list[int]:
    """Waits of the training thread in those of these steps after which nothing is due, without those of the loop."""
    waits, terms = list[int](), node.spec.terms
    for _ in range(steps):
        mixed = mixed_precision(CUDA, terms)
        mixed._enabled = False  # autocast is not pretended
        loss = backward(loop.module, loop.batch, lambda model, batch: loop.loss(model), mixed)
        before, quiet = Counter(cuda.waits), node.executor.machine.quiet_steps > 1
        assert node.step(loss=loss)
        if quiet:
            waits.append(sum(n for (thread, _), n in (cuda.waits - before).items() if thread == "MainThread"))
        time.sleep(0.005)  # a step takes its time, in which updates come
    return waits


@pytest.mark.slow
def test_a_node_on_a_device_waits_in_no_quiet_step_and_moves_few_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes a parameter and round over PCIe, in both directions: 8 of anchors in host memory, and about 1 of payloads.
    What is written for CUDA is run by this, but for what is listed."""
    caplog.set_level(logging.INFO)
    wanted, cpu = branches(), Loop(build(CONFIG, 0), torch.device("cpu"), 2, 16)
    with coordinator(cpu, tmp_path, H, 1000 * H) as port, Device("lazy") as cuda:
        loop = Loop(build(CONFIG, 0).to("cuda"), torch.device("cuda"), 2, 16)
        for anchors, most in (("auto", 0.0), ("host", 8.0)):
            loop.module.load_state_dict(load_file(tmp_path / FIRST))
            with (
                traced(wanted),
                join(
                    f"tcp://127.0.0.1:{port}", loop.module, name="gpu", state_dir=tmp_path / "gpu", give_up_s=60.0,
                    signals=False, anchors=anchors, save_every_rounds=0,
                ) as node,
            ):  # fmt: skip
                trained(loop, node, H + H // 2, cuda)
                cuda.h2d.clear()
                cuda.d2h.clear()
                fragments, replica = node.spec.identity.layout.fragments, node.executor.replica
                before, largest = dict(replica.versions), max(fragment.numel for fragment in fragments)
                waits = trained(loop, node, 2 * H, cuda)
                merged = sum((replica.versions[f.index] - before[f.index]) * f.numel for f in fragments)
                moved = cuda.h2d + cuda.d2h
                assert abs(moved["pinned"] - most * merged) <= 4 * largest, "one copy may be begun or not ended"
                assert moved["pageable"] <= 1.1 * merged + largest
                assert waits and not any(waits)
                assert sum(each.memory.nbytes for each in replica.buffers._free) <= 8 * largest
                assert "pretend CUDA" in node.cluster.describe() and not replica.can_apply_ahead(0)
        with traced(wanted):
            assert "pretend CUDA" in describe(CUDA)
            for codec in ("topk", "ternary"):
                assert codec_named(codec).encode(torch.zeros(1024, device="cuda"), flat(1024)).is_cuda
            assert orthogonal(torch.zeros(2, 3, 4, device="cuda")).is_cuda
    assert not cuda.races and not cuda.unmodelled
    assert "anchors are kept on the device" in caplog.text
    assert set(wanted.values()) == {
        "node/cluster.py: device.type == 'cuda'",  # NCCL, of several ranks
        "quant/kernels/gpu/host.py: device.type == 'cuda'",  # a launch of Triton
    }
