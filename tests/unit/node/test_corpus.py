"""Covers `node/data.py`."""

import json
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.node.data import Corpus, CorpusError, _split, load_corpus


def text_of(corpus: Corpus) -> bytes:
    """Validation comes first: the two are cut from one text."""
    return corpus.validation.tobytes() + corpus.train.tobytes()


def documents_of(corpus: Corpus) -> list[bytes]:
    *documents, rest = text_of(corpus).split(b"\0")
    assert rest == b"", "the last document is closed too"
    return documents


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_a_folder_gives_each_of_its_texts_once(tmp_path: Path) -> None:
    write(tmp_path, a="first text", b="second text", c="first text", d="")
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    write(tmp_path / "sub" / "deep", e="third text")
    corpus = load_corpus(tmp_path)
    assert sorted(documents_of(corpus)) == [b"first text", b"second text", b"third text"]
    assert (corpus.files, corpus.duplicates, corpus.skipped) == (3, 1, 0)


def test_neither_names_nor_folders_show_in_the_corpus(tmp_path: Path) -> None:
    texts = [f"document {i} " * 20 for i in range(30)]
    for folder, order in (("one", texts), ("two", texts[::-1])):
        (tmp_path / folder / "sub").mkdir(parents=True)
        for i, text in enumerate(order):
            (tmp_path / folder / ("sub" if i % 2 else "") / f"{i}.txt").write_text(text)
    one, two = load_corpus(tmp_path / "one"), load_corpus(tmp_path / "two")
    assert one.digest == two.digest
    assert np.array_equal(one.train, two.train)
    assert np.array_equal(one.validation, two.validation)


def test_the_digest_changes_with_any_byte(tmp_path: Path) -> None:
    digests = set()
    for text in ("some text", "some texT", "some text "):
        digests.add(load_corpus(write(tmp_path, a=text)).digest)
    assert len(digests) == 3
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in digests)


def test_the_digest_never_changes(tmp_path: Path) -> None:
    """It is part of a run's identity: nodes of two releases have to agree on it."""
    assert load_corpus(write(tmp_path, a="alpha " * 50, b="beta " * 50)).digest == "72716399162bbcea"


def test_validation_is_about_a_twentieth_and_made_of_whole_files(tmp_path: Path) -> None:
    texts = {f"{i}.txt": f"document {i}: " + "x" * 500 for i in range(200)}
    corpus = load_corpus(write(tmp_path, **texts))
    assert 0.04 < len(corpus.validation) / len(text_of(corpus)) < 0.06
    for part in (corpus.validation, corpus.train):
        *documents, rest = part.tobytes().split(b"\0")
        assert rest == b""
        assert {document.decode() for document in documents} < set(texts.values())


def test_a_single_file_gives_both_texts(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(1000))
    corpus = load_corpus(write(tmp_path, a=text) / "a")
    assert documents_of(corpus) == [text.encode()]
    assert len(corpus.validation) == int(0.05 * (len(text) + 1))
    assert corpus.files == 1


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=40))
def test_the_split_loses_nothing_and_keeps_its_share(documents: list[bytes]) -> None:
    validation, train = _split(documents)
    assert validation + train == b"".join(document + b"\0" for document in documents)
    aim = int(0.05 * len(validation + train))
    assert aim / 2 <= len(validation) <= 2 * aim


def test_binary_and_foreign_encodings_are_skipped_and_counted(tmp_path: Path) -> None:
    write(tmp_path, good="größer als nötig")
    (tmp_path / "latin.txt").write_bytes("größer".encode("latin-1"))
    (tmp_path / "image").write_bytes(b"plain, but\0binary")
    corpus = load_corpus(tmp_path)
    assert documents_of(corpus) == ["größer als nötig".encode()]
    assert (corpus.files, corpus.skipped) == (1, 2)


