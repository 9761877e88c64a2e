"""Corpus, batches and the evaluation set."""

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farloop.algo.sample_order import BLOCK, arrivals, part_of, quotas, sample_index, source_of
from farloop.algo.spec import RunSpec
from farloop.node.data.token_file import (
    BYTES,
    SEPARATOR,
    VALIDATION_SHARE,
    Tokens,
    by_hashed_path,
    files_under,
    is_token_file,
    open_tokens,
    walk,
)
from farloop.node.errors import CorpusError
from farloop.node.model.named import LossOf, causal_lm_loss
from farloop.node.settings import VOCABULARY, Share

# --- Corpus
#
# Text as bytes, the same on every node that is given the same files. The default is the source text of the running
# interpreter's standard library: about 12 MB that every machine already has.
#
# A *document* is a text file or one record of a JSONL file. Documents are de-duplicated, ordered by the SHA-256 of
# their bytes and each closed by a byte 0, so neither names nor directory order affect the result.

DEFAULT_MAX_BYTES = 16_000_000  # holds the whole standard library and loads in under a second


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Training and validation tokens, or those of several parts; two corpora are the same when their digests are."""

    train: Tokens  # a read-only view, or a memory map; empty for a mixture
    validation: Tokens
    digest: str  # 16 hex digits over both
    vocabulary: int = VOCABULARY  # every token is below
    tokenizer: str = BYTES  # or 16 hex digits, as in the header of a token file
    files: int = 1  # files with text in the corpus
    duplicates: int = 0  # documents left out because their bytes had been seen
    skipped: int = 0  # files left out because they are not UTF-8 text
    parts: tuple["Corpus", ...] = ()  # of a mixture
    quotas: tuple[int, ...] = (BLOCK,)  # samples of each part in a block of them
    source: Path | None = None  # the token file that it is mapped from

    def __reduce__(self) -> str | tuple[Any, ...]:
        """A process that is sent the corpus of a token file maps the file itself."""
        return object.__reduce__(self) if self.source is None else (load_corpus, (self.source,))

    @property
    def each(self) -> tuple["Corpus", ...]:
        """Its parts; itself where it is no mixture."""
        return self.parts or (self,)

    @property
    def size(self) -> int:
        """Tokens in all."""
        return sum(len(part.train) + len(part.validation) for part in self.each)


def mixture_of(parts: Sequence[Corpus], weights: Sequence[float]) -> Corpus:
    """Corpora of which each gives its share of the samples. Raises CorpusError: weights or tokenizers do not go."""
    try:
        counts = quotas(weights)
    except ValueError as error:
        raise CorpusError(str(error)) from error
    check_tokenizers(parts)
    first = parts[0]
    named = ",".join(f"{count}*{part.digest}" for count, part in zip(counts, parts, strict=True))
    empty = first.train[:0]
    return Corpus(
        train=empty,
        validation=empty,
        digest=hashlib.sha256(named.encode()).hexdigest()[:16],
        vocabulary=first.vocabulary,
        tokenizer=first.tokenizer,
        files=sum(part.files for part in parts),
        duplicates=sum(part.duplicates for part in parts),
        skipped=sum(part.skipped for part in parts),
        parts=tuple(parts),
        quotas=counts,
    )


def check_tokenizers(corpora: Sequence[Corpus]) -> None:
    """Raises CorpusError unless all have the tokenizer of the first."""
    first = corpora[0]
    for number, other in enumerate(corpora, start=1):
        if (other.tokenizer, other.vocabulary) != (first.tokenizer, first.vocabulary):
            where = other.source or f"number {number}"
            raise CorpusError(
                f"{where} has the tokenizer {other.tokenizer} ({other.vocabulary} tokens), the first data "
                f"{first.tokenizer} ({first.vocabulary}): build all with one tokenizer"
            )


def load_mixture(shares: Sequence[Share], *, max_bytes: int = DEFAULT_MAX_BYTES) -> Corpus:
    """The mixture of these corpora; `max_bytes` is for each text. Raises CorpusError as `load_corpus`, `mixture_of`."""
    corpora = [load_corpus(share.path, max_bytes=max_bytes) for share in shares]
    return mixture_of(corpora, [share.weight for share in shares])


def load_corpus(path: Path | None = None, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Corpus:
    """The corpus of a token file, a text file, a JSONL file with a field "text", a folder of texts, or the standard
    library.

    A token file is mapped into memory, whole. Of texts, keeps `max_bytes` at most and reads little more: when a folder
    holds more, its files are taken in the order of a hash of their relative paths, so that the part is a fair sample
    of the whole.

    Another version or distribution of Python has another standard library, and so another digest.

    Raises CorpusError when `path` is missing or unreadable, holds no text, or a JSONL record has no text.
    """
    if path is not None and path.is_file() and is_token_file(path):
        tokens = open_tokens(path)
        header = tokens.header
        return Corpus(
            train=tokens.train,
            validation=tokens.validation,
            digest=header.digest,
            vocabulary=header.vocabulary,
            tokenizer=header.tokenizer,
            source=path,
        )
    reading = _Reading(max_bytes)
    for file in _standard_library_files() if path is None else files_under(path):
        if reading.room <= len(SEPARATOR):
            break
        reading.add(file)
    if not reading.documents:
        where = "the standard library (name a text with --data)" if path is None else path
        found = f"{reading.skipped} not UTF-8, the rest empty" if reading.skipped else "no file, or only empty files"
        raise CorpusError(f"no text in {where} ({found}); name a text file, a JSONL file or a folder of those")
    validation, train = _split([reading.documents[key] for key in sorted(reading.documents)])
    return Corpus(
        train=np.frombuffer(train, dtype=np.uint8),
        validation=np.frombuffer(validation, dtype=np.uint8),
        digest=_digest(train, validation),
        files=reading.files,
        duplicates=reading.duplicates,
        skipped=reading.skipped,
    )


class _Reading:
    """The documents found so far, the room left for more, and what was left out."""

    def __init__(self, max_bytes: int) -> None:
        self.documents: dict[bytes, bytes] = {}  # SHA-256 → text
        self.room = max_bytes  # bytes, separators included
        self.files = self.duplicates = self.skipped = 0

    def add(self, file: Path) -> None:
        """Add the documents of a file while there is room. Raises CorpusError: it cannot be read."""
        found = len(self.documents)
        try:
            for text in _documents_of(file, self.room):
                self._add(_truncate(text, self.room - len(SEPARATOR)))
                if self.room <= len(SEPARATOR):
                    break
        except _NotText:
            self.skipped += 1
        except OSError as error:
            raise CorpusError(f"cannot read {file}: {error.strerror}") from error
        self.files += len(self.documents) > found

    def _add(self, text: bytes) -> None:
        key = hashlib.sha256(text).digest()
        if key in self.documents:
            self.duplicates += 1
        elif text:
            self.documents[key] = text
            self.room -= len(text) + len(SEPARATOR)


class _NotText(Exception):
    """A file is binary or in another encoding."""


def _documents_of(file: Path, limit: int) -> Iterator[bytes]:
    """The records of a JSONL file, or the first `limit` bytes of a text file. Raises CorpusError, _NotText, OSError."""
    with file.open("rb") as stream:
        if file.suffix == ".jsonl":
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield _text_of(line, f"{file}, line {number}")
            return
        text = stream.read(limit + 1)
    text = _truncate(text, limit)
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        raise _NotText from None
    if SEPARATOR in text:
        raise _NotText
    yield text


def _text_of(line: bytes, where: str) -> bytes:
    """A JSONL record's text. One without is an error: skipping it could skip them all, by a misspelt field."""
    try:
        # A lone surrogate is legal in JSON and has no UTF-8: UnicodeEncodeError, a ValueError.
        text: bytes = json.loads(line)["text"].encode("utf-8")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CorpusError(f'{where}: not a JSON object with a string field "text"') from None
    return text


