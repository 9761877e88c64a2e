"""What traits promise is kept, by error feedback too: of every codec, and of parameters that change the promise."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from codec_cases import (
    LARGE,
    MATRICES,
    MIXED,
    every_codec,
    every_spelling,
    gaussian,
    of_shapes,
    on,
    padded,
    same_bits,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from farloop.algo.spec import Fragment
from farloop.quant.codec import Codec, flat
from farloop.quant.errors import NonFiniteError
from farloop.quant.formats import blocks
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.registry import CODECS, codec_named

pytestmark = pytest.mark.usefixtures("one_thread")

Inputs = Callable[[Fragment], Tensor]


# --- error feedback


@every_codec
@on(flat(700), MIXED, MATRICES)
@pytest.mark.parametrize("beta", [None, 0.9, 0.0])
def test_the_residual_becomes_exactly_what_was_lost(codec: Codec, fragment: Fragment, beta: float | None) -> None:
    """v = fl(x + fl(β·residual)); its payload is v's own; the residual becomes fl(v − decoded)."""
    codec = codec if beta is None else dataclasses.replace(codec, beta=beta)
    x, residual = gaussian(fragment), gaussian(fragment, 1)
    previous = codec.encode(gaussian(fragment, 2), fragment, seed=8)
    v = torch.from_numpy(x.numpy() + np.float32(codec.beta) * residual.numpy())
    out = torch.full_like(previous, 0xA5)
    codec.encode_feedback_(x, residual, out, fragment, seed=9, previous=previous)
    assert torch.equal(out, codec.encode(v, fragment, seed=9, previous=previous))
    assert same_bits(residual, v - codec.decode(out, fragment, seed=9))
    assert same_bits(x, gaussian(fragment))


@every_codec
@on(flat(700), MIXED)
def test_a_number_that_is_none_is_named_with_error_feedback_too(codec: Codec, fragment: Fragment) -> None:
    x, out = gaussian(fragment), torch.empty(codec.payload_bytes(fragment), dtype=torch.uint8)
    x[33] = torch.nan
    with pytest.raises(NonFiniteError, match="element 33 is"):
        codec.encode_feedback_(x, gaussian(fragment, 1), out, fragment)


@every_spelling
def test_a_residual_stays_bounded_where_a_contraction_is_promised(codec: Codec) -> None:
    """Where β = 1: |e| ≤ |delta|·(1 + √(1 − δ))/δ on average; 30 rounds see a residual that doubles."""
    if codec.traits.contraction == 0:
        return
    codec = dataclasses.replace(codec, beta=1.0)
    residual, out = torch.zeros(MATRICES.numel), torch.empty(codec.payload_bytes(MATRICES), dtype=torch.uint8)
    previous, delta = None, 1.0
    for number in range(30):
        x = gaussian(MATRICES, number)
        delta = float(x.norm())
        codec.encode_feedback_(x, residual, out, MATRICES, seed=number, previous=previous)
        previous = out.clone() if codec.traits.warm_start else None
    kept = codec.traits.contraction
    assert float(residual.norm()) <= 1.1 * delta * min(30.0, (1 + math.sqrt(1 - kept)) / kept)


# --- what traits promise


