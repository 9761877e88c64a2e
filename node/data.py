"""From a corpus and positions of the stream to a batch: training samples, and the fixed evaluation set.

The coordinator grants positions of one endless stream of samples (protocol "Data leases"); a node alone turns them into
tokens. Nothing here knows of the link.

Shape suffixes: B batch, S = L + 1 tokens of a sample of sequence length L (inputs and, shifted by one, targets).
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farloop.algo.permutation import sample_index
from farloop.algo.replay import arrivals, source_of
from farloop.algo.spec import RunSpec
from farloop.node.corpus import Corpus, CorpusError
from farloop.node.model import GPT


def num_samples(corpus: Corpus, sequence_tokens: int) -> int:
    """Samples in one data pass: sample i is the tokens [i·L, i·L + L + 1) of the training text.

    Neighbours share one token, the last target of one and the first input of the next, so every token but the first,
    and a tail shorter than L, is predicted exactly once a pass.

    Raises CorpusError when the text is too short for one sample.
    """
    return _fitting(len(corpus.train), sequence_tokens, "training")


class Samples:
    """The endless stream of training samples: pass after pass over the corpus, each in its own order."""

    def __init__(self, corpus: Corpus, sequence_tokens: int, seed: int) -> None:
        """Raises CorpusError when the training text is too short for one sample of `sequence_tokens`."""
        self._train = corpus.train
        self._sequence_tokens = sequence_tokens
        self._seed = seed
        self.num_samples = num_samples(corpus, sequence_tokens)
        """In one data pass."""

    def batch(self, positions: Sequence[int]) -> Tensor:
        """Tokens of the samples at these positions of the stream: int64 [B, S], on the CPU."""
        indices = [sample_index(position, self.num_samples, self._seed) for position in positions]
        return _gather(self._train, [i * self._sequence_tokens for i in indices], self._sequence_tokens)


class Mixture:
    """The run's samples: those of its corpus and, from a re-warm on that brings new data, of that one as well.

    A position is a sample of one corpus alone, the same sample whenever it is that one: in each corpus no sample comes
    twice in a pass.
    """

    def __init__(self, spec: RunSpec, corpora: Sequence[Corpus]) -> None:
        """`corpora`: the first, then one of each re-warm that brings one.

        Raises CorpusError when one is too short for one sample.
        """
        self._brought = arrivals(spec.terms.lr)
        assert len(corpora) == 1 + len(self._brought), "a corpus to begin with, and one of each re-warm that brings one"
        self._length, self._seed = spec.terms.sequence_tokens, spec.identity.seed
        self._sources = [Samples(corpus, self._length, self._seed) for corpus in corpora]

    def batch(self, positions: Sequence[int], at: float) -> Tensor:
        """Tokens of the samples at these positions of the stream, for an inner step at schedule position `at`.

        int64 [B, S], on the CPU.
        """
        wanted: dict[int, list[int]] = {}
        for row, position in enumerate(positions):
            wanted.setdefault(source_of(position, at, self._brought, self._seed), []).append(row)
        tokens_BS = torch.empty(len(positions), self._length + 1, dtype=torch.int64)
        for source, rows in wanted.items():
            tokens_BS[rows] = self._sources[source].batch([positions[row] for row in rows])
        return tokens_BS


class EvaluationSet:
    """A fixed set of validation sequences, spread evenly; its digest is part of the run's identity (protocol J).

    Of the first corpus, whatever data re-warms bring: losses before and after can be compared.
    """

    def __init__(self, corpus: Corpus, *, sequences: int, sequence_tokens: int) -> None:
        """Takes fewer than `sequences` where the validation text has no room for so many disjoint ones.

        Raises CorpusError when it has no room for one.
        """
        fitting = _fitting(len(corpus.validation), sequence_tokens, "validation")
        count = min(sequences, fitting)
        # Sequence k starts at the ⌊k·fitting/count⌋-th of the disjoint places.
        starts = [k * fitting // count * sequence_tokens for k in range(count)]
        self.tokens_BS = _gather(corpus.validation, starts, sequence_tokens)
        self.digest = _digest(self.tokens_BS)
        """16 hex digits over shape and tokens."""

    def __len__(self) -> int:
        return len(self.tokens_BS)

    @torch.no_grad()
    def loss(self, model: GPT, batch_size: int) -> float:
        """Mean cross-entropy in nats per byte over the whole set; the model's mode is restored.

        `batch_size` bounds memory. It changes the grouping of the sums, so the last digits of the result, nothing else.
        """
        device = model.embed.weight.device
        was_training = model.training
        model.eval()
        total = 0.0
        try:
            for start in range(0, len(self), batch_size):
                part_BS = self.tokens_BS[start : start + batch_size]
                total += model.loss(part_BS.to(device)).item() * len(part_BS)
        finally:
            model.train(was_training)
        return total / len(self)


def _fitting(text_bytes: int, sequence_tokens: int, which: str) -> int:
    """How many sequences of L tokens, each with its last target, fit into a text."""
    count = (text_bytes - 1) // sequence_tokens
    if count < 1:
        raise CorpusError(
            f"the {which} text has {text_bytes} bytes, too little for one sequence of {sequence_tokens} tokens: "
            f"add text or shorten the sequences"
        )
    return count


def _gather(text: NDArray[np.uint8], starts: Sequence[int], sequence_tokens: int) -> Tensor:
    """[B, S] int64 from a byte array, which may be read-only or a memory map."""
    rows_BS = np.stack([text[start : start + sequence_tokens + 1] for start in starts])
    return torch.from_numpy(rows_BS.astype(np.int64))


def _digest(tokens_BS: Tensor) -> str:
    content = hashlib.sha256(repr(tuple(tokens_BS.shape)).encode())
    content.update(tokens_BS.to(torch.uint8).numpy().tobytes())
    return content.hexdigest()[:16]
