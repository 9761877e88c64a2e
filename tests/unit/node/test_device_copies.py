"""What a node keeps in host memory for a model on a device: copies are queued, few, and never overtaken.

All on the pretend CUDA device (`pretend_cuda.py`), whose streams run as late as they may.
"""

import ast
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from device_story import EPOCH, asked, story
from plain_runs import plain_terms
from pretend_cuda import CUDA, ROOT, Device
from torch import Tensor, nn

from farloop.algo.fragments import partition, trainable_tensors, zero_padding_
from farloop.node.anchor_files import AnchorFiles
from farloop.node.cluster import Cluster
from farloop.node.devices import device_of
from farloop.node.encoder import encode_delta
from farloop.node.library import _told
from farloop.node.replica import Replica, matched_parameters
from farloop.node.shards import Shards, Weights
from farloop.node.state_dir import Residuals
from farloop.node.trainer import mixed_precision
from farloop.quant.blob import BlobHeader, pack_blob
from farloop.quant.registry import CODECS, codec_named
from farloop.wire.machine_info import NOTHING

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
        delta = replica.take(0) if what == "take" else None
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
        assert replica.files.ended()
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


def rounds(replica: Replica, count: int, *, ahead: bool = False) -> None:
    """Every fragment is sent, brought up to date and merged; one after the other."""
    for version in range(1, count + 1):
        for index in replica.anchors:
            if ahead:
                replica.buffers.copy_ahead(replica.anchors[index])
            for parameter in replica.parameters.values():
                parameter.mul_(1.01)
            command, delta, done = asked(index, version - 1, "q4"), replica.take(index), list[Any]()

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
def test_a_round_moves_each_anchor_to_the_device_and_back_once(
    anchors: str, most: float, payloads: float, ahead: bool
) -> None:
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
        assert 4 * largest <= replica.buffers.kept_bytes <= 8 * largest
    assert not cuda.races


# --- What of the code for CUDA runs on the pretend device


def _tests_of_the_device(path: Path) -> dict[int, str]:
    """By the line that is run on CUDA alone, or where a device is asked for its type: that expression."""
    found: dict[int, str] = {}
    for statement in ast.walk(ast.parse(path.read_text())):
        if not isinstance(statement, ast.stmt) or isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        own = statement.test if isinstance(statement, ast.If) else statement
        if isinstance(statement, ast.With | ast.For | ast.While | ast.Try):
            own = statement.items[0] if isinstance(statement, ast.With) else ast.Pass()  # type: ignore[assignment]
        for test in ast.walk(own):
            if isinstance(test, ast.Compare) and isinstance(test.comparators[-1], ast.Constant):
                asks = ast.unparse(test)
                if asks.endswith(('.type == "cuda"', ".type == 'cuda'", ".type != 'cpu'")):
                    runs = statement.body[0] if isinstance(statement, ast.If) else test
                    found[runs.lineno] = asks
                elif asks.endswith((".type != 'cuda'", ".type == 'cpu'")):
                    found[test.lineno] = asks
    return found


NOT_REACHED = {
    "node/cluster.py: device.type == 'cuda'": "NCCL, of several ranks",
    "quant/kernels/dispatch.py: devices[0].type != 'cuda'": "which of Triton's kernels there are: pretended",
    "quant/kernels/gpu/host.py: device.type == 'cuda'": "a launch of Triton",
}


@torch.no_grad()
def test_what_is_for_cuda_alone_runs_on_the_pretend_device() -> None:
    wanted = {
        (str(path), line): f"{path.relative_to(ROOT)}: {asks}"
        for folder in ("node", "quant")
        for path in sorted(Path(ROOT, folder).rglob("*.py"))
        for line, asks in _tests_of_the_device(path).items()
    }
    files, seen = {file for file, _ in wanted}, set[tuple[str, int]]()

    def lines(frame: FrameType, event: str, _: object) -> Any:
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return lines

    def calls(frame: FrameType, event: str, _: object) -> Any:
        return lines if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    with Device("eager"):
        sys.settrace(calls)
        threading.settrace(calls)
        try:
            for anchors in ANCHORS:
                story("cuda", anchors, torch.float32, codecs=("q4", "q4r:beta=0.9"))
            replica, cluster = replica_on("host"), Cluster.from_torchrun()
            assert "pretend CUDA" in cluster.describe() and device_of(nn.Linear(2, 2).to("cuda"), CUDA) == CUDA
            assert _told(NOTHING, cluster).devices == 1 and not replica.can_apply_ahead(0)
            assert mixed_precision(CUDA, plain_terms())._enabled
            for name in CODECS:
                assert codec_named(name).encode(replica.take(0), replica.layout.fragments[0]).is_cuda
        finally:
            sys.settrace(before)
            threading.settrace(None)  # type: ignore[arg-type]
    assert {what for at, what in wanted.items() if at not in seen} == set(NOT_REACHED)
