"""The arithmetic of a commit: a pure job whose decoded update is what every anchor gets (protocol K, M, O)."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from farloop.algo.digest import combine, digest
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
from farloop.quant.errors import BadBlob, NonFiniteError
from farloop.quant.norm import norm_sq, tensor_norms
from farloop.quant.registry import CODECS, codec_named

FRAGMENT = Fragment(
    index=3,
    slot=0,
    numel=1280,
    tensors=(TensorSlot(name="w", shape=(20, 50), offset=0), TensorSlot(name="b", shape=(7,), offset=1024)),
)


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


def decoded(blob: bytes | bytearray, codec: str, version: int) -> Tensor:
    expect = Expected(
        codecs=(codec_named(codec),), fragment=FRAGMENT, version=version, base=version - 1, newest_epoch=2
    )
    header, payload = parse_blob(blob, expect)
    return codec_named(codec).decode(payload, FRAGMENT, seed=header.seed)


def begun(terms: Terms) -> Buffers:
    anchor = noise(0, scale=1.0)
    return Buffers.begin(anchor, terms)


def commit(buffers: Buffers, inputs: list[tuple[bytearray, float]], terms: Terms, *, codec_down: str = "q4") -> Result:
    """One whole commit, as the daemon does it."""
    this = step(buffers.version + 1, lr=terms.outer.lr, momentum=terms.outer.momentum)
    merged = aggregator.merge(
        inputs, this, [terms.codecs.up] * len(inputs), [(buffers.version, buffers.version + 1)] * len(inputs)
    )
    return aggregator.commit(buffers, merged, this, terms, codec_down)


def test_the_first_anchor_is_flat_padded_and_canonical() -> None:
    """M, N: |x| < 2⁻¹²⁶ and −0 become +0; padding is 0."""
    w, b = torch.full((20, 50), 1.5), torch.tensor([1.0, -0.0, 1e-39, -1e-40, 2.0**-126, -3.0, 0.5])
    flat = aggregator.first_anchor(FRAGMENT, {"w": w, "b": b})
    assert flat.dtype == torch.float32 and flat.shape == (1280,)
    assert torch.equal(flat[:1000], w.reshape(-1)) and not flat[1000:1024].any() and not flat[1031:].any()
    assert flat[1024:1031].tolist() == [1.0, 0.0, 0.0, 0.0, 2.0**-126, -3.0, 0.5]
    assert not bool(torch.signbit(flat[1025:1028]).any())


def test_a_run_begins_with_the_target_at_the_anchor_and_no_momentum(spec: RunSpec) -> None:
    buffers = begun(spec.terms)
    assert buffers.version == 0
    assert torch.equal(buffers.target, buffers.anchor) and buffers.target is not buffers.anchor
    assert list(buffers.outer) == ["momentum"] and not buffers.outer["momentum"].any()


def test_without_outer_momentum_there_is_no_buffer_of_it(spec: RunSpec) -> None:
    buffers = begun(spec.terms.replace(outer_momentum=0.0))
    assert buffers.outer == {} and buffers.outer_digest() is None


def test_the_digest_of_the_optimizer_tells_its_buffers_apart() -> None:
    """P: two moments that change places are another state."""
    m, v, x = noise(1), noise(2), noise(3)
    one = Buffers(version=1, anchor=x, target=x, outer={"exp_avg": m, "exp_avg_sq": v})
    other = Buffers(version=1, anchor=x, target=x, outer={"exp_avg": v, "exp_avg_sq": m})
    assert one.outer_digest() == combine([digest(m), digest(v, 1280)]) != other.outer_digest()


@pytest.mark.parametrize("codec", CODECS)
def test_the_merged_delta_is_the_sum_of_weighted_decoded_deltas_with_two_roundings_each(codec: str) -> None:
    """M: t = k·s, u = fl(w·t), acc = fl(acc + u), in the order given."""
    deltas, weights = [noise(i) for i in range(1, 4)], [0.2, 0.3, 0.5]
    blobs = [delta(x, codec, salt=salt) for salt, x in enumerate(deltas)]
    merged = aggregator.merge(
        list(zip(blobs, weights, strict=True)), step(), [codec] * len(blobs), [(0, 1)] * len(blobs)
    )
    acc = torch.zeros(1280)
    for blob, weight in zip(blobs, weights, strict=True):
        acc = acc + decoded(blob, codec, 1) * torch.tensor(weight)
    assert torch.equal(merged, acc)


@pytest.mark.parametrize("codecs", [("q4", "q8", "q4"), ("q4", "q4r", "fp32"), ("q4r", "q4r:step=0.5", "q4r")])
@pytest.mark.parametrize("rule", ["mean", "radial"])
def test_each_delta_is_read_by_the_codec_of_its_own_window(codecs: tuple[str, ...], rule: str) -> None:
    """B, M: a late delta names an earlier window than the others, whose terms may have been others."""
    deltas, weights = [noise(i) for i in range(1, 4)], [0.2, 0.3, 0.5]
    mixed = [delta(x, codec) for x, codec in zip(deltas, codecs, strict=True)]
    plain = [delta(decoded(blob, codec, 1), "fp32") for blob, codec in zip(mixed, codecs, strict=True)]
    merged = aggregator.merge(list(zip(mixed, weights, strict=True)), step(), codecs, [(0, 1)] * 3, rule)
    as_numbers = aggregator.merge(list(zip(plain, weights, strict=True)), step(), ["fp32"] * 3, [(0, 1)] * 3, rule)
    assert torch.equal(merged, as_numbers)


def test_in_any_order_the_sum_is_the_same_to_the_last_bits_and_in_one_order_it_is_the_same() -> None:
    """D39: within M ulp; bit-identical in the fixed order, which is why there is one."""
    inputs = [(delta(noise(i, scale=10.0 ** (i - 3)), "fp32"), i / 10) for i in range(1, 5)]
    ordered = aggregator.merge(inputs, step(), ["fp32"] * len(inputs), [(0, 1)] * len(inputs))
    magnitude = sum((decoded(blob, "fp32", 1).abs() * weight for blob, weight in inputs), torch.zeros(1280))
    seen = set()
    for order in itertools.permutations(inputs):
        merged = aggregator.merge(order, step(), ["fp32"] * len(inputs), [(0, 1)] * len(inputs))
        assert bool(((merged - ordered).abs() <= 4 * torch.finfo(torch.float32).eps * magnitude).all())
        seen.add(digest(merged))
    assert len(seen) > 1, "else the order would not matter, and this test would show nothing"
    assert digest(aggregator.merge(list(inputs), step(), ["fp32"] * len(inputs), [(0, 1)] * len(inputs))) == digest(
        ordered
    )


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
        aggregator.merge([(blob, 1.0)], step(), ["q4"], [(0, 1)])


def test_the_outer_step_is_nesterovs(spec: RunSpec) -> None:
    """b ← μb + Δ, target ← target − ν(Δ + μb) (arXiv 2311.08105)."""
    buffers, terms = begun(spec.terms), spec.terms
    momentum, target = torch.zeros(1280), buffers.target.clone()
    for number in range(1, 4):
        change = noise(number)
        buffers = aggregator.advance(buffers, change, step(number), terms)
        momentum = momentum * 0.9 + change
        target = target - (momentum * 0.9 + change) * 0.6
        assert torch.equal(buffers.target, target) and torch.equal(buffers.outer["momentum"], momentum)


def test_the_settings_of_the_commit_count_not_those_of_the_run(spec: RunSpec) -> None:
    """P: replay repeats arithmetic, never decisions; a commit says its own ν and μ."""
    buffers, change = begun(spec.terms), noise(1)
    stepped = aggregator.advance(buffers, change, step(lr=1.0, momentum=0.0), spec.terms)
    assert torch.equal(stepped.target, buffers.target - change)


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
        position = 10 * (number - 1)
        result = commit(buffers, [(delta(mean, "fp32", version=number), 1.0)], terms, codec_down="fp32")
        buffers = result.buffers
        w.grad, b.grad = mean[:1000].clone().reshape(20, 50), mean[1024:1031].clone()
        torch.nn.utils.clip_grad_norm_([w, b], terms.inner.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(terms, position)
        optimizer.step()
        torch.testing.assert_close(buffers.target[:1000], w.detach().reshape(-1), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(buffers.target[1024:1031], b.detach(), rtol=1e-5, atol=1e-6)
    assert sorted(buffers.outer) == ["exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize("codec_down", [name for name, codec in CODECS.items() if codec.traits.exact_decode])
def test_the_anchor_moves_by_the_decoded_update_and_by_nothing_else(spec: RunSpec, codec_down: str) -> None:
    """B17: whoever decodes the same bytes holds the same anchor, bit for bit."""
    buffers = begun(spec.terms)
    nodes_anchor = buffers.anchor.clone()
    for number in range(1, 5):
        result = commit(buffers, [(delta(noise(number), "q4", version=number), 1.0)], spec.terms, codec_down=codec_down)
        nodes_anchor = nodes_anchor + decoded(result.update, codec_down, number)
        assert torch.equal(result.buffers.anchor, nodes_anchor)
        assert result.anchor_digest == digest(nodes_anchor)
        assert result.target_digest == digest(result.buffers.target)
        assert result.outer_digest == result.buffers.outer_digest()
        buffers = result.buffers
    assert buffers.version == 4


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
    header, _ = parse_blob(result.update, expect)
    assert header == BlobHeader(codec=codec_named("q4"), fragment=FRAGMENT, version=1, base=0, epoch=2)
    with pytest.raises(BadBlob, match="version"):
        aggregator.apply_update_(noise(0), result.update, step(2), "q4")


def test_a_commit_changes_nothing_that_it_was_given(spec: RunSpec) -> None:
    """O: a commit that cannot be made durable leaves no trace."""
    buffers = begun(spec.terms)
    tensors = [buffers.anchor, buffers.target, *buffers.outer.values()]
    copies = [tensor.clone() for tensor in tensors]
    blob = delta(noise(1), "q4")
    before = bytes(blob)
    result = commit(buffers, [(blob, 1.0)], spec.terms)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))
    assert bytes(blob) == before and buffers.version == 0
    new = [result.buffers.anchor, result.buffers.target, *result.buffers.outer.values()]
    assert not {tensor.data_ptr() for tensor in new} & {tensor.data_ptr() for tensor in tensors}


def test_the_same_commit_gives_the_same_bytes(spec: RunSpec) -> None:
    inputs = [(delta(noise(i), "q4"), 0.5) for i in (1, 2)]
    first, second = (commit(begun(spec.terms), inputs, spec.terms) for _ in range(2))
    assert first.update == second.update and first.anchor_digest == second.anchor_digest


def test_the_norm_of_the_merged_delta_is_reported(spec: RunSpec) -> None:
    change = torch.zeros(1280)
    change[3], change[9] = 3.0, 4.0
    result = commit(begun(spec.terms), [(delta(change, "fp32"), 1.0)], spec.terms.replace(codec_up="fp32"))
    assert result.delta_norm == 5.0


def test_deltas_that_add_up_to_infinity_make_no_update(spec: RunSpec) -> None:
    """They were finite one by one; the commit fails as a whole."""
    terms = spec.terms.replace(codec_up="fp32")
    huge = torch.zeros(1280)
    huge[5] = 3e38
    with pytest.raises(NonFiniteError):
        commit(begun(terms), [(delta(huge, "fp32"), 1.0), (delta(huge, "fp32"), 1.0)], terms)


@pytest.mark.parametrize("codec_down", ["fp32", "bf16", "q8", "q4", "q4r:rounding=nearest", "q4r:step=0.7/1.3", "e3m0"])
@pytest.mark.parametrize(("lr", "momentum", "buffer"), [(0.6, 0.9, True), (1.0, 0.0, True), (0.7, 0.0, False)])
def test_one_pass_gives_the_bits_of_step_encoding_and_application_one_after_the_other(
    spec: RunSpec, codec_down: str, lr: float, momentum: float, buffer: bool
) -> None:
    """M: hardware chooses the kernel, never the bytes. A flush has a buffer of momentum, and none in use."""
    terms = spec.terms.replace(outer_momentum=0.9 if buffer else 0.0)
    at_once = stepwise = begun(terms)
    for version in (1, 2, 3):
        this, merged = step(version, lr=lr, momentum=momentum), noise(version)
        one = aggregator.commit(at_once, merged, this, terms, codec_down)
        other = aggregator.publish(aggregator.advance(stepwise, merged, this, terms), this, codec_down, merged)
        assert one.update == other.update
        assert (one.anchor_digest, one.target_digest, one.outer_digest) == (
            other.anchor_digest,
            other.target_digest,
            other.outer_digest,
        )
        at_once, stepwise = one.buffers, other.buffers


def test_a_delta_is_scaled_once_before_the_step_and_its_norm_is_told_as_it_came(spec: RunSpec) -> None:
    """The bits are those of a step with the scaled delta, in one pass and in several."""
    merged, this = noise(1), step(1, lr=1.9, momentum=0.8)
    scaled = dataclasses.replace(this, outer=dataclasses.replace(this.outer, delta_scale=0.3))
    for codec_down in ("q4", "q4r:rounding=nearest", "fp32"):
        one = aggregator.commit(begun(spec.terms), merged, scaled, spec.terms, codec_down)
        other = aggregator.commit(begun(spec.terms), merged * 0.3, this, spec.terms, codec_down)
        assert (one.update, one.target_digest, one.outer_digest) == (
            other.update,
            other.target_digest,
            other.outer_digest,
        )
        assert one.delta_norm == norm_sq(merged) ** 0.5
    replayed = aggregator.advance(begun(spec.terms), merged, scaled, spec.terms)
    assert (digest(replayed.target), replayed.outer_digest()) == (one.target_digest, one.outer_digest)


KINDS: tuple[OuterKind, ...] = tuple(kind for kind in get_args(OuterKind) if kind != "adamw")


def settings_of(kind: OuterKind) -> OuterSettings:
    momentum = 0.0 if kind == "sgd" else 0.9
    return OuterSettings(kind=kind, lr=0.6, momentum=momentum, clip=0.02, buffer=2, spread=0.1, restart=4)


def begun_with(kind: OuterKind, terms: Terms, monkeypatch: pytest.MonkeyPatch) -> tuple[Buffers, Terms]:
    """Version 0 of a run whose method has this outer optimizer."""
    monkeypatch.setitem(METHODS, "streaming", dataclasses.replace(METHODS["streaming"], outer=kind))
    terms = terms.replace(outer_momentum=settings_of(kind).momentum)
    return begun(terms), terms


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_optimizer_steps_as_its_rule_says_and_keeps_its_state(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch, kind: OuterKind
) -> None:
    settings, reach = settings_of(kind), 0.4
    buffers, terms = begun_with(kind, spec.terms, monkeypatch)
    target = buffers.target.clone()
    state = {name: torch.zeros(1280) for name in state_names(kind, settings.momentum)}
    assert sorted(buffers.outer) == sorted(state)
    for version in range(1, 8):
        this = dataclasses.replace(step(version), outer=settings, reach=reach)
        result = aggregator.commit(buffers, noise(version), this, terms, "q4")
        gap = 1.0 + 0.6 * norm_sq(state["momentum"]) ** 0.5 / reach if kind == "co2" else 1.0
        step_(target, state, noise(version), settings, version=version, gap=gap)
        assert torch.equal(result.buffers.target, target)
        assert result.buffers.outer.keys() == state.keys()
        assert all(torch.equal(result.buffers.outer[name], tensor) for name, tensor in state.items())
        assert result.outer_digest == result.buffers.outer_digest()
        assert (gap > 1.0) == (kind == "co2" and version > 1)

        replayed = aggregator.advance(buffers, noise(version), this, terms)
        assert (digest(replayed.target), replayed.outer_digest()) == (result.target_digest, result.outer_digest)
        buffers = result.buffers


@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_of_any_kind_changes_nothing_that_it_was_given(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch, kind: OuterKind
) -> None:
    """O."""
    buffers, terms = begun_with(kind, spec.terms, monkeypatch)
    for version in (1, 2, 3, 4, 5):
        this = dataclasses.replace(step(version), outer=settings_of(kind), reach=0.4)
        tensors = [buffers.anchor, buffers.target, *buffers.outer.values()]
        before = [tensor.clone() for tensor in tensors]
        result = aggregator.commit(buffers, noise(version), this, terms, "q4")
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))
        buffers = result.buffers


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_step_of_any_kind_is_plain(spec: RunSpec, monkeypatch: pytest.MonkeyPatch, kind: OuterKind) -> None:
    """The run ends on the mean of what the nodes hold; no state gets lost, so that its digest can be told."""
    buffers, terms = begun_with(kind, spec.terms, monkeypatch)
    buffers = aggregator.commit(
        buffers, noise(1), dataclasses.replace(step(), outer=settings_of(kind), reach=0.4), terms, "q4"
    ).buffers
    last = aggregator.commit(buffers, noise(2), dataclasses.replace(step(2), outer=PLAIN_AVERAGE), terms, "q4")
    assert torch.equal(last.buffers.target, buffers.target - noise(2))
    assert last.buffers.outer.keys() == buffers.outer.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_any_kind_goes_to_a_snapshot_and_back(
    tmp_path: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch, kind: OuterKind
) -> None:
    buffers, terms = begun_with(kind, spec.terms, monkeypatch)
    for version in (1, 2, 3):
        this = dataclasses.replace(step(version), outer=settings_of(kind), reach=0.4)
        buffers = aggregator.commit(buffers, noise(version), this, terms, "q4").buffers
    saved = Snapshot(
        fingerprint="0" * 16,
        fragment=3,
        version=3,
        tensors={"anchor": buffers.anchor, "target": buffers.target, **buffers.outer},
        digests={},
    )
    tensors = dict(load(save(tmp_path, saved)).tensors)
    again = Buffers(version=3, anchor=tensors.pop("anchor"), target=tensors.pop("target"), outer=tensors)
    assert again.outer_digest() == buffers.outer_digest()
    this = dataclasses.replace(step(4), outer=settings_of(kind), reach=0.4)
    one, other = (aggregator.commit(b, noise(4), this, terms, "q4") for b in (buffers, again))
    assert (one.update, one.target_digest, one.outer_digest) == (other.update, other.target_digest, other.outer_digest)


LAYERS = dataclasses.replace(
    FRAGMENT,
    tensors=(TensorSlot(name="blocks.0.w", shape=(20, 50), offset=0), TensorSlot(name="b", shape=(7,), offset=1024)),
)


def radial(blobs: list[bytearray], weights: list[float], codec: str) -> Tensor:
    this = dataclasses.replace(step(), fragment=LAYERS)
    return aggregator.merge(
        list(zip(blobs, weights, strict=True)), this, [codec] * len(blobs), [(0, 1)] * len(blobs), "radial"
    )


@pytest.mark.parametrize("codec", CODECS)
def test_the_radial_average_is_that_of_the_decoded_deltas(codec: str) -> None:
    weights = [0.2, 0.3, 0.5]
    blobs = [delta(noise(i), codec, salt=i) for i in range(3)]
    numbers = [decoded(blob, codec, 1) for blob in blobs]
    expected = torch.empty(1280)
    radial_into(
        [functools.partial(iter, [x]) for x in numbers], weights, LAYERS, expected, lambda x: tensor_norms(x, LAYERS)
    )
    merged = radial(blobs, weights, codec)
    assert torch.equal(merged, expected)
    assert torch.equal(merged, radial(blobs, weights, codec)), "and so it is at a replay"
    w = slice(0, 1000)
    lengths = [norm_sq(x[w]) ** 0.5 for x in numbers]
    assert norm_sq(merged[w]) ** 0.5 == pytest.approx(
        sum(weight * length for weight, length in zip(weights, lengths, strict=True)), rel=1e-5
    )
    plain = aggregator.merge(list(zip(blobs, weights, strict=True)), step(), [codec] * 3, [(0, 1)] * 3)
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
        this = dataclasses.replace(step(), fragment=fragment)
        header = BlobHeader(codec=codec_named(codec), fragment=fragment, version=1, base=0, epoch=1)
        blobs = [pack_blob(header, codec_named(codec).encode(x, fragment, seed=header.seed)) for x in parts]
        return aggregator.merge([(blob, 0.5) for blob in blobs], this, [codec] * 2, [(0, 1)] * 2, "radial")

    whole = merged(large, deltas)
    for tensor in large.tensors:
        [alone] = partition([(tensor.name, tensor.shape)], pattern="whole").fragments
        here = slice(tensor.offset, tensor.offset + alone.numel)
        assert torch.equal(whole[here], merged(alone, [x[here].clone() for x in deltas]))
