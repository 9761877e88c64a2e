"""The arithmetic of a commit: sum the deltas, step the target, encode the update, and apply what was encoded.

Buffers and blobs in, buffers and one blob out. Nothing is changed in place unless the caller allows it, so that a
commit that cannot be made durable leaves no trace. The decoded update is canonical: it is what every anchor gets.
"""

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from farloop.algo import schedule
from farloop.algo.adamw import AdamWSettings, adamw_step_
from farloop.algo.fragments import flatten_into, view
from farloop.algo.merge_rules import Gram, Pieces, coordinates_into, gram, radial_into
from farloop.algo.methods import method_named
from farloop.algo.outer_optimizers import OUTER_OPTIMIZERS, OuterSettings, restarts, staleness_gap, state_names, step_
from farloop.algo.spec import Fragment, RoundPlan, is_statistic
from farloop.algo.terms import Terms
from farloop.algo.validation import ROBUST_RULES
from farloop.quant.blob import (
    HEADER_BYTES,
    BlobHeader,
    Bytes,
    Expected,
    Parsed,
    as_tensor,
    blob_bytes,
    parse_blob,
    seal,
)
from farloop.quant.codec import Codec, finite_weight
from farloop.quant.digest import canonicalise_, combine, digest, finite_digest
from farloop.quant.errors import NonFiniteError
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.kernels.dispatch import fast_path
from farloop.quant.kernels.interface import BlockKernels, Found, OuterStep
from farloop.quant.norm import norm_sq, tensor_norms, total_of
from farloop.quant.registry import codec_named

FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """A fragment on the coordinator at one version, fp32 [numel] each."""

    version: int
    anchor: Tensor
    target: Tensor
    outer: dict[str, Tensor]  # state of the outer optimizer by name, as `state_names` says; empty without momentum
    largest: float = math.inf  # no magnitude in them is larger

    @classmethod
    def begin(cls, anchor: Tensor, terms: Terms) -> "Buffers":
        """Version 0: the target is the anchor, the optimizer's state is zero."""
        names = state_names(method_named(terms.method).outer, terms.outer.momentum)
        outer = {name: torch.zeros_like(anchor) for name in names}
        return cls(version=0, anchor=anchor, target=anchor.clone(), outer=outer)

    def ready_for(self, terms: Terms) -> "Buffers":
        """With the state that these terms need: zero for a momentum that is new."""
        names = state_names(method_named(terms.method).outer, terms.outer.momentum)
        missing = {name: torch.zeros_like(self.anchor) for name in names if name not in self.outer}
        return replace(self, outer={**self.outer, **missing}) if missing else self

    @property
    def tensors(self) -> list[Tensor]:
        return [self.anchor, self.target, *self.outer.values()]

    def outer_digest(self, digest: Callable[[Tensor, int], int] = digest) -> int | None:
        """Digest over the optimizer's state; None without one."""
        if not self.outer:
            return None
        numel = self.anchor.numel()
        return combine(digest(self.outer[name], i * numel) for i, name in enumerate(sorted(self.outer)))


_LARGE_BYTES = 32 << 20  # malloc keeps what is smaller: `keep_freed_blocks`


def _references(buffers: Sequence[bytearray]) -> list[int]:
    """How many references there are to each; views and tensors of its memory have one, too."""
    return [sys.getrefcount(buffer) for buffer in buffers]


_ALONE = _references([bytearray(1)])[0]  # to a buffer that only a list refers to


