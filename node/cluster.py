"""The ranks of one node: rank 0 owns the link and decides, and what it decides reaches every rank at the same step.

Inside the cluster everything is torch.distributed (started by torchrun); farloop adds one small broadcast for a stretch
of steps in which nothing is due, and the merged weights of a fragment at the steps where one is merged.
"""

import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from farloop.algo.fragments import rows_of
from farloop.algo.spec import Layout, RunSpec
from farloop.node.devices import device_number
from farloop.node.errors import Unreachable
from farloop.node.machine_info import read_inventory
from farloop.node.parent import end_with_torchrun
from farloop.wire.machine_info import NOTHING, Inventory
from farloop.wire.messages import pack, unpack, validate

_log = logging.getLogger(__name__)

PATIENCE = timedelta(days=30)
"""How long the other ranks wait for rank 0's next decision: it may itself be waiting for a coordinator that is away,
and the ten or thirty minutes that process groups allow a collective would end the node."""

_SHORT = 1024  # bytes of the first message, which begins with the length of all
_LENGTH = 8


_SHARED = "TORCHELASTIC_USE_AGENT_STORE"
"""Where torchrun tells its processes that its store outlives them."""


_START_S = 600.0  # for all ranks of a start to be there


@dataclass(slots=True, kw_only=True)
class Decision:
    """What rank 0 tells before the next inner step."""

    running: bool
    lr: float
    merged: tuple[int, ...] = ()  # fragments whose local weights changed
    samples: tuple[int, ...] = ()  # stream positions of the next batch, over all ranks
    ahead: tuple[int, ...] = ()  # and of batches after it, where the loop wants to load them early
    position: float = 0.0


