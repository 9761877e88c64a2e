"""Covers `node/data/builder.py`: sources, tokenizers, and token files that depend on neither batches nor threads."""

import ast
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples

from farloop.node.data import builder
from farloop.node.data.builder import ByteTokenizer, FileTokenizer, Progress, Tokenizer, build, train_tokenizer
from farloop.node.data.corpus import load_corpus
from farloop.node.data.token_file import TokenFile, open_tokens
from farloop.node.errors import CorpusError

TEXTS = ["eins", "zwei ü\n\n𝄞", "drei <|endoftext|> drei", "vier " * 40, "fünf"]


@pytest.fixture(autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()


def jsonl(path: Path, texts: Sequence[str] = TEXTS, field: str = "text") -> str:
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return str(path)


def parquet(path: Path, texts: Sequence[str] = TEXTS) -> str:
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(len(texts))), "text": texts}), path)
    return str(path)


def built(sources: Sequence[str], out: Path, tokenizer: Tokenizer | None = None, **options: Any) -> TokenFile:
    options = {"validation_share": 0.0, **options}
    build(sources, out, tokenizer or ByteTokenizer(), **options)
    return open_tokens(out)


def documents(file: TokenFile) -> list[list[int]]:
    """Without their end tokens."""
    parts = np.split(file.tokens, file.ends.astype(int))[:-1]
    assert all(part[-1] == file.header.end_token for part in parts)
    return [part[:-1].tolist() for part in parts]


