"""What a node keeps in host memory for a model on a device: copies are queued, few, and never overtaken.

All on the pretend CUDA device (`pretend_cuda.py`), whose streams run as late as they may.
"""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from device_story import EPOCH, asked
from plain_runs import plain_terms
from pretend_cuda import CUDA, Device
from torch import Tensor, nn

from farloop.algo.fragments import partition, trainable_tensors, zero_padding_
from farloop.node.cluster import Cluster
from farloop.node.model.anchor_files import AnchorFiles
from farloop.node.model.encoder import encode_delta
from farloop.node.model.inner_optimizer import InnerStep, default_optimizer
from farloop.node.model.replica import Replica, matched_parameters
from farloop.node.model.residuals import Residuals
from farloop.node.model.shards import Shards, Weights
from farloop.quant.blob import BlobHeader, pack_blob
from farloop.quant.registry import codec_named

ANCHORS = ("host", "device")


def replica_on(anchors: Any, *, shards: bool = False, fragments: int = 3) -> Replica:
    """Of a model with tensors of several sizes, on the device, with anchors of version 0."""
    module = nn.Sequential(*(nn.Linear(64, 256 * size, bias=False) for size in (1, 2, 4))).to("cuda")
    shapes = [(name, tuple(parameter.shape)) for name, parameter in trainable_tensors(module)]
    layout = partition(shapes, pattern="sequential", fragments=fragments)
    parameters = matched_parameters(module, layout)
    weights = (
        Shards(Cluster(device=CUDA), module, layout, parameters, anchors=anchors)
        if shards
        else Weights(layout, parameters, anchors=anchors)
    )
    replica = Replica(module, layout, gradients=False, weights=weights)
    for index in replica.anchors:
        replica.first(index, 1)
        replica.versions[index] = 0
    return replica


def blob_of(replica: Replica, index: int, version: int, base: int, codec: str, value: float) -> bytearray:
    fragment = replica.layout.fragments[index]
    x = torch.full((fragment.numel,), value)
    zero_padding_(fragment, x)
    header = BlobHeader(codec=codec_named(codec), fragment=fragment, version=version, base=base, epoch=EPOCH)
    return pack_blob(header, header.codec.encode(x, fragment, seed=header.seed))


def merge_then_install(order: str, anchors: str, what: str) -> list[Tensor]:
    """A merge, an update or a send is queued behind training; then a snapshot replaces the anchor."""
    with Device(order) as cuda, torch.no_grad():
        replica = replica_on(anchors)
        for parameter in replica.parameters.values():
            parameter.mul_(1.5)
        delta = replica.compute_delta(0) if what == "take" else None
        if what == "apply":
            replica.apply(0, 1, blob_of(replica, 0, 1, 0, "q4", 0.5), "q4", EPOCH, 0)
        if what == "ahead":
            replica.buffers.copy_ahead(replica.anchors[0])
        if what != "take":
            replica.merge(0, 0.5)
        assert replica.install(0, 5, blob_of(replica, 0, 5, 5, "fp32", 7.0), EPOCH)
        found = [replica.anchors[0].read().cpu(), *(p.detach().cpu() for p in replica.parameters.values())]
        found += [] if delta is None else [delta.cpu()]
    assert not cuda.races
    return found