@dataclass(slots=True)
class Cluster:
    """The process group, or a cluster of one."""

    rank: int = 0
    size: int = 1
    data_rank: int = 0
    data_size: int = 1  # which of the node's different parts of a batch this rank trains on, and how many there are
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    decisions: dist.ProcessGroup | None = None
    """All ranks on the CPU, with `PATIENCE`; whole weights and gradients travel in the default group."""
    codes: dist.ProcessGroup | None = None
    """As `decisions`, for encoded deltas that move while training goes on; see `begin_codes`."""
    owns_group: bool = False  # whether the default group was begun here, and is to be ended here

    @classmethod
    def from_torchrun(cls, data: DeviceMesh | None = None) -> "Cluster":
        """The ranks that torchrun started, or one alone. CUDA where there is some, with one device a rank.

        `data`: the ranks that train on different samples, as one dimension of the loop's mesh; all unless given.
        """
        device = torch.device("cpu")
        if torch.cuda.is_available():
            here = device_number(os.environ.get("LOCAL_RANK"), torch.cuda.device_count(), torch.cuda.current_device())
            device = torch.device("cuda", here)
            torch.cuda.set_device(device)
        end_with_torchrun(os.environ)
        owns_group = not dist.is_initialized()
        if (int(os.environ.get("WORLD_SIZE", "1")) if owns_group else dist.get_world_size()) == 1:
            return cls(device=device)
        if owns_group:
            store, rank, size = next(iter(rendezvous("env://")))
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # of the loop's tensors on either
            dist.init_process_group(backend, store=_new_start(store, rank, size), rank=rank, world_size=size)
        elif int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and os.environ.get(_SHARED) == "True":
            _log.warning(
                "a restart by torchrun may hang in init_process_group (torch 2.13 keeps the keys of the start before): "
                "start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or leave init_process_group to join"
            )
        return cls(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            data_rank=dist.get_rank() if data is None else data.get_local_rank(),
            data_size=dist.get_world_size() if data is None else data.size(),
            device=device,
            decisions=dist.new_group(backend="gloo", timeout=PATIENCE),
            owns_group=owns_group,
        )

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def leads(self) -> bool:
        """Whether this rank owns the link."""
        return self.rank == 0

    @property
    def first_on_host(self) -> bool:
        """Whether this rank acts for its host; without LOCAL_RANK each does."""
        return self.leads or os.environ.get("LOCAL_RANK", "0") == "0"

    @property
    def serves_pages(self) -> bool:
        """Whether this rank has its host's port. Without LOCAL_RANK rank 0 alone: others may share its host."""
        return self.leads or os.environ.get("LOCAL_RANK") == "0"

    def describe(self) -> str:
        if self.device.type == "cuda":
            return f"{self.size} x {torch.cuda.get_device_name(self.device)}"
        return f"{self.size} x cpu ({torch.get_num_threads()} threads)"

    def described(self, inventory: Inventory) -> Inventory:
        """The machine's inventory, looked up unless given, with the node's devices."""
        found = read_inventory({}) if inventory == NOTHING else inventory
        found = replace(found, cpus=found.cpus or os.cpu_count() or 0)
        if self.device.type != "cuda":
            return found
        memory = torch.cuda.get_device_properties(self.device).total_memory * self.size
        return replace(found, devices=self.size, memory_bytes=memory)

    def share_spec(self, spec: RunSpec | None) -> RunSpec:
        """Send rank 0's spec to all ranks."""
        if self.alone:
            assert spec is not None
            return spec
        return validate(RunSpec, unpack(self._share_bytes(pack(spec) if spec else b"")))

    def share_decisions(self, decisions: Sequence[Decision]) -> list[Decision]:
        """Send rank 0's decisions on the next steps, at least one, to all ranks."""
        if self.alone:
            return list(decisions)
        return [validate(Decision, plain) for plain in unpack(self._share_bytes(pack(list(decisions))))]

    def all_agree(self, yes: bool) -> bool:
        """Whether every rank agrees; the same answer on all ranks."""
        if self.alone:
            return yes
        answer = torch.tensor([yes], dtype=torch.uint8, device="cpu")
        dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=self.decisions)
        return bool(answer.item())

    @torch.no_grad()
    def share_weights(self, layout: Layout, index: int, parameters: Mapping[str, Tensor]) -> None:
        """Send rank 0's local weights of this fragment to all ranks."""
        if self.alone:
            return
        for slot in layout.fragments[index].tensors:
            parameter = rows_of(parameters[slot.name].detach(), slot)
            dense = parameter.contiguous()  # itself, but for parameters of unusual strides
            dist.broadcast(dense, src=0)
            if dense.data_ptr() != parameter.data_ptr():
                parameter.copy_(dense)

    def mine(self, samples: tuple[int, ...]) -> tuple[int, ...]:
        """This rank's part of a batch: every `data_size`-th sample."""
        return samples[self.data_rank :: self.data_size]

    def broadcast(self, action: Sequence[Any]) -> None:
        """Rank 0: plain values for all other ranks, which wait for them in `receive`."""
        if not self.alone:
            self._share_bytes(pack(action))

    def receive(self) -> Any:
        """What rank 0 tells next; sequences come as lists."""
        return unpack(self._share_bytes(b""))

    def gather(self, value: Any) -> list[Any]:
        """A plain value of every rank, by rank, on every rank; sequences come as lists."""
        if self.alone:
            return [value]
        data = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)], dtype=torch.int64, device="cpu"), group=self.decisions)
        longest = max(int(length) for length in lengths)
        buffers = [torch.zeros(longest, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        dist.all_gather(buffers, torch.nn.functional.pad(data, (0, longest - len(data))), group=self.decisions)
        return [
            unpack(buffer.numpy()[: int(length)].tobytes()) for buffer, length in zip(buffers, lengths, strict=True)
        ]

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send every rank its bytes, uint8 in host memory; what they send, `sizes` bytes, by rank."""
        received, work = self.begin_swap(parts, sizes, self.decisions)
        if work is not None:
            work.wait()
        return received

    def begin_swap(
        self, parts: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup | None
    ) -> tuple[list[Tensor], dist.Work | None]:
        """As `swap`, at once: what is received is there after `wait`, in any thread. All ranks begin the swaps of a
        group in one order."""
        if self.alone:
            return list(parts), None
        out = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        splits = [part.numel() for part in parts]
        work = dist.all_to_all_single(out, torch.cat(list(parts)), list(sizes), splits, group=group, async_op=True)
        return list(torch.split(out, list(sizes))), work

    def begin_codes(self) -> None:
        """Begin the group `codes`; all ranks."""
        if not self.alone:
            self.codes = dist.new_group(backend="gloo", timeout=PATIENCE)

    def close(self) -> None:
        self.codes = None
        self.decisions = None  # the last reference joins the group's threads, which must not outlive the interpreter
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def _share_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes, on all ranks, as tensors: nothing is pickled. Short ones take one message."""
        first = torch.zeros(_SHORT, dtype=torch.uint8, device="cpu")
        if self.leads:
            begin = len(data).to_bytes(_LENGTH, "little") + data[: _SHORT - _LENGTH]
            first[: len(begin)] = torch.frombuffer(bytearray(begin), dtype=torch.uint8)
        dist.broadcast(first, src=0, group=self.decisions)
        told = first.numpy().tobytes()
        length = int.from_bytes(told[:_LENGTH], "little")
        if length <= _SHORT - _LENGTH:
            return told[_LENGTH : _LENGTH + length]
        rest = torch.zeros(length - _SHORT + _LENGTH, dtype=torch.uint8, device="cpu")
        if self.leads:
            rest.copy_(torch.frombuffer(bytearray(data[_SHORT - _LENGTH :]), dtype=torch.uint8))
        dist.broadcast(rest, src=0, group=self.decisions)
        return told[_LENGTH:] + rest.numpy().tobytes()


def _new_start(store: Store, rank: int, size: int) -> Store:
    """A part of the store that no earlier start has used.

    torch 2.13 keeps one store over all restarts of torchrun, and `init_process_group` hangs on what the ranks of an
    earlier start left there. How often they were restarted differs between agents, so rank 0 draws a name, and gives it
    to each rank that asks under a name of its own.
    """
    mine, deadline = secrets.token_hex(8), time.monotonic() + _START_S
    if rank:
        store.set(f"farloop/ask/{rank}", mine)
        name = store.get(f"farloop/answer/{mine}").decode()
        store.set(f"farloop/{name}/{rank}", "")
        return PrefixStore(name, store)
    missing = set(range(1, size))
    while missing:
        for other in sorted(missing):
            if store.check([f"farloop/{mine}/{other}"]):
                missing.discard(other)
            elif store.check([f"farloop/ask/{other}"]):
                asked = store.get(f"farloop/ask/{other}").decode()
                store.set(f"farloop/answer/{asked}", mine)
        if time.monotonic() > deadline:
            raise Unreachable(f"ranks {sorted(missing)} of the node did not start within {_START_S:g} s")
        time.sleep(0.02)
    return PrefixStore(mine, store)
