"""`farloop data build`: documents of texts, JSONL, Parquet and Hugging Face datasets become one token file.

Documents keep the order of the sources: a run draws its samples in an order of its own. Which documents are held out
for validation follows from a hash of their text, so equal documents are never on both sides.

A document is encoded in pieces of about `PIECE_CHARACTERS`, cut after a line end: they depend on the text alone, so the
tokens do not depend on how pieces are gathered into batches, nor on the threads that encode them.
"""

import codecs
import hashlib
import importlib.util
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np

from farloop.monitoring.units import few_of
from farloop.node.data.token_file import BYTES, SEPARATOR, VALIDATION_SHARE, Header, Tokens, TokenWriter, files_under
from farloop.node.errors import CorpusError
from farloop.node.settings import VOCABULARY

EXTRA = "install farloop with the extra [data]: pip install 'farloop[data]'"
HUB = "hf:"  # a source that is a dataset of Hugging Face, as hf:NAME, hf:NAME:CONFIG or hf:FOLDER, and @REVISION
PIECE_CHARACTERS = 1 << 20
BATCH_CHARACTERS = 1 << 22  # encoded together, by as many threads as the tokenizer has
END_OF_TEXT = "<|endoftext|>"  # of a tokenizer that is trained here; its token 0
END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[EOS]", "<|im_end|>")
"""Tokens that close a document, by the names of known tokenizers; the first that a tokenizer has."""
LEAST_VOCABULARY = VOCABULARY + 1  # of a trained tokenizer: every byte, and the end of a text
TRAINING_CHARACTERS = 1 << 28  # a tokenizer is trained on that many at most: about 270 MB of English

_ROWS = 4096  # of a table that are read at a time


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a build is."""

    doing: str = "reading"
    source: str = ""
    documents: int = 0
    characters: int = 0
    tokens: int = 0
    skipped: int = 0  # records and files left out by skip_bad


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a document."""

    text: str
    first: bool
    last: bool


