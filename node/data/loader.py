"""The samples that a run grants, for a loop of one's own: `for batch in Batches(node, dataset, num_workers=4)`.

The coordinator grants positions of one stream, and a position says which sample it is (algo/sample_order.py). A
dataset so needs no shuffling, no sampler for ranks, and no state of a loader to save: after a restart, on however many
ranks, the positions go on.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.utils.data import DataLoader

from farloop.algo.sample_order import sample_index
from farloop.algo.spec import RunSpec
from farloop.node.data.corpus import Mixture
from farloop.node.errors import DataError, LoopError
from farloop.node.library import Node

PREFETCH = 2  # batches that each worker loads ahead, as torch does by default


class MapStyle(Protocol):
    """A dataset with random access, as `torch.utils.data.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Batches(Iterator[Any]):
    """One batch for each inner step, until the run ends or the node is asked to leave.

    A batch has this rank's part of the run's `batch_sequences`, stacked by DataLoader's `collate_fn`. Every batch is
    followed by one `node.step`; a loop that accumulates gradients splits it.
    """

    def __init__(
        self, node: Node, dataset: MapStyle, *, digest: str = "", num_workers: int = 0, **options: Any
    ) -> None:
        """
        Args:
            dataset: a `Mixture` of the run's token files or texts, or any dataset with random access.
            digest: name of the dataset, if it has no attribute of that name: [data] digest in the RUN.toml.
            num_workers: processes that load batches while the loop computes; 0: none.
            options: of `torch.utils.data.DataLoader`, as collate_fn and pin_memory.

        Raises:
            DataError: the dataset is not the run's.
            LoopError: it has no digest, or an option of DataLoader decides on the order of samples.
        """
        _check(node.spec, dataset, digest, node.module)
        if ordering := sorted({"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"} & options.keys()):
            raise LoopError(f"Batches({ordering[0]}=…): the run decides on batches and their order; leave it out")
        if num_workers:
            options = {"prefetch_factor": PREFETCH, "persistent_workers": True, **options}
        # A generator of its own: workers are seeded from it, and the loop's random numbers stay as they were.
        options = {"generator": torch.Generator().manual_seed(node.spec.identity.seed % 2**63), **options}
        self._node, self._dataset = node, dataset
        self._ahead = num_workers * options.get("prefetch_factor", 0)
        self._plan = _Plan()
        self._loading: deque[list[int]] = deque()  # batches that the loader was or will be asked for, in its order
        given: Any = dataset  # it has what DataLoader asks for
        self._loader: DataLoader[Any] = DataLoader(given, batch_sampler=self._plan, num_workers=num_workers, **options)
        self._loaded: Iterator[Any] = iter(())
        self._given: tuple[float, tuple[int, ...]] | None = None  # position and samples of the batch given last

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """The next step's batch. Raises LoopError: there was no step since the last."""
        node = self._node
        ahead = node.samples_ahead(self._ahead)
        if not node.running:
            raise StopIteration
        # A new history of the run may begin at a position that has been: then with other samples.
        if (node.position, node.samples) == self._given:
            raise LoopError("a second batch was taken for one inner step: call node.step after each batch")
        self._given = node.position, node.samples
        wanted = [self._indices(positions) for positions in (node.samples, *ahead)]
        if not self._loading or list(self._loading) != wanted[: len(self._loading)]:
            self._begin(wanted)
        else:
            self._add(wanted[len(self._loading) :])
        self._loading.popleft()
        return next(self._loaded)

    def _begin(self, wanted: list[list[int]]) -> None:
        """Load these from here on; what is being loaded is dropped. At the start, and after other samples came."""
        self._loading.clear()
        self._plan.clear()
        self._add(wanted)
        self._loaded = iter(self._loader)

    def _add(self, batches: Sequence[list[int]]) -> None:
        self._loading.extend(batches)
        self._plan.extend(batches)

    def _indices(self, positions: Sequence[int]) -> list[int]:
        if isinstance(self._dataset, Mixture):
            return [self._dataset.index(position, self._node.position) for position in positions]
        seed = self._node.spec.identity.seed
        return [sample_index(position, len(self._dataset), seed) for position in positions]


class _Plan(deque[list[int]]):
    """The batch sampler: what is known of the next batches. It may end, and go on once more is known."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[int]:
        if not self:
            raise StopIteration
        return self.popleft()


def _check(spec: RunSpec, dataset: MapStyle, digest: str, module: nn.Module) -> None:
    """Whether the dataset is the run's, and its tokens those of the model. Raises DataError, LoopError."""
    identity = spec.identity
    if not identity.num_samples:
        raise DataError(
            "the run grants no samples: name its data in [data] of the RUN.toml, as path = 'tokens.bin', or your own "
            "dataset with digest and samples"
        )
    digest = digest or getattr(dataset, "digest", "")
    if not digest:
        raise LoopError("Batches(dataset) has no attribute digest: give digest=…, as [data] digest has it in RUN.toml")
    if digest != identity.data:
        raise DataError(
            f"this node's data have the digest {digest}, the run's {identity.data}: give every node the same data"
        )
    if not isinstance(dataset, Mixture) and len(dataset) != identity.num_samples:
        raise DataError(f"the dataset has {len(dataset)} samples, the run's {identity.num_samples}")
    vocabulary = getattr(dataset, "vocabulary", 0)
    rows = max((layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding)), default=None)
    if rows is not None and rows < vocabulary:
        raise DataError(
            f"the data have a vocabulary of {vocabulary} tokens, and the model's largest embedding {rows}: "
            "build the data with the model's tokenizer, or give the model that vocabulary"
        )