class Pool:
    """Tensors and buffers that are not read any more, for the commits to come. Any thread.

    To fill pages that are new to the process costs more than the arithmetic on them, and seconds where the system has
    to clear pages of 2 MiB first.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._tensors, self._lock = most_bytes, list[Tensor](), threading.Lock()
        self._buffers: list[bytearray] = []  # large ones, those that are in use too

    def buffer(self, num_bytes: int) -> bytearray:
        """Memory for a blob, with any content. It is used again, without being given back, once no reference to it is
        left: a delta or an update has many readers. Those that are free beyond the limit are dropped."""
        if num_bytes < _LARGE_BYTES or num_bytes > self._most_bytes:
            return bytearray(num_bytes)
        with self._lock:
            free = [k for k, count in enumerate(_references(self._buffers)) if count == _ALONE]
            for k in free:
                if len(self._buffers[k]) == num_bytes:
                    return self._buffers[k]
            room = self._most_bytes - num_bytes
            for k in reversed(free):  # the newest are kept
                room -= len(self._buffers[k])
                if room < 0:
                    del self._buffers[k]
            self._buffers.append(bytearray(num_bytes))
            return self._buffers[-1]

    def empty(self, numel: int) -> Tensor:
        """A tensor with any content, fp32 [numel]. Where it is made, what is kept leaves it room within the limit."""
        with self._lock:
            for k, tensor in enumerate(self._tensors):
                if tensor.numel() == numel:
                    return self._tensors.pop(k)
            self._free_down_to(max(0, self._most_bytes - FP32_BYTES * numel))
        return torch.empty(numel, dtype=torch.float32, device="cpu")

    def copy(self, tensor: Tensor) -> Tensor:
        return self.empty(tensor.numel()).copy_(tensor)

    def give(self, tensors: Sequence[Tensor]) -> None:
        """A tensor that is given may have no other reader. The oldest are dropped beyond the limit."""
        with self._lock:
            self._tensors += tensors
            self._free_down_to(self._most_bytes)

    def _free_down_to(self, num_bytes: int) -> None:
        while self._tensors and sum(tensor.nbytes for tensor in self._tensors) > num_bytes:
            del self._tensors[0]


NO_POOL = Pool(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    fragment: Fragment
    version: int  # the version that the commit will have
    round: RoundPlan
    outer: OuterSettings
    epoch: int
    reach: float = 0.0
    """Progress of a node in the round of these deltas (`weights.reach`): co2 measures their staleness by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A commit before it is durable."""

    buffers: Buffers
    update: bytearray  # the encoded update, header included
    anchor_digest: int
    target_digest: int
    outer_digest: int | None
    delta_norm: float  # norm of the merged delta
    chosen: Mapping[str, str] = field(default_factory=dict)
    """By requested codec, the one chosen for the fragment's next deltas; others stay as requested."""
    gap: float = 1.0  # Λ of co2's step
    weights: tuple[float, ...] | None = None  # weights of the deltas, if a robust rule set them
    cosines: tuple[float | None, ...] = ()  # cosines of the deltas, then of those in quarantine; empty if not measured


