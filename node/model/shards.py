"""The local weights that a node's deltas are taken from and its anchors are merged into: whole, or sharded over ranks.

farloop shards nothing itself: it takes the DTensors that the training loop has made (FSDP2, HSDP, tensor parallelism).
Every rank keeps the anchors of its own part of each fragment (`algo/shards.py` says which), and encodes that. Rank 0,
the lead, owns the link. It puts payloads together from the ranks' codes and deals out those that come.
The bytes that are sent, the anchors and the merged weights are those of a node of one process: nothing here computes.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from farloop.algo.fragments import rows_of, view
from farloop.algo.local_update import correct_, mix_fragment_into, mix_into
from farloop.algo.shards import Box, Move, OwnPart, check_cover, moves_of, part_of, ranges_of
from farloop.algo.spec import TILE, Fragment, Layout
from farloop.algo.stages import Part, fragments_of
from farloop.node.cluster import Cluster
from farloop.node.errors import LoopError, TermsMismatch
from farloop.node.settings import Where
from farloop.quant.codec import Codec
from farloop.quant.digest import box_digest, combine, digest
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.registry import CODECS, codec_named

_TILE: Final = TILE
"""Elements, 4 MiB of fp32: bounds the buffers for what moves between ranks."""

_EMPTY: Final = torch.empty(0, dtype=torch.uint8, device="cpu")


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a part of a tensor that lies on several ranks. If DTensors were not imported, none exists: to
    import them takes as long as half of torch. While another thread imports them, the module is there without them."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def is_sharded(module: nn.Module) -> bool:
    """Whether any parameter is a DTensor."""
    return any(map(is_dtensor, module.parameters()))


def is_on_all(parameters: Iterable[Tensor], ranks: int) -> bool:
    """Whether each is a DTensor over all ranks of the node: then all know the norm of all gradients."""
    return all(is_dtensor(each) and each.device_mesh.size() == ranks for each in parameters)  # type: ignore[attr-defined]


def is_split(cluster: Cluster, tensors: Iterable[Tensor]) -> bool:
    """Whether a rank lacks any part of these tensors: of DTensors, or of those that are `elsewhere`. The same answer on
    all ranks, which all call this."""
    return not cluster.all_agree(not any(is_dtensor(tensor) or tensor.is_meta for tensor in tensors))


def elsewhere(cluster: Cluster, tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """What other ranks have and this one has not, as where the loop has cut the model into stages of a pipeline: by
    name, of the whole shape, without memory. All ranks call this."""
    told = cluster.gather([[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors.items()])
    for rank, of_rank in enumerate(told):
        for name, _, dtype in of_rank:
            if name in tensors and (here := str(tensors[name].dtype)) != dtype:
                raise LoopError(
                    f"parameter {name!r} is {dtype} on rank {rank} and {here} on rank {cluster.rank}: give join the "
                    "same model on all ranks"
                )
    return {
        name: nn.Parameter(torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta"), False)
        for of_rank in told
        for name, shape, dtype in of_rank
        if name not in tensors
    }


class ModelParts(nn.Module):
    """Parts of one model that a rank has apart, as one module with the names of the whole; without a forward pass."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        """Raises LoopError: two parts have a parameter of one name."""
        super().__init__()
        self.parts = nn.ModuleList(parts)
        owners: dict[str, nn.Parameter] = {}
        for part in parts:
            for name, parameter in part.named_parameters(remove_duplicate=False):
                if owners.setdefault(name, parameter) is not parameter:
                    raise LoopError(
                        f"two parts of the model have a parameter {name!r}: give them the names that they have in the "
                        "whole model"
                    )

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Those of the parts: the names of parameters and buffers follow from these."""
        memo = set() if memo is None else memo
        for part in self.parts:
            yield from part.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *given: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name: value for part in self.parts for name, value in part.state_dict(*given, **options).items()}


