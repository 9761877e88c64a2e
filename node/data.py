"""Corpus, batches and the evaluation set."""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from farloop.algo.sample_order import arrivals, sample_index, source_of
from farloop.algo.spec import RunSpec
from farloop.node.named_model import LossOf, causal_lm_loss

# --- Corpus
#
# Text as bytes, the same on every node that is given the same files. The default is the source text of the running
# interpreter's standard library: about 12 MB that every machine already has.
#
# A *document* is a text file or one record of a JSONL file. Documents are de-duplicated, ordered by the SHA-256 of
# their bytes and each closed by a byte 0, so neither names nor directory order affect the result.

DEFAULT_MAX_BYTES = 16_000_000  # holds the whole standard library and loads in under a second
SEPARATOR = b"\0"  # closes each document; a file that contains it counts as binary
VALIDATION_SHARE = 0.05


class CorpusError(ValueError):
    """The text cannot be used; one line for the person who named it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Training and validation text; two corpora are the same when their digests are."""

    train: NDArray[np.uint8]  # [bytes]; a read-only view, or a memory map
    validation: NDArray[np.uint8]  # [bytes]
    digest: str  # 16 hex digits over both texts
    files: int  # files with text in the corpus
    duplicates: int  # documents left out because their bytes had been seen
    skipped: int  # files left out because they are not UTF-8 text


def load_corpus(path: Path | None = None, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Corpus:
    """The corpus of a text file, a JSONL file with a field "text", a folder of those, or the standard library.

    Keeps `max_bytes` at most and reads little more: when a folder holds more, its files are taken in the order of a
    hash of their relative paths, so that the part is a fair sample of the whole.

    Another version or distribution of Python has another standard library, and so another digest.

    Raises CorpusError when `path` is missing or unreadable, holds no text, or a JSONL record has no text.
    """
    reading = _Reading(max_bytes)
    for file in _standard_library_files() if path is None else _files_under(path):
        if reading.room <= len(SEPARATOR):
            break
        reading.add(file)
    if not reading.documents:
        where = "the standard library (name a text with --data)" if path is None else path
        found = f"{reading.skipped} not UTF-8, the rest empty" if reading.skipped else "nothing, or empty files alone"
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
                self._keep(_cut(text, self.room - len(SEPARATOR)))
                if self.room <= len(SEPARATOR):
                    break
        except _NotText:
            self.skipped += 1
        except OSError as error:
            raise CorpusError(f"cannot read {file}: {error.strerror}") from error
        self.files += len(self.documents) > found

    def _keep(self, text: bytes) -> None:
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
    text = _cut(text, limit)
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


def _cut(text: bytes, limit: int) -> bytes:
    """At most `limit` bytes of UTF-8, no character halved."""
    if len(text) <= limit:
        return text
    # A character has at most three continuation bytes; a text with more in a row is not UTF-8, and decoding will tell.
    for end in range(limit, max(limit - 4, -1), -1):
        if text[end] & 0xC0 != 0x80:
            return text[:end]
    return text[:limit]


def _files_under(path: Path) -> list[Path]:
    """`path` itself, or the files below it without hidden ones, in the order of a hash of their relative paths."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CorpusError(f"no file or folder {path}")
    return _by_hashed_path(path, (file for file in _walk(path) if file.is_file()))


def _standard_library_files() -> list[Path]:
    """The interpreter's own modules, without tests, installed packages and what differs from one build to the next."""
    root = Path(sysconfig.get_path("stdlib"))
    return _by_hashed_path(root, (file for file in _walk(root) if _is_library_source(file.relative_to(root))))


def _is_library_source(relative: Path) -> bool:
    foreign = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    # Compiler flags, install paths and a distribution's own hooks: two clusters with the same Python would disagree.
    local = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")
    return relative.suffix == ".py" and foreign.isdisjoint(relative.parts) and not relative.parts[0].startswith(local)


def _walk(root: Path) -> Iterator[Path]:
    """Paths of all entries below `root` that are not folders or hidden; links to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise CorpusError(f"cannot read {error.filename}: {error.strerror}") from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _by_hashed_path(root: Path, files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=lambda file: hashlib.sha256(os.fsencode(file.relative_to(root).as_posix())).digest())


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
        self.num_samples = num_samples(corpus, sequence_tokens)  # in one data pass

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
        self._brought = arrivals(spec.terms.schedule.lr)
        assert len(corpora) == 1 + len(self._brought), "a corpus to begin with, and one of each re-warm that brings one"
        self._length, self._seed = spec.terms.inner.sequence_tokens, spec.identity.seed
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
    """A fixed set of validation sequences, spread evenly; its digest is part of the run's identity.

    It is of the first corpus, whatever data re-warms bring, so losses before and after can be compared.
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
        self.digest = _set_digest(self.tokens_BS)  # 16 hex digits over shape and tokens

    def __len__(self) -> int:
        return len(self.tokens_BS)

    @torch.no_grad()
    def loss(self, model: nn.Module, batch_size: int, loss_of: LossOf = causal_lm_loss) -> float:
        """Mean cross-entropy in nats per byte over the whole set; the model's mode is restored.

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


def _set_digest(tokens_BS: Tensor) -> str:
    content = hashlib.sha256(repr(tuple(tokens_BS.shape)).encode())
    content.update(tokens_BS.to(torch.uint8).numpy().tobytes())
    return content.hexdigest()[:16]
