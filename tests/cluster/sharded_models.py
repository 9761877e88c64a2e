"""What ranks do in these tests: a model with every awkward shape, sharded in every way, against one process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from node_story import identity
from plain_runs import plain_terms
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from farloop.algo import fragments
from farloop.algo.fragments import partition, statistics_of, trainable_tensors, zero_padding_
from farloop.algo.spec import BlobId, BlobKind, Layout, NodeId, RunSpec, WindowTerms
from farloop.algo.terms import LearningRate
from farloop.node import events as ev
from farloop.node.arguments import LoopOptions
from farloop.node.cluster import Cluster
from farloop.node.devices import Kept
from farloop.node.errors import LoopError, NonFiniteDelta
from farloop.node.hang_watch import HangWatch
from farloop.node.library import Held, Node
from farloop.node.model import inner_optimizer, shards
from farloop.node.model.anchor_files import AnchorFiles, Head
from farloop.node.model.built_in import build
from farloop.node.model.encoder import Encoded, encode_delta, finish, pack_at_once
from farloop.node.model.frozen import Frozen
from farloop.node.model.inner_optimizer import default_optimizer, orthogonal
from farloop.node.model.merges import Merges
from farloop.node.model.moments import Moments
from farloop.node.model.named import causal_lm_loss, shard_blocks_
from farloop.node.model.replica import OwnDelta, Replica, matched_parameters
from farloop.node.model.shards import Shards, Weights, box_of, elsewhere, is_dtensor, local_of, reshard, whole
from farloop.node.settings import PRESETS, NodeConfig
from farloop.quant.blob import BlobHeader, pack_anchor, pack_blob
from farloop.quant.codec import Codec
from farloop.quant.digest import digest
from farloop.quant.registry import codec_named

NODE, EPOCH = NodeId("oslo"), 1
CODECS = ("fp32", "bf16", "q8", "q4", "e3m0", "q4r", "q4r:rounding=nearest,beta=0.9", "q4:beta=0.9")


class Expert(nn.Module):
    """Three stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(3, 100, 250))
        self.down = nn.Parameter(torch.empty(3, 250, 100))


