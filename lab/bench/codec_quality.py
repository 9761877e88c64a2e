"""What codecs lose: relative squared error, angle, shrinkage, and the bits that blobs really take.

On random matrices, where theory says what is possible, and on the outer gradients of a real run with their real
tensors. One encoding by itself: error feedback, which pays back later what was lost, is not counted here.
"""

import math
from collections.abc import Callable, Sequence
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
    projection: float  # ⟨x, x̂⟩ / |x|²: below 1, progress shrinks
    mean_rel_mse: float | None = None
    """Of the mean over the nodes against the mean of what was decoded; None for a single vector."""
    gap_db: float | None
    """10·log10(rel_mse · 4^bits): above the least error that a Gaussian allows at these bits; None without an error."""


def random_sample(name: str, side: int = 1024, seed: int = 0) -> Sample:
    """A matrix of side · side numbers of a distribution."""
    values = DISTRIBUTIONS[name](np.random.default_rng([seed, *name.encode()]), side * side) * SIZE
    return Sample(name=name, fragment=matrix(side, side), vectors=(torch.from_numpy(values.astype(np.float32)),))


def outer_sample(found: OuterGradients) -> Sample:
    return Sample(name=OUTER, fragment=found.fragment, vectors=found.deltas, before=found.before)


def matrix(rows: int, columns: int) -> Fragment:
    slot = TensorSlot(name="x", shape=(rows, columns), offset=0)
    return Fragment(index=0, slot=0, numel=rows * columns, tensors=(slot,))


def codec_quality(codec: Codec, sample: Sample) -> QualityRow:
    """Encode, seal, decode and compare every vector of the sample."""
    decoded, num_bytes = [], 0
    for node, x in enumerate(sample.vectors):
        header = BlobHeader(codec=codec, fragment=sample.fragment, version=2, base=1, epoch=0, salt=node)
        previous = codec.encode(sample.before[node], sample.fragment, seed=node) if sample.before else None
        payload = codec.encode(x, sample.fragment, seed=header.seed, previous=previous)
        num_bytes += len(pack_blob(header, payload)) - HEADER_BYTES
        decoded.append(codec.decode(payload, sample.fragment, seed=header.seed))
    return quality_row(spelling_of(codec), sample, decoded, num_bytes)


def quality_row(codec: str, sample: Sample, decoded: Sequence[Tensor], num_bytes: int) -> QualityRow:
    """Compare a sample with what came back of it by `num_bytes` in all."""
    count = len(sample.vectors)
    found = [compared(x, y) for x, y in zip(sample.vectors, decoded, strict=True)]
    rel_mse, cosine, projection = (sum(column) / count for column in zip(*found, strict=True))
    bits = 8 * num_bytes / (count * sample.num_parameters)
    return QualityRow(
        codec=codec,
        data=sample.name,
        bits=bits,
        rel_mse=rel_mse,
        cosine=cosine,
        projection=projection,
        mean_rel_mse=None if count == 1 else compared(_mean(sample.vectors), _mean(decoded))[0],
        gap_db=10 * math.log10(rel_mse) + 20 * math.log10(2) * bits if rel_mse else None,
    )


def compared(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """(|x − y|² / |x|², cosine, ⟨x, y⟩ / |x|²) in fp64; the cosine of a zero is 0."""
    x, y = x.double(), y.double()
    xx, xy, yy = (float(torch.dot(a, b)) for a, b in ((x, x), (x, y), (y, y)))
    difference = x - y
    return float(torch.dot(difference, difference)) / xx, xy / (xx * yy) ** 0.5 if yy else 0.0, xy / xx


def _mean(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(vectors)).mean(dim=0)
