"""What codecs lose: relative squared error, angle, and the bits that blobs really take.

On random matrices, where theory says what is possible, and on the outer gradients of a real run with their real
tensors. One encoding by itself: error feedback, which pays back later what was lost, is not counted here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from farloop.algo.spec import Fragment, TensorSlot
from farloop.lab.bench.training import OuterGradients
from farloop.quant.blob import HEADER_BYTES, BlobHeader, pack_blob
from farloop.quant.codec import Codec
from farloop.quant.registry import spelling_of

SIZE = 1e-3  # standard deviation, or scale, of random samples: about that of outer gradients
OUTER = "outer"  # the name of the sample of real outer gradients

Draw = Callable[[np.random.Generator, int], "np.typing.NDArray[np.float64]"]

DISTRIBUTIONS: dict[str, Draw] = {
    "gauss": lambda random, count: random.standard_normal(count),
    "laplace": lambda random, count: random.laplace(size=count),
    "student3": lambda random, count: random.standard_t(3, count),
}
"""By name; the last one, Student's t with 3 degrees of freedom, has heavy tails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Vectors of one fragment: one for each node that would send them."""

    name: str
    fragment: Fragment
    vectors: tuple[Tensor, ...]
    """fp32 [numel] each."""
    before: tuple[Tensor, ...] = ()
    """What the same nodes sent last, for codecs that start from it; empty where nothing was."""

    @property
    def num_parameters(self) -> int:
        """Elements that are no padding."""
        return sum(tensor.numel for tensor in self.fragment.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRow:
    """What one codec loses of one sample. Errors are of whole vectors, means over the sample's vectors."""

    codec: str
    data: str
    bits: float  # per parameter, of the sealed blob without its header: scales counted, after the entropy stage
    rel_mse: float  # |x − x̂|² / |x|²
    cosine: float  # ⟨x, x̂⟩ / (|x| |x̂|)


def random_sample(name: str, side: int = 1024) -> Sample:
    """A matrix of side · side numbers of a distribution."""
    values = DISTRIBUTIONS[name](np.random.default_rng([0, *name.encode()]), side * side) * SIZE
    return Sample(name=name, fragment=matrix(side, side), vectors=(torch.from_numpy(values.astype(np.float32)),))


def outer_sample(found: OuterGradients) -> Sample:
    return Sample(name=OUTER, fragment=found.fragment, vectors=found.deltas, before=found.before)


def matrix(rows: int, columns: int) -> Fragment:
    slot = TensorSlot(name="x", shape=(rows, columns), offset=0)
    return Fragment(index=0, slot=0, numel=rows * columns, tensors=(slot,))


def codec_quality(codec: Codec, sample: Sample) -> QualityRow:
    """Encode, seal, decode and compare every vector of the sample."""
    found, num_bytes = [], 0
    for node, x in enumerate(sample.vectors):
        header = BlobHeader(codec=codec, fragment=sample.fragment, version=2, base=1, epoch=0, salt=node)
        previous = codec.encode(sample.before[node], sample.fragment, seed=node) if sample.before else None
        payload = codec.encode(x, sample.fragment, seed=header.seed, previous=previous)
        num_bytes += len(pack_blob(header, payload)) - HEADER_BYTES
        found.append(compared(x, codec.decode(payload, sample.fragment, seed=header.seed)))
    rel_mse, cosine = (sum(column) / len(found) for column in zip(*found, strict=True))
    bits = 8 * num_bytes / (len(found) * sample.num_parameters)
    return QualityRow(codec=spelling_of(codec), data=sample.name, bits=bits, rel_mse=rel_mse, cosine=cosine)


def compared(x: Tensor, y: Tensor) -> tuple[float, float]:
    """(|x − y|² / |x|², cosine) in fp64; the cosine of a zero is 0."""
    x, y = x.double(), y.double()
    xx, xy, yy = (float(torch.dot(a, b)) for a, b in ((x, x), (x, y), (y, y)))
    difference = x - y
    return float(torch.dot(difference, difference)) / xx, xy / (xx * yy) ** 0.5 if yy else 0.0