class Awkward(nn.Module):
    """Tied embedding and head, a frozen layer, buffers, experts, a scale without dimensions: widths of 100, 250 and
    331, so that no shard ends where a block of a codec does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(331, 100)
        self.first = nn.Linear(100, 250)
        self.second = nn.Linear(250, 100)
        self.frozen = nn.Linear(100, 100)
        self.experts = Expert()
        self.norm = nn.LayerNorm(100)
        self.head = nn.Linear(100, 331, bias=False)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("running_mean", torch.full((100,), 0.1))


def awkward(dtype: torch.dtype = torch.float32) -> Awkward:
    model = Awkward()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    model.head.weight = model.embed.weight
    model.frozen.requires_grad_(False)
    return model.to(dtype)


# --- Ways to shard it


def rows(model: Awkward) -> None:
    for part in (model.first, model.second, model.experts):
        fully_shard(part)
    fully_shard(model)


def columns(model: Awkward) -> None:
    size = dist.get_world_size()
    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 and p.shape[1] % size == 0 else None)


def replicas(model: Awkward) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "shards"))
    fully_shard(model, mesh=mesh)


def tensor_parallel(model: Awkward, mesh: Any = None) -> None:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    experts = model.experts
    experts.up = nn.Parameter(distribute_tensor(experts.up.detach(), mesh, [Shard(2)]))
    experts.down = nn.Parameter(distribute_tensor(experts.down.detach(), mesh, [Shard(1)]))


def both(model: Awkward) -> None:
    """FSDP2 over tensor parallelism: shards of shards."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    for part in (model.first, model.second):
        fully_shard(part, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def plain(model: Awkward) -> None:
    """Every rank has all of it."""


def parts(model: Awkward) -> None:
    """Stages of a pipeline: every rank has some layers and no other, and of two more each has half (FSDP2)."""
    names, size = ["embed", "first", "second", "experts", "norm", "frozen"], dist.get_world_size()
    if size > 2:
        fully_shard(model.first), fully_shard(model.experts)
        names = [name for name in names if name not in ("first", "experts")]
    for place, name in enumerate(names):
        if place % size != dist.get_rank():
            delattr(model, name)
    if not hasattr(model, "embed"):
        del model.head


WAYS: dict[str, Callable[[Awkward], None]] = {
    way.__name__: way for way in (rows, columns, replicas, tensor_parallel, both, plain, parts)
}


# --- One rank of a node, and the whole model beside it


@dataclass(slots=True)
class Rank:
    cluster: Cluster
    model: Awkward
    ours: Replica  # of this rank
    theirs: Replica  # of one process, on every rank
    whole: Awkward  # its model

    @property
    def layout(self) -> Layout:
        return self.ours.layout

    @torch.no_grad()
    def train(self) -> None:
        """A step that does the same to every element, wherever it lies."""
        for replica in (self.ours, self.theirs):
            replica.weights.reshard()
            for name in replica.parameters:
                replica.weights._local(name).mul_(1 + 2**-6)  # of none, if it is elsewhere


def one_rank(way: str, dtype: torch.dtype, *, largest: int | None = None) -> Rank:
    shards._TILE = 4096  # so that what moves in tiles takes several
    if largest is not None:
        fragments.MAX_FRAGMENT_ELEMENTS = largest  # so that tensors are split between rows
    cluster = Cluster.from_torchrun()
    model, whole = awkward(dtype), awkward(dtype)
    exchanged = [*trainable_tensors(whole), *statistics_of(whole).items()]
    layout = partition([(name, tuple(t.shape)) for name, t in exchanged], pattern="balanced", fragments=2)
    WAYS[way](model)
    absent = elsewhere(cluster, dict(trainable_tensors(model)))
    weights = Shards(cluster, model, layout, matched_parameters(model, layout, absent=absent))
    return Rank(
        cluster=cluster,
        model=model,
        ours=Replica(model, layout, gradients=False, weights=weights),
        theirs=Replica(whole, layout, gradients=False),
        whole=whole,
    )


def same_weights(rank: Rank) -> bool:
    """Whether the shards of all ranks, replicas too, have the bits of the whole model."""
    rank.ours.weights.reshard()
    same = True
    for name, parameter in rank.ours.parameters.items():
        here, there = rank.ours.weights._local(name), rank.theirs.parameters[name].detach()
        offset, shape = box_of(name, parameter)
        for dimension, (first, count) in enumerate(zip(offset, shape, strict=True)):
            there = there.narrow(dimension, first, count)
        same = same and same_bits(here, there)
    return rank.cluster.all_agree(same)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.is_meta or torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def noise(numel: int, seed: int, scale: float = 1e-3) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def command(index: int, codec: str, seq: int = 1, version: int = 0) -> ev.Encode:
    blob = BlobId(kind=BlobKind.DELTA, fragment=index, version=version, node=NODE, incarnation=1, seq=seq)
    return ev.Encode(blob=blob, window=version + 1, codec=codec, steps=3, tokens=64)


def encoded_by_one(replica: Replica, asked: ev.Encode, residual: Tensor | None) -> Encoded:
    return encode_delta(replica, asked, replica.compute_delta(asked.blob.fragment), EPOCH, 1, residual)


def encoded_by_ranks(replica: Replica, asked: ev.Encode, residual: Tensor | None) -> Encoded:
    packed = pack_at_once(replica, asked, EPOCH, 1, residual)
    assert packed is not None
    return finish(packed)


def update(layout: Layout, index: int, codec: Codec, version: int, seed: int) -> bytearray:
    fragment = layout.fragments[index]
    x = noise(fragment.numel, seed)
    zero_padding_(fragment, x)
    header = BlobHeader(codec=codec, fragment=fragment, version=version, base=version - 1, epoch=EPOCH)
    return pack_blob(header, codec.encode(x, fragment, seed=header.seed))


def rounds(
    way: str, dtype: str, codecs: tuple[str, ...] = CODECS, largest: int | None = None, apart: str = ""
) -> dict[str, Any]:
    """Several rounds by one process and by ranks, each with its own steps of training, and what differed. `apart`:
    whose anchors are kept as if the weights were on another device."""
    rank = one_rank(way, getattr(torch, dtype), largest=largest)
    if apart:
        getattr(rank, apart).weights.apart = True
    ours, theirs, layout, leads = rank.ours, rank.theirs, rank.layout, rank.cluster.leads
    differ, compared, blobs = list[str](), 0, xxhash.xxh3_64()

    def check(what: str, equal: bool) -> None:
        nonlocal compared
        compared += 1
        if not equal:
            differ.append(what)

    frozen = Frozen(rank.model, rank.cluster, buffers=True).digest
    check("digest of what is frozen", frozen == Frozen(awkward(getattr(torch, dtype)), Cluster(), buffers=True).digest)
    version = dict.fromkeys(ours.anchors, 0)
    for index, fragment in enumerate(layout.fragments):
        first = _digest_of(theirs, index)
        assert theirs.first(index, first)
        check(f"another first anchor of {index}", _lead(rank, ours.first, index, 5) in (False, None))
        check(f"the first anchor of {index}", _lead(rank, ours.first, index, first) in (True, None))
        check(f"first anchor of {index}", not _part_differs(rank, index, ours.anchors[index], theirs.anchors[index]))
        moved = theirs.anchors[index].read() + noise(fragment.numel, 3 + index)
        zero_padding_(fragment, moved)
        blob = pack_anchor(moved, fragment, 0, EPOCH)
        assert theirs.install(index, 0, bytearray(blob), EPOCH)
        _lead(rank, ours.install, index, 0, bytearray(blob), EPOCH)
        check(f"anchor of {index}", not _part_differs(rank, index, ours.anchors[index], theirs.anchors[index]))
        if leads:
            check(f"digest of {index}", ours.digests == theirs.digests)
    for number, spelling in enumerate(codecs):
        codec = codec_named(spelling)
        for index, fragment in enumerate(layout.fragments):
            residual = ours_residual = None
            if codec.beta:
                residual = torch.zeros(fragment.numel)
                ours_residual = torch.zeros(ours.own[index].numel)
            for turn, mix in enumerate((0.5, 0.0)):
                rank.train()
                asked = command(index, spelling, seq=2 * number + turn, version=version[index])
                one = encoded_by_one(theirs, asked, residual)
                many = _lead(rank, encoded_by_ranks, ours, asked, ours_residual)
                told = f"{spelling} of {index}, turn {turn}"
                if many is not None:
                    blobs.update(many.data)
                    check(f"blob by {told}", many.data == one.data and many.offer == one.offer)
                    check(
                        f"ratio by {told}",
                        (many.residual_ratio or 0.0) == pytest.approx(one.residual_ratio or 0.0, rel=1e-9),
                    )
                if residual is not None:
                    lost = ours_residual if leads else ours._residuals[index]
                    assert lost is not None
                    check(f"residual by {told}", not _part_differs(rank, index, Kept(lost), Kept(residual)))
                version[index] += 1
                down = update(layout, index, codec_named(spelling), version[index], 10 * number + turn)
                assert not theirs.apply(index, version[index], bytearray(down), spelling, EPOCH, 0), "another digest"
                theirs.versions[index] = version[index]
                good = _lead(
                    rank, ours.apply, index, version[index], bytearray(down), spelling, EPOCH, theirs.digests[index]
                )
                check(f"update by {told}", good in (True, None))
                check(
                    f"anchor after {told}", not _part_differs(rank, index, ours.anchors[index], theirs.anchors[index])
                )
                own = ()
                if turn:
                    terms = WindowTerms(
                        fragment=index, window=asked.window, round=0, tau=0, mix=0.0, codec_up=spelling,
                        codec_down=spelling,
                    )  # fmt: skip
                    own = (OwnDelta(blob=asked.blob, terms=terms, data=one.data),)
                theirs.merge(index, mix, own, 0.3, EPOCH)
                _lead(rank, ours.merge, index, mix, own, 0.3, EPOCH)
                check(f"weights after {told}", same_weights(rank))
                if turn:
                    start, ahead = ours._starts[index], theirs._starts[index]
                    check(f"eager start after {told}", not _part_differs(rank, index, start, ahead))
                    learned = [
                        theirs.parsed(index, asked.window, asked.blob.version, spelling, EPOCH, one.data),
                        theirs.parsed(index, version[index], version[index] - 1, spelling, EPOCH, down),
                    ]
                    rates = {"outer_lr": 0.7, "lr_sum": 0.3, "alpha": 0.5}
                    theirs.learn(index, *learned, **rates)
                    _lead(rank, ours.learn, index, *learned, **rates)
                    theirs.correct(index, 0.01)
                    _lead(rank, ours.correct, index, 0.01)
                    check(
                        f"drift after {told}", not _part_differs(rank, index, ours.drifts[index], theirs.drifts[index])
                    )
                    check(f"corrected weights after {told}", same_weights(rank))
    for replica in (ours, theirs):
        for anchor in (kept.write() for kept in replica.anchors.values()):
            anchor.mul_(2.0)
    kept_aside = {name: ours.weights._local(name).clone() for name in ours.parameters}
    with theirs.anchors_in_place():
        seen = list[bool]()

        def evaluate() -> float:
            seen.append(same_weights(rank))
            return 0.5

        if leads:
            with ours.anchors_in_place():
                check("an evaluation", ours.evaluate(evaluate) == 0.5)
            ours.resume()
        else:
            ours.follow(evaluate)
        check("weights during an evaluation", seen == [True])
    restored = all(same_bits(ours.weights._local(name), kept) for name, kept in kept_aside.items())
    check("weights after an evaluation", restored)
    sent = _lead(rank, ours.anchor_blob, 0, EPOCH)
    if leads:
        expected = pack_anchor(theirs.anchors[0].read(), layout.fragments[0], theirs.versions[0], EPOCH)
        check("a snapshot", sent == theirs.anchor_blob(0, EPOCH) == expected)
    kept = sum(anchor.numel for anchor in ours.anchors.values())
    return {
        "differ": differ,
        "compared": compared,
        "blobs": blobs.hexdigest(),
        "kept": kept,
        "all": sum(f.numel for f in layout.fragments),
    }


def _lead(rank: Rank, work: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """What the lead's work returns; None on the other ranks, which take part."""
    if not rank.cluster.leads:
        rank.ours.follow(lambda: None)
        return None
    done = work(*given, **options)
    rank.ours.resume()
    return done


def _digest_of(whole: Replica, index: int) -> int:
    fragment = whole.layout.fragments[index]
    flat = torch.empty(fragment.numel)
    fragments.flatten_into(fragment, {n: p.detach() for n, p in whole.parameters.items()}, flat)
    return digest(flat)


def _part_differs(rank: Rank, index: int, own: Kept, whole: Kept) -> bool:
    return any(
        not same_bits(own.read()[start : start + count], whole.read()[place : place + count])
        for place, start, count in rank.ours.weights.own[index].runs
    )


def faults(way: str) -> dict[str, Any]:
    """What every rank raises or answers when something is wrong: a NaN in the last rank's shard, damaged updates."""
    rank = one_rank(way, torch.float32)
    ours, layout = rank.ours, rank.layout
    for index in ours.anchors:
        assert rank.theirs.first(index, _digest_of(rank.theirs, index))
        _lead(rank, ours.install, index, 0, rank.theirs.anchor_blob(index, EPOCH), EPOCH)
    before = {index: anchor.read().clone() for index, anchor in ours.anchors.items()}
    codec = codec_named("q4")
    good = update(layout, 0, codec, 1, 5)
    cut, flipped = good[:-1], bytearray(good)
    flipped[-3] ^= 1
    answers = [_lead(rank, ours.apply, 0, 1, blob, "q4", EPOCH, 0) for blob in (cut, flipped)]
    untouched = all(same_bits(ours.anchors[index].read(), was) for index, was in before.items())
    wrong = _lead(rank, ours.apply, 0, 1, bytearray(good), "q4", EPOCH, 0)  # not the announced digest
    lost = ours.versions[0]
    snapshot = pack_anchor(rank.theirs.anchors[0].read(), layout.fragments[0], 1, EPOCH)
    mended = _lead(rank, ours.install, 0, 1, snapshot, EPOCH)
    name = "experts.down"
    local = ours.weights._local(name)
    with torch.no_grad():
        if rank.cluster.rank == rank.cluster.size - 1:
            local.reshape(-1)[-1:] = float("nan")
            assert local.numel()
    index = next(f.index for f in layout.fragments if name in {slot.name for slot in f.tensors})
    raised = ""
    try:
        _lead(rank, encoded_by_ranks, ours, command(index, "q4"), None)
    except NonFiniteDelta as error:
        raised = str(error)
    return {
        "answers": answers, "untouched": untouched, "wrong": wrong, "lost": lost, "mended": mended, "raised": raised
    }  # fmt: skip


def refusals() -> dict[str, str]:
    """What `Shards` and `check_codecs` say of what they cannot take, on every rank."""
    cluster = Cluster.from_torchrun()
    mesh = init_device_mesh("cpu", (2,))

    def sharded(local: Tensor, placement: Placement, *shape: int) -> DTensor:
        stride = torch.empty(shape).stride()
        return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)

    made = {
        "partial": sharded(torch.ones(4, 6), Partial(), 4, 6),
        "gaps": sharded(torch.ones(6), _StridedShard(0, split_factor=3), 12),
        "shape": sharded(torch.ones(3, 6), Shard(0), 8, 6),
    }
    told = {}
    for what, tensor in made.items():
        model = nn.Module()
        model.weight = nn.Parameter(tensor)
        layout = partition([("weight", tuple(tensor.shape))], pattern="whole")
        try:
            Shards(cluster, model, layout, {"weight": model.weight})
        except LoopError as error:
            told[what] = str(error)
    kinds = nn.Module()
    kinds.weight = nn.Parameter(torch.ones(3, dtype=torch.float32 if cluster.leads else torch.bfloat16))
    try:
        Shards(cluster, kinds, partition([("weight", (3,))], pattern="whole"), {"weight": kinds.weight})
    except LoopError as error:
        told["types"] = str(error)
    return told


def evaluated_before() -> list[bool]:
    """Whether FSDP2 shows a whole copy of a weight after a forward pass, and a shard once it is put back."""
    model = nn.Sequential(nn.Linear(6, 5))
    fully_shard(model)
    with torch.no_grad():
        model(torch.ones(1, 6))
    seen = [is_dtensor(model[0].weight)]
    reshard(model)
    return [*seen, is_dtensor(model[0].weight)]


def samples() -> list[list[int]]:
    """Of a batch of eight, which this rank trains on: over a dimension of data, and over one of tensors (T12)."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    return [list(Cluster.from_torchrun(data).mine(tuple(range(8)))) for data in (mesh["dp"], None)]


def mixed_precision() -> dict[str, Any]:
    """Two steps of a built-in model that computes in bf16 and is sharded: what its blocks see, and what is stepped."""
    model = build(PRESETS["nano"], 0)
    seen = list[torch.dtype]()
    model.blocks[0].attention.qkv.register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
    shard_blocks_(model, torch.device("cpu"), dist.get_world_size(), computes=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    for step in range(2):
        loss = causal_lm_loss(model, torch.arange(66).view(2, 33) + step)
        loss.backward()
        optimizer.step()
    after = [parameter.to_local() for parameter in model.parameters()]
    moved = sum(int((one != other).sum()) for one, other in zip(before, after, strict=True))
    return {
        "seen": {str(dtype) for dtype in seen},
        "kept": {str(parameter.dtype) for parameter in after},
        "moved": moved / sum(parameter.numel() for parameter in after),
        "loss": loss.item(),
    }


def give_gradients(ours: nn.Module, alone: nn.Module, generator: torch.Generator) -> None:
    """Equal ones to a sharded model and to one process'."""
    for mine, one in zip(trainable_tensors(ours), trainable_tensors(alone), strict=True):
        gradient = torch.randn(one[1].shape, generator=generator)
        one[1].grad, spread = gradient, is_dtensor(mine[1])
        mine[1].grad = torch.zeros_like(mine[1]) if spread else gradient
        part = gradient
        for dimension, (begin, count) in enumerate(zip(*box_of(*mine), strict=True)):
            part = part.narrow(dimension, begin, count)
        local_of(mine[1].grad).copy_(part)


def torch_muon_steps(way: str) -> tuple[float, float]:
    """How far three steps of torch's Muon on a sharded model end from those of one process, and how far they go,
    as norms of all matrices."""
    ours, alone = awkward(), awkward()
    WAYS[way](ours)
    generator = torch.Generator().manual_seed(2)
    first = [p.detach().clone() for _, p in trainable_tensors(alone) if p.ndim == 2]
    muons = [torch.optim.Muon([p for _, p in trainable_tensors(m) if p.ndim == 2], lr=0.1) for m in (ours, alone)]
    for _ in range(3):
        give_gradients(ours, alone, generator)
        for muon in muons:
            muon.step()
    ends = [[whole(p.detach()) for group in muon.param_groups for p in group["params"]] for muon in muons]
    far = sum(float((mine - one).square().sum()) for mine, one in zip(*ends, strict=True)) ** 0.5
    went = sum(float((one - begin).square().sum()) for one, begin in zip(ends[1], first, strict=True)) ** 0.5
    return far, went


def muon_steps(way: str) -> tuple[bool, int, int]:
    """Whether three steps of the default Muon on a sharded model have the bits of those of one process, how many of
    its matrices were sharded, and of how many this rank computed a direction, over all steps."""
    terms = plain_terms(inner_optimizer="muon", lr=LearningRate(peak=0.1))
    ours, alone = awkward(), awkward()
    WAYS[way](ours)
    stacks = list[torch.Tensor]()
    inner_optimizer.orthogonal = lambda stack: stacks.append(stack) or orthogonal(stack)
    optimizers = default_optimizer(ours, terms), default_optimizer(alone, terms)
    generator, computed = torch.Generator().manual_seed(2), 0
    for _ in range(3):
        give_gradients(ours, alone, generator)
        optimizers[0].step()
        computed += sum(int(bool(matrix.any())) for stack in stacks for matrix in stack)
        optimizers[1].step()
        stacks.clear()
    pairs = zip(trainable_tensors(ours), trainable_tensors(alone), strict=True)
    same = all(same_bits(whole(mine.detach()), one.detach()) for (_, mine), (_, one) in pairs)
    muon = optimizers[0].parts[0]
    return same, sum(is_dtensor(p) for group in muon.param_groups for p in group["params"]), computed


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has a state, of numbers that follow from the weights."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5 if parameter.requires_grad else None
        optimizer.step()
    for parameter, state in optimizer.state.items():
        state["p0"] = parameter.detach().clone()  # a copy of the weights
    return optimizer


def moved_copies(way: str) -> float:
    """How far copies in the state, and those moved by on_merge, are from the weights after a merge by about 1."""
    rank, far = one_rank(way, torch.float32), 0.0
    optimizer = stepped(rank.model)
    beside = {p: local_of(p.detach()).clone() for p in optimizer.state}
    for parameter, state in optimizer.state.items():
        state["master"] = parameter.detach().clone()

    def told(changes: Mapping[nn.Parameter, Tensor]) -> None:
        for parameter, change in changes.items():
            beside[parameter].add_(change)

    rank.ours.merges = Merges(optimizer, rank.ours.parameters, rank.layout, told)
    for index, fragment in enumerate(rank.layout.fragments):
        anchor = noise(fragment.numel, index, 1.0)
        zero_padding_(fragment, anchor)
        _lead(rank, rank.ours.install, index, 7, bytearray(pack_anchor(anchor, fragment, 7, EPOCH)), EPOCH)
        _lead(rank, rank.ours.merge, index, 0.0)
    for parameter, state in optimizer.state.items():
        for copy in (state["master"], state["p0"], beside[parameter]):
            off = (local_of(copy) - local_of(parameter.detach())).abs()
            far = max(far, float(off.max()) if off.numel() else 0.0)
    return far


def saved(way: str, folder: Path) -> tuple[dict[int, int], list[Any]]:
    """Every rank writes its part of the anchors at version 7 and of the optimizer's state, and the lead updates to 8:
    the digests at 8, and of one process's state."""
    rank = one_rank(way, torch.float32)
    ours, theirs, layout = rank.ours, rank.theirs, rank.layout
    ours.files = AnchorFiles(folder)
    ours.moments = Moments(stepped(rank.model), ours.weights, layout, ours.files)
    one, states = Moments(stepped(rank.whole), theirs.weights, layout, AnchorFiles(folder / "of_one")), list[Any]()
    for index, fragment in enumerate(layout.fragments):
        anchor = noise(fragment.numel, index)
        zero_padding_(fragment, anchor)
        blob = bytearray(pack_anchor(anchor, fragment, 7, EPOCH))
        assert theirs.install(index, 7, blob, EPOCH)
        _lead(rank, ours.install, index, 7, blob, EPOCH)
        head = Head(run="run", history=0, fragment=index, version=7, digest=digest(anchor), size=4 * fragment.numel)
        _lead(rank, ours.save, index)
        _lead(rank, ours.end_save, head)
        state = _lead(rank, ours.moments.save, head)
        if not fragment.averaged:  # no optimizer has a state of statistics
            _lead(rank, ours.end_save, state)
            states.append(one.save_here(index, 7))
        down = update(layout, index, codec_named("q4"), 8, index)
        theirs.apply(index, 8, bytearray(down), "q4", EPOCH, 0)
        if rank.cluster.leads:
            ours.files.add(replace(head, version=8, digest=theirs.digests[index], size=len(down), codec="q4"), down)
    ours.files.close()
    return theirs.digests, states


def loaded(way: str, folder: Path) -> tuple[dict[int, int], list[Any]] | None:
    """As `saved` returns them, of what the ranks read; None from the other ranks, and 0 for another anchor than was
    written."""
    rank = one_rank(way, torch.float32)
    ours, files = rank.ours, AnchorFiles(folder)
    optimizer = torch.optim.AdamW([p for p in rank.model.parameters() if p.requires_grad], lr=1e-3)
    ours.files, moments = files, Moments(optimizer, ours.weights, rank.layout, files)
    ours.moments, states = moments, list[Any]()

    def restore() -> tuple[dict[int, int], list[Any]]:
        files.find()
        for index in ours.own:
            base = files.base(index)
            good = base is not None and ours.load(index, base.version, base.digest)
            for head, data in files.updates(index) if good else ():
                good = ours.apply(index, head.version, data, head.codec, EPOCH, head.digest)
            ours.digests[index] *= good and ours.versions[index] == 8
            if good and base is not None and moments.load(index):
                again = moments.save(replace(base, version=9))
                states.append(again and (again.more["state"], again.more["digests"]))
                ours.end_save(None)
        return ours.digests, states

    told: tuple[dict[int, int], list[Any]] | None = _lead(rank, restore)
    return told


def shared_state(folder: Path) -> bool:
    """Whether ranks that hold the model whole have the state that the lead alone has read."""
    rank = one_rank("plain", torch.float32)
    wanted, layout = stepped(rank.whole), rank.layout
    rank.model.load_state_dict(rank.whole.state_dict())
    optimizer = torch.optim.AdamW([p for p in rank.model.parameters() if p.requires_grad], lr=1e-3)
    kept = Moments(wanted, rank.theirs.weights, layout, AnchorFiles(folder / str(rank.cluster.rank)))
    files = AnchorFiles(folder / str(rank.cluster.rank))
    moments = Moments(optimizer, Weights(layout, matched_parameters(rank.model, layout)), layout, files)
    if rank.cluster.leads:
        trained = [fragment.index for fragment in layout.fragments if not fragment.averaged]
        for index in trained:
            anchor = Head(run="run", history=0, fragment=index, version=7, digest=0, size=0)
            kept._files.begin(index, 7, [], lambda: torch.empty(0))
            for head in (anchor, kept.save(anchor) if kept._files.finish_save() else None):
                assert head is not None and (head is anchor or kept._files.finish_save())
                kept._files.finish(head)
        kept._files.close()
        files.find()
        assert all(moments.load(index) for index in trained)
    moments.share(rank.cluster)
    here, there = (each.state_dict()["state"] for each in (optimizer, wanted))
    return all(torch.equal(here[number][key], value) for number in there for key, value in there[number].items())


def accumulated() -> dict[str, Any]:
    """The gradient after a backward pass inside `no_sync`, and after one more outside, by who averages."""
    cluster, found = Cluster.from_torchrun(), dict[str, Any]()
    for way in ("ddp", "none", "fully_shard"):
        module = nn.Linear(2, 2, bias=False)
        nn.init.ones_(module.weight)
        if way == "fully_shard":
            fully_shard(module)
        layout = partition([("weight", (2, 2))], pattern="whole")
        spec = RunSpec(identity=identity(layout), terms=plain_terms(method="diloco"))
        options = LoopOptions(
            model=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
            wrap="none" if way == "none" else "ddp",
        )
        node = Node(Held(cluster, watch=HangWatch(cluster, 0.0)), NodeConfig(name="a"), options, spec)
        x = torch.full((1, 2), 1.0 + cluster.rank)
        with node.no_sync():
            node.model(x).sum().backward()
        alone = None if module.weight.grad is None else module.weight.grad[0, 0].item()
        node.model(10 * x).sum().backward()
        assert module.weight.grad is not None
        found[way] = [alone, whole(module.weight.grad)[0, 0].item()]
    return found
