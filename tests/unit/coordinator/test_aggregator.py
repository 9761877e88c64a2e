"""The arithmetic of a commit: a pure job whose decoded update is what every anchor gets (protocol K, M, O)."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest
import torch
from slow_cases import mostly_slow, slow
from torch import Tensor

from farloop.algo.fragments import partition, zero_padding_
from farloop.algo.merge_rules import radial_into
from farloop.algo.methods import METHODS
from farloop.algo.outer_optimizers import OuterKind, OuterSettings, state_names, step_
from farloop.algo.outer_settings import PLAIN_AVERAGE
from farloop.algo.schedule import learning_rate
from farloop.algo.spec import Fragment, RoundPlan, RunSpec, TensorSlot
from farloop.algo.terms import Terms
from farloop.coordinator import aggregator
from farloop.coordinator.aggregator import Buffers, Result, Step
from farloop.coordinator.storage.snapshots import Snapshot, load, save
from farloop.quant.blob import BlobHeader, Expected, pack_blob, parse_blob
from farloop.quant.digest import combine, digest
from farloop.quant.errors import BadBlob, NonFiniteError
from farloop.quant.norm import norm_sq, tensor_norms
from farloop.quant.registry import CODECS, codec_named

FRAGMENT = Fragment(
    index=3,
    slot=0,
    numel=1280,
    tensors=(TensorSlot(name="blocks.0.w", shape=(20, 50), offset=0), TensorSlot(name="b", shape=(7,), offset=1024)),
)
WEIGHTS = [0.2, 0.3, 0.5]
OF_EACH_KIND = ("fp32", "q4", "q4r", "topk")
"""Plain numbers, blocks with and without chance, and few numbers with their places."""


def step(version: int = 1, *, lr: float = 0.6, momentum: float = 0.9) -> Step:
    return Step(
        fragment=FRAGMENT,
        version=version,
        round=RoundPlan(index=version - 1, start=10 * (version - 1), length=10),
        outer=OuterSettings(lr=lr, momentum=momentum),
        epoch=2,
    )


def noise(seed: int, scale: float = 1e-2) -> Tensor:
    """fp32 [1280] with zeros where the padding is."""
    x = torch.randn(1280, generator=torch.Generator().manual_seed(seed)) * scale
    x[1000:1024] = 0.0
    x[1031:] = 0.0
    return x


def delta(x: Tensor, codec: str, *, version: int = 1, fragment: int = 3, salt: int = 0) -> bytearray:
    """A node's blob."""
    of = dataclasses.replace(FRAGMENT, index=fragment)
    header = BlobHeader(codec=codec_named(codec), fragment=of, version=version, base=version - 1, epoch=1, salt=salt)
    return pack_blob(header, codec_named(codec).encode(x, of, seed=header.seed))


def expected(codec: str, version: int = 1, fragment: Fragment = FRAGMENT) -> Expected:
    return Expected(codecs=(codec_named(codec),), fragment=fragment, version=version, base=version - 1, newest_epoch=2)


def decoded(blob: bytes | bytearray, codec: str, version: int = 1) -> Tensor:
    header, payload, _ = parse_blob(blob, expected(codec, version))
    return codec_named(codec).decode(payload, FRAGMENT, seed=header.seed)


def merge(
    blobs: Sequence[bytearray], weights: Sequence[float], codecs: str | Sequence[str], rule: str = "mean"
) -> Tensor:
    """Deltas of one window."""
    inputs = list(zip(blobs, weights, strict=True))
    named = [codecs] * len(inputs) if isinstance(codecs, str) else codecs
    return aggregator.whole(aggregator.to_merge(inputs, FRAGMENT, list(map(expected, named)), rule))


def begun(terms: Terms) -> Buffers:
    return Buffers.begin(noise(0, scale=1.0), terms)


def commit(buffers: Buffers, inputs: list[tuple[bytearray, float]], terms: Terms, *, codec_down: str = "q4") -> Result:
    """One whole commit, as the daemon does it."""
    this = step(buffers.version + 1, lr=terms.outer.lr, momentum=terms.outer.momentum)
    merged = aggregator.to_merge(inputs, FRAGMENT, [expected(terms.codecs.up, this.version)] * len(inputs))
    return aggregator.commit(buffers, merged, this, terms, codec_down)


def bits(result: Result) -> tuple[object, ...]:
    return result.update, result.anchor_digest, result.target_digest, result.outer_digest