def reshard(module: nn.Module) -> None:
    """Have FSDP2's shards in their place: a forward pass without a backward pass leaves whole copies there."""
    for part in module.modules():
        # That of FSDPModule, which is not imported: torch.distributed.fsdp takes a good part of a node's start.
        if callable(put_back := getattr(part, "reshard", None)):
            put_back()


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or that which a DTensor is a part of: all of its ranks have to call this."""
    gathered: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return gathered


def check_codecs(spellings: Iterable[str]) -> None:
    """Raises TermsMismatch for a codec of which ranks cannot encode parts: it needs a tensor or a fragment whole."""
    for spelling in spellings:
        if not isinstance(codec_named(spelling), BlockCodec):
            works = ", ".join(name for name, codec in CODECS.items() if isinstance(codec, BlockCodec))
            raise TermsMismatch(
                f"the run's codec {spelling} needs whole tensors, and this node's model is sharded: codecs for a run "
                f"with sharded models are {works}"
            )


# --- Whole


class Weights:
    """The local weights of a process that holds the model whole. It keeps all of every fragment."""

    sharded = False

    def __init__(
        self,
        layout: Layout,
        parameters: Mapping[str, nn.Parameter],
        holds: Part = None,
        anchors: Where = "device",
    ) -> None:
        """`parameters`: by the layout's names. `anchors`: where they are kept, by the parameters or in host memory;
        "auto": there at first."""
        self.fragments = fragments_of(holds, layout)  # held ones, in order
        self.parameters = parameters
        here = (parameter.device for parameter in parameters.values() if not parameter.is_meta)
        self.device = next(here, torch.device("cpu"))  # where deltas and merges are computed
        self.home = self.device if anchors == "device" else torch.device("cpu")  # of what a node keeps
        self.apart = self.home != self.device
        self.own = {f.index: OwnPart(fragment=f, runs=((0, 0, f.numel),)) for f in self.fragments}
        self._whole = {f.index: f for f in self.fragments}
        self._kept: dict[str, Tensor] = {}
        self._cluster = Cluster()  # of this process alone

    def sources(self, index: int, *, gradients: bool) -> Mapping[str, Tensor]:
        """What a delta is taken from, weights or gradients (zeros for none), by the names of the own part's tensors."""
        names = {slot.name for slot in self._whole[index].tensors}
        return {name: self._source(self.parameters[name], gradients=gradients) for name in names}

    def mix(self, index: int, start: Tensor, mix: float) -> None:
        """local ← mix·local + (1 − mix)·start on every rank; start is fp32 [numel of the own part], on `device`."""
        mix_fragment_into(self._whole[index], self.parameters, start, mix)

    def correct(self, index: int, drift: Tensor, lr: float) -> None:
        """local ← local − lr · drift on every rank; drift is fp32 [numel of the own part], on `device`."""
        for slot in self._whole[index].tensors:
            correct_(rows_of(self._local(slot.name), slot), view(drift, slot).view(-1), lr)

    def set_aside(self) -> None:
        """Set the local weights aside, in host memory, until `restore`."""
        self.reshard()
        here = [name for name, parameter in self.parameters.items() if not parameter.is_meta]
        self._kept = {name: self._local(name).to("cpu", copy=True) for name in here}

    def reshard(self) -> None:
        """Have the shards in their place."""

    def restore(self) -> None:
        """Put the weights back that `set_aside` saved."""
        self.reshard()
        for name, kept in self._kept.items():
            self._local(name).copy_(kept)
        self._kept = {}

    def digest(self, index: int, anchor: Tensor) -> int:
        """Of the whole fragment; `anchor` is the own part, fp32."""
        return digest(anchor)

    def gather(self, value: Any) -> list[Any]:
        """A plain value of every rank, by rank."""
        return self._cluster.gather(value)

    def payload_of(self, index: int, codec: Codec, payload: Tensor | None) -> Tensor:
        """The own part's payload. The whole one is given on the lead alone."""
        assert payload is not None
        return payload

    def collect(self, index: int, codec: Codec, payload: Tensor) -> "Collected":
        """Begin to put the whole payload together on the lead, of that of every rank's own part."""
        return Collected(received=[(payload, [(slice(None), slice(None))])])

    def collect_into(self, index: int, codec: Codec, x: Tensor, out: Tensor | None) -> None:
        """Write the whole payload of what every rank has of a fragment, x fp32 [numel of the own part], into the lead's
        `out`, uint8 [payload bytes]; None on other ranks."""
        assert out is not None
        codec.encode_into(x, out, self._whole[index])

    def broadcast(self, *action: Any) -> None:
        """The lead: let the other ranks take part in what it does next."""
        self._cluster.broadcast(action)

    def receive(self) -> Any:
        """The other ranks: what the lead told."""
        return self._cluster.receive()

    def _local(self, name: str) -> Tensor:
        return self.parameters[name].detach()

    def _source(self, parameter: nn.Parameter, *, gradients: bool) -> Tensor:
        if not gradients:
            return parameter.detach()
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A payload on its way to the lead."""

    received: Sequence[tuple[Tensor, Sequence[tuple[slice, slice]]]] = ()
    """Of every rank: its bytes, and where they belong in the whole payload and lie in these."""
    gap: slice = field(default_factory=lambda: slice(0, 0))
    work: dist.Work | None = None

    def into(self, out: Tensor) -> None:
        """The lead, in any thread: wait for all bytes, and write the whole payload, uint8 [payload bytes]."""
        if self.work is not None:
            self.work.wait()
        out[self.gap] = 0
        for data, places in self.received:
            for there, here in places:
                out[there] = data[here]


# --- Sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What one rank does for a fragment."""

    fragment: Fragment
    own: OwnPart
    parts: tuple[OwnPart, ...]  # of all ranks, by rank
    moves: tuple[Move, ...]
    pieces: Mapping[int, tuple[int, int]]
    """By the place of a tensor in the fragment: the first element of the own range in the flat tensor, and its place
    among the own part's tensors."""
    dtypes: tuple[torch.dtype, ...]  # of the fragment's tensors, in an order that all ranks share