class Tokenizer(Protocol):
    """Turns text into tokens below `vocabulary`."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def end_token(self) -> int: ...
    @property
    def digest(self) -> str: ...

    def encode(self, texts: Sequence[str]) -> Iterable[Sequence[int] | Tokens]:
        """The tokens of each; none of its own are added."""


def build(
    sources: Sequence[str],
    out: Path,
    tokenizer: Tokenizer,
    *,
    field: str = "text",
    split: str = "train",
    validation_share: float = VALIDATION_SHARE,
    skip_bad: bool = False,
    batch_characters: int = BATCH_CHARACTERS,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Header, Progress]:
    """Write the documents of these sources to the token file `out`, which is there when it is whole, or not at all.

    Args:
        sources: text, JSONL and Parquet files, folders of those, and `hf:` datasets.
        field: of JSONL records and of Parquet and `hf:` rows: the one that holds the text.
        split: of `hf:` datasets.
        skip_bad: leave out records and files that cannot be used, and count them.
        batch_characters: text that is encoded together; the tokens do not depend on it.

    Raises:
        CorpusError: a source cannot be used; one line with its file and line. OSError: `out` cannot be written.
    """
    progress, limit = Progress(doing="encoding"), int(validation_share * 2**64)
    held_out = False
    with TokenWriter(
        out, vocabulary=tokenizer.vocabulary, end_token=tokenizer.end_token, tokenizer=tokenizer.digest
    ) as writer:
        found = pieces(sources, field=field, split=split, skip_bad=skip_bad, progress=progress)
        for batch in _batches(found, batch_characters):
            for piece, tokens in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
                if piece.first:
                    hashed = hashlib.sha256(piece.text.encode()).digest()
                    held_out = int.from_bytes(hashed[:8], "little") < limit
                writer.add(tokens, closes=piece.last, held_out=held_out)
                progress.documents += piece.last
                progress.characters += len(piece.text)
            progress.tokens = writer.tokens
            on_progress(progress)
        progress.doing = "writing"
        on_progress(progress)
        return writer.finish(validation_share), progress


def _batches(found: Iterable[Piece], characters: int) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in found:
        batch.append(piece)
        size += len(piece.text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# --- Tokenizers


class ByteTokenizer:
    """Tokens are the bytes of UTF-8; byte 0 closes a document."""

    vocabulary, end_token, digest = VOCABULARY, SEPARATOR[0], BYTES

    def encode(self, texts: Sequence[str]) -> Iterator[Tokens]:
        for text in texts:
            yield np.frombuffer(text.encode(), dtype=np.uint8)


class FileTokenizer:
    """A tokenizer.json, by the package tokenizers."""

    def __init__(self, path: Path, end_token: str | None = None) -> None:
        """`path`: a tokenizer.json, or a folder that holds one. Raises CorpusError."""
        file = path / "tokenizer.json" if path.is_dir() else path
        tokenizers = _imported("tokenizers", "a tokenizer")
        try:
            content = file.read_bytes()
        except OSError as error:
            hint = "; AutoTokenizer.from_pretrained(…).save_pretrained(FOLDER) writes one" if path.is_dir() else ""
            raise CorpusError(f"cannot read {file}: {(error.strerror or str(error)).lower()}{hint}") from error
        try:
            inner = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:
            raise CorpusError(f"{file} is no tokenizer.json: {error}") from error
        end_token = end_token or _named_end(path)
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # a document that spells a special token does not hold one
        known: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        ends = [end_token] if end_token is not None else [name for name in END_TOKENS if name in known]
        if not ends or ends[0] not in known:
            special = [token.content for token in inner.get_added_tokens_decoder().values()]
            what = f"has no token {end_token!r}" if end_token else "has no known token that ends a document"
            raise CorpusError(f"{file} {what}: name one with --end-token; it has {', '.join(special) or 'none'}")
        self._inner, self.digest = inner, hashlib.sha256(content).hexdigest()[:16]
        self.vocabulary, self.end_token = max(known.values()) + 1, known[ends[0]]

    def encode(self, texts: Sequence[str]) -> Iterator[Sequence[int]]:
        for encoding in self._inner.encode_batch_fast(list(texts), add_special_tokens=False):
            yield encoding.ids


def train_tokenizer(
    sources: Sequence[str],
    out: Path,
    vocabulary: int,
    *,
    field: str = "text",
    split: str = "train",
    skip_bad: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Write a byte-level BPE tokenizer.json, trained on the sources in turn, up to `TRAINING_CHARACTERS`.

    It has `vocabulary` tokens, or fewer where the text has too few different words. Raises CorpusError as `build`.
    """
    if vocabulary < LEAST_VOCABULARY:
        raise CorpusError(f"a tokenizer of {vocabulary} tokens: the least is {LEAST_VOCABULARY}, all bytes and the end")
    _imported("tokenizers", "a tokenizer")
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    progress = Progress(doing="training the tokenizer")
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        each = [pieces([one], field=field, split=split, skip_bad=skip_bad, progress=progress) for one in sources]
        for piece in itertools.chain.from_iterable(itertools.zip_longest(*each)):
            if piece is None:  # of a source that is at its end
                continue
            progress.documents += piece.last
            progress.characters += len(piece.text)
            on_progress(progress)
            yield piece.text
            if progress.characters >= TRAINING_CHARACTERS:
                return

    inner.train_from_iterator(texts(), trainer)
    part = out.with_name(f".{out.name}.part")
    try:
        inner.save(str(part), pretty=False)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def _named_end(path: Path) -> str | None:
    """The end token that a folder's tokenizer_config.json names."""
    config = path / "tokenizer_config.json"
    if not config.is_file():
        return None
    try:
        named = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise CorpusError(f"{config} cannot be read as JSON: {error}") from error
    if isinstance(named, dict):
        named = named.get("content")
    return named if isinstance(named, str) else None


# --- Sources


class _Bad(Exception):
    """A record or a file that cannot be used; one line with its place."""


def pieces(sources: Sequence[str], *, field: str, split: str, skip_bad: bool, progress: Progress) -> Iterator[Piece]:
    """All documents, in pieces. Raises CorpusError."""
    for source in sources:
        if source.startswith(HUB):
            progress.source = source
            yield from _usable(_hub_rows(source, split, field), skip_bad, progress)
            continue
        for file in files_under(Path(source)):
            progress.source = str(file)
            try:
                yield from _usable(_READERS.get(file.suffix, _text_pieces)(file, field), skip_bad, progress)
            except OSError as error:
                raise CorpusError(f"cannot read {file}: {error.strerror}") from error


def _usable(found: Iterator[Piece | _Bad], skip_bad: bool, progress: Progress) -> Iterator[Piece]:
    for piece in found:
        if isinstance(piece, Piece):
            if piece.text or not piece.first:  # an empty document is none
                yield piece
        elif skip_bad:
            progress.skipped += 1
        else:
            raise CorpusError(f"{piece} (--skip-bad leaves such out)")


def _text_pieces(file: Path, field: str) -> Iterator[Piece | _Bad]:
    """A text file is one document. It is read in pieces, and checked before the first."""
    if bad := _not_text(file):
        yield bad
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    first, pending = True, ""
    with file.open("rb") as stream:
        while chunk := stream.read(PIECE_CHARACTERS):
            pending += decoder.decode(chunk)
            while len(pending) > PIECE_CHARACTERS:
                # After the last line end, or in a line that is longer than a piece.
                cut = pending.rfind("\n", 0, PIECE_CHARACTERS) + 1 or PIECE_CHARACTERS
                yield Piece(pending[:cut], first, last=False)
                first, pending = False, pending[cut:]
    yield Piece(pending, first, last=True)