def spikes(fragment: Fragment) -> Tensor:
    x = torch.zeros(fragment.numel)
    for slot in fragment.tensors:
        x[slot.offset + slot.numel // 3 : slot.offset + slot.numel : 97] = 3.0
    return x


def heavy_tails(fragment: Fragment) -> Tensor:
    return padded(fragment, gaussian(fragment) * (5 * gaussian(fragment, 1) * 1e3).exp())


def one_large(fragment: Fragment) -> Tensor:
    """And all others just below half a step of an int4 with its scale."""
    x = padded(fragment, torch.full((fragment.numel,), 0.499))
    x[::64] = -8.0
    return padded(fragment, x)


INPUTS: dict[str, Inputs] = {
    "gaussian": gaussian,
    "spikes": spikes,
    "heavy tails": heavy_tails,
    "constant": lambda fragment: padded(fragment, torch.full((fragment.numel,), 0.7)),
    "alternating": lambda fragment: padded(fragment, torch.tensor([1.0, -1.0]).repeat(fragment.numel // 2 + 1))[
        : fragment.numel
    ],
    "ramp": lambda fragment: padded(fragment, torch.linspace(-1, 1, fragment.numel)),
    "one large": one_large,
    "powers": lambda fragment: padded(fragment, torch.exp2(-(torch.arange(fragment.numel) % 30).float())),
}


@every_spelling
@pytest.mark.parametrize("kind", INPUTS)
@on(flat(1), flat(300), flat(5000), MIXED, MATRICES, LARGE)
def test_the_promised_part_arrives(codec: Codec, kind: str, fragment: Fragment) -> None:
    """E|x − decoded|² ≤ (1 − δ)|x|², with three standard errors where chance is in it."""
    if codec.traits.contraction == 0 or (fragment is LARGE and not codec.traits.sparse):
        return
    x = INPUTS[kind](fragment)
    assert x.any() or fragment.numel == 1
    runs = 1 if codec.traits.deterministic else (4 if fragment is LARGE else 24)
    lost = torch.zeros(runs, dtype=torch.float64)
    for seed in range(runs):
        decoded = codec.decode(codec.encode(x, fragment, seed=seed), fragment, seed=seed)
        lost[seed] = (x.double() - decoded.double()).square().sum()
    slack = 3 * float(lost.std()) / math.sqrt(runs) if runs > 1 else 0.0
    assert float(lost.mean()) <= (1 - codec.traits.contraction) * float(x.double().square().sum()) + slack


@every_spelling
@given(
    values=st.lists(st.sampled_from([k / 16 * sign for k in range(0, 129, 3) for sign in (1, -1)]), min_size=1),
    repeats=st.integers(1, 40),
)
@settings(deadline=None, max_examples=40)
def test_the_promised_part_arrives_of_made_up_vectors(codec: Codec, values: list[float], repeats: int) -> None:
    """Without chance, where a counterexample is one."""
    if codec.traits.contraction == 0 or not codec.traits.deterministic:
        return
    x = torch.tensor(values * repeats)
    fragment = flat(x.numel())
    lost = (x.double() - codec.decode(codec.encode(x, fragment), fragment).double()).square().sum()
    assert float(lost) <= (1 - codec.traits.contraction) * float(x.double().square().sum())


def uniform(fragment: Fragment) -> Tensor:
    """Of no tails: what lies beyond its largest code is clipped by `q4r`."""
    x = torch.rand(fragment.numel, generator=torch.Generator().manual_seed(0)) * 2e-3 - 1e-3
    return padded(fragment, x)


@every_spelling
@on(flat(1000), of_shapes((64, 64), (3, 200)))
def test_on_average_over_seeds_what_arrives_is_what_was_sent(codec: Codec, fragment: Fragment) -> None:
    """Along several directions, within three standard errors; small elements apart, for they show dead zones."""
    if not codec.traits.unbiased:
        return
    x = uniform(fragment)
    small = (x.abs() < 2e-4) & (x != 0)
    directions = torch.stack((x, x.sign(), torch.ones_like(x), x.sign() * small, gaussian(fragment, 9))).double()
    errors = torch.empty(256, len(directions), dtype=torch.float64)
    for seed in range(len(errors)):
        decoded = codec.decode(codec.encode(x, fragment, seed=seed), fragment, seed=seed)
        errors[seed] = directions @ (decoded.double() - x.double())
    standard_error = errors.std(dim=0) / math.sqrt(len(errors))
    assert (errors.mean(dim=0).abs() <= 3 * standard_error).all()


def test_a_bias_would_be_seen() -> None:
    """The law above can fail: nearest rounding has a dead zone."""
    codec, fragment = codec_named("q4r:rounding=nearest"), flat(1000)
    x = uniform(fragment)
    assert not codec.traits.unbiased
    assert not codec.decode(codec.encode(x, fragment), fragment)[x.abs() < 2e-4].any()


class Exact(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every floating-point operation is done in fp64 as well, and must come out as the same number."""

    ARITHMETIC = frozenset(
        [
            "add",
            "sub",
            "rsub",
            "mul",
            "div",
            "neg",
            "sum",
            "cumsum",
            "mean",
            "sqrt",
            "square",
            "pow",
            "lerp",
            "addcmul",
            "ldexp",
            "reciprocal",
            "mm",
            "bmm",
            "addmm",
            "dot",
            "mv",
            "exp",
            "exp2",
            "log",
            "clamp",
        ]
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__.rstrip("_")
        wide = None
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if name in self.ARITHMETIC and any(tensor.dtype == torch.float32 for tensor in tensors):
            self.seen.add(name)
            wide = func(*map(self.widened, args), **{key: self.widened(value) for key, value in kwargs.items()})
        result = func(*args, **kwargs)
        if wide is not None and isinstance(result, Tensor) and result.dtype == torch.float32:
            assert torch.equal(result.double(), wide), f"{func} rounds"
        return result

    @staticmethod
    def widened(value: object) -> object:
        if isinstance(value, Tensor):
            return value.double() if value.dtype == torch.float32 else value.clone()
        return value


@every_spelling
@on(flat(700), MIXED, MATRICES)
def test_exact_decoding_does_not_round(codec: Codec, fragment: Fragment, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation of the reference does, so no order, no fusion and no unit of a machine can show. Protocol M."""
    if not codec.traits.exact_decode:
        return
    monkeypatch.setattr(blocks, "fast_path", lambda *_: None)
    largest = (gaussian(fragment) * 1e3).clamp(-1, 1) * 3e38
    for x in (gaussian(fragment), heavy_tails(fragment), gaussian(fragment) * 1e-25, largest):
        payload = codec.encode(x, fragment, seed=6)
        with Exact() as mode:
            codec.decode(payload, fragment, seed=6)
        if isinstance(codec, BlockCodec) and codec.scale_bits:
            assert "mul" in mode.seen, "code times scale"


def test_a_rounding_in_the_decoder_would_be_seen() -> None:
    mode = Exact()
    with pytest.raises(AssertionError, match="rounds"), mode:
        torch.full((3,), 1 / 3) * torch.full((3,), 0.1)
    assert mode.seen == {"mul"}


@pytest.mark.parametrize("codec", [codec for codec in CODECS.values() if codec.traits.warm_start], ids=lambda c: c.name)
def test_a_warm_start_is_worth_it(codec: Codec) -> None:
    """The same matrix again and again: what is lost of it falls, if anything."""
    generator = torch.Generator().manual_seed(0)
    shape, fragment = (96, 128), of_shapes((96, 128))
    x = (torch.randn(96, 6, generator=generator) @ torch.randn(6, 128, generator=generator)).view(-1)
    x += 0.3 * torch.randn(math.prod(shape), generator=generator)
    lost, previous = [], None
    for seed in range(4):
        previous = codec.encode(x, fragment, seed=seed, previous=previous)
        lost.append(float((x - codec.decode(previous, fragment)).norm()))
    assert lost[-1] < 0.99 * lost[0]
