"""A node's tensors: local parameters and anchors.

Three operations: take a delta, apply an update to an anchor, merge an anchor into the local weights. The machine
decides when; this module knows nothing of windows or sessions.

Where the model is sharded, every rank has a replica, with its own part of every fragment. What the lead is asked for it
tells the others, which take part in `follow`: a public method tells, and the private one of its name is what all do.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor, nn

from farloop.algo.fragments import (
    flatten_into,
    plain_name,
    rows_of,
    statistics_of,
    tiles,
    trainable_tensors,
    view,
    whole_shapes,
)
from farloop.algo.local_update import (
    eager_start_into,
    fragment_delta_into,
    increment_,
    learn_,
    learn_increment_,
    merged_by_plain_step,
)
from farloop.algo.methods import method_named
from farloop.algo.outer_settings import sums_increments
from farloop.algo.spec import BlobId, Layout, RunSpec, WindowTerms
from farloop.algo.stages import Part, described, fragments_of
from farloop.node.devices import Buffers, Kept, SideStream, locked_zeros, spare_bytes
from farloop.node.errors import LayoutMismatch, NonFiniteDelta
from farloop.node.model.anchor_files import AnchorFiles, Head
from farloop.node.model.merges import Merges
from farloop.node.model.moments import Moments
from farloop.node.model.shards import Collected, Weights, check_codecs, is_dtensor
from farloop.quant.blob import HEADER_BYTES, BlobHeader, Expected, as_tensor, blob_bytes, parse_blob, seal
from farloop.quant.codec import Codec
from farloop.quant.digest import canonicalise_
from farloop.quant.errors import BadBlob, NonFiniteError
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.kernels.dispatch import fast_path
from farloop.quant.kernels.interface import Encode
from farloop.quant.norm import norm_sq
from farloop.quant.registry import codec_named

_log = logging.getLogger(__name__)

_FP32 = "fp32"
_WORTH_AHEAD = 1 << 20  # elements: an update of fewer is applied in a millisecond


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDelta:
    blob: BlobId
    terms: WindowTerms
    data: bytearray


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A payload that came over the link or was sent: its codec's spelling, its seed, and on the lead its bytes."""

    codec: str
    seed: int
    payload: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """What an anchor is after its next update."""

    index: int
    version: int
    changes: int  # of the anchor, as it was when this was begun
    anchor: Tensor
    digest: int