@pytest.mark.parametrize("what", ["merge", "take", "apply", "ahead"])
@pytest.mark.parametrize("anchors", ANCHORS)
def test_a_snapshot_waits_for_what_the_device_has_yet_to_read(anchors: str, what: str) -> None:
    torch.manual_seed(0)
    expected = merge_then_install("eager", anchors, what)
    torch.manual_seed(0)
    for one, other in zip(merge_then_install("lazy", anchors, what), expected, strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
def test_an_anchor_is_saved_whole_where_the_loop_trains_on_a_stream_of_its_own(tmp_path: Path) -> None:
    with Device("lazy") as cuda, torch.cuda.stream(torch.cuda.Stream()):
        replica = replica_on("device")
        replica.files = AnchorFiles(tmp_path)
        replica.anchors[0].write().add_(3.0)
        replica._save(0, 1)
        assert replica.files.finish_save()
        kept = torch.frombuffer(bytearray((tmp_path / "0-1.anchor").read_bytes()[4096:]), dtype=torch.float32)
        assert torch.equal(kept, replica.anchors[0].read().cpu())
        replica.files.close()
    assert not cuda.races


@torch.no_grad()
@pytest.mark.parametrize("anchors", ANCHORS)
def test_what_any_rank_keeps_lies_where_its_anchors_lie(anchors: str) -> None:
    with Device("lazy"):
        replica = replica_on(anchors, shards=True)
        home = replica.anchors[0].device
        followers = replica._residual(0, False)
        assert followers is not None
        replica._encode(0, "q4r:beta=0.9", 1, followers, 1)
        leads = Residuals("run", replica.zeros, None, lambda job: job()).for_delta(asked(0, 0, "topk").blob, "topk")
        assert leads is not None
        sent = {"index": 0, "version": 1, "base": 0, "codec": "q4", "epoch": EPOCH}
        update = replica.parsed(**sent, blob=blob_of(replica, 0, 1, 0, "q4", 0.5))  # type: ignore[arg-type]
        replica.learn(0, update, update, outer_lr=0.7, lr_sum=0.3, alpha=0.5)
        assert {followers.device, leads.device, replica.drifts[0].device} == {home}


@torch.no_grad()
@pytest.mark.parametrize("anchors", ANCHORS)
def test_an_evaluation_with_the_anchors_waits_for_no_copy(anchors: str) -> None:
    with Device("lazy") as cuda:
        replica = replica_on(anchors)
        assert len(cuda.registered) == (anchors == "host"), "all host anchors at once"
        for parameter in replica.parameters.values():
            parameter.mul_(1.5)
        local = [parameter.detach().cpu() for parameter in replica.parameters.values()]
        kept = [anchor.read().cpu().clone() for anchor in replica.anchors.values()]
        before = cuda.waits.total()
        with replica.anchors_in_place():
            shown = [parameter.detach().clone() for parameter in replica.parameters.values()]
        assert cuda.waits.total() == before
        for one, other in zip(local, replica.parameters.values(), strict=True):
            assert torch.equal(one, other.detach().cpu())
        for one, other in zip(kept, replica.anchors.values(), strict=True):
            assert torch.equal(one, other.read().cpu())
        assert all(torch.equal(one, 1.5 * other.cpu()) for one, other in zip(local, shown, strict=True))
    assert not cuda.races


def rounds(replica: Replica, count: int, *, first: int = 1, ahead: bool = False) -> None:
    """Every fragment is sent, brought up to date and merged; one after the other."""
    for version in range(first, first + count):
        for index in replica.anchors:
            if ahead:
                replica.copy_ahead(index)
            for parameter in replica.parameters.values():
                parameter.mul_(1.01)
            command, delta, done = asked(index, version - 1, "q4"), replica.compute_delta(index), list[Any]()

            def job(command: Any = command, delta: Tensor = delta, done: list[Any] = done) -> None:
                done.append(encode_delta(replica, command, delta, EPOCH, 1))

            thread = threading.Thread(target=replica.side.beside(job))
            thread.start()
            thread.join()
            update = blob_of(replica, index, version, version - 1, "q4", 0.01)
            replica.apply(index, version, update, "q4", EPOCH, 0)
            replica.versions[index] = version
            replica.merge(index, 0.5)


@torch.no_grad()
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("anchors", "most", "payloads"), [("host", 8.0, 1.2), ("device", 0.0, 1.2)])
def test_a_round_moves_each_anchor_there_and_back_once(anchors: str, most: float, payloads: float, ahead: bool) -> None:
    """Bytes a parameter: of anchors, and of payloads of 4 bits in both directions."""
    with Device("lazy") as cuda:
        replica = replica_on(anchors)
        cuda.h2d.clear()
        cuda.d2h.clear()
        rounds(replica, 2, ahead=ahead and anchors == "host")
        held = sum(anchor.numel for anchor in replica.anchors.values())
        assert 2 * most * held == cuda.h2d["pinned"] + cuda.d2h["pinned"]
        assert cuda.h2d["pageable"] + cuda.d2h["pageable"] <= 2 * payloads * held
        largest = max(anchor.numel for anchor in replica.anchors.values())
        assert 4 * largest <= sum(buffer.memory.nbytes for buffer in replica.buffers._free) <= 8 * largest
    assert not cuda.races