def test_the_first_anchor_is_flat_padded_and_canonical() -> None:
    """M, N: |x| < 2⁻¹²⁶ and −0 become +0; padding is 0."""
    w, b = torch.full((20, 50), 1.5), torch.tensor([1.0, -0.0, 1e-39, -1e-40, 2.0**-126, -3.0, 0.5])
    flat = aggregator.first_anchor(FRAGMENT, {"blocks.0.w": w, "b": b})
    assert flat.dtype == torch.float32 and flat.shape == (1280,)
    assert torch.equal(flat[:1000], w.reshape(-1)) and not flat[1000:1024].any() and not flat[1031:].any()
    assert flat[1024:1031].tolist() == [1.0, 0.0, 0.0, 0.0, 2.0**-126, -3.0, 0.5]
    assert not bool(torch.signbit(flat[1025:1028]).any())


def test_the_digest_of_the_optimizer_tells_its_buffers_apart() -> None:
    """P: two moments that change places are another state."""
    m, v, x = noise(1), noise(2), noise(3)
    one = Buffers(version=1, anchor=x, target=x, outer={"exp_avg": m, "exp_avg_sq": v})
    other = Buffers(version=1, anchor=x, target=x, outer={"exp_avg": v, "exp_avg_sq": m})
    assert one.outer_digest() == combine([digest(m), digest(v, 1280)]) != other.outer_digest()


# --- Merging


@pytest.mark.parametrize("codec", mostly_slow(CODECS, *OF_EACH_KIND))
def test_the_merged_delta_is_the_sum_of_weighted_decoded_deltas_with_two_roundings_each(codec: str) -> None:
    """M: t = k·s, u = fl(w·t), acc = fl(acc + u), in the order given."""
    blobs = [delta(noise(i), codec, salt=i) for i in range(3)]
    acc = torch.zeros(1280)
    for blob, weight in zip(blobs, WEIGHTS, strict=True):
        acc = acc + decoded(blob, codec) * torch.tensor(weight)
    assert torch.equal(merge(blobs, WEIGHTS, codec), acc)


@pytest.mark.parametrize("codecs", [("q4", "q8", "q4"), ("q4", "q4r", "fp32"), ("q4r", "q4r:step=0.5", "q4r")])
@pytest.mark.parametrize("rule", ["mean", "radial"])
def test_each_delta_is_read_by_the_codec_of_its_own_window(codecs: tuple[str, ...], rule: str) -> None:
    """B, M: a late delta names an earlier window than the others, whose terms may have been others."""
    mixed = [delta(noise(i), codec) for i, codec in enumerate(codecs)]
    plain = [delta(decoded(blob, codec), "fp32") for blob, codec in zip(mixed, codecs, strict=True)]
    assert torch.equal(merge(mixed, WEIGHTS, codecs, rule), merge(plain, WEIGHTS, "fp32", rule))


def test_in_any_order_the_sum_is_the_same_to_the_last_bits_and_in_one_order_it_is_the_same() -> None:
    """D39: within M ulp; bit-identical in the fixed order, which is why there is one."""
    inputs = [(delta(noise(i, scale=10.0 ** (i - 3)), "fp32"), i / 10) for i in range(1, 5)]
    ordered = merge(*zip(*inputs, strict=True), "fp32")
    magnitude = sum((decoded(blob, "fp32").abs() * weight for blob, weight in inputs), torch.zeros(1280))
    seen = set()
    for order in itertools.permutations(inputs):
        merged = merge(*zip(*order, strict=True), "fp32")
        assert bool(((merged - ordered).abs() <= 4 * torch.finfo(torch.float32).eps * magnitude).all())
        seen.add(digest(merged))
    assert len(seen) > 1, "else the order would not matter, and this test would show nothing"
    assert torch.equal(merge(*zip(*inputs, strict=True), "fp32"), ordered)


@pytest.mark.parametrize(
    ("blob", "what"),
    [
        (delta(noise(1), "q4", version=2), "version"),
        (delta(noise(1), "q8"), "codec"),
        (delta(noise(1), "q4", fragment=2), "fragment"),
        (delta(noise(1), "q4")[:-1], "bytes"),
    ],
)
def test_a_blob_that_is_not_the_windows_is_refused(blob: bytearray, what: str) -> None:
    with pytest.raises(BadBlob, match=what):
        merge([blob], [1.0], "q4")


