"""The ranks of one node: rank 0 owns the link and decides, and what it decides reaches every rank at the same step.

Inside the cluster everything is torch.distributed (started by torchrun); farloop adds one small broadcast a step, and
the merged weights of a fragment at the steps where one is merged.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from farloop.algo.spec import Layout, RunSpec
from farloop.wire.messages import pack, unpack, validate


@dataclass(slots=True, kw_only=True)
class Decision:
    """What rank 0 tells before the next inner step."""

    running: bool
    lr: float
    merged: tuple[int, ...] = ()
    """Fragments whose local weights changed."""
    samples: tuple[int, ...] = ()
    """Stream positions of the next batch, over all ranks."""
    position: float = 0.0


@dataclass(slots=True)
class Cluster:
    """The process group, or a cluster of one."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def from_torchrun(cls) -> "Cluster":
        """The ranks that torchrun started, or one alone. CUDA where there is some, with one device a rank."""
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
        if "WORLD_SIZE" not in os.environ or int(os.environ["WORLD_SIZE"]) == 1:
            return cls(device=device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), device=device)

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def leads(self) -> bool:
        """Whether this rank owns the link."""
        return self.rank == 0

    def describe(self) -> str:
        """The devices in words, as logs and displays show them."""
        if self.device.type == "cuda":
            return f"{self.size} x {torch.cuda.get_device_name(self.device)}"
        return f"{self.size} x cpu ({torch.get_num_threads()} threads)"

    def share_spec(self, spec: RunSpec | None) -> RunSpec:
        """Rank 0's spec, everywhere."""
        if self.alone:
            assert spec is not None
            return spec
        data = self._share_bytes(pack(spec) if spec else b"")
        return validate(RunSpec, unpack(data))

    def share_decision(self, decision: Decision | None) -> Decision:
        """Rank 0's decision, everywhere."""
        if self.alone:
            assert decision is not None
            return decision
        plain = (
            [decision.running, decision.lr, list(decision.merged), list(decision.samples), decision.position]
            if decision
            else []
        )
        running, lr, merged, samples, position = unpack(self._share_bytes(pack(plain)))
        return Decision(running=running, lr=lr, merged=tuple(merged), samples=tuple(samples), position=position)

    @torch.no_grad()
    def share_weights(self, layout: Layout, merged: tuple[int, ...], parameters: Mapping[str, nn.Parameter]) -> None:
        """Rank 0's local weights of these fragments, everywhere."""
        if self.alone:
            return
        for index in merged:
            for tensor in layout.fragments[index].tensors:
                dist.broadcast(parameters[tensor.name].data, src=0)

    def mine(self, samples: tuple[int, ...]) -> tuple[int, ...]:
        """This rank's part of a batch: every `size`-th sample."""
        return samples[self.rank :: self.size]

    def close(self) -> None:
        if not self.alone and dist.is_initialized():
            dist.destroy_process_group()

    def _share_bytes(self, data: bytes) -> bytes:
        """Length first, then the bytes, as tensors: nothing is pickled."""
        length = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        dist.broadcast(length, src=0)
        buffer = torch.zeros(int(length.item()), dtype=torch.uint8, device=self.device)
        if self.leads:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, src=0)
        return bytes(buffer.cpu().numpy().tobytes())