@torch.no_grad()
def test_a_merged_anchor_is_copied_back_beside_training() -> None:
    with Device("lazy") as cuda:
        replica = replica_on("host")
        before = replica.anchors[0].read().clone()
        replica.apply(0, 1, blob_of(replica, 0, 1, 0, "q4", 0.5), "q4", EPOCH, 0)
        replica.merge(0, 0.5)
        cuda.default.run()
        for parameter in replica.parameters.values():
            assert parameter._real.isfinite().all(), "it is merged"
        assert torch.equal(replica.anchors[0]._numbers, before), "and not yet copied back"
        assert not torch.equal(replica.anchors[0].read(), before)
    assert not cuda.races


# --- Steps that wait for nothing


def stepped(order: str, bad: set[int]) -> tuple[list[Tensor], list[bool], list[int], Device]:
    """Weights after some steps, what `run` returned, and the waits of each step; gradients of the steps in `bad` hold
    a NaN."""
    told, waits, terms = list[bool](), list[int](), plain_terms(clip=0.5)
    with Device(order) as cuda:
        module = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, bias=False))
        generator = torch.Generator().manual_seed(1)
        for parameter in module.parameters():
            nn.init.normal_(parameter, generator=generator)
        module = module.to("cuda")
        optimizer = default_optimizer(module, terms)
        inner = InnerStep(optimizer, module, dict(module.named_parameters()), terms)
        for step in range(6):
            before = sum(cuda.waits.values())
            for parameter in module.parameters():
                gradient = torch.randn(parameter.shape, generator=generator)
                gradient.view(-1)[0] = float("nan") if step in bad else 0.0
                parameter.grad = torch.empty_like(parameter).copy_(gradient, non_blocking=True)
            told.append(inner.run(0.01))
            waits.append(sum(cuda.waits.values()) - before)
        with torch.no_grad():
            weights = [parameter.detach().cpu() for parameter in module.parameters()]
        torch.cuda.synchronize()
        parameter.grad = torch.zeros_like(parameter)
        told.append(inner.run(0.0))
    return weights, told, waits, cuda


def test_a_quiet_step_waits_for_nothing_and_the_device_skips_by_itself() -> None:
    weights, told, waits, cuda = stepped("lazy", bad={2})
    assert waits == [0] * 6 and told[:6] == [True] * 6 and not cuda.races
    expected, told, _, _ = stepped("eager", bad={2})
    assert told == [True, True, False, True, True, True, True], "as soon as the device has done it"
    assert all(torch.equal(one, other) and one.isfinite().all() for one, other in zip(weights, expected, strict=True))


def test_a_skipped_step_is_told_at_a_later_one() -> None:
    _, told, _, _ = stepped("lazy", bad={0})
    assert told == [True] * 6 + [False]


@pytest.mark.parametrize(("memory", "place"), [(80 << 30, "device"), (1 << 20, "host")])
@torch.no_grad()
def test_auto_keeps_anchors_on_a_device_with_room(memory: int, place: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with Device("lazy", memory=memory) as cuda:
        replica = replica_on("auto")
        rounds(replica, 1)
        before = {index: anchor.read().cpu().clone() for index, anchor in replica.anchors.items()}
        replica.place()
        (line,) = [record.getMessage() for record in caplog.records if "anchors are kept" in record.getMessage()]
        assert line.startswith(f"anchors are kept on the {place}: they take 0.00 GB there, and "), line
        assert all(torch.equal(anchor.read().cpu(), before[index]) for index, anchor in replica.anchors.items())
        cuda.h2d.clear()
        rounds(replica, 1, first=2)
        assert (cuda.h2d["pinned"] == 0) == (place == "device")
    assert not cuda.races