class Replica:
    """The model of a process, cut as the run's layout says. All methods but `follow` are the lead's."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        *,
        gradients: bool,
        holds: Part = None,
        weights: Weights | None = None,
        copies: int = 1,
    ) -> None:
        """`gradients`: a delta is the step's raw gradient, not anchor − local. `holds`: the part of the model that the
        module is; only its fragments are kept, by number. `weights`: the module's, whole ones unless given. `copies`:
        of each fragment, its anchor and what is kept beside it.

        Raises LayoutMismatch: the module's trainable tensors are not those of the layout.
        """
        self.layout = layout
        self.gradients, self._copies = gradients, copies
        self.weights = weights or Weights(layout, matched_parameters(module, layout, holds), holds)
        self.fragments = self.weights.fragments
        self.parameters = self.weights.parameters
        self.own = {index: part.fragment for index, part in self.weights.own.items()}
        """What this process keeps of each held fragment, as a fragment: all of it, or a rank's part."""
        is_locked = self.weights.apart and self.weights.device.type == "cuda"
        numbers = locked_zeros(part.numel for part in self.own.values()) if is_locked else map(self.zeros, self.own)
        self.anchors = dict(zip(self.own, map(Kept, numbers), strict=True))
        """fp32 [numel of the own part] each."""
        self.side = SideStream(self.weights.device)
        largest = max((part.numel for part in self.own.values()), default=0)
        self.buffers = Buffers(largest, self.weights.device, self.side)
        self.versions = dict.fromkeys(self.anchors, -1)  # version of each anchor; −1 if it is missing or damaged
        self.digests = dict.fromkeys(self.anchors, 0)  # of whole fragments
        self._starts: dict[int, Kept] = {}
        """Start of an eager node's round, fp32 as the anchor, for fragments where that is not the anchor."""
        self.drifts: dict[int, Kept] = {}  # d_i of control variates, fp32 as the anchor; those that are not zero
        self._smoothed: dict[int, Kept] = {}  # v_i of SCAFCOM, of fragments of which one was sent
        self._increments: dict[int, Kept] = {}  # c_i of SCAFCOM; those that are not zero
        self._next: dict[int, tuple[float, float]] = {}  # Ση and β of an increment that is taken next
        self._residuals: dict[int, Tensor] = {}  # of a rank's part, as they were added last
        self._ahead: _Ahead | None = None
        self._spare: Tensor | None = None  # the memory of an anchor that such a one has replaced
        self.files: AnchorFiles | None = None  # where anchors are saved, if anywhere; on all ranks or none
        self.moments: Moments | None = None  # the optimizer's state, where it is saved too; likewise
        self.merges = Merges(None, self.parameters, layout)  # what hears of merges; the optimizer's, where there is one

    def zeros(self, index: int) -> Tensor:
        """fp32 [numel of the own part] where anchors are kept: all that a replica keeps beside them begins so."""
        return torch.zeros(self.own[index].numel, device=self.weights.home, dtype=torch.float32)

    def place(self) -> None:
        """Keep anchors, and what is kept beside them, on the device from now on if it has the room. Every rank decides
        for itself: no number depends on it."""
        wanted = sum(4 * self._copies * anchor.numel for anchor in self.anchors.values()) + self.buffers.most_bytes
        spare = max(0, spare_bytes(self.weights.device))
        _log.info(
            "anchors are kept on the %s: they take %.2f GB there, and %.2f GB are spare after two steps; "
            "anchors='host' or 'device' chooses",
            *("device" if wanted <= spare else "host", wanted / 1e9, spare / 1e9),
        )
        if wanted <= spare:
            self.weights.home, self.weights.apart = self.weights.device, False
            beside = (self._starts, self.drifts, self._smoothed, self._increments)
            for kept in (kept for each in (self.anchors, *beside) for kept in each.values()):
                kept.replace(kept.read().to(self.weights.device))

    def copy_ahead(self, index: int) -> None:
        """The fragment is the next that is sent: begin to copy its anchor to the device, if it is not there."""
        if self.weights.apart and self.buffers.has_room(self._start(index)):
            self.weights.broadcast("copy ahead", index)
            self.buffers.copy_ahead(self._start(index))

    def follow(self, evaluate: Callable[[], object]) -> None:
        """The other ranks: take part in what the lead does, until it goes on with training.

        Raises NonFiniteDelta, on all ranks.
        """
        while True:
            match self.weights.receive():
                case ["go on"]:
                    return
                case ["encode", int() as index, str() as codec, int() as seed, residual, int() as inner_step]:
                    self._encode(index, codec, seed, self._residual(index, residual), inner_step)
                case ["add", int() as index, str() as codec, int() as seed]:
                    self._add(index, Sent(codec=codec, seed=seed))
                case ["set", int() as index]:
                    self._set(index, None)
                case ["load", int() as index, int() as version]:
                    self._load(index, version)
                case ["save", int() as index, int() as version]:
                    self._save(index, version)
                case ["saved", head]:
                    self._end_save(None if head is None else Head(**head))
                case ["save moments", int() as index, int() as version]:
                    assert self.moments is not None
                    self.moments.save_here(index, version)
                case ["load moments", int() as index, int() as version, dict() as more]:
                    assert self.moments is not None
                    self.moments.load_here(index, version, more)
                case ["first", int() as index, int() as wanted]:
                    self._first(index, wanted)
                case ["collect", int() as index]:
                    self.weights.collect_into(index, codec_named(_FP32), self.anchors[index].read(), None)
                case ["merge", int() as index, float() as mix, float() as factor, list() as own]:
                    self._merge(index, mix, factor, [Sent(codec=codec, seed=seed) for codec, seed in own])
                case ["learn", int() as index, list() as own, list() as update, outer_lr, lr_sum, alpha]:
                    delta, merged = (Sent(codec=codec, seed=seed) for codec, seed in (own, update))
                    self._learn(index, delta, merged, outer_lr, lr_sum, alpha)
                case ["correct", int() as index, float() as lr]:
                    self._correct(index, lr)
                case ["copy ahead", int() as index]:
                    if self.weights.apart:  # each rank decided where its anchors are
                        self.buffers.copy_ahead(self._start(index))
                case ["take increment", int() as index, lr_sum, rate]:
                    self._next[index] = lr_sum, rate
                case ["forget", int() as index]:
                    self._forget_drift(index)
                case ["begin again"]:
                    self._begin_again()
                case ["show"]:
                    self._show()
                case ["evaluate"]:
                    evaluate()
                case ["restore"]:
                    self._restore()
                case told:
                    raise AssertionError(f"rank 0 told {told!r}")

    def resume(self) -> None:
        """Let the other ranks go on with training."""
        self.weights.broadcast("go on")

    def evaluate(self, evaluate: Callable[[], float]) -> float:
        """The lead's result of what all ranks call: a forward pass needs all shards."""
        self.weights.broadcast("evaluate")
        return evaluate()

    @torch.no_grad()
    def compute_delta(self, index: int) -> Tensor:
        """The own part of the fragment's current delta, fp32 where the weights are, in a buffer that `give_back`
        reuses. Where the model is sharded, all ranks call it."""
        self.merges.show()
        part, kept, buffers = self.own[index], self._start(index), self.buffers
        sources = self.weights.sources(index, gradients=self.gradients)
        if self.gradients:
            out = buffers.acquire(part.numel)
            flatten_into(part, sources, out)
        elif not self._is_apart(kept):
            out = buffers.acquire(part.numel)
            fragment_delta_into(part, kept.read(), sources, out)
        else:
            start = buffers.acquire(part.numel, kept)
            out = buffers.acquire(part.numel) if buffers.has_room() else start
            fragment_delta_into(part, start, sources, out)
            if out is not start:  # the update that follows will want it
                buffers.give_back(start, kept)
        if index in self._next:
            self._to_increment_(index, out, *self._next.pop(index))
        return out

    def take_increment(self, index: int, lr_sum: float, rate: float) -> None:
        """What is taken next of the fragment is an increment of SCAFCOM, with that Ση and β (`local_update.py`)."""
        self.weights.broadcast("take increment", index, lr_sum, rate)
        self._next[index] = lr_sum, rate

    def _begin(self, kept: dict[int, Kept], index: int) -> None:
        if index not in kept:
            kept[index] = Kept(self.zeros(index))

    def _to_increment_(self, index: int, delta: Tensor, lr_sum: float, rate: float) -> None:
        first = index not in self._smoothed
        for kept in (self._smoothed, self._increments):
            self._begin(kept, index)
        smoothed, sent = self._smoothed[index].write(), self._increments[index].read()
        here, drift = delta.to(self.weights.home), self.drifts[index].read() if index in self.drifts else None
        increment_(here, smoothed, sent, drift, lr_sum=lr_sum, rate=1.0 if first else rate)
        if here is not delta:
            delta.copy_(here)

    def _is_apart(self, kept: Kept) -> bool:
        return self.weights.apart or kept.device != self.weights.device

    @contextmanager
    def _with_the_weights(self, kept: Kept, *, changes: bool = False) -> Iterator[Tensor]:
        """Of an anchor, or what is kept as it is: itself, or a copy of it on the device of the weights, which is
        copied back if it `changes`."""
        if not self._is_apart(kept):
            yield kept.write() if changes else kept.read()
            return
        there, changed = self.buffers.acquire(kept.numel, kept, changes=changes), None
        try:
            yield there
            changed = kept if changes else None  # a merge follows
        finally:
            self.buffers.give_back(there, changed, changed=changes)

    @torch.no_grad()
    def pack(self, index: int, codec: BlockCodec, payload: Tensor, seed: int) -> bool:
        """Encode the fragment's delta now, without a buffer for the delta; False where there is no path for that.
        Raises NonFiniteError: `payload` is meaningless then."""
        fragment, start = self.layout.fragments[index], self._start(index).read()
        if self.weights.device.type != "cpu" or (fast := fast_path(codec.kernel_key(), start.device)) is None:
            return False
        self.merges.show()
        sources = self.weights.sources(index, gradients=self.gradients)
        tensors = [(slot, rows_of(sources[slot.name], slot)) for slot in fragment.tensors]
        dtypes = (torch.float32,) if self.gradients else (torch.float32, torch.bfloat16, torch.float16)
        plain = all(tensor.is_contiguous() and tensor.dtype in dtypes for _, tensor in tensors)
        if not plain or index in self._next:
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

    def encode(
        self, index: int, codec: str, seed: int, residual: Tensor | None, inner_step: int
    ) -> tuple[Collected, tuple[float, float]]:
        """Of a sharded model: the delta's payload as all ranks encode it now, and |residual|² and |delta|².

        `residual`, fp32 as the anchor, is the lead's, and a new one is zeros. It is added with the codec's β and
        becomes what this encoding lost; without one both norms are 0.

        Raises NonFiniteDelta, on all ranks. TermsMismatch: ranks cannot encode parts with this codec.
        """
        check_codecs([codec])
        kept = None if residual is None else residual is self._residuals.pop(index, None)
        self.weights.broadcast("encode", index, codec, seed, kept, inner_step)
        if residual is not None:
            self._residuals[index] = residual
        return self._encode(index, codec, seed, residual, inner_step)

    def _residual(self, index: int, kept: bool | None) -> Tensor | None:
        """The residual of another rank than the lead: as it was left, or (False) zeros; None: the codec has none."""
        before = self._residuals.pop(index, None)
        if kept is None:
            return None
        self._residuals[index] = before if kept and before is not None else self.zeros(index)
        return self._residuals[index]

    @torch.no_grad()
    def _encode(
        self, index: int, spelling: str, seed: int, residual: Tensor | None, inner_step: int
    ) -> tuple[Collected, tuple[float, float]]:
        codec, own, fragment = codec_named(spelling), self.weights.own[index], self.layout.fragments[index]
        assert isinstance(codec, BlockCodec)
        payload = torch.zeros(codec.payload_bytes(own.fragment), dtype=torch.uint8, device=self.weights.device)
        delta = self.compute_delta(index)
        bad, lost = -1, None if residual is None else Kept(residual)
        with nullcontext() if lost is None else self._with_the_weights(lost, changes=True) as lost_here:
            try:
                for place, start, count in own.runs:
                    run = slice(start, start + count)
                    added = None if lost_here is None else lost_here[run]
                    codec.encode_run(
                        delta[run], payload, fragment, own.fragment, index=place, start=start, seed=seed, residual=added
                    )
            except NonFiniteError as error:
                bad = error.index
        squares = [0.0, 0.0] if lost is None or bad >= 0 else [norm_sq(lost.read()), norm_sq(delta)]
        self.give_back(delta)
        told = self.weights.gather([bad, *squares])
        if wrong := [place for place, *_ in told if place >= 0]:
            raise NonFiniteDelta(self.layout.fragments[index].tensor_at(min(wrong)), inner_step)
        sums = sum(each[1] for each in told), sum(each[2] for each in told)
        return self.weights.collect(index, codec, payload.cpu()), sums

    def _start(self, index: int) -> Kept:
        return self._starts.get(index, self.anchors[index])

    def give_back(self, buffer: Tensor) -> None:
        """Of `compute_delta`. From any thread, once the device is done with it."""
        self.buffers.give_back(buffer)

    def apply(self, index: int, version: int, blob: bytearray, codec: str, epoch: int, anchor_digest: int) -> bool:
        """anchor += decoded update; False if the bytes or the resulting digest are wrong."""
        self.versions[index] = -1
        if not self._use_ahead(index, version):
            try:
                sent = self.parsed(index, version, version - 1, codec, epoch, blob)
            except BadBlob:
                return False
            self.weights.broadcast("add", index, codec, sent.seed)
            self.digests[index] = self._add(index, sent)
        if self.digests[index] != anchor_digest:
            return False
        self.versions[index] = version
        return True

    def can_apply_ahead(self, index: int) -> bool:
        """Whether `apply_ahead` is worth a copy of the anchor in memory: of a quarter of them at most, on the CPU."""
        numel, kept = self.own[index].numel, sum(fragment.numel for fragment in self.own.values())
        in_reach = not self.weights.sharded and self.weights.device.type == "cpu"
        return in_reach and _WORTH_AHEAD <= numel <= kept // 4 and self._ahead is None

    @torch.no_grad()
    def apply_ahead(self, index: int, version: int, blob: bytearray, codec: str, epoch: int) -> None:
        """In another thread, while the anchor is still wanted as it is: what `apply` of this update will make of it.

        `apply` takes it unless the anchor has changed meanwhile, and then does all again.
        """
        changes = self.anchors[index].changes
        if self._ahead is not None or self.versions[index] != version - 1:
            return
        try:
            sent = self.parsed(index, version, version - 1, codec, epoch, blob)
        except BadBlob:  # `apply` sees it again
            return
        before, spare, self._spare = self.anchors[index].read(), self._spare, None
        anchor = torch.empty_like(before) if spare is None or spare.numel() != before.numel() else spare
        digest = self._apply(index, sent, before, anchor)
        self._ahead = _Ahead(index=index, version=version, changes=changes, anchor=anchor, digest=digest)

    def _use_ahead(self, index: int, version: int) -> bool:
        """Make the anchor what was reckoned ahead; False if that was another one, or of the anchor as it was before."""
        ahead = self._ahead
        if ahead is None:
            return False
        self._ahead = None
        if (ahead.index, ahead.version, ahead.changes) != (index, version, self.anchors[index].changes):
            self._spare = ahead.anchor
            return False
        self._spare, self.digests[index] = self.anchors[index].replace(ahead.anchor), ahead.digest
        return True

    def _add(self, index: int, sent: Sent) -> int:
        """anchor += decoded; the digest of the whole anchor."""
        with self._with_the_weights(self.anchors[index], changes=True) as anchor:
            return self._apply(index, sent, anchor, anchor)

    @torch.no_grad()
    def _apply(self, index: int, sent: Sent, base: Tensor, out: Tensor) -> int:
        """out = base + decoded, of the own part; the digest of the whole fragment. `out` may be `base`."""
        if self.weights.sharded:
            assert out is base
            self._decode_add(index, sent, out)
            return self.weights.digest(index, out)
        codec, payload = self._payload(index, sent, out)
        return codec.apply_into(payload, base, out, self.own[index], seed=sent.seed)

    @torch.no_grad()
    def _decode_add(self, index: int, sent: Sent, out: Tensor) -> None:
        codec, payload = self._payload(index, sent, out)
        codec.decode_add_(payload, out, 1.0, self.own[index], seed=sent.seed)

    def _payload(self, index: int, sent: Sent, out: Tensor) -> tuple[Codec, Tensor]:
        """What was sent, of the own part, where `out` is."""
        codec = codec_named(sent.codec)
        return codec, self.weights.payload_of(index, codec, sent.payload).to(out.device)

    def install(self, index: int, version: int, blob: bytearray, epoch: int) -> bool:
        """Replace the anchor by a snapshot; False if it is not one."""
        self.versions[index] = -1
        try:
            sent = self.parsed(index, version, version, _FP32, epoch, blob)
        except BadBlob:
            return False
        self.weights.broadcast("set", index)
        self.digests[index] = self._set(index, sent.payload)
        self.versions[index] = version
        return True

    @torch.no_grad()
    def _set(self, index: int, payload: Tensor | None) -> int:
        codec, anchor = codec_named(_FP32), self.anchors[index].write()
        codec.decode_into(self.weights.payload_of(index, codec, payload), anchor, self.own[index])
        return self.weights.digest(index, anchor)

    def load(self, index: int, version: int, wanted: int) -> bool:
        """Read the anchor from disk; False unless all of it is there, with this digest."""
        self.versions[index] = -1
        self.weights.broadcast("load", index, version)
        self.digests[index] = self._load(index, version)
        if self.digests[index] != wanted:
            return False
        self.versions[index] = version
        return True

    def _load(self, index: int, version: int) -> int:
        assert self.files is not None
        anchor = self.anchors[index].write()
        self.files.read(index, version, self.weights.own[index].runs, anchor)
        return self.weights.digest(index, anchor)

    def save(self, index: int) -> None:
        """Begin to write the anchor to disk, while training goes on; `end_save` follows."""
        self.weights.broadcast("save", index, self.versions[index])
        self._save(index, self.versions[index])

    def _save(self, index: int, version: int) -> None:
        assert self.files is not None
        runs, anchor = self.weights.own[index].runs, self.anchors[index]
        self.files.begin(index, version, runs, anchor.read, lambda: anchor.changes, beside=self.side.beside)

    def end_save(self, head: Head | None) -> None:
        """Wait until all ranks have written their parts; the file counts if all could. None: it is not wanted."""
        self.weights.broadcast("saved", None if head is None else asdict(head))
        self._end_save(head)

    def _end_save(self, head: Head | None) -> None:
        assert self.files is not None
        if all(self.weights.gather(self.files.finish_save())) and head is not None:
            self.files.finish(head)

    def first(self, index: int, wanted: int) -> bool:
        """Make the local weights the anchor of version 0; False, and no anchor, unless they have this digest."""
        self.weights.broadcast("first", index, wanted)
        if not self._first(index, wanted):
            return False
        self.versions[index], self.digests[index] = 0, wanted
        return True

    @torch.no_grad()
    def _first(self, index: int, wanted: int) -> bool:
        self.merges.show()
        anchor = self.anchors[index].write()
        flatten_into(self.own[index], self.weights.sources(index, gradients=False), anchor)
        canonicalise_(anchor)
        return self.weights.digest(index, anchor) == wanted

    def anchor_blob(self, index: int, epoch: int) -> bytearray:
        self.weights.broadcast("collect", index)
        codec, fragment, version = codec_named(_FP32), self.layout.fragments[index], self.versions[index]
        blob = bytearray(blob_bytes(codec, fragment))
        self.weights.collect_into(index, codec, self.anchors[index].read(), as_tensor(blob)[HEADER_BYTES:])
        return seal(BlobHeader(codec=codec, fragment=fragment, version=version, base=version, epoch=epoch), blob)

    def merge(self, index: int, mix: float, own: Sequence[OwnDelta] = (), factor: float = 0.0, epoch: int = 0) -> None:
        """local ← mix·local + (1 − mix)·start. The next delta is measured from the start.

        That is the anchor; with deltas of its `own` anchor − factor · Σ decoded (`local_update.py`), one more copy.
        """
        sent = [
            self.parsed(
                index, delta.terms.window, delta.blob.version, delta.terms.codec_of(delta.blob.node), epoch, delta.data
            )
            for delta in own
        ]
        self.weights.broadcast("merge", index, mix, factor, [[each.codec, each.seed] for each in sent])
        self._merge(index, mix, factor, sent)

    @torch.no_grad()
    def _merge(self, index: int, mix: float, factor: float, own: Sequence[Sent]) -> None:
        start = self.anchors[index]
        self._starts.pop(index, None)
        if own:
            fresh = self.zeros(index)
            for sent in own:
                self._decode_add(index, sent, fresh)
            eager_start_into(start.read(), fresh, fresh, factor=factor)
            start = self._starts[index] = Kept(fresh)
        with self._with_the_weights(start) as there, self.merges.merge(index):
            self.weights.mix(index, there, mix)

    def learn(self, index: int, own: Sent, update: Sent, *, outer_lr: float, lr_sum: float, alpha: float) -> None:
        """d_i of a fragment, from the node's own delta and from the update with it; `local_update.learn_` says how."""
        told = [[sent.codec, sent.seed] for sent in (own, update)]
        self.weights.broadcast("learn", index, *told, outer_lr, lr_sum, alpha)
        self._learn(index, own, update, outer_lr, lr_sum, alpha)

    @torch.no_grad()
    def _learn(self, index: int, own: Sent, update: Sent, outer_lr: float, lr_sum: float, alpha: float) -> None:
        increments = index in self._smoothed
        for kept in (self.drifts, self._increments) if increments else (self.drifts,):
            self._begin(kept, index)
        decoded = [self._decoded(index, sent) for sent in (own, update)]
        kept_parts = tiles(self.drifts[index].write(), (self._increments if increments else self.drifts)[index].write())
        for (drift_part, sent_part), own_part, update_part in zip(kept_parts, *decoded, strict=True):
            mean_part = merged_by_plain_step(update_part, outer_lr)
            if increments:
                learn_increment_(drift_part, sent_part, own_part, mean_part, lr_sum=lr_sum)
            else:
                learn_(drift_part, own_part, mean_part, lr_sum=lr_sum, alpha=alpha)

    def _decoded(self, index: int, sent: Sent) -> Iterator[Tensor]:
        """The own part's decoded numbers, a tile at a time."""
        codec = codec_named(sent.codec)
        payload = self.weights.payload_of(index, codec, sent.payload)
        return codec.decoded_tiles(payload, self.own[index], seed=sent.seed, device=self.drifts[index].device)

    def correct(self, index: int, lr: float) -> None:
        """local ← local − lr · d_i, after an inner step at that rate; nothing while d_i is zero."""
        if index in self.drifts:
            self.weights.broadcast("correct", index, lr)
            self._correct(index, lr)

    @torch.no_grad()
    def _correct(self, index: int, lr: float) -> None:
        with self._with_the_weights(self.drifts[index]) as drift, self.merges.move(index):
            self.weights.correct(index, drift, lr)

    def forget_drift(self, index: int) -> None:
        """d_i ← 0."""
        if index in self.drifts:
            self.weights.broadcast("forget", index)
            self._forget_drift(index)

    def _forget_drift(self, index: int) -> None:
        self.drifts.pop(index, None)
        self._increments.pop(index, None)

    @contextmanager
    def anchors_in_place(self) -> Iterator[None]:
        """The module computes with the anchors inside the block.

        Whole fp32 weights change places with their anchors, which takes no memory.
        """
        self.weights.broadcast("show")
        self._show()
        try:
            yield
        finally:
            self.weights.broadcast("restore")
            self._restore()

    @torch.no_grad()
    def _show(self) -> None:
        self.merges.show()
        if self._can_exchange:
            return self._exchange_()
        self.weights.set_aside()
        for fragment in self.fragments:
            with self._with_the_weights(self.anchors[fragment.index]) as anchor:
                self.weights.mix(fragment.index, anchor, 0.0)

    @torch.no_grad()
    def _restore(self) -> None:
        if self._can_exchange:
            return self._exchange_()
        self.weights.restore()

    @property
    def _can_exchange(self) -> bool:
        """Whether anchors can hold the local weights. They cannot hold those of a sharded model or of another type than
        fp32, nor statistics, which a forward pass may change."""
        parameters = self.parameters.values()
        return type(self.weights) is Weights and all(p.dtype == torch.float32 and p.requires_grad for p in parameters)

    def _exchange_(self) -> None:
        """Swap weights and anchors, a tile at a time."""
        for fragment in self.fragments:
            with self._with_the_weights(self.anchors[fragment.index], changes=True) as flat:
                for slot in fragment.tensors:
                    local, anchor = rows_of(self.parameters[slot.name], slot), view(flat, slot)
                    flats = (local.view(-1), anchor.view(-1)) if local.is_contiguous() else None
                    for here, there in tiles(*flats) if flats is not None else [(local, anchor)]:
                        kept = here.clone()
                        here.copy_(there)
                        there.copy_(kept)

    def begin_again(self) -> None:
        """Drop all anchors. The local weights stay until they are merged with new ones."""
        self.weights.broadcast("begin again")
        self._begin_again()

    def _begin_again(self) -> None:
        self.versions = dict.fromkeys(self.anchors, -1)
        for anchor in self.anchors.values():
            anchor.changes += 1
        self._starts.clear()
        for beside in (self.drifts, self._smoothed, self._increments, self._next):
            beside.clear()

    def parsed(self, index: int, version: int, base: int, codec: str, epoch: int, blob: bytes | bytearray) -> Sent:
        """A blob of a fragment. Raises BadBlob."""
        expect = Expected(
            codecs=(codec_named(codec),),
            fragment=self.layout.fragments[index],
            version=version,
            base=base,
            newest_epoch=epoch,
        )
        header, payload, _ = parse_blob(blob, expect)
        return Sent(codec=codec, seed=header.seed, payload=payload)