def test_a_binary_file_beyond_the_cap_is_skipped_too(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\x80" * 100)
    (tmp_path / "b").write_text("text")
    corpus = load_corpus(tmp_path, max_bytes=20)
    assert documents_of(corpus) == [b"text"]
    assert corpus.skipped == 1


def test_hidden_entries_and_linked_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data" / ".git").mkdir(parents=True)
    write(tmp_path / "data" / ".git", config="hidden in a folder")
    write(tmp_path / "data", **{"a.txt": "seen", ".hidden": "hidden"})
    (tmp_path / "data" / "round").symlink_to(tmp_path / "data")
    assert documents_of(load_corpus(tmp_path / "data")) == [b"seen"]


def test_a_named_pipe_in_a_folder_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert documents_of(load_corpus(write(tmp_path, a="text"))) == [b"text"]


def test_each_record_of_a_jsonl_file_is_a_document(tmp_path: Path) -> None:
    records = [{"text": "eins"}, {"text": "zwei ü", "id": 2}, {"text": "eins"}, {"text": ""}]
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    corpus = load_corpus(file)
    assert sorted(documents_of(corpus)) == [b"eins", "zwei ü".encode()]
    assert (corpus.files, corpus.duplicates) == (1, 1)


@pytest.mark.parametrize(
    "line", ['{"body": "x"}', '["text"]', '"text"', '{"text": 5}', '{"text"', '{"text": "\\ud800"}']
)
def test_a_jsonl_record_without_text_is_an_error_that_says_where(tmp_path: Path, line: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(CorpusError, match=r"data\.jsonl, line 2: not a JSON object with a string field"):
        load_corpus(file)


@given(max_bytes=st.integers(2, 400))
def test_the_cap_is_kept_to_the_byte_and_no_character_is_halved(
    tmp_path_factory: pytest.TempPathFactory, max_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("cap")
    write(folder, a="ü" * 60, b="€" * 40)
    (folder / "c.jsonl").write_text("\n".join(json.dumps({"text": f"{i}𝄞" * 3}) for i in range(5)))
    try:
        corpus = load_corpus(folder, max_bytes=max_bytes)
    except CorpusError:
        assert max_bytes <= 4, "room for one character of four bytes"
        return
    size = len(text_of(corpus))
    everything = 60 * 2 + 40 * 3 + 5 * 15 + 7
    assert size <= max_bytes
    assert size == everything or size >= max_bytes - 4, "less than a character and its separator is left"
    for document in documents_of(corpus):
        document.decode()


def test_a_capped_folder_is_a_sample_that_depends_on_nothing_but_its_files(tmp_path: Path) -> None:
    texts = {f"{i:03}": f"{i:03} " + "y" * 96 for i in range(100)}
    for folder, names in (("one", list(texts)), ("two", list(texts)[::-1])):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, **{name: texts[name] for name in names})
    one = load_corpus(tmp_path / "one", max_bytes=2020)
    assert one.digest == load_corpus(tmp_path / "two", max_bytes=2020).digest
    chosen = {int(document[:3]) for document in documents_of(one)}
    assert len(chosen) == 20
    assert min(chosen) < 33 and max(chosen) > 66, "not the first files of the folder"


@pytest.mark.parametrize("content", [{}, {"empty": ""}])
def test_a_folder_without_text_is_an_error(tmp_path: Path, content: dict[str, str]) -> None:
    with pytest.raises(CorpusError, match="no text in"):
        load_corpus(write(tmp_path, **content))


def test_a_binary_file_is_an_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(CorpusError, match="1 not UTF-8, the rest empty"):
        load_corpus(tmp_path / "image")


def test_a_missing_path_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no file or folder") as raised:
        load_corpus(tmp_path / "nowhere")
    assert "\n" not in str(raised.value)


def test_an_unreadable_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, a="text")

    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CorpusError, match=r"cannot read .*a: Permission denied"):
        load_corpus(tmp_path)


def test_the_arrays_cannot_be_written(tmp_path: Path) -> None:
    corpus = load_corpus(write(tmp_path, a="text " * 20))
    for array in (corpus.train, corpus.validation):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_the_standard_library_is_a_corpus() -> None:
    corpus = load_corpus()
    assert corpus.digest == load_corpus().digest
    assert 5_000_000 < len(text_of(corpus)) <= 16_000_000
    assert 0.025 < len(corpus.validation) / len(text_of(corpus)) < 0.1
    documents = set(documents_of(corpus))
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "dataclasses.py").read_bytes() in documents
    build_specific = [*root.glob("_sysconfigdata*.py"), *root.glob("config-*/*.py")]
    assert not documents & {file.read_bytes() for file in build_specific}
    tests = root / "test" / "support" / "__init__.py"
    assert not tests.exists() or tests.read_bytes() not in documents