@torch.no_grad()
def first_anchor(fragment: Fragment, tensors: Mapping[str, Tensor]) -> Tensor:
    """The anchor of version 0 from named tensors, canonical, fp32 [numel]."""
    flat = torch.empty(fragment.numel, dtype=torch.float32, device="cpu")
    flatten_into(fragment, tensors, flat)
    canonicalise_(flat)
    return flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Σ weight · decoded of valid payloads of one codec, in this order: a commit need not have all of it in memory."""

    codec: Codec
    fragment: Fragment
    payloads: list[Tensor]
    weights: list[float]
    seeds: list[int]

    def whole(self, pool: Pool) -> Tensor:
        total = pool.empty(self.fragment.numel)
        self.codec.sum_into(self.payloads, self.weights, total, self.fragment, seeds=self.seeds)
        return total


def whole(delta: Tensor | Sum) -> Tensor:
    return delta.whole(NO_POOL) if isinstance(delta, Sum) else delta


@torch.no_grad()
def to_merge(
    inputs: Sequence[tuple[Bytes | Parsed, float]], fragment: Fragment, expected: Sequence[Expected], rule: str = "mean"
) -> Tensor | Sum:
    """One delta of many, fp32 [numel], summed in the given order.

    By the mean it is Σ weight · decoded, and is left as a `Sum` where it can be. Another rule reads every payload more
    than once, decoding it a tile at a time where the codec can. `expected` has one codec of each delta.
    """
    codecs = [codec for expect in expected for codec in expect.codecs]
    if rule in ROBUST_RULES:
        total = torch.empty(fragment.numel, dtype=torch.float32, device="cpu")
        counted = [k for k, (_, weight) in enumerate(inputs) if weight > 0.0]
        coordinates_into(rule, _pieces([inputs[k][0] for k in counted], [expected[k] for k in counted]), total)
        return total
    if rule == "radial":
        total = torch.empty(fragment.numel, dtype=torch.float32, device="cpu")
        pieces = _pieces([blob for blob, _ in inputs], expected, _scratch(expected))
        weights = [weight for _, weight in inputs]
        radial_into(pieces, weights, fragment, total, lambda read: tensor_norms(read, fragment))
        return total
    if any(codec.traits.entropy_coded or codec != codecs[0] for codec in codecs):
        # One after the other, so that a single payload lies here decompressed.
        total, scratch = torch.zeros(fragment.numel, dtype=torch.float32, device="cpu"), _scratch(expected)
        for (blob, weight), expect in zip(inputs, expected, strict=True):
            header, payload, _ = parse_blob(blob, expect, scratch=scratch)
            header.codec.decode_add_(payload, total, weight, fragment, seed=header.seed)
        return total
    parsed = [parse_blob(blob, expect) for (blob, _), expect in zip(inputs, expected, strict=True)]
    return Sum(
        codec=codecs[0],
        fragment=fragment,
        payloads=[each.payload for each in parsed],
        weights=[weight for _, weight in inputs],
        seeds=[each.header.seed for each in parsed],
    )


@torch.no_grad()
def products(blobs: Sequence[Bytes | Parsed], expected: Sequence[Expected]) -> Gram:
    """Inner products of encoded deltas. Deltas that cannot be decoded by tiles are held decoded, all at once."""
    return gram(_pieces(blobs, expected))


def _pieces(
    blobs: Sequence[Bytes | Parsed], expected: Sequence[Expected], scratch: bytearray | None = None
) -> list[Pieces]:
    """`scratch`: for all of them, where one is read at a time."""

    def read(blob: Bytes | Parsed, expect: Expected) -> Iterator[Tensor]:
        header, payload, _ = parse_blob(blob, expect, scratch=scratch)
        return header.codec.decoded_tiles(payload, expect.fragment, seed=header.seed)

    return [partial(read, blob, expect) for blob, expect in zip(blobs, expected, strict=True)]


def _scratch(expected: Sequence[Expected]) -> bytearray | None:
    """A buffer for any one of these payloads, decompressed; None if none is compressed."""
    coded = [(codec, expect.fragment) for expect in expected for codec in expect.codecs if codec.traits.entropy_coded]
    return bytearray(max(codec.payload_bytes(fragment) for codec, fragment in coded)) if coded else None


@torch.no_grad()
def advance(buffers: Buffers, delta: Tensor, step: Step, terms: Terms) -> Buffers:
    """The outer step: new target and optimizer state; the anchor stays."""
    buffers = buffers.ready_for(terms)
    return _advanced(buffers, delta, step, terms, _gap(buffers, step, terms))


def _advanced(buffers: Buffers, delta: Tensor, step: Step, terms: Terms, gap: float, pool: Pool = NO_POOL) -> Buffers:
    if step.outer.delta_scale != 1.0:
        delta = delta * step.outer.delta_scale
    target = pool.copy(buffers.target)
    outer = {name: pool.copy(tensor) for name, tensor in buffers.outer.items()}
    if method_named(terms.method).outer == "adamw":
        adamw_step_(
            target,
            outer,
            delta,
            fragment=step.fragment,
            step=step.version,
            lr=schedule.learning_rate(terms, step.round.start),
            grad_norm=norm_sq(delta) ** 0.5,
            settings=AdamWSettings(clip=terms.inner.clip, weight_decay=terms.inner.weight_decay),
        )
    else:
        step_(target, outer, delta, _with_clip(step, delta, gap), version=step.version, gap=gap)
    for slot in step.fragment.tensors:
        if is_statistic(slot.name) and slot.name.endswith("var"):  # the sum is rounded, beyond 0 where it is all of it
            view(target, slot).clamp_(min=0.0)
    return Buffers(version=buffers.version, anchor=buffers.anchor, target=target, outer=outer)


def _gap(buffers: Buffers, step: Step, terms: Terms) -> float:
    """Λ, from the target's last step α·m. Eager nodes have gone on from the late delta: there is no gap to damp."""
    if terms.schedule.eager or not OUTER_OPTIMIZERS[step.outer.kind].has_gap:
        return 1.0
    return staleness_gap(step.outer.lr * norm_sq(buffers.outer["momentum"]) ** 0.5, step.reach)