def _truncate(text: bytes, limit: int) -> bytes:
    """At most `limit` bytes of UTF-8, no character halved."""
    if len(text) <= limit:
        return text
    # A character has at most three continuation bytes; a text with more in a row is not UTF-8, and decoding will tell.
    for end in range(limit, max(limit - 4, -1), -1):
        if text[end] & 0xC0 != 0x80:
            return text[:end]
    return text[:limit]


def _standard_library_files() -> list[Path]:
    """The interpreter's own modules, without tests, installed packages and what differs from one build to the next."""
    root = Path(sysconfig.get_path("stdlib"))
    foreign = ("site-packages", "dist-packages", "test", "tests", "idle_test")
    # Compiler flags, install paths and a distribution's own hooks: two clusters with the same Python would disagree.
    local = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")
    sources = (file for file in walk(root, foreign) if file.suffix == ".py")
    return by_hashed_path(root, (f for f in sources if not f.relative_to(root).parts[0].startswith(local)))


def _split(documents: list[bytes]) -> tuple[bytes, bytes]:
    """(validation, train): about the first `VALIDATION_SHARE` of the bytes, and the rest.

    The cut is at the document border nearest to that share. Where documents are so few or so large that this would
    halve or double it, the cut goes through a document: a single file has to give both texts.
    """
    closed = [document + SEPARATOR for document in documents]
    text = b"".join(closed)
    aim = int(VALIDATION_SHARE * len(text))
    border = min(accumulate(map(len, closed)), key=lambda end: abs(end - aim))
    cut = border if aim / 2 <= border <= 2 * aim else aim
    return text[:cut], text[cut:]


