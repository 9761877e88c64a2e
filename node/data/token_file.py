"""Token files: tokenised text that a run maps into memory; `farloop data build` makes them.

| at | holds |
| --- | --- |
| 0 | the line `farloop tokens 1`, a line of JSON (`Header`), zeros |
| 4096 | the training tokens and, after them, the validation tokens: unsigned, little-endian, of the header's dtype |
| next multiple of 8 | where each document ends, as uint64: tokens from the first training token on |

Every document is closed by the header's end token. A file appears under its name once it is whole.
"""

import dataclasses
import hashlib
import json
import os
import re
from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from farloop.node.errors import CorpusError
from farloop.runtime.system import hold, remove_abandoned

MAGIC = b"farloop tokens 1\n"
HEADER_BYTES = 4096
DTYPES = ("uint8", "uint16", "uint32")  # little-endian in the file
BYTES = "bytes"  # in place of a tokenizer's digest: tokens are bytes of UTF-8, and byte 0 closes a document

Tokens = NDArray[np.unsignedinteger[Any]]

_PIECE = 1 << 24  # bytes read at a time for a digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a token file says of itself."""

    dtype: str
    tokens: int  # training and validation
    validation_tokens: int  # the last of them
    documents: int
    vocabulary: int  # every token is below
    end_token: int
    tokenizer: str  # 16 hex digits over tokenizer.json, or BYTES
    digest: str = ""  # 16 hex digits over tokens, ends of documents, and the header without this

    @property
    def ends_at(self) -> int:
        """Where in the file the ends of the documents begin."""
        return HEADER_BYTES + -(-self.tokens * np.dtype(self.dtype).itemsize // 8) * 8

    @property
    def file_bytes(self) -> int:
        return self.ends_at + 8 * self.documents


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFile:
    """A token file, mapped into memory: nothing is read before it is used."""

    header: Header
    tokens: Tokens  # [tokens]
    ends: NDArray[np.uint64]  # [documents]: one past the last token of each, its end token

    @property
    def train(self) -> Tokens:
        return self.tokens[: self.header.tokens - self.header.validation_tokens]

    @property
    def validation(self) -> Tokens:
        return self.tokens[self.header.tokens - self.header.validation_tokens :]


def is_token_file(path: Path) -> bool:
    """Whether it begins as one, of whatever version. Raises CorpusError: it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)).startswith(MAGIC[:-2])
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from error


def open_tokens(path: Path) -> TokenFile:
    """Raises CorpusError, one line: it is no token file, of a newer release, or not whole."""
    try:
        with path.open("rb") as file:
            header = _header_of(file.read(HEADER_BYTES), path)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from error
    if size != header.file_bytes:
        raise CorpusError(f"{path} has {size} bytes, not the {header.file_bytes} of its header: copy or build it again")
    stored = np.dtype(header.dtype).newbyteorder("<")
    return TokenFile(
        header=header,
        tokens=np.memmap(path, dtype=stored, mode="r", offset=HEADER_BYTES, shape=(header.tokens,)),
        ends=np.memmap(path, dtype="<u8", mode="r", offset=header.ends_at, shape=(header.documents,)),
    )


def verify(path: Path) -> Header:
    """Read the whole file and compare its digest. Raises CorpusError as `open_tokens`, or: a byte has changed."""
    header = open_tokens(path).header
    content = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        while piece := file.read(_PIECE):
            content.update(piece)
    if _closed(content, header) != header.digest:
        raise CorpusError(f"{path} does not have the digest of its header, {header.digest}: copy or build it again")
    return header


def dtype_for(vocabulary: int) -> str:
    """The smallest that holds every token."""
    return next(name for name in DTYPES if vocabulary <= 1 << 8 * np.dtype(name).itemsize)


class TokenWriter:
    """Writes a token file piece by piece. Use as a context manager: without `finish`, nothing is left."""

    def __init__(self, path: Path, *, vocabulary: int, end_token: int, tokenizer: str) -> None:
        """Raises OSError: the folder cannot be written."""
        self._path, self._part = path, path.with_name(f".{path.name}.{os.getpid()}.part")
        self._held_part = self._part.with_suffix(".held")
        self._stored = np.dtype(dtype_for(vocabulary)).newbyteorder("<")
        self._end = np.array([end_token], dtype=self._stored)
        self._facts = {"vocabulary": vocabulary, "end_token": end_token, "tokenizer": tokenizer}
        self._open_document = 0  # tokens of the document that is not closed yet
        self.tokens = 0  # written so far
        self._lengths = array("Q"), array("Q")  # of the documents of training, and of those held out
        remove_abandoned(path.parent, rf"\.{re.escape(path.name)}\.\d+\.(part|held)")
        self._files: list[IO[bytes]] = []
        for part in (self._part, self._held_part):
            self._files.append(part.open("w+b"))
            hold(self._files[-1].fileno())
        self._files[0].write(bytes(HEADER_BYTES))

    def add(self, tokens: Sequence[int] | Tokens, *, closes: bool, held_out: bool) -> None:
        """The next piece of a document. `closes`: it is the last of that document; `held_out`: it is for validation,
        the same for all pieces of a document."""
        file = self._files[held_out]
        file.write(np.asarray(tokens, dtype=self._stored).tobytes())
        self._open_document += len(tokens)
        self.tokens += len(tokens) + closes
        if closes:
            file.write(self._end.tobytes())
            self._lengths[held_out].append(self._open_document + 1)
            self._open_document = 0

    def finish(self, validation_share: float) -> Header:
        """Put the file into its place. Raises OSError; CorpusError: it holds no document.

        The documents that were held out are the validation text, unless they have less than half of that share of all
        tokens, or more than twice as many: where documents are few or large, the cut goes through one.
        """
        assert self._open_document == 0, "a document was not closed"
        main, held = self._files
        lengths = np.concatenate([np.frombuffer(one, dtype=np.uint64) for one in self._lengths])
        if not len(lengths):
            raise CorpusError("there is no text in the sources")
        total, held_out = int(lengths.sum()), sum(self._lengths[1])
        aim = int(validation_share * total)
        held.seek(0)
        while piece := held.read(_PIECE):
            main.write(piece)
        header = Header(
            dtype=self._stored.name,
            tokens=total,
            validation_tokens=held_out if aim / 2 <= held_out <= 2 * aim else aim,
            documents=len(lengths),
            **self._facts,  # type: ignore[arg-type]
        )
        main.write(bytes(header.ends_at - main.tell()))
        main.write(lengths.cumsum(dtype=np.uint64).astype("<u8").tobytes())
        main.seek(HEADER_BYTES)
        content = hashlib.sha256()
        while piece := main.read(_PIECE):
            content.update(piece)
        header = dataclasses.replace(header, digest=_closed(content, header))
        main.seek(0)
        main.write(MAGIC + json.dumps(dataclasses.asdict(header), allow_nan=False).encode() + b"\n")
        main.flush()
        os.fsync(main.fileno())
        self._part.replace(self._path)
        return header

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file, part in zip(self._files, (self._part, self._held_part), strict=True):
            file.close()
            part.unlink(missing_ok=True)


def _header_of(start: bytes, path: Path) -> Header:
    if not start.startswith(MAGIC):
        newer = start.startswith(MAGIC[:-2])
        what = "is of another release of farloop" if newer else "is no token file"
        raise CorpusError(f"{path} {what}: make it with farloop data build")
    try:
        said = json.loads(start[len(MAGIC) :].partition(b"\n")[0])
        header = Header(**said)
        counts = (header.tokens, header.validation_tokens, header.documents, header.vocabulary, header.end_token)
        sound = all(type(count) is int and count >= 0 for count in counts) and header.dtype in DTYPES
        sound = sound and isinstance(header.tokenizer, str) and isinstance(header.digest, str)
        sound = sound and header.validation_tokens <= header.tokens and header.documents > 0
    except (ValueError, TypeError):
        sound = False
    if not sound:
        raise CorpusError(f"{path} has a broken header: copy or build it again")
    return header


def _closed(content: "hashlib._Hash", header: Header) -> str:
    """The digest, from a hash over all that follows the header."""
    facts = dataclasses.asdict(header)
    del facts["digest"]
    content.update(json.dumps(facts, sort_keys=True, allow_nan=False).encode())
    return content.hexdigest()[:16]


SEPARATOR = b"\0"  # closes each document; a file that contains it counts as binary


VALIDATION_SHARE = 0.05


def files_under(path: Path) -> list[Path]:
    """`path` itself, or the files below it in the order of a hash of their relative paths.

    Hidden ones and Python's caches are left out.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CorpusError(f"no file or folder {path}")
    return by_hashed_path(path, (file for file in walk(path) if file.is_file()))


def by_hashed_path(root: Path, files: Iterable[Path]) -> list[Path]:
    return sorted(files, key=lambda file: hashlib.sha256(os.fsencode(file.relative_to(root).as_posix())).digest())


def walk(root: Path, without: Container[str] = ()) -> Iterator[Path]:
    """Paths of all entries below `root` that are not folders or hidden; links to folders are not followed. `without`:
    names of folders that are left out."""

    def refuse(error: OSError) -> None:
        raise CorpusError(f"cannot read {error.filename}: {error.strerror}") from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [n for n in subfolders if not n.startswith(".") and n != "__pycache__" and n not in without]
        yield from (Path(folder, name) for name in names if not name.startswith("."))
