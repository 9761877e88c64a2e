"""Covers `node/data/token_file.py`: the format, and that a file is whole or refused."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.node.data.token_file import HEADER_BYTES, TokenWriter, dtype_for, is_token_file, open_tokens, verify
from farloop.node.errors import CorpusError
from farloop.runtime.system import remove_abandoned

DOCUMENTS = [[5, 6, 7], [8], [300, 301], [9, 9, 9, 9]]


def written(path: Path, documents: list[list[int]] = DOCUMENTS, *, vocabulary: int = 400, share: float = 0.25) -> Path:
    """The last document is held out."""
    with TokenWriter(path, vocabulary=vocabulary, end_token=1, tokenizer="0123456789abcdef") as writer:
        for number, document in enumerate(documents):
            writer.add(document, closes=True, held_out=number == len(documents) - 1)
        writer.finish(share)
    return path


def test_the_bytes_of_a_file_stay_what_they_are(tmp_path: Path) -> None:
    """Runs name the digest, and files outlive releases."""
    data = written(tmp_path / "t.bin").read_bytes()
    head = (
        b'farloop tokens 1\n{"dtype": "uint16", "tokens": 14, "validation_tokens": 5, "documents": 4, '
        b'"vocabulary": 400, "end_token": 1, "tokenizer": "0123456789abcdef", "digest": "8a4e8cea6011b965"}\n'
    )
    assert data[:HEADER_BYTES] == head.ljust(HEADER_BYTES, b"\0")
    tokens = [5, 6, 7, 1, 8, 1, 300, 301, 1, 9, 9, 9, 9, 1]
    assert (
        data[HEADER_BYTES:]
        == np.array(tokens, "<u2").tobytes().ljust(32, b"\0") + np.array([4, 6, 9, 14], "<u8").tobytes()
    )


@given(
    documents=st.lists(st.lists(st.integers(2, 70_000), max_size=9), min_size=1, max_size=12),
    vocabulary=st.sampled_from([70_001, 2**32]),
    cuts=st.integers(1, 4),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocabulary: int, cuts: int
) -> None:
    """In whatever pieces it came."""
    path = tmp_path_factory.mktemp("tokens") / "t.bin"
    with TokenWriter(path, vocabulary=vocabulary, end_token=1, tokenizer="bytes") as writer:
        for document in documents:
            for start in range(0, len(document), cuts):
                writer.add(document[start : start + cuts], closes=False, held_out=False)
            writer.add([], closes=True, held_out=False)
        header = writer.finish(0.25)
    file = open_tokens(path)
    assert file.header == header == verify(path) and is_token_file(path)
    assert np.split(file.tokens, file.ends[:-1].astype(int))[0].tolist() == [*documents[0], 1]
    assert file.tokens.tolist() == [token for document in documents for token in [*document, 1]]
    assert len(file.validation) == int(0.25 * len(file.tokens)) and len(file.ends) == len(documents)
    assert [*file.train, *file.validation] == file.tokens.tolist()


def test_the_smallest_type_that_holds_the_vocabulary() -> None:
    sizes = [256, 257, 65_536, 65_537, 2**32]
    assert [dtype_for(size) for size in sizes] == ["uint8", "uint16", "uint16", "uint32", "uint32"]


@pytest.mark.parametrize(("last", "validation"), [(4, 5), (1, 7), (40, 17)])
def test_held_out_documents_are_the_validation_text_unless_they_are_far_from_its_share(
    tmp_path: Path, last: int, validation: int
) -> None:
    file = open_tokens(written(tmp_path / "t.bin", [[5] * 13, [6] * 14, [7] * last]))
    assert len(file.validation) == validation and file.header.tokens == last + 30


def test_nothing_is_left_of_a_build_that_fails_and_an_old_file_stays(tmp_path: Path) -> None:
    path = written(tmp_path / "t.bin")
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError), TokenWriter(path, vocabulary=400, end_token=1, tokenizer="bytes") as writer:
        writer.add([2, 3], closes=True, held_out=False)
        assert len(list(tmp_path.iterdir())) == 3, "parts under other names"
        raise ZeroDivisionError
    assert [path] == list(tmp_path.iterdir()) and path.read_bytes() == before
    with (
        pytest.raises(CorpusError, match="no text in the sources"),
        TokenWriter(path, vocabulary=400, end_token=1, tokenizer="bytes") as writer,
    ):
        writer.finish(0.05)
    assert path.read_bytes() == before


def test_what_a_killed_build_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    left = [tmp_path / f".t.bin.77.{kind}" for kind in ("part", "held")]
    others = [tmp_path / name for name in (".u.bin.77.part", ".t.bin.old.part", "t.bin.77.part")]
    for path in (*left, *others):
        path.write_bytes(b"left")
    with TokenWriter(tmp_path / "t.bin", vocabulary=400, end_token=1, tokenizer="bytes") as writer:
        assert not any(path.exists() for path in left) and all(path.exists() for path in others)
        parts = {path for path in tmp_path.iterdir() if path not in others}
        remove_abandoned(tmp_path, r".*\.(part|held)")
        assert set(tmp_path.iterdir()) == parts, "of all of them, those that are being written stay"
        writer.add([2], closes=True, held_out=False)
        writer.finish(0.05)


def test_a_file_that_is_not_whole_is_refused_in_one_line(tmp_path: Path) -> None:
    path = written(tmp_path / "t.bin")
    whole = path.read_bytes()

    def refused(data: bytes) -> str:
        path.write_bytes(data)
        with pytest.raises(CorpusError) as error:
            open_tokens(path)
        return str(error.value)

    assert "has 4100 bytes, not the 4160 of its header" in refused(whole[:4100])
    assert "is no token file: make it with farloop data build" in refused(bytes(HEADER_BYTES) + whole[HEADER_BYTES:])
    assert "is of another release" in refused(whole.replace(b"tokens 1", b"tokens 2", 1))
    assert "has a broken header" in refused(whole.replace(b'"uint16"', b'"int16"', 1))
    assert "has a broken header" in refused(whole.replace(b'"tokens": 14', b'"tokens": -4', 1))
    path.write_bytes(whole[:-1] + b"\1")
    assert open_tokens(path).header.tokens == 14, "its bytes are not read"
    with pytest.raises(CorpusError, match="does not have the digest of its header"):
        verify(path)
    with pytest.raises(CorpusError, match=r"cannot read .*: No such file"):
        open_tokens(tmp_path / "nowhere")