def _not_text(file: Path) -> _Bad | None:
    decoder, lines = codecs.getincrementaldecoder("utf-8")(), 1
    with file.open("rb") as stream:
        while True:
            chunk = stream.read(PIECE_CHARACTERS)
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                return _Bad(f"{file}, line {lines + error.object[: error.start].count(10)}: not UTF-8")
            if "\0" in text:
                return _Bad(f"{file}, line {lines + text.partition(chr(0))[0].count(chr(10))}: a zero byte, so no text")
            lines += text.count("\n")
            if not chunk:
                return None


def _jsonl_pieces(file: Path, field: str) -> Iterator[Piece | _Bad]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield from _record(line.rstrip(b"\r\n"), f"{file}, line {number}", field)


def _record(line: bytes, where: str, field: str) -> Iterator[Piece | _Bad]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        yield _Bad(f"{where}: not UTF-8")
    except json.JSONDecodeError as error:
        yield _Bad(f"{where}: not JSON: {error.msg} at character {error.pos + 1}")
    except RecursionError:
        yield _Bad(f"{where}: not JSON that can be read: it is nested too deeply")
    else:
        if not isinstance(record, dict):
            yield _Bad(f"{where}: expected a JSON object, got a {type(record).__name__}")
        elif field not in record:
            yield _Bad(f"{where}: there is no field {field!r}; there are {_listed(record)}")
        else:
            yield from _document(record[field], where, field)


def _parquet_pieces(file: Path, field: str) -> Iterator[Piece | _Bad]:
    parquet = _imported("pyarrow.parquet", f"{file}")
    import pyarrow

    try:
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        if field not in names:
            yield _Bad(f"{file}: there is no column {field!r}; there are {_listed(names)}")
            return
        row = 0
        for batch in table.iter_batches(batch_size=_ROWS, columns=[field]):
            for value in batch.column(0).to_pylist():
                row += 1
                yield from _document(value, f"{file}, row {row}", field)
    except pyarrow.ArrowException as error:
        yield _Bad(f"{file}: not a Parquet file that can be read: {' '.join(str(error).split())}")


def _hub_rows(source: str, split: str, field: str) -> Iterator[Piece | _Bad]:
    """Rows of a dataset of the hub, or of a folder that `save_to_disk` wrote."""
    datasets = _imported("datasets", source)
    name, _, revision = source.removeprefix(HUB).partition("@")
    try:
        if any((Path(name) / saved).is_file() for saved in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(name)
            found = found[split] if isinstance(found, dict) else found
        else:
            name, _, config = name.partition(":")
            found = datasets.load_dataset(name, config or None, split=split, revision=revision or None)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CorpusError(f"{source}: cannot be loaded (split {split}): {type(error).__name__}: {reason}") from error
    if field not in found.column_names:
        raise CorpusError(f"{source}: there is no column {field!r}; there are {_listed(found.column_names)}")
    row = 0
    for batch in found.select_columns([field]).iter(batch_size=_ROWS):
        for value in batch[field]:
            row += 1
            yield from _document(value, f"{source}, row {row}", field)


def _document(text: object, where: str, field: str) -> Iterator[Piece | _Bad]:
    if not isinstance(text, str):
        yield _Bad(f"{where}: field {field!r}: expected text, got a {type(text).__name__}")
    elif "\0" in text:
        yield _Bad(f"{where}: field {field!r} holds a zero byte, which closes a document")
    elif not _encodable(text):
        yield _Bad(f"{where}: field {field!r} holds half of a surrogate pair, which has no UTF-8")
    else:
        cuts = [0]
        while len(text) - cuts[-1] > PIECE_CHARACTERS:
            end = cuts[-1] + PIECE_CHARACTERS
            cuts.append(text.rfind("\n", cuts[-1], end) + 1 or end)
        for start, end in itertools.pairwise([*cuts, len(text)]):
            yield Piece(text[start:end], first=start == 0, last=end == len(text))


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _listed(names: Iterable[str], most: int = 12) -> str:
    return few_of([repr(name) for name in names], most) or "none"


def _imported(module: str, what: str) -> ModuleType:
    """A module of the extra. Raises CorpusError where it is not installed."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise CorpusError(f"{what} needs the package {module.partition('.')[0]}: {EXTRA}")
    return importlib.import_module(module)


_READERS: dict[str, Callable[[Path, str], Iterator[Piece | _Bad]]] = {
    ".jsonl": _jsonl_pieces,
    ".ndjson": _jsonl_pieces,
    ".parquet": _parquet_pieces,
}
