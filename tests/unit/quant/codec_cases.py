"""What laws over codecs are tried on: spellings, fragments, numbers; random words by a second implementation."""

import functools
import inspect
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from farloop.algo.fragments import zero_padding_
from farloop.algo.spec import Fragment, TensorSlot
from farloop.quant.codec import Codec
from farloop.quant.registry import CODECS, codec_named


def of_shapes(*shapes: tuple[int, ...]) -> Fragment:
    """A fragment as a layout makes it: every tensor padded to a multiple of 256."""
    slots, offset = [], 0
    for number, shape in enumerate(shapes):
        slots.append(TensorSlot(name=f"t{number}", shape=shape, offset=offset))
        offset += -(-math.prod(shape) // 256) * 256
    return Fragment(index=3, slot=1, numel=offset, tensors=tuple(slots))


MIXED = of_shapes((20, 50), (7,), (3, 129), (), (2, 3, 5), (256,))
MATRICES = of_shapes((64, 128), (100,), (130, 70), (3, 512))
LARGE = of_shapes((256, 320), (100,), (40, 40))

SPELLINGS = [
    *CODECS,
    "q4r:rounding=nearest",
    "q4r:step=0.5",
    "q4r:step=1.6,rounding=nearest",
    "q4r:step=0.001,policy=absolute",
    "topk:k=512",
    "topk:k=4096",
    "randk:fraction=0.5",
    "sketch:density=0.2,min_numel=4096",
    "ternary:clip=0",
    "lowrank:rank=1",
]
"""Every format with its defaults, and formats whose traits follow from their parameters."""

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
every_spelling = pytest.mark.parametrize("codec", [codec_named(spelling) for spelling in SPELLINGS], ids=SPELLINGS)


def on(*fragments: Fragment) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on each of these fragments, one after the other, as one case."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_all(**arguments: object) -> None:
            for fragment in fragments:
                try:
                    test(fragment=fragment, **arguments)
                except BaseException as error:
                    name = {id(MIXED): "mixed", id(MATRICES): "matrices"}.get(id(fragment), str(fragment.numel))
                    error.add_note(f"fragment: {name}")
                    raise

        asked = inspect.signature(test)
        others = [parameter for name, parameter in asked.parameters.items() if name != "fragment"]
        vars(on_all)["__signature__"] = asked.replace(parameters=others)
        return on_all

    return decorate


def padded(fragment: Fragment, x: Tensor) -> Tensor:
    zero_padding_(fragment, x)
    return x


def gaussian(fragment: Fragment, seed: int = 0) -> Tensor:
    return padded(fragment, torch.randn(fragment.numel, generator=torch.Generator().manual_seed(seed)) * 1e-3)


TOP = float(torch.finfo(torch.float32).max)


def hard_numbers() -> Tensor:
    """Blocks in which something is special; all finite."""
    ramp = torch.linspace(-1, 1, 1024)
    signs = torch.where(torch.arange(1024) % 3 == 0, -1.0, 1.0)
    powers = torch.tensor([sign * 1.5 * 2.0**power for power in range(-150, 128) for sign in (1, -1)])
    few = torch.tensor([-1.0, -0.9375, -0.5, -0.0, 0.0, 0.0625, 0.1875, 0.5, 1.0])
    lone = torch.zeros(1024)
    lone[::64] = torch.tensor([2.0**-97, -(2.0**-98), 1.0, -3.0] * 4)
    thresholds = torch.cat([torch.tensor([s * t * 2.0**p for t in (1.0, 1.5)]) for p in range(-8, 1) for s in (1, -1)])
    special = (
        0.0 * signs,  # zeros of both signs
        signs,  # ties of the largest magnitude
        few[torch.randint(9, (1500,), generator=torch.Generator().manual_seed(1))],  # ties of codes
        torch.tensor([-8.0, 0.5, 1.5, 2.5, 6.5, -0.5, -1.5] + [0.0] * 57).repeat(8),  # halves of codes
        thresholds.repeat(9),  # of e3m0
        torch.tensor([2.0**-149, -(2.0**-149), 2.0**-127, 3 * 2.0**-140] * 70),  # subnormal numbers
        ramp * 2.0**-97,  # around the smallest scale
        ramp * 2.0**-100,  # the same for absolute steps
        torch.tensor([TOP, -TOP, 1.0, 0.25 * TOP] * 100),
        lone,  # one element in a block
        torch.ldexp(ramp, torch.arange(1024) // 4 - 130),  # every exponent
        powers[torch.randperm(powers.numel(), generator=torch.Generator().manual_seed(2))],
    )
    return torch.cat([torch.nn.functional.pad(x, (0, -x.numel() % 256)) for x in special])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def lost(codec: Codec, x: Tensor, fragment: Fragment, *, seed: int = 0, previous: Tensor | None = None) -> float:
    """Share of the squared norm that one encoding loses."""
    payload = codec.encode(x, fragment, seed=seed, previous=previous)
    codec.validate(payload, fragment)
    error = codec.decode(payload, fragment, seed=seed).double() - x.double()
    return float(error.square().sum() / x.double().square().sum())


def mix(x: int) -> int:
    """The finaliser of the README once more, with the shift and the product of each round in one line."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 15


def word(seed: int, counter: int) -> int:
    return mix((counter * 0x9E3779B1 + mix(seed)) % 2**32)


def uniform(seed: int, element: int) -> float:
    """In (0, 1), of an element's 16 random bits."""
    bits = word(seed, element // 2)
    return ((bits >> 16 if element % 2 else bits % 2**16) + 0.5) / 2**16