class Shards(Weights):
    """The local weights of one rank of several. All ranks call the same methods in the same order: the lead sends the
    others what is next (`broadcast`, `receive`). Everything moves over the CPU, never over an accelerator's group."""

    sharded = True

    def __init__(
        self,
        cluster: Cluster,
        module: nn.Module,
        layout: Layout,
        parameters: Mapping[str, nn.Parameter],
        holds: Part = None,
        anchors: Where = "device",
    ) -> None:
        """`parameters`: the module's, by the layout's names, with the shards in their place (`reshard`).

        Raises LoopError, on all ranks: shards that are no boxes, or do not make the tensors.
        """
        super().__init__(layout, parameters, holds, anchors)
        self._cluster, self._module = cluster, module
        boxes, self._dtypes = _share_boxes(cluster, parameters)
        self._boxes = {name: next((b for b in found if b.rank == cluster.rank), None) for name, found in boxes.items()}
        ranges = ranges_of(self.fragments, boxes)
        _check_same(cluster, repr(ranges))
        self._plans: dict[int, _Plan] = {}
        for fragment in self.fragments:
            parts = tuple(part_of(fragment, ranges[fragment.index], rank) for rank in range(cluster.size))
            mine = [own for own in ranges[fragment.index] if own.rank == cluster.rank]
            names = dict.fromkeys(slot.name for slot in fragment.tensors)
            self._plans[fragment.index] = _Plan(
                fragment=fragment,
                own=parts[cluster.rank],
                parts=parts,
                moves=tuple(moves_of(fragment, boxes, ranges[fragment.index], cluster.rank)),
                pieces={
                    own.tensor: (own.start - fragment.tensors[own.tensor].offset, place)
                    for place, own in enumerate(mine)
                },
                dtypes=tuple(sorted({self._dtypes[name] for name in names}, key=str)),
            )
        self.own = {index: plan.own for index, plan in self._plans.items()}
        cluster.begin_codes()
        self._sending: list[dist.Work] = []

    def digest(self, index: int, anchor: Tensor) -> int:
        runs = self.own[index].runs
        own = combine(digest(anchor[at : at + count], first_index=start) for start, at, count in runs)
        return combine(self.gather(own))

    def sources(self, index: int, *, gradients: bool) -> Mapping[str, Tensor]:
        """Flat, on `device`."""
        self.reshard()
        plan, me = self._plans[index], self._cluster.rank
        up = [move for move in plan.moves if move.up]
        local = {
            slot.name: self._local_source(slot.name, gradients=gradients)
            for slot in plan.fragment.tensors
            if self._boxes[slot.name] is not None
        }
        arrived = self._swap(
            plan,
            [(move.keeper, move, self._region(plan, move, local)) for move in up if move.holder == me],
            [(move.holder, move) for move in up if move.keeper == me],
            typed=True,
        )
        by_tensor: dict[int, list[tuple[Move, Tensor]]] = {}
        for move, values in arrived:
            by_tensor.setdefault(move.tensor, []).append((move, values.to(self.device)))
        found: dict[str, Tensor] = {}
        for tensor, moves in by_tensor.items():
            slot = plan.own.fragment.tensors[plan.pieces[tensor][1]]
            if len(moves) == 1:
                found[slot.name] = moves[0][1].reshape(-1)
                continue
            flat = torch.empty(slot.numel, dtype=moves[0][1].dtype, device=self.device)
            for move, values in moves:
                self._place(plan, move, flat).copy_(values)
            found[slot.name] = flat
        return found

    def mix(self, index: int, start: Tensor, mix: float) -> None:
        if mix == 1.0:
            return
        for local, values in self.spread(index, start, typed=mix == 0.0):
            if mix == 0.0:
                local.copy_(values)
            else:
                mix_into(local, values.to(local.device).reshape(-1), mix)

    def correct(self, index: int, drift: Tensor, lr: float) -> None:
        for local, values in self.spread(index, drift, typed=False):
            correct_(local, values.to(local.device).reshape(-1), lr)

    def spread(self, index: int, flat: Tensor, *, typed: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Move numbers of the own part, fp32, back to every holder: parts of this rank's shards, which share their
        memory, and the numbers for them, on `device` or in host memory; `typed` in the parameter's number type."""
        self.reshard()
        plan, me = self._plans[index], self._cluster.rank
        slots = plan.own.fragment.tensors
        sends = list[tuple[int, Move, Tensor]]()
        for move in plan.moves:
            if move.keeper != me:
                continue
            slot = slots[plan.pieces[move.tensor][1]]
            values = self._place(plan, move, flat[slot.offset : slot.offset + slot.numel])
            dtype = self._dtypes[plan.fragment.tensors[move.tensor].name]
            sends.append((move.holder, move, values.to(dtype) if typed else values))
        receives = [(move.keeper, move) for move in plan.moves if move.holder == me]
        local = {slot.name: self._local(slot.name) for slot in plan.fragment.tensors if self._boxes[slot.name]}
        for move, values in self._swap(plan, sends, receives, typed=typed):
            yield self._region(plan, move, local), values

    def payload_of(self, index: int, codec: Codec, payload: Tensor | None) -> Tensor:
        assert isinstance(codec, BlockCodec)
        own = torch.zeros(codec.payload_bytes(self.own[index].fragment), dtype=torch.uint8, device="cpu")
        for places in self._tiles(index, codec):
            mine = [here for _, here in places[self._cluster.rank]]
            parts = [_EMPTY] * self._cluster.size
            if payload is not None:
                parts = [torch.cat([_EMPTY, *(payload[there] for there, _ in of_rank)]) for of_rank in places]
            sizes = [0] * self._cluster.size
            sizes[0] = sum(map(_length, mine))
            _deal_out(self._cluster.swap(parts, sizes)[0], own, mine)
        return own

    def collect_into(self, index: int, codec: Codec, x: Tensor, out: Tensor | None) -> None:
        assert isinstance(codec, BlockCodec)
        own = codec.encode(x, self.own[index].fragment).cpu()
        if out is not None:
            out[codec.layout.gap(self._plans[index].fragment.numel)] = 0
        for places in self._tiles(index, codec):
            parts = [_EMPTY] * self._cluster.size
            parts[0] = torch.cat([_EMPTY, *(own[here] for _, here in places[self._cluster.rank])])
            theirs = [[there for there, _ in of_rank] for of_rank in places]
            sizes = [sum(map(_length, of_rank)) if out is not None else 0 for of_rank in theirs]
            for of_rank, data in zip(theirs, self._cluster.swap(parts, sizes), strict=True):
                if out is not None:
                    _deal_out(data, out, of_rank)

    def _tiles(self, index: int, codec: BlockCodec) -> Iterator[list[list[tuple[slice, slice]]]]:
        """Of every tile of a fragment and rank: where the same bytes are in the whole payload and in that of the rank's
        part. What moves whole payloads a tile at a time takes no memory for them."""
        plan = self._plans[index]
        for first in range(0, plan.fragment.numel, _TILE):
            yield [
                list(codec.slices(plan.fragment, part.fragment, _inside(part.runs, first, first + _TILE)))
                for part in plan.parts
            ]

    def collect(self, index: int, codec: Codec, payload: Tensor) -> Collected:
        """Returns at once: the bytes move while training goes on, in a group of their own."""
        assert isinstance(codec, BlockCodec)
        plan = self._plans[index]
        parts = [torch.empty(0, dtype=torch.uint8, device="cpu")] * self._cluster.size
        parts[0] = payload
        sizes = [codec.payload_bytes(part.fragment) if self._cluster.leads else 0 for part in plan.parts]
        received, work = self._cluster.begin_swap(parts, sizes, self._cluster.codes)
        while self._sending and self._sending[0].is_completed():
            self._sending.pop(0).wait()  # raises what went wrong
        if work is not None:
            self._sending.append(work)
        places = [list(codec.slices(plan.fragment, part.fragment, part.runs)) for part in plan.parts]
        gap = codec.layout.gap(plan.fragment.numel)
        return Collected(received=list(zip(received, places, strict=True)), gap=gap, work=work)

    def reshard(self) -> None:
        reshard(self._module)

    def _swap(
        self,
        plan: _Plan,
        sends: Sequence[tuple[int, Move, Tensor]],
        receives: Sequence[tuple[int, Move]],
        *,
        typed: bool,
    ) -> Iterator[tuple[Move, Tensor]]:
        """Send the tensors to ranks; what arrives, each in the shape of its move. What stays here is not copied."""
        me = self._cluster.rank
        yield from ((move, values) for rank, move, values in sends if rank == me)
        for dtype in plan.dtypes if typed else (torch.float32,):

            def fits(move: Move, dtype: torch.dtype = dtype) -> bool:
                return not typed or self._dtypes[plan.fragment.tensors[move.tensor].name] == dtype

            out: list[list[Tensor]] = [[] for _ in range(self._cluster.size)]
            for rank, move, values in sends:
                if rank != me and fits(move):
                    out[rank].append(values.reshape(-1))
            incoming: list[list[Move]] = [[] for _ in range(self._cluster.size)]
            for rank, move in receives:
                if rank != me and fits(move):
                    incoming[rank].append(move)
            parts = [torch.cat(values).cpu().view(torch.uint8) if values else _EMPTY for values in out]
            counts = [sum(_count(move) for move in moves) for moves in incoming]
            for moves, data in zip(
                incoming, self._cluster.swap(parts, [n * dtype.itemsize for n in counts]), strict=True
            ):
                at, values = 0, data.view(dtype).to(self.device)
                for move in moves:
                    yield move, values[at : at + _count(move)].view(move.shape)
                    at += _count(move)

    def _place(self, plan: _Plan, move: Move, flat: Tensor) -> Tensor:
        """The elements of a move in the own range of its tensor, `flat` [count], as a view."""
        strides, at = list[int](), 0
        for extent in reversed(plan.fragment.tensors[move.tensor].shape):
            strides.insert(0, at or 1)
            at = strides[0] * extent
        first = sum(offset * stride for offset, stride in zip(move.offset, strides, strict=True))
        begin = first - plan.pieces[move.tensor][0]
        return flat.as_strided(move.shape, strides, flat.storage_offset() + begin)

    def _region(self, plan: _Plan, move: Move, local: Mapping[str, Tensor]) -> Tensor:
        """The elements of a move in this rank's shard, as a view."""
        slot = plan.fragment.tensors[move.tensor]
        box, region = self._boxes[slot.name], local[slot.name]
        assert box is not None
        for dimension, (first, count) in enumerate(zip(move.offset, move.shape, strict=True)):
            rows = slot.rows[0] if slot.rows is not None and dimension == 0 else 0
            region = region.narrow(dimension, first + rows - box.offset[dimension], count)
        return region

    def _local(self, name: str) -> Tensor:
        return local_of(self.parameters[name]).detach()

    def _local_source(self, name: str, *, gradients: bool) -> Tensor:
        parameter = self.parameters[name]
        source = self._source(parameter, gradients=gradients)
        if gradients and is_dtensor(source) and source.placements != parameter.placements:  # type: ignore[attr-defined]
            source = source.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        return local_of(source).detach()


def _inside(runs: Iterable[tuple[int, int, int]], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """What is in [first, last) of the runs of an `OwnPart`."""
    for index, start, count in runs:
        begin, end = max(index, first), min(index + count, last)
        if begin < end:
            yield begin, start + begin - index, end - begin


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _deal_out(data: Tensor, out: Tensor, places: Iterable[slice]) -> None:
    """Copy bytes that lie side by side to their places."""
    at = 0
    for place in places:
        out[place] = data[at : at + _length(place)]
        at += _length(place)


def _count(move: Move) -> int:
    return int(torch.Size(move.shape).numel())


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory."""
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return local


@contextmanager
def unaveraged(model: nn.Module) -> Iterator[None]:
    """Backward passes inside do not average gradients over ranks: of a model in DistributedDataParallel, or sharded by
    FSDP2; any other model never does."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
        return
    # That of FSDPModule, whose import takes a good part of a node's start.
    set_sync = getattr(model, "set_requires_gradient_sync", lambda syncs: None)
    set_sync(False)
    try:
        yield
    finally:
        set_sync(True)


# --- What the ranks hold


def tensor_digests(cluster: Cluster, tensors: Mapping[str, Tensor]) -> list[int]:
    """The `digest` of every tensor, flat, as fp32, however it is sharded; all ranks call this, and those of the same
    box leave it to the first of them. Raises LoopError as `Shards`."""
    if not is_split(cluster, tensors.values()):
        return [box_digest(tensor, [0] * tensor.ndim, tensor.shape) for tensor in tensors.values()]
    boxes, _ = _share_boxes(cluster, tensors)
    own = list[int]()
    for name, tensor in tensors.items():
        firsts = {(box.offset, box.shape): box for box in reversed(boxes[name])}.values()
        mine = next((box for box in firsts if box.rank == cluster.rank), None)
        own.append(0 if mine is None else box_digest(local_of(tensor), mine.offset, tensor.shape))
    return [combine(of_ranks) for of_ranks in zip(*cluster.gather(own), strict=True)]


def _share_boxes(
    cluster: Cluster, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, list[Box]], dict[str, torch.dtype]]:
    """The boxes of all ranks and the number type, by name. Raises LoopError, on all ranks alike."""
    told: dict[str, Any] = {}
    try:
        for name, parameter in parameters.items():
            if parameter.is_meta:
                continue  # elsewhere
            offset, shape = box_of(name, parameter)
            told[name] = [offset, shape, str(parameter.dtype)]
    except LoopError as error:
        told = {"": str(error)}
    boxes: dict[str, list[Box]] = {name: [] for name in parameters}
    for rank, of_rank in enumerate(cluster.gather(told)):
        if "" in of_rank:
            raise LoopError(of_rank[""])
        for name, (offset, shape, dtype) in of_rank.items():
            if name not in boxes or dtype != str(parameters[name].dtype):
                here = "no such parameter" if name not in boxes else str(parameters[name].dtype)
                raise LoopError(
                    f"parameter {name!r} is {dtype} on rank {rank} and {here} on rank {cluster.rank}: give join the "
                    "same model on all ranks"
                )
            if 0 not in shape:
                boxes[name].append(Box(rank, tuple(offset), tuple(shape)))
    for name, parameter in parameters.items():
        try:
            check_cover(name, tuple(parameter.shape), boxes[name])
        except ValueError as error:
            raise LoopError(f"the shards of the model do not make it: {error}") from error
    return boxes, {name: parameter.dtype for name, parameter in parameters.items()}


def box_of(name: str, parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part of a parameter begins in every dimension, and its shape; with a 0 in it, it is empty.

    Raises LoopError: that part is not one box.
    """
    if not is_dtensor(parameter):
        return (0,) * parameter.ndim, tuple(parameter.shape)
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    assert isinstance(parameter, DTensor)
    mesh, local = parameter.device_mesh, tuple(parameter.to_local().shape)
    if (coordinate := mesh.get_coordinate()) is None:  # a mesh of other ranks
        return (0,) * parameter.ndim, (0,) * parameter.ndim
    indices = [torch.arange(extent, dtype=torch.int64, device="cpu") for extent in parameter.shape]
    for size, place, placement in zip(mesh.shape, coordinate, parameter.placements, strict=True):
        if isinstance(placement, _StridedShard):
            # FSDP2 over tensor parallelism: each of `split_factor` parts is cut for itself.
            parts = _chunks(indices[placement.dim], int(placement.split_factor))
            indices[placement.dim] = torch.cat([_chunks(part, size)[place] for part in parts])
        elif isinstance(placement, Shard):
            indices[placement.dim] = _chunks(indices[placement.dim], size)[place]
        elif not isinstance(placement, Replicate):
            raise LoopError(
                f"parameter {name!r} is sharded as {parameter.placements}, which is not supported: take Shard and "
                "Replicate (fully_shard, HSDP, tensor parallelism, or fully_shard over tensor parallelism)"
            )
    shape = tuple(len(index) for index in indices)
    gaps = any(len(index) and int(index[-1] - index[0]) + 1 != len(index) for index in indices)
    if gaps or shape != local:
        what = "has gaps" if gaps else f"has the shape {local}, not {shape}"
        raise LoopError(
            f"the shard of parameter {name!r}, of shape {tuple(parameter.shape)} and sharded as {parameter.placements} "
            f"over a mesh of {tuple(mesh.shape)}, {what}: shard it by sizes that divide it"
        )
    return tuple(int(index[0]) if len(index) else 0 for index in indices), shape


def _chunks(indices: Tensor, count: int) -> list[Tensor]:
    """As `torch.chunk`, but always as many: the last ones may be empty."""
    size = -(-len(indices) // count)
    return [indices[size * place : size * (place + 1)] for place in range(count)]


def _check_same(cluster: Cluster, ranges: str) -> None:
    """Raises LoopError unless all ranks have computed the same."""
    digests = cluster.gather(xxhash.xxh3_64_intdigest(ranges.encode()))
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise LoopError(
                f"ranks 0 and {rank} deal out the model's tensors differently: install the same version of farloop "
                "on all hosts of the node"
            )
