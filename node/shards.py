"""Weights that the training loop has sharded over the node's ranks: FSDP2, HSDP, tensor parallelism (DTensors).

farloop shards nothing itself. Rank 0 (the lead) owns the link and keeps the anchors, in host memory. At a step boundary
it tells the other ranks what to take part in: gather a fragment, merge one, evaluate. The bytes that are sent and the
merged weights are those of a node with one process that has the same weights: gathering copies, and merging is
element-wise.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farloop.algo.fragments import view
from farloop.algo.local_update import mix_into
from farloop.algo.spec import Layout, TensorSlot
from farloop.node.cluster import Cluster
from farloop.node.errors import LoopError


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a part of a tensor that lies on several ranks. Where nobody has imported DTensors, none exists: to
    import them takes as long as half of torch."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(module: nn.Module) -> bool:
    """Whether any parameter is a DTensor."""
    return any(map(is_dtensor, module.parameters()))


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or that which a DTensor is a part of: all of its ranks have to call this."""
    gathered: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return gathered


def check_sharding(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises LoopError for placements whose local part is not one box of the tensor."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor) and not {type(placement) for placement in parameter.placements} <= {
            Shard,
            Replicate,
        }:
            raise LoopError(
                f"parameter {name!r} is sharded as {parameter.placements}, which is not supported: take Shard and "
                "Replicate (fully_shard, HSDP or tensor parallelism; not fully_shard over tensor parallelism)"
            )


class Shards:
    """One rank's part in what the lead does with the local weights. A method named `lead_…` is called by the lead
    alone, while the other ranks are in `follow`."""

    def __init__(
        self,
        cluster: Cluster,
        module: nn.Module,
        layout: Layout,
        parameters: Mapping[str, nn.Parameter],
        evaluate: Callable[[nn.Module], float] | None,
    ) -> None:
        """`parameters`: the module's, by the layout's names, as they are now: FSDP2 shows gathered ones at times.

        Raises LoopError: their placements are not supported.
        """
        check_sharding(parameters)
        self._cluster, self._module, self._layout = cluster, module, layout
        self._parameters, self._evaluate = parameters, evaluate
        self._kept: dict[str, Tensor] = {}

    def lead_gather(self, index: int, kind: Literal["weights", "gradients"]) -> dict[str, Tensor]:
        """The whole tensors of a fragment by name, in host memory; a missing gradient is zeros."""
        self._tell("gather", index, kind)
        return self._gather(index, kind)

    def lead_merge(self, index: int, anchor: Tensor, mix: float) -> None:
        """local ← mix·local + (1 − mix)·anchor on every rank; `anchor` is fp32 [fragment.numel] in host memory."""
        self._tell("merge", index, mix)
        self._merge(index, anchor, mix)

    def lead_keep(self) -> None:
        """Set the local weights aside, until `lead_restore`."""
        self._tell("keep")
        self._keep()

    def lead_restore(self) -> None:
        """Put the weights back that `lead_keep` set aside."""
        self._tell("restore")
        self._restore()

    def lead_evaluate(self) -> float:
        """The lead's result of `join(evaluate=…)`, which every rank calls: a forward pass needs all shards."""
        self._tell("evaluate")
        return self._score()

    def lead_go_on(self) -> None:
        """Let the other ranks leave `follow`."""
        self._tell("go on")

    def follow(self) -> None:
        """Take part in what the lead does, until it says to go on."""
        while True:
            match self._cluster.hear():
                case ["go on"]:
                    return
                case ["gather", int() as index, str() as kind]:
                    self._gather(index, kind)
                case ["merge", int() as index, float() as mix]:
                    self._merge(index, None, mix)
                case ["keep"]:
                    self._keep()
                case ["restore"]:
                    self._restore()
                case ["evaluate"]:
                    self._score()
                case told:
                    raise AssertionError(f"rank 0 told {told!r}")

    def _tell(self, *action: Any) -> None:
        self._cluster.tell(action)

    @torch.no_grad()
    def _gather(self, index: int, kind: str) -> dict[str, Tensor]:
        self._reshard()
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys(slot.name for slot in self._layout.fragments[index].tensors):
            tensor: Tensor = self._parameters[name].detach()
            if kind == "gradients":
                gradient = self._parameters[name].grad
                tensor = torch.zeros_like(tensor) if gradient is None else gradient
            tensor = whole(tensor)
            if self._cluster.leads:
                found[name] = tensor.cpu()
        return found

    @torch.no_grad()
    def _merge(self, index: int, anchor: Tensor | None, mix: float) -> None:
        self._reshard()
        for slot in self._layout.fragments[index].tensors:
            parameter = self._parameters[slot.name]
            local, offset = _local_box(parameter)
            part = torch.empty(slot.shape, device=local.device) if anchor is None else view(anchor, slot)
            part = part.to(local.device).contiguous()
            dist.broadcast(part, src=0)
            if (boxes := _overlap(slot, local, offset, part)) is not None:
                mix_into(boxes[0], boxes[1].reshape(-1), mix)

    @torch.no_grad()
    def _keep(self) -> None:
        self._reshard()
        self._kept = {name: _local_box(parameter)[0].clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def _restore(self) -> None:
        self._reshard()
        for name, parameter in self._parameters.items():
            _local_box(parameter)[0].copy_(self._kept[name])
        self._kept = {}

    def _score(self) -> float:
        assert self._evaluate is not None
        return self._evaluate(self._module)

    def _reshard(self) -> None:
        """After a forward pass without a backward pass FSDP2 leaves whole copies in the place of its shards."""
        for part in self._module.modules():
            # That of FSDPModule, which is not imported: torch.distributed.fsdp takes a good part of a node's start.
            if callable(reshard := getattr(part, "reshard", None)):
                reshard()


def _local_box(parameter: nn.Parameter) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a parameter, sharing its memory, and where it begins in each dimension."""
    if not is_dtensor(parameter):
        return parameter.detach(), (0,) * parameter.ndim
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(parameter, DTensor)
    local = parameter.to_local().detach()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    assert tuple(local.shape) == tuple(shape), f"a local part is {tuple(local.shape)}, not {tuple(shape)}"
    return local, tuple(offset)


def _overlap(slot: TensorSlot, local: Tensor, offset: tuple[int, ...], part: Tensor) -> tuple[Tensor, Tensor] | None:
    """The elements that the slot and a local box share, as views of `local` and of `part` [slot.shape]; None: none."""
    first = slot.rows[0] if slot.rows is not None else 0
    for dimension, start in enumerate(offset):
        begin = start - (first if dimension == 0 else 0)  # of the box, in the slot
        low, high = max(0, begin), min(part.shape[dimension], begin + local.shape[dimension])
        if low >= high:
            return None
        local = local.narrow(dimension, low - begin, high - low)
        part = part.narrow(dimension, low, high - low)
    return local, part