def texts_of(file: TokenFile) -> list[str]:
    return [bytes(document).decode() for document in documents(file)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([jsonl(folder / "x.jsonl")], folder / "tokenizer.json", 280)
    return folder / "tokenizer.json"


def refused(sources: Sequence[str], folder: Path, **options: Any) -> str:
    with pytest.raises(CorpusError) as error:
        built(sources, folder / "refused.bin", **options)
    assert "\n" not in str(error.value) and not (folder / "refused.bin").exists()
    return str(error.value)


# --- sources


def test_every_kind_of_source_gives_the_same_documents(tmp_path: Path) -> None:
    saved, plain = tmp_path / "saved", tmp_path / "plain"
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(saved)
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(tmp_path / "splits")
    plain.mkdir()
    jsonl(plain / "train.jsonl")
    sources = [jsonl(tmp_path / "x.jsonl"), parquet(tmp_path / "x.parquet")]
    sources += [f"hf:{saved}", f"hf:{tmp_path / 'splits'}", f"hf:{plain}"]
    for number, source in enumerate(sources):
        assert texts_of(built([source], tmp_path / f"{number}.bin")) == TEXTS, source
    assert texts_of(built(sources[:2], tmp_path / "two.bin")) == TEXTS + TEXTS


def test_a_folder_is_every_file_in_it_and_a_text_file_one_document(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("first")
    (folder / "sub" / "b.md").write_text("second")
    (folder / "empty").write_text("")
    jsonl(folder / "c.jsonl", ["third", ""])
    parquet(folder / "d.parquet", ["fourth"])
    (folder / ".hidden").write_text("not this")
    assert sorted(texts_of(built([str(folder)], tmp_path / "t.bin"))) == ["first", "fourth", "second", "third"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "x"', r"not JSON: Expecting ',' delimiter at character 13"),
        (b'{"body": "x", "id": 3}', "there is no field 'text'; there are 'body', 'id'"),
        (b'{"text": 5}', "field 'text': expected text, got a int"),
        (b'["text"]', "expected a JSON object, got a list"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "a\\u0000b"}', "holds a zero byte"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line_or_left_out_if_asked(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}\n')
    said = refused([str(path)], tmp_path)
    assert said.startswith(f"{path}, line 3: ") and words in said and said.endswith("(--skip-bad leaves such out)")
    header, progress = build([str(path)], tmp_path / "t.bin", ByteTokenizer(), skip_bad=True)
    assert (header.documents, progress.documents, progress.skipped) == (2, 2, 1)


def test_bad_files_are_named_with_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "PIECE_CHARACTERS", 7)
    latin, binary, table = tmp_path / "latin.txt", tmp_path / "binary", tmp_path / "x.parquet"
    latin.write_bytes("one\ntwo\nthree\n größer".encode("latin-1"))
    binary.write_bytes(b"one\ntwo\nthree\n4\0")
    table.write_bytes(b"PAR1 and no more")
    assert f"{latin}, line 4: not UTF-8" in refused([str(latin)], tmp_path)
    assert f"{binary}, line 4: a zero byte" in refused([str(binary)], tmp_path)
    assert f"{table}: not a Parquet file that can be read" in refused([str(table)], tmp_path)
    good = parquet(tmp_path / "good.parquet")
    assert f"{good}: there is no column 'body'; there are 'id', 'text'" in refused([good], tmp_path, field="body")
    assert "good.parquet, row 1: field 'id': expected text, got a int" in refused([good], tmp_path, field="id")
    jsonl(tmp_path / "fine.jsonl")
    file = built([str(tmp_path)], tmp_path.parent / "rest.bin", skip_bad=True)
    assert len(documents(file)) == 2 * len(TEXTS)


def test_datasets_that_cannot_be_had_are_refused_in_one_line(tmp_path: Path) -> None:
    assert "no file or folder" in refused([str(tmp_path / "nowhere")], tmp_path)
    assert "no text in the sources" in refused([jsonl(tmp_path / "empty.jsonl", [])], tmp_path)
    datasets.Dataset.from_dict({"body": TEXTS}).save_to_disk(tmp_path / "saved")
    assert "there is no column 'text'; there are 'body'" in refused([f"hf:{tmp_path / 'saved'}"], tmp_path)
    assert "hf:nobody/nothing@main: cannot be loaded (split train): " in refused(["hf:nobody/nothing@main"], tmp_path)


def test_what_is_not_installed_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = parquet(tmp_path / "x.parquet")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for source, package in ((table, "pyarrow"), ("hf:name", "datasets")):
        assert f"needs the package {package}: install farloop with the extra [data]" in refused([source], tmp_path)
    for make in (lambda: FileTokenizer(tmp_path), lambda: train_tokenizer([table], tmp_path / "t.json", 300)):
        with pytest.raises(CorpusError, match=r"a tokenizer needs the package tokenizers: install farloop with"):
            make()
    tree = ast.parse(Path(builder.__file__).read_text())
    first = {name.name.partition(".")[0] for node in tree.body if isinstance(node, ast.Import) for name in node.names}
    first |= {str(node.module).partition(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert not first & {"datasets", "tokenizers", "pyarrow"}, "not imported before they are used"


# --- tokenizers


def test_a_trained_tokenizer_gives_every_text_back_and_makes_it_shorter(tmp_path: Path, tokenizer: Path) -> None:
    from tokenizers import Tokenizer as Inner

    used, inner = FileTokenizer(tokenizer), Inner.from_file(str(tokenizer))
    file = built([jsonl(tmp_path / "x.jsonl")], tmp_path / "t.bin", used)
    assert [inner.decode(document, skip_special_tokens=False) for document in documents(file)] == TEXTS
    assert file.header.tokens < 0.7 * sum(len(text.encode()) for text in TEXTS)
    assert (file.header.dtype, file.header.vocabulary, file.header.end_token) == ("uint16", 280, 0)
    assert file.header.tokenizer == used.digest
    assert all(0 not in document for document in documents(file)), "spelled in a text, it is no special token"
    again = tmp_path / "again.json"
    train_tokenizer([jsonl(tmp_path / "x.jsonl")], again, 280)
    assert again.read_bytes() == tokenizer.read_bytes(), "the same texts give the same tokenizer"


def test_a_folder_of_hugging_face_names_its_end_token(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    assert FileTokenizer(tmp_path).end_token == 0
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "e"}}')
    used = FileTokenizer(tmp_path)
    assert used.end_token != 0 and used.end_token == FileTokenizer(tmp_path, "e").end_token


def test_tokenizers_that_cannot_be_used_are_refused_in_one_line(tmp_path: Path, tokenizer: Path) -> None:
    def said(path: Path, end_token: str | None = None) -> str:
        with pytest.raises(CorpusError) as error:
            FileTokenizer(path, end_token)
        return str(error.value)

    assert "cannot read" in said(tmp_path) and "save_pretrained(FOLDER) writes one" in said(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert f"{tmp_path / 'tokenizer.json'} is no tokenizer.json: " in said(tmp_path)
    assert "has no token '</s>': name one with --end-token; it has <|endoftext|>" in said(tokenizer, "</s>")
    plain = tmp_path / "plain.json"
    plain.write_text(tokenizer.read_text().replace("<|endoftext|>", "<|start|>"))
    assert "has no known token that ends a document: name one with --end-token; it has <|start|>" in said(plain)
    with pytest.raises(CorpusError, match="a tokenizer of 256 tokens: the least is 257"):
        train_tokenizer([str(tmp_path)], tmp_path / "t.json", 256)


def test_a_bad_record_stops_the_training_of_a_tokenizer_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "one"}\n{"text"\n')
    with pytest.raises(CorpusError, match=r"x\.jsonl, line 2: not JSON"):
        train_tokenizer([str(tmp_path / "x.jsonl")], tmp_path / "t.json", 300)
    assert not list(tmp_path.glob("*t.json*"))


def test_no_source_fills_the_text_a_tokenizer_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read in turn, and no further than needed."""
    monkeypatch.setattr(builder, "TRAINING_CHARACTERS", 300)
    sources = [jsonl(tmp_path / f"{word}.jsonl", [f"{word} "] * 100) for word in ("kittiwake", "guillemot")]
    seen: list[int] = []
    train_tokenizer(sources, tmp_path / "t.json", 300, on_progress=lambda progress: seen.append(progress.characters))
    assert 300 <= seen[-1] < 320
    vocabulary = (tmp_path / "t.json").read_text()
    assert '"kittiwake"' in vocabulary and '"guillemot"' in vocabulary


# --- what a file depends on


@settings(max_examples=examples(10), deadline=None)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=60), min_size=1),
    batch=st.integers(1, 200),
    piece=st.integers(4, 40),
)
def test_tokens_depend_on_the_text_alone(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, texts: list[str], batch: int, piece: int
) -> None:
    """Not on how much of it is encoded together, nor on what kind of file it stands in."""
    folder = tmp_path_factory.mktemp("chunks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "PIECE_CHARACTERS", piece)
        used, source = FileTokenizer(tokenizer), jsonl(folder / "x.jsonl", texts)
        whole = built([source], folder / "whole.bin", used, validation_share=0.2)
        parts = built([source], folder / "parts.bin", used, validation_share=0.2, batch_characters=batch)
        assert whole.header == parts.header and np.array_equal(whole.tokens, parts.tokens)
        (folder / "x.txt").write_bytes(texts[0].encode())
        as_text = built([str(folder / "x.txt")], folder / "text.bin", used)
        as_record = built([jsonl(folder / "one.jsonl", texts[:1])], folder / "one.bin", used)
        assert as_text.header == as_record.header


def test_validation_is_about_its_share_and_equal_documents_are_on_one_side(tmp_path: Path) -> None:
    texts = [f"document {number} " * 5 for number in range(400)] * 2
    file = built([jsonl(tmp_path / "x.jsonl", texts)], tmp_path / "t.bin", validation_share=0.1)
    assert 0.06 < len(file.validation) / len(file.tokens) < 0.14
    sides = [set(part.tobytes().split(b"\0")[:-1]) for part in (file.train, file.validation)]
    assert not sides[0] & sides[1] and len(sides[0]) + len(sides[1]) == 400
    single = built([jsonl(tmp_path / "one.jsonl", ["x" * 99])], tmp_path / "one.bin", validation_share=0.1)
    assert len(single.validation) == 10, "of one document, a part"


def test_progress_counts_what_was_read(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    def note(progress: Progress) -> None:
        seen.append((progress.doing, progress.documents, progress.tokens))

    built([jsonl(tmp_path / "x.jsonl")], tmp_path / "t.bin", on_progress=note, batch_characters=1)
    assert [documents for _, documents, _ in seen] == [1, 2, 3, 4, 5, 5]
    assert seen[-1] == ("writing", 5, open_tokens(tmp_path / "t.bin").header.tokens)


def test_a_built_file_is_a_corpus(tmp_path: Path, tokenizer: Path) -> None:
    file = built([jsonl(tmp_path / "x.jsonl")], tmp_path / "t.bin", FileTokenizer(tokenizer), validation_share=0.25)
    corpus = load_corpus(tmp_path / "t.bin", max_bytes=1)
    assert np.array_equal(corpus.train, file.train) and np.array_equal(corpus.validation, file.validation)
    assert (corpus.digest, corpus.vocabulary, corpus.tokenizer) == (file.header.digest, 280, file.header.tokenizer)
    assert isinstance(corpus.train, np.memmap)