def _with_clip(step: Step, delta: Tensor, gap: float) -> OuterSettings:
    """The settings with φ as a size of an element: it is given in root mean squares of the damped delta."""
    if step.outer.clip is None:
        return step.outer
    numel = sum(tensor.numel for tensor in step.fragment.tensors)
    return replace(step.outer, clip=step.outer.clip * (norm_sq(delta) / numel) ** 0.5 / gap)


def kernels_of(buffers: Buffers, delta: Tensor | Sum, step: Step, terms: Terms, codec_down: str) -> BlockKernels | None:
    """Kernels that make this commit in one pass; None if it takes several."""
    codec = codec_named(codec_down)
    # The kernels know Nesterov and, without momentum, SGD: the last step of every run whose nodes have an optimizer.
    known = method_named(terms.method).outer != "adamw" and step.outer.kind in ("nesterov", "sgd")
    known = known and not restarts(step.outer, step.version) and not step.fragment.averaged
    if not known or not isinstance(codec, BlockCodec):
        return None
    if isinstance(delta, Sum) and delta.codec.name != codec.name:
        return None
    return fast_path(codec.kernel_key(), buffers.target.device)


@torch.no_grad()
def commit(
    buffers: Buffers,
    delta: Tensor | Sum,
    step: Step,
    terms: Terms,
    codec_down: str,
    pool: Pool = NO_POOL,
    in_place: bool = False,
    expendable: bool = False,
    measured: bool = True,
) -> Result:
    """The outer step, the encoded difference of target and anchor, and the anchor with what the nodes will decode.

    `in_place`: the old buffers may become the new ones. They do where it is known before that every number stays
    finite, so that an error leaves them as they were. `expendable`: they do, and an error leaves them lost. Where the
    kernels make it in one pass, and it is not to be `measured`, digests and the norm are 0, and the update no blob.
    Raises NonFiniteError: the sum or the step left what fp32 holds.
    """
    codec, buffers, numel = codec_named(codec_down), buffers.ready_for(terms), step.fragment.numel
    fast = kernels_of(buffers, delta, step, terms, codec_down)
    if isinstance(delta, Sum) and fast is None:
        total = delta.whole(pool)
        result = commit(buffers, total, step, terms, codec_down, pool)
        pool.give([total])
        return result
    if fast is None:
        assert isinstance(delta, Tensor)
        gap = _gap(buffers, step, terms)
        stepped = _advanced(buffers, delta, step, terms, gap, pool)
        return replace(publish(stepped, step, codec_down, delta, pool), gap=gap)
    assert isinstance(codec, BlockCodec)
    header, update = _header(codec, step), pool.buffer(blob_bytes(codec, step.fragment))
    momentum = buffers.outer.get("momentum")
    in_place = expendable or (in_place and isinstance(delta, Sum) and _stays_finite(buffers, delta, step, codec))
    if in_place:
        new_target, new_anchor, new_momentum = buffers.target, buffers.anchor, momentum
    else:
        new_target, new_anchor = pool.empty(numel), pool.empty(numel)
        new_momentum = None if momentum is None else pool.empty(numel)
    found = fast.outer(
        OuterStep(
            delta=None if isinstance(delta, Sum) else delta,
            payloads=delta.payloads if isinstance(delta, Sum) else (),
            weights=[finite_weight(weight) for weight in delta.weights] if isinstance(delta, Sum) else (),
            scale=step.outer.delta_scale,
            target=buffers.target,
            momentum=momentum,
            anchor=buffers.anchor,
            lr=step.outer.lr,
            mu=step.outer.momentum,
            out=as_tensor(update)[HEADER_BYTES:],
            new_target=new_target,
            new_momentum=new_momentum,
            new_anchor=new_anchor,
            seed=header.seed,
            steps=codec.steps(step.fragment),
            measured=measured,
        )
    )
    if isinstance(found, int):
        assert expendable or not in_place
        raise NonFiniteError(found)
    assert expendable or not in_place or math.isfinite(found.largest)
    outer = buffers.outer if new_momentum is None else {**buffers.outer, "momentum": new_momentum}
    after = Buffers(version=step.version, anchor=new_anchor, target=new_target, outer=outer)
    after = replace(after, largest=math.inf if outer.keys() - {"momentum"} else found.largest)
    if not measured:
        return Result(buffers=after, update=update, anchor_digest=0, target_digest=0, outer_digest=None, delta_norm=0.0)
    return _result(after, seal(header, update), total_of(found.tile_sums), found)