@pytest.mark.parametrize("codec", mostly_slow(CODECS, *OF_EACH_KIND))
def test_the_radial_average_is_that_of_the_decoded_deltas(codec: str) -> None:
    blobs = [delta(noise(i), codec, salt=i) for i in range(3)]
    numbers, expected = [decoded(blob, codec) for blob in blobs], torch.empty(1280)
    parts = [functools.partial(iter, [x]) for x in numbers]
    radial_into(parts, WEIGHTS, FRAGMENT, expected, lambda x: tensor_norms(x, FRAGMENT))
    merged, plain, w = merge(blobs, WEIGHTS, codec, "radial"), merge(blobs, WEIGHTS, codec), slice(0, 1000)
    assert torch.equal(merged, expected)
    assert torch.equal(merged, merge(blobs, WEIGHTS, codec, "radial")), "and so it is at a replay"
    length = sum(weight * norm_sq(x[w]) ** 0.5 for weight, x in zip(WEIGHTS, numbers, strict=True))
    assert norm_sq(merged[w]) ** 0.5 == pytest.approx(length, rel=1e-5)
    assert torch.equal(merged[1000:], plain[1000:]) and not torch.equal(merged[w], plain[w])


@pytest.mark.parametrize("codec", ["q4", "fp32"])
def test_over_many_tiles_the_radial_average_is_the_same_tensor_by_tensor(codec: str) -> None:
    """A tensor that begins in one tile and ends in the third is averaged as if it were alone."""
    shapes = [("blocks.0.a", (300, 100)), ("blocks.0.b", (1100, 1000)), ("blocks.1.c", (100, 7))]
    [large] = partition(shapes, pattern="whole").fragments
    deltas = [torch.randn(large.numel, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    for x in deltas:
        zero_padding_(large, x)

    def merged(fragment: Fragment, parts: list[Tensor]) -> Tensor:
        header = BlobHeader(codec=codec_named(codec), fragment=fragment, version=1, base=0, epoch=1)
        blobs = [pack_blob(header, codec_named(codec).encode(x, fragment, seed=header.seed)) for x in parts]
        expect = [expected(codec, fragment=fragment)] * 2
        return aggregator.whole(aggregator.to_merge([(blob, 0.5) for blob in blobs], fragment, expect, "radial"))

    whole = merged(large, deltas)
    for tensor in large.tensors:
        [alone] = partition([(tensor.name, tensor.shape)], pattern="whole").fragments
        here = slice(tensor.offset, tensor.offset + alone.numel)
        assert torch.equal(whole[here], merged(alone, [x[here].clone() for x in deltas]))


# --- The outer step


def test_data_parallel_is_one_adamw_on_the_mean_gradient(spec: RunSpec) -> None:
    """K: the coordinator clips the mean and steps torch's AdamW with the run's schedule; matrices alone decay."""
    terms = spec.terms.replace(method="data-parallel", h=1, codec_up="fp32", codec_down="fp32", clip=0.1)
    buffers = begun(terms)
    w = torch.nn.Parameter(buffers.target[:1000].clone().reshape(20, 50))
    b = torch.nn.Parameter(buffers.target[1024:1031].clone())
    groups = [{"params": [w], "weight_decay": terms.inner.weight_decay}, {"params": [b], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95))
    for number in range(1, 6):
        mean = noise(number)
        buffers = commit(buffers, [(delta(mean, "fp32", version=number), 1.0)], terms, codec_down="fp32").buffers
        w.grad, b.grad = mean[:1000].clone().reshape(20, 50), mean[1024:1031].clone()
        torch.nn.utils.clip_grad_norm_([w, b], terms.inner.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(terms, 10 * (number - 1))
        optimizer.step()
        torch.testing.assert_close(buffers.target[:1000], w.detach().reshape(-1), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(buffers.target[1024:1031], b.detach(), rtol=1e-5, atol=1e-6)
    assert sorted(buffers.outer) == ["exp_avg", "exp_avg_sq"]


def test_a_delta_is_scaled_once_before_the_step_and_its_norm_is_told_as_it_came(spec: RunSpec) -> None:
    """The bits are those of a step with the scaled delta, in one pass and in several."""
    merged, this = noise(1), step(1, lr=1.9, momentum=0.8)
    scaled = dataclasses.replace(this, outer=dataclasses.replace(this.outer, delta_scale=0.3))
    for codec_down in ("q4", "q4r:rounding=nearest", "fp32"):
        one = aggregator.commit(begun(spec.terms), merged, scaled, spec.terms, codec_down)
        other = aggregator.commit(begun(spec.terms), merged * 0.3, this, spec.terms, codec_down)
        assert bits(one) == bits(other)
        assert one.delta_norm == norm_sq(merged) ** 0.5
    replayed = aggregator.advance(begun(spec.terms), merged, scaled, spec.terms)
    assert (digest(replayed.target), replayed.outer_digest()) == (one.target_digest, one.outer_digest)


KINDS: tuple[OuterKind, ...] = tuple(kind for kind in get_args(OuterKind) if kind != "adamw")
REACH = 0.4


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_optimizer_steps_as_its_rule_says_and_keeps_its_state(
    tmp_path: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch, kind: OuterKind
) -> None:
    """O, P: what a commit was given stays, a replay and a snapshot give the same bits, and the last step is plain."""
    momentum = 0.0 if kind == "sgd" else 0.9
    settings = OuterSettings(kind=kind, lr=0.6, momentum=momentum, clip=1.2, buffer=2, spread=0.1, restart=4)
    monkeypatch.setitem(METHODS, "streaming", dataclasses.replace(METHODS["streaming"], outer=kind))
    terms = spec.terms.replace(outer_momentum=momentum)
    buffers = begun(terms)
    target, state = buffers.target.clone(), {name: torch.zeros(1280) for name in state_names(kind, momentum)}
    assert buffers.outer.keys() == state.keys()
    for version in range(1, 8):
        this = dataclasses.replace(step(version), outer=settings, reach=REACH)
        given = [buffers.anchor, buffers.target, *buffers.outer.values()]
        before = [tensor.clone() for tensor in given]
        result = aggregator.commit(buffers, noise(version), this, terms, "q4")
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, before, strict=True))

        gap = 1.0 + 0.6 * norm_sq(state["momentum"]) ** 0.5 / REACH if kind == "co2" else 1.0
        assert (gap > 1.0) == (kind == "co2" and version > 1)
        rms = (norm_sq(noise(version)) / sum(tensor.numel for tensor in this.fragment.tensors)) ** 0.5
        sized = dataclasses.replace(settings, clip=1.2 * rms / gap)
        step_(target, state, noise(version), sized, version=version, gap=gap)
        assert torch.equal(result.buffers.target, target) and result.buffers.outer.keys() == state.keys()
        assert all(torch.equal(result.buffers.outer[name], tensor) for name, tensor in state.items())
        assert result.outer_digest == result.buffers.outer_digest()

        replayed = aggregator.advance(buffers, noise(version), this, terms)
        assert (digest(replayed.target), replayed.outer_digest()) == (result.target_digest, result.outer_digest)
        tensors = {"anchor": buffers.anchor, "target": buffers.target, **buffers.outer}
        saved = Snapshot(fingerprint="0" * 16, fragment=3, version=version, tensors=tensors, digests={})
        loaded = dict(load(save(tmp_path, saved)).tensors)
        again = Buffers(version=version - 1, anchor=loaded.pop("anchor"), target=loaded.pop("target"), outer=loaded)
        assert bits(aggregator.commit(again, noise(version), this, terms, "q4")) == bits(result)
        buffers = result.buffers

    last = aggregator.commit(buffers, noise(8), dataclasses.replace(step(8), outer=PLAIN_AVERAGE), terms, "q4").buffers
    assert torch.equal(last.target, buffers.target - noise(8)), "the run ends on the mean of what the nodes hold"
    assert last.outer.keys() == buffers.outer.keys(), "no state gets lost, so that its digest can be told"


# --- The update


@pytest.mark.parametrize(
    "codec_down", mostly_slow([name for name, codec in CODECS.items() if codec.traits.exact_decode], *OF_EACH_KIND)
)
def test_the_anchor_moves_by_the_decoded_update_and_by_nothing_else(spec: RunSpec, codec_down: str) -> None:
    """B17: whoever decodes the same bytes holds the same anchor, bit for bit."""
    buffers = begun(spec.terms)
    nodes_anchor = buffers.anchor.clone()
    for number in range(1, 5):
        result = commit(buffers, [(delta(noise(number), "q4", version=number), 1.0)], spec.terms, codec_down=codec_down)
        buffers = result.buffers
        nodes_anchor = nodes_anchor + decoded(result.update, codec_down, number)
        assert torch.equal(buffers.anchor, nodes_anchor) and buffers.version == number
        assert (result.anchor_digest, result.target_digest, result.outer_digest) == (
            digest(nodes_anchor), digest(buffers.target), buffers.outer_digest()
        )  # fmt: skip


def test_what_the_downlink_loses_is_in_the_next_update(spec: RunSpec) -> None:
    """target − anchor is the downlink's error feedback: without new deltas the anchor comes to the target."""
    terms = spec.terms.replace(codec_up="fp32", outer_momentum=0.0)
    buffers, gaps = begun(terms), []
    for number in range(1, 6):
        change = noise(1) if number == 1 else torch.zeros(1280)
        buffers = commit(buffers, [(delta(change, "fp32", version=number), 1.0)], terms).buffers
        gaps.append(float((buffers.target - buffers.anchor).norm()))
    assert 0.0 < gaps[0] < 0.2 * float(noise(1).norm())
    assert all(later < 0.3 * earlier for earlier, later in itertools.pairwise(gaps))


def test_the_update_says_what_it_is(spec: RunSpec) -> None:
    """Q: version, base and epoch are in its header, and a blob of another version is not it."""
    result = commit(begun(spec.terms), [(delta(noise(1), "q4"), 1.0)], spec.terms)
    expect = Expected(codecs=(codec_named("q4"),), fragment=FRAGMENT, version=1, base=0, newest_epoch=2)
    header, _, _ = parse_blob(result.update, expect)
    assert header == BlobHeader(codec=codec_named("q4"), fragment=FRAGMENT, version=1, base=0, epoch=2)
    with pytest.raises(BadBlob, match="version"):
        aggregator.apply_update_(noise(0), result.update, step(2), "q4")


@pytest.mark.parametrize(
    ("codec", "written_over"), [("q4", True), ("q8", True), *slow(("e3m0", True)), ("fp32", False)]
)
def test_a_commit_in_place_has_the_same_bits_and_is_one_only_where_nothing_can_go_wrong(
    spec: RunSpec, codec: str, written_over: bool
) -> None:
    terms = spec.terms.replace(codec_up=codec)
    apart = here = begun(terms)
    for version in (1, 2, 3, 4):
        deltas = [(delta(noise(version + 10 * k), codec, version=version), 0.5) for k in (0, 1)]
        this = step(version)
        merged = aggregator.to_merge(deltas, FRAGMENT, [expected(codec, version)] * 2)
        one = aggregator.commit(apart, merged, this, terms, codec)
        before = here
        other = aggregator.commit(here, merged, this, terms, codec, in_place=True)
        assert bits(one) == bits(other) and one.delta_norm == other.delta_norm
        apart, here = one.buffers, other.buffers
        assert (here.anchor is before.anchor) == (written_over and version > 1), "of the first no bound is known"
    if not written_over:
        return
    old = [tensor.clone() for tensor in here.tensors]
    for scale, error in ((1e35, nullcontext()), (3e37, pytest.raises(NonFiniteError))):
        huge = [(delta(torch.full((1280,), scale), codec, version=5), 1.0)] * 2
        this = dataclasses.replace(step(5), outer=OuterSettings(lr=2.0, momentum=0.9, delta_scale=3.0))
        with error:
            merged = aggregator.to_merge(huge, FRAGMENT, [expected(codec, 5)] * 2)
            result = aggregator.commit(here, merged, this, terms, codec, in_place=True)
            assert result.buffers.anchor is not here.anchor
        assert all(torch.equal(tensor, was) for tensor, was in zip(here.tensors, old, strict=True))


def test_the_norm_of_the_merged_delta_is_reported_and_infinity_makes_no_update(spec: RunSpec) -> None:
    terms, change, huge = spec.terms.replace(codec_up="fp32"), torch.zeros(1280), torch.zeros(1280)
    change[3], change[9] = 3.0, 4.0
    assert commit(begun(terms), [(delta(change, "fp32"), 1.0)], terms).delta_norm == 5.0
    huge[5] = 3e38
    with pytest.raises(NonFiniteError):  # they were finite one by one; the commit fails as a whole
        commit(begun(terms), [(delta(huge, "fp32"), 1.0)] * 2, terms)


@pytest.mark.parametrize(
    "codec_down", ["fp32", "bf16", "q8", "q4", "q4r:rounding=nearest", "q4r:step=0.7/1.3", *slow("e3m0")]
)
@pytest.mark.parametrize(("lr", "momentum", "buffer"), [(0.6, 0.9, True), (1.0, 0.0, True), (0.7, 0.0, False)])
def test_one_pass_gives_the_bits_of_step_encoding_and_application_one_after_the_other(
    spec: RunSpec, codec_down: str, lr: float, momentum: float, buffer: bool
) -> None:
    """M: hardware chooses the kernel, never the bytes. A flush has a buffer of momentum, and none in use."""
    terms = spec.terms.replace(outer_momentum=0.9 if buffer else 0.0)
    at_once = stepwise = begun(terms)
    for version in (1, 2, 3):
        this = step(version, lr=lr, momentum=momentum)
        inputs = [(delta(noise(k), codec_down, version=version), 0.5) for k in (version, version + 10)]
        unsummed = aggregator.to_merge(inputs, FRAGMENT, [expected(codec_down, version)] * 2)
        assert isinstance(unsummed, aggregator.Sum) != codec_named(codec_down).traits.entropy_coded
        merged = aggregator.whole(unsummed)
        one = aggregator.commit(at_once, merged, this, terms, codec_down)
        assert bits(one) == bits(aggregator.commit(at_once, unsummed, this, terms, codec_down))
        other = aggregator.publish(aggregator.advance(stepwise, merged, this, terms), this, codec_down, merged)
        assert bits(one) == bits(other)
        at_once, stepwise = one.buffers, other.buffers


# --- Running statistics

STATISTICS = Fragment(
    index=3,
    slot=0,
    numel=512,
    tensors=(
        TensorSlot(name="norm.running_mean", shape=(3,), offset=0),
        TensorSlot(name="norm.running_var", shape=(3,), offset=256),
    ),
)


def averaged(before: Buffers, of_nodes: Sequence[Tensor], weights: Sequence[float], terms: Terms) -> Result:
    """One commit of what nodes have, fp32 [512] each; a replay of it is the same."""
    this = dataclasses.replace(step(before.version + 1), fragment=STATISTICS, outer=PLAIN_AVERAGE)
    codec, inputs = codec_named("fp32"), []
    for local, weight in zip(of_nodes, weights, strict=True):
        header = BlobHeader(codec=codec, fragment=STATISTICS, version=before.version + 1, base=before.version, epoch=1)
        inputs.append((pack_blob(header, codec.encode(before.anchor - local, STATISTICS)), weight))
    merged = aggregator.to_merge(inputs, STATISTICS, [expected("fp32", this.version, STATISTICS)] * len(inputs))
    result = aggregator.commit(before, merged, this, terms, "fp32")
    again = aggregator.advance(before, aggregator.whole(merged), this, terms)
    assert digest(again.target) == result.target_digest
    return result


def statistics(mean: float, var: float) -> Tensor:
    """fp32 [512], of three features."""
    flat = torch.zeros(512)
    flat[:3], flat[256:259] = mean, var
    return flat


def test_statistics_become_the_weighted_mean_whatever_the_outer_optimizer_is(spec: RunSpec) -> None:
    terms = spec.terms.replace(outer_lr=0.4, outer_momentum=0.9)
    buffers = Buffers.begin(statistics(0.0, 1.0), terms)
    for shift in range(3):  # a momentum would show at the second
        nodes = [statistics(shift + 1.0, 2.0), statistics(shift - 3.0, 6.0)]
        buffers = averaged(buffers, nodes, [0.25, 0.75], terms).buffers
        assert torch.allclose(buffers.anchor, statistics(shift - 2.0, 5.0), rtol=1e-6)
    alone = averaged(buffers, [statistics(0.1, 0.3)], [1.0], terms).buffers
    assert torch.allclose(alone.anchor, statistics(0.1, 0.3), rtol=1e-6), "of one node it is what that one has"


@pytest.mark.parametrize("large", [1e6, 3.3e-3, 1e-30])
def test_a_variance_stays_between_those_of_the_nodes_and_never_falls_below_zero(spec: RunSpec, large: float) -> None:
    """Features that die on all nodes within one round: weights of fp32 add up to more than 1 now and then."""
    for count in range(1, 12):
        tokens = [1.0 + 0.37 * k for k in range(count)]
        weights = [each / sum(tokens) for each in tokens]
        buffers = Buffers.begin(statistics(-large, large), spec.terms)
        result = averaged(buffers, [statistics(0.0, 0.0)] * count, weights, spec.terms)
        for tensor in (result.buffers.target, result.buffers.anchor):
            assert float(tensor[256:].min()) >= 0.0, count
            assert float(tensor.abs().max()) <= 1e-6 * large, count