def replica_of(module: nn.Module, spec: RunSpec, holds: Part = None, weights: Weights | None = None) -> Replica:
    """For a run. Raises LayoutMismatch."""
    terms = spec.terms
    variates = (3 if sums_increments(terms) else 1) if terms.inner.control_variates else 0
    beside = codec_named(terms.codecs.up).beta > 0.0, variates, terms.schedule.eager
    return Replica(
        module,
        spec.identity.layout,
        gradients=not method_named(terms.method).inner,
        holds=holds,
        weights=weights,
        copies=1 + sum(beside),
    )


def matched_parameters(
    module: nn.Module, layout: Layout, holds: Part = None, absent: Mapping[str, nn.Parameter] = MappingProxyType({})
) -> dict[str, nn.Parameter]:
    """The module's trainable tensors by name, its running statistics if the run averages them, and those that are
    `absent` because another rank has them, checked against this part of the layout: it has them all, and no others.
    Raises LayoutMismatch: names the first difference, or a tie that is lost."""
    _check_ties(module)
    there = whole_shapes(fragments_of(holds, layout))
    # A run that began from the weights of a compiled model may have its names.
    names = {plain_name(name): name for name in there}
    here = {names.get(name, name): parameter for name, parameter in [*trainable_tensors(module), *absent.items()]}
    # Buffers are taken for parameters without gradients.
    here |= {name: cast(nn.Parameter, tensor) for name, tensor in statistics_of(module, there).items()}
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