_FAR_FROM_THE_LARGEST = 2.0**120


def _stays_finite(buffers: Buffers, delta: Sum, step: Step, codec: BlockCodec) -> bool:
    """Whether no number of this commit can come near the largest of fp32, by bounds of all that goes into it."""
    if codec.kernel_key().absolute or not isinstance(delta.codec, BlockCodec):  # a step of its own, however large
        return False
    lr, mu, old = step.outer.lr, step.outer.momentum, buffers.largest
    each = [abs(w) * delta.codec.largest(p, delta.fragment) for p, w in zip(delta.payloads, delta.weights, strict=True)]
    moved = abs(step.outer.delta_scale) * sum(each)
    momentum = mu * old + moved
    target = old + lr * (mu * momentum + moved)
    anchor = old + 2 * (target + old)  # what is decoded is less than twice what was encoded
    return max(momentum, anchor) < _FAR_FROM_THE_LARGEST


@torch.no_grad()
def publish(stepped: Buffers, step: Step, codec_down: str, delta: Tensor, pool: Pool = NO_POOL) -> Result:
    """Encode target − anchor, and apply the decoded update to the anchor."""
    codec, fragment = codec_named(codec_down), step.fragment
    header, update = _header(codec, step), pool.buffer(blob_bytes(codec, fragment))
    codec.encode_into(stepped.target - stepped.anchor, as_tensor(update)[HEADER_BYTES:], fragment, seed=header.seed)
    update = seal(header, update)
    anchor = pool.copy(stepped.anchor)
    apply_update_(anchor, update, step, codec_down)
    after = Buffers(version=step.version, anchor=anchor, target=stepped.target, outer=stepped.outer)
    return _result(after, update, norm_sq(delta))


def _header(codec: Codec, step: Step) -> BlobHeader:
    return BlobHeader(
        codec=codec, fragment=step.fragment, version=step.version, base=step.version - 1, epoch=step.epoch
    )


def _result(after: Buffers, update: bytearray, delta_norm_sq: float, found: Found | None = None) -> Result:
    """`found`: by the pass that wrote these buffers, momentum included."""
    if found is None or not math.isfinite(found.largest) or after.outer.keys() - {"momentum"}:
        anchor_digest = finite_digest(after.anchor)  # an update is finite, and may lead beyond what fp32 holds
        target_digest, outer_digest = digest(after.target), after.outer_digest(finite_digest)
    else:
        anchor_digest, target_digest = found.anchor_digest, found.target_digest
        outer_digest = found.momentum_digest if after.outer else None
    return Result(
        buffers=after,
        update=update,
        anchor_digest=anchor_digest,
        target_digest=target_digest,
        outer_digest=outer_digest,
        delta_norm=delta_norm_sq**0.5,
    )


@torch.no_grad()
def apply_update_(anchor: Tensor, update: bytes | bytearray | memoryview, step: Step, codec_down: str) -> None:
    """anchor += decoded update: the one line that makes all anchors equal."""
    codec = codec_named(codec_down)
    expect = Expected(
        codecs=(codec,), fragment=step.fragment, version=step.version, base=step.version - 1, newest_epoch=step.epoch
    )
    header, payload, _ = parse_blob(update, expect)
    codec.decode_add_(payload, anchor, 1.0, step.fragment, seed=header.seed)