def _digest(train: bytes, validation: bytes) -> str:
    content = hashlib.sha256(len(train).to_bytes(8, "little"))
    content.update(train)
    content.update(validation)
    return content.hexdigest()[:16]


# --- Batches and the evaluation set
#
# The coordinator grants positions of one endless stream of samples; the node turns them into tokens.
#
# Shape suffixes: B batch, S = L + 1 tokens of a sample of sequence length L (inputs and, shifted by one, targets).


def num_samples(corpus: Corpus, sequence_tokens: int) -> int:
    """Samples in one data pass: sample i is the tokens [i·L, i·L + L + 1) of the training text.

    Neighbours share one token, the last target of one and the first input of the next, so every token but the first,
    and a tail shorter than L, is predicted exactly once a pass. Of a mixture: all samples of all parts.

    Raises CorpusError when the text, or one of the parts, is too short for one sample.
    """
    return sum(_fitting(part, part.train, sequence_tokens, "training") for part in corpus.each)


class Samples:
    """The endless stream of training samples: pass after pass over the corpus, each in its own order."""

    def __init__(self, corpus: Corpus, sequence_tokens: int, seed: int) -> None:
        """Raises CorpusError when the training text is too short for one sample of `sequence_tokens`."""
        self._parts = corpus.each
        self._counts = [num_samples(part, sequence_tokens) for part in corpus.each]
        self._quotas, self._sequence_tokens, self._seed = corpus.quotas, sequence_tokens, seed
        self.num_samples = sum(self._counts)  # in one data pass

    def index(self, position: int) -> int:
        """Index of the sample at this position of the stream, counted through all parts."""
        number, place = part_of(position, self._quotas, self._seed)
        return sum(self._counts[:number]) + sample_index(place, self._counts[number], self._seed)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Tensor:
        """Tokens of a sample: int64 [S]."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"there is no sample {index} of {self.num_samples}")
        for part, count in zip(self._parts, self._counts, strict=True):
            if index < count:
                return _sequence(part.train, index * self._sequence_tokens, self._sequence_tokens)
            index -= count
        raise AssertionError

    def batch(self, positions: Sequence[int]) -> Tensor:
        """Tokens of the samples at these positions of the stream: int64 [B, S], on the CPU."""
        return torch.stack([self[self.index(position)] for position in positions])


def data_name(corpora: Sequence[Corpus]) -> str:
    """How an identity names the samples: the digest of the corpus, and of those that re-warms bring."""
    return "+".join(corpus.digest for corpus in corpora)


class Mixture:
    """The run's samples: those of its corpus and, from a re-warm on that brings new data, of that one as well.

    A position is a sample of one corpus alone, and always the same: in each corpus no sample comes twice in a pass.
    """

    def __init__(self, spec: RunSpec, corpora: Sequence[Corpus]) -> None:
        """`corpora`: the first, then one of each re-warm that brings one.

        Raises CorpusError when one is too short for one sample.
        """
        self._brought = arrivals(spec.terms.schedule.lr)
        assert len(corpora) == 1 + len(self._brought), "a corpus to begin with, and one of each re-warm that brings one"
        self._length, self._seed = spec.terms.inner.sequence_tokens, spec.identity.seed
        self._sources = [Samples(corpus, self._length, self._seed) for corpus in corpora]
        self.digest, self.vocabulary = data_name(corpora), corpora[0].vocabulary

    def index(self, position: int, at: float) -> int:
        """Index of the sample at this position of the stream, counted through all corpora; `at`: as in `batch`."""
        source = source_of(position, at, self._brought, self._seed)
        return sum(map(len, self._sources[:source])) + self._sources[source].index(position)

    def __len__(self) -> int:
        return sum(map(len, self._sources))

    def __getitem__(self, index: int) -> Tensor:
        """Tokens of a sample: int64 [S]."""
        for samples in self._sources:
            if index < len(samples):
                return samples[index]
            index -= len(samples)
        raise IndexError("there is no such sample")

    def batch(self, positions: Sequence[int], at: float) -> Tensor:
        """Tokens of the samples at these positions of the stream, for an inner step at schedule position `at`.

        int64 [B, S], on the CPU.
        """
        if not positions:
            return torch.empty(0, self._length + 1, dtype=torch.int64, device="cpu")
        return torch.stack([self[self.index(position, at)] for position in positions])


class EvaluationSet:
    """A fixed set of validation sequences, spread evenly; its digest is part of the run's identity.

    It is of the first corpus, whatever data re-warms bring, so losses before and after can be compared. Each part of a
    mixture has its share of the sequences.
    """

    def __init__(self, corpus: Corpus, *, sequences: int, sequence_tokens: int) -> None:
        """Takes fewer than `sequences` where the validation text has no room for so many disjoint ones.

        Raises CorpusError when it has no room for one.
        """
        rows: list[Tensor] = []
        given = 0
        for number, part in enumerate(corpus.each):
            ends = sequences * sum(corpus.quotas[: number + 1]) // BLOCK
            fitting = _fitting(part, part.validation, sequence_tokens, "validation")
            count = min(ends - given, fitting)
            given = ends
            # Sequence k starts at the ⌊k·fitting/count⌋-th of the disjoint places.
            starts = [k * fitting // count * sequence_tokens for k in range(count)]
            rows += [_sequence(part.validation, start, sequence_tokens) for start in starts]
        self.tokens_BS = torch.stack(rows)
        self.digest = _set_digest(self.tokens_BS, corpus.vocabulary)  # 16 hex digits over shape and tokens

    def __len__(self) -> int:
        return len(self.tokens_BS)

    @torch.no_grad()
    def loss(self, model: nn.Module, batch_size: int, loss_of: LossOf = causal_lm_loss) -> float:
        """Mean cross-entropy in nats per token over the whole set; the model's mode is restored.

        `batch_size` bounds memory. It changes the grouping of the sums, so the last digits of the result, nothing else.
        """
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        total = 0.0
        try:
            for start in range(0, len(self), batch_size):
                part_BS = self.tokens_BS[start : start + batch_size]
                total += loss_of(model, part_BS.to(device)).item() * len(part_BS)
        finally:
            model.train(was_training)
        return total / len(self)


def _sequence(text: Tokens, start: int, sequence_tokens: int) -> Tensor:
    """int64 [S], a copy."""
    return torch.from_numpy(text[start : start + sequence_tokens + 1].astype(np.int64))


def _fitting(corpus: Corpus, text: Tokens, sequence_tokens: int, which: str) -> int:
    """How many sequences of L tokens, each with its last target, fit into a text."""
    count = (len(text) - 1) // sequence_tokens
    if count < 1:
        unit = "bytes" if corpus.tokenizer == BYTES else "tokens"
        raise CorpusError(
            f"the {which} text has {len(text)} {unit}, too little for one sequence of {sequence_tokens} tokens: "
            f"add text or shorten the sequences"
        )
    return count


def _set_digest(tokens_BS: Tensor, vocabulary: int) -> str:
    content = hashlib.sha256(repr(tuple(tokens_BS.shape)).encode())
    stored = np.uint8 if vocabulary <= VOCABULARY else np.dtype("<u4")
    content.update(tokens_BS.numpy().astype(stored).tobytes())
    return content.hexdigest()[:16]