def _check_ties(module: nn.Module) -> None:
    """Raises LayoutMismatch: a transformers model says that two weights are tied, and here they are two parameters."""
    for part in module.modules():
        here = {plain_name(name): weight for name, weight in part.named_parameters(remove_duplicate=False)}
        for second, first in _ties(part, here).items():
            one, other = here.get(first), here.get(second)
            if one is None or other is None or (one.data_ptr() or id(one)) == (other.data_ptr() or id(other)):
                continue
            if not (one.requires_grad or other.requires_grad):
                continue  # not exchanged: they stay as they were loaded
            modules = ", ".join(f"model.{name.rpartition('.')[0]}" for name in (first, second))
            sharded = is_dtensor(one) or is_dtensor(other)
            fix = f"shard them in one call, as fully_shard([{modules}])" if sharded else "call model.tie_weights()"
            raise LayoutMismatch(
                f"the model's config says that {second!r} is tied to {first!r}, and here they are two parameters: "
                f"{fix}, or build the model with tie_word_embeddings=False"
            )


def _ties(part: nn.Module, here: Mapping[str, nn.Parameter]) -> Mapping[str, str]:
    """Of each weight of a part that is another's, by the part's config: the other. Empty for what has no config."""
    ties: Mapping[str, str] | None = part.__dict__.get("all_tied_weights_keys")  # of transformers 5, for this config
    config, embedding_of = getattr(part, "config", None), getattr(part, "get_output_embeddings", None)
    if ties is not None or not getattr(config, "tie_word_embeddings", False) or embedding_of is None:
        return ties or {}
    ends = (embedding_of(), part.get_input_embeddings())  # type: ignore[operator]
    names = [next((name for name, w in here.items() if w is getattr(end, "weight", None)), "") for end in ends]
    return {names[0]: names[1]}


def _why_missing(name: str, module: nn.Module, here: Mapping[str, nn.Parameter]) -> str:
    """Why the module lacks a parameter of the run, and the fix; empty if unknown."""
    wrapped = next((other for other in here if other.endswith(f".{name}")), None)
    if wrapped is not None:
        return f": here it is {wrapped!r}. Give join the module inside the wrapper, as model.module"
    if any(
        name == other.replace(f".{adapter}", "") for adapter in getattr(module, "peft_config", ()) for other in here
    ):
        save = "save_file({name: p.detach() for name, p in model.named_parameters() if p.requires_grad}, FILE)"
        return f": peft's own files leave out the adapter's name. Make the run's weights file with {save}"
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
