"""A node's tensors: local parameters and anchors.

Three operations: take a delta, apply an update to an anchor, merge an anchor into the local weights. The machine
decides when; this module knows nothing of windows or sessions.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farloop.algo.digest import canonicalise_, combine, digest
from farloop.algo.fragments import flatten_into, plain_name, rows_of, trainable_tensors, whole_shapes
from farloop.algo.local_update import eager_start_into, fragment_delta_into, mix_fragment_into
from farloop.algo.spec import TILE, BlobId, Layout, WindowTerms
from farloop.algo.stages import Part, described, fragments_of
from farloop.node.errors import LayoutMismatch
from farloop.node.shards import Shards, whole
from farloop.quant.blob import Expected, parse_blob
from farloop.quant.codec import Codec
from farloop.quant.errors import BadBlob, NonFiniteError
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.kernels.dispatch import fast_path
from farloop.quant.kernels.interface import Encode
from farloop.quant.registry import codec_named


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDelta:
    blob: BlobId
    terms: WindowTerms
    data: bytearray


class Replica:
    """The model of one rank that owns the link, cut as the run's layout says."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        *,
        gradients: bool,
        holds: Part = None,
        shards: Shards | None = None,
    ) -> None:
        """`gradients`: a delta is the step's raw gradient, not anchor − local. `holds`: the part of the model that the
        module is; only its fragments are kept, by number.

        Raises LayoutMismatch: the module's trainable tensors are not those of the layout.
        """
        self.layout = layout
        self.fragments = fragments_of(holds, layout)  # held fragments, in order
        self.gradients = gradients
        self.parameters = matched_parameters(module, layout, holds)
        self._shards = shards
        device = torch.device("cpu") if shards is not None else next(iter(self.parameters.values())).device
        self.anchors = {f.index: torch.zeros(f.numel, device=device) for f in self.fragments}  # fp32 [numel] each
        self.versions = dict.fromkeys(self.anchors, -1)  # version of each anchor; −1 if it is missing or damaged
        self.digests = dict.fromkeys(self.anchors, 0)
        self._starts: dict[int, Tensor] = {}
        """Start of an eager node's round, fp32 [numel], for fragments where that is not the anchor."""
        self._free: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def take(self, index: int) -> Tensor:
        """The fragment's current delta, fp32 [numel], in a buffer that `give_back` reuses."""
        fragment = self.layout.fragments[index]
        stock = self._free.setdefault(fragment.numel, [])
        out = stock.pop() if stock else torch.empty(fragment.numel, device=self.anchors[index].device)
        if self.gradients:
            flatten_into(fragment, self._sources(index), out)
        else:
            fragment_delta_into(fragment, self._start(index), self._sources(index), out)
        return out

    @torch.no_grad()
    def pack(self, index: int, codec: BlockCodec, payload: Tensor, seed: int) -> bool:
        """Encode the fragment's delta now, without a buffer for the delta; False where there is no path for that.
        Raises NonFiniteError: `payload` is meaningless then."""
        fragment, start = self.layout.fragments[index], self._start(index)
        if start.device.type != "cpu" or (fast := fast_path(codec.kernel_key(), start.device)) is None:
            return False
        sources = self._sources(index)
        tensors = [(slot, rows_of(sources[slot.name], slot)) for slot in fragment.tensors]
        dtypes = (torch.float32,) if self.gradients else (torch.float32, torch.bfloat16, torch.float16)
        plain = all(tensor.is_contiguous() and tensor.dtype in dtypes for _, tensor in tensors)
        if not plain:
            return False
        steps = codec.steps(fragment)
        for slot, tensor in tensors:
            here = slice(slot.offset, slot.offset + slot.numel)
            x, local = (tensor.view(-1), None) if self.gradients else (start[here], tensor.view(-1))
            call = Encode(
                x=x, out=payload, numel=fragment.numel, local=local, seed=seed, steps=steps, start=slot.offset
            )
            bad = fast.encode(call)
            if bad >= 0:
                raise NonFiniteError(slot.offset + bad)
        return True

    def _start(self, index: int) -> Tensor:
        return self._starts.get(index, self.anchors[index])

    def _sources(self, index: int) -> Mapping[str, Tensor]:
        """What a delta of the fragment is taken from: whole weights or gradients, by name."""
        if self._shards is not None:
            return self._shards.lead_gather(index, "gradients" if self.gradients else "weights")
        names = [slot.name for slot in self.layout.fragments[index].tensors]
        return {name: (self._gradient(name) if self.gradients else self.parameters[name]).detach() for name in names}

    def _mix(self, index: int, start: Tensor, mix: float) -> None:
        if self._shards is not None:
            self._shards.lead_merge(index, start, mix)
        else:
            mix_fragment_into(self.layout.fragments[index], self.parameters, start, mix)

    def give_back(self, buffer: Tensor) -> None:
        self._free.setdefault(buffer.numel(), []).append(buffer)

    @torch.no_grad()
    def apply(self, index: int, version: int, blob: bytearray, codec: str, epoch: int, anchor_digest: int) -> bool:
        """anchor += decoded update; False if the bytes or the resulting digest are wrong."""
        codec_down = codec_named(codec)
        self.versions[index] = -1
        try:
            expect = self._expected(index, version, version - 1, codec_down, epoch)
            header, payload = parse_blob(blob, expect)
            codec_down.decode_add_(payload, self.anchors[index], 1.0, expect.fragment, seed=header.seed)
        except BadBlob:
            return False
        self.digests[index] = digest(self.anchors[index])
        if self.digests[index] != anchor_digest:
            return False
        self.versions[index] = version
        return True

    @torch.no_grad()
    def install(self, index: int, version: int, blob: bytearray, epoch: int) -> bool:
        """Replace the anchor by a snapshot; False if it is not one."""
        codec = codec_named("fp32")
        self.versions[index] = -1
        try:
            expect = self._expected(index, version, version, codec, epoch)
            codec.decode_into(parse_blob(blob, expect)[1], self.anchors[index], expect.fragment)
        except BadBlob:
            return False
        self.digests[index] = digest(self.anchors[index])
        self.versions[index] = version
        return True

    @torch.no_grad()
    def first(self, index: int) -> Tensor:
        """The local weights as a canonical anchor of version 0, fp32 [numel]."""
        fragment = self.layout.fragments[index]
        flat = torch.empty(fragment.numel, device=self.anchors[index].device)
        flatten_into(
            fragment, self.parameters if self._shards is None else self._shards.lead_gather(index, "weights"), flat
        )
        canonicalise_(flat)
        return flat

    @torch.no_grad()
    def merge(self, index: int, mix: float, own: Sequence[OwnDelta] = (), factor: float = 0.0, epoch: int = 0) -> None:
        """local ← mix·local + (1 − mix)·start. The next delta is measured from the start.

        That is the anchor; with deltas of its `own` anchor − factor · Σ decoded (`local_update.py`), one more copy.
        """
        start = self.anchors[index]
        self._starts.pop(index, None)
        if own:
            start = self._starts[index] = self._ahead(index, own, factor, epoch)
        self._mix(index, start, mix)

    def _ahead(self, index: int, own: Sequence[OwnDelta], factor: float, epoch: int) -> Tensor:
        fragment, anchor = self.layout.fragments[index], self.anchors[index]
        fresh = torch.zeros_like(anchor)
        for delta in own:
            codec = codec_named(delta.terms.codec_of(delta.blob.node))
            expect = self._expected(index, delta.terms.window, delta.blob.version, codec, epoch)
            header, payload = parse_blob(delta.data, expect)
            codec.decode_add_(payload, fresh, 1.0, fragment, seed=header.seed)
        eager_start_into(anchor, fresh, fresh, share=factor, gain=1.0)
        return fresh

    @contextmanager
    def anchors_in_place(self) -> Iterator[None]:
        """The module computes with the anchors inside the block."""
        kept: dict[str, Tensor] = {}
        if self._shards is not None:
            self._shards.lead_keep()
        else:
            kept = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        try:
            for fragment in self.fragments:
                self._mix(fragment.index, self.anchors[fragment.index], 0.0)
            yield
        finally:
            if self._shards is not None:
                self._shards.lead_restore()
            with torch.no_grad():
                for name, weights in kept.items():
                    self.parameters[name].copy_(weights)

    def begin_again(self) -> None:
        """Drop all anchors. The local weights stay until they are merged with new ones."""
        self.versions = dict.fromkeys(self.anchors, -1)
        self._starts.clear()

    def tensor_at(self, index: int, element: int) -> str:
        tensors = self.layout.fragments[index].tensors
        return next((t.name for t in reversed(tensors) if t.offset <= element), tensors[0].name)

    def _gradient(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def _expected(self, index: int, version: int, base: int, codec: Codec, epoch: int) -> Expected:
        return Expected(
            codecs=(codec,), fragment=self.layout.fragments[index], version=version, base=base, newest_epoch=epoch
        )


def matched_parameters(module: nn.Module, layout: Layout, holds: Part = None) -> dict[str, nn.Parameter]:
    """The module's trainable tensors by name, checked against this part of the layout: it has them all, and no others.
    Raises LayoutMismatch: names the first difference."""
    fragments = fragments_of(holds, layout)
    there = whole_shapes(fragments)
    # A run that began from the weights of a compiled model may have its names.
    names = {plain_name(name): name for name in there}
    here = {names.get(name, name): parameter for name, parameter in trainable_tensors(module)}
    whose = "the run's model" if holds is None else f"stage {described(holds)} of the run's model"
    for name, shape in there.items():
        if name not in here:
            part = "; say what it holds, if it is a part" if holds is None and layout.num_stages > 1 else ""
            why = _why_missing(name, module, here) or part
            raise LayoutMismatch(f"{whose} has a parameter {name!r} of shape {shape}, this one has not{why}")
        if tuple(here[name].shape) != shape:
            raise LayoutMismatch(f"parameter {name!r} has shape {tuple(here[name].shape)} here, {shape} in the run")
    for name in here:
        if name not in there:
            raise LayoutMismatch(
                f"this model has a trainable parameter {name!r} that {whose} has not: freeze it before join, or "
                "begin a run whose weights file has it"
            )
    return here


def frozen_digest(module: nn.Module, *, buffers: bool) -> int:
    """Digest of the names, shapes and values, as fp32, of the weights that are not exchanged; 0 if there are none.

    These are the parameters without a gradient and, with `buffers`, the floating-point buffers of the module's state
    dict. Where a tensor is sharded all of its ranks have to call this.
    """
    kept: dict[str, Tensor] = {n: tensor for n, tensor in module.named_parameters() if not tensor.requires_grad}
    if buffers:
        saved = module.state_dict(keep_vars=True)  # without the buffers that are not persistent
        kept |= {n: tensor for n, tensor in module.named_buffers() if n in saved and tensor.is_floating_point()}
    total = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted((plain_name(name), tensor) for name, tensor in kept.items()):
        values = whole(tensor.detach()).reshape(-1)
        found = combine(digest(values[at : at + TILE].float(), at) for at in range(0, values.numel(), TILE))
        total.update(f"{name} {tuple(tensor.shape)} {found:016x}\n".encode())
    return int.from_bytes(total.digest()) if kept else 0


def _why_missing(name: str, module: nn.Module, here: Mapping[str, nn.Parameter]) -> str:
    """Why the module lacks a parameter of the run, and the fix; empty if unknown."""
    wrapped = next((other for other in here if other.endswith(f".{name}")), None)
    if wrapped is not None:
        return f": here it is {wrapped!r}. Give join the module inside the wrapper, as model.module"
    all_names = dict(module.named_parameters(remove_duplicate=False))
    parameter = next((p for other, p in all_names.items() if plain_name(other) == name), None)
    if parameter is None:
        return ""
    first = next((other for other, p in here.items() if p.data_ptr() == parameter.data_ptr()), None)
    save = "save_file({name: p.detach() for name, p in model.named_parameters()}, FILE)"
    if first is not None and parameter.requires_grad:
        return (
            f": here it is tied to {first!r}. A run has tied parameters once, under their first name: make its weights "
            f"file with {save}, and begin the run with that"
        )
    return ": here it is frozen. Set requires_grad_(True) before join, or begin a run whose weights file is without it"
