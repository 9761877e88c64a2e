"""Covers `node/data.py`."""

import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from plain_runs import plain_terms

from farloop.algo.sample_order import sample_index
from farloop.algo.spec import Identity, Layout, RunSpec
from farloop.algo.terms import LearningRate, Rewarm
from farloop.node.data import Corpus, CorpusError, EvaluationSet, Mixture, Samples, _split, load_corpus, num_samples
from farloop.node.model import PRESETS, build


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def corpus_of(train: NDArray[np.uint8], validation: NDArray[np.uint8] | None = None) -> Corpus:
    return Corpus(
        train=train,
        validation=train if validation is None else validation,
        digest="0" * 16,
        files=1,
        duplicates=0,
        skipped=0,
    )


def counting(length: int) -> NDArray[np.uint8]:
    """Bytes that say where they stand, modulo 251 (prime, so no sequence length divides it)."""
    return (np.arange(length) % 251).astype(np.uint8)


@pytest.mark.parametrize(("length", "expected"), [(9, 1), (16, 1), (17, 2), (8 * 100, 99), (8 * 100 + 1, 100)])
def test_a_sample_needs_its_last_target_too(length: int, expected: int) -> None:
    assert num_samples(corpus_of(counting(length)), 8) == expected


@pytest.mark.parametrize("length", [0, 1, 8])
def test_too_little_training_text_is_an_error_with_the_numbers(length: int) -> None:
    with pytest.raises(
        CorpusError, match=f"the training text has {length} bytes, too little for one sequence of 8 tokens"
    ):
        Samples(corpus_of(counting(length)), 8, seed=0)


def test_a_data_pass_predicts_every_token_but_the_first_once() -> None:
    tokens = counting(8 * 30 + 1)
    samples = Samples(corpus_of(tokens), 8, seed=4)
    assert samples.num_samples == 30
    batch = samples.batch(range(60, 90))
    assert batch.shape == (30, 9)
    assert batch.dtype == torch.int64
    order = np.argsort([sample_index(position, 30, 4) for position in range(60, 90)])
    assert batch[order, 1:].flatten().tolist() == tokens[1:].tolist()
    assert batch[order, 0].tolist() == tokens[:-1:8].tolist()


def test_a_position_always_gives_the_same_sample() -> None:
    samples = Samples(corpus_of(counting(5000)), 16, seed=1)
    together = samples.batch([7, 100_000, 8])
    assert torch.equal(together[1:2], samples.batch([100_000]))
    assert torch.equal(together, Samples(corpus_of(counting(5000)), 16, seed=1).batch([7, 100_000, 8]))


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    corpus = corpus_of(counting(16 * 100 + 1))
    samples = Samples(corpus, 16, seed=1)
    assert not torch.equal(samples.batch(range(100)), samples.batch(range(100, 200)))
    assert not torch.equal(samples.batch(range(100)), Samples(corpus, 16, seed=2).batch(range(100)))


def test_a_memory_map_serves_as_text(tmp_path: Path) -> None:
    (tmp_path / "train").write_bytes(counting(400).tobytes())
    mapped = np.memmap(tmp_path / "train", dtype=np.uint8, mode="r")
    from_map = Samples(corpus_of(mapped), 16, seed=0).batch([0, 1, 2])
    assert torch.equal(from_map, Samples(corpus_of(counting(400)), 16, seed=0).batch([0, 1, 2]))


def test_a_batch_is_a_copy_of_the_text() -> None:
    train = counting(400)
    train.flags.writeable = False
    samples = Samples(corpus_of(train), 16, seed=0)
    before = samples.batch([0])
    samples.batch([0]).zero_()
    assert torch.equal(samples.batch([0]), before)


def mixed(*replays: float, seed: int = 1) -> RunSpec:
    """A run of sequences of 16 tokens, with new data at positions 100, 200, …"""
    rewarms = tuple(Rewarm(start=100 * k, peak=1e-3, replay=replay) for k, replay in enumerate(replays, start=1))
    terms = plain_terms(
        method="diloco",
        steps=900,
        h=30,
        lr=LearningRate(rewarms=rewarms),
        weight_decay=0.1,
        batch_sequences=4,
        sequence_tokens=16,
    )
    identity = Identity(
        name="run", model="own", layout=Layout(slots=1, fragments=()), anchor_digests=(), data="0", num_samples=1,
        evaluation_set="none", seed=seed,
    )  # fmt: skip
    return RunSpec(identity=identity, terms=terms)


def filled(byte: int, sequences: int) -> Corpus:
    """A text of one byte."""
    return corpus_of(np.full(16 * sequences + 1, byte, dtype=np.uint8))


@given(positions=st.lists(st.integers(0, 2**50), max_size=5), at=st.floats(0, 900), seed=st.integers(0, 2**63 - 1))
def test_a_run_without_new_data_has_the_samples_of_its_corpus(positions: list[int], at: float, seed: int) -> None:
    corpus = corpus_of(counting(5000))
    batch = Mixture(mixed(seed=seed), [corpus]).batch(positions, at)
    assert batch.shape == (len(positions), 17) and batch.dtype == torch.int64
    assert not positions or torch.equal(batch, Samples(corpus, 16, seed).batch(positions))


def test_new_data_comes_at_its_position_and_a_share_of_the_old_stays() -> None:
    corpora = [filled(0, 5), filled(1, 7), filled(2, 11)]
    mixture = Mixture(mixed(0.25, 0.5), corpora)

    def shares(at: float) -> list[float]:
        drawn = mixture.batch(range(4000), at)[:, 0]
        return [(drawn == byte).float().mean().item() for byte in range(3)]

    assert shares(99.5) == [1.0, 0.0, 0.0]
    assert shares(100.0) == shares(199.0) == pytest.approx([0.25, 0.75, 0.0], abs=0.035)
    assert shares(200.0) == pytest.approx([0.125, 0.375, 0.5], abs=0.04)


@given(seed=st.integers(0, 2**63 - 1), data_pass=st.integers(0, 1000), at=st.sampled_from([0.0, 100.0]))
def test_in_a_pass_over_a_corpus_none_of_its_samples_comes_twice(seed: int, data_pass: int, at: float) -> None:
    """Every sample of either begins with a byte of its own."""
    old, new = (np.repeat(np.arange(start, start + 121), 16).astype(np.uint8)[:-15] for start in (0, 121))
    batch = Mixture(mixed(0.4, seed=seed), [corpus_of(old), corpus_of(new)]).batch(
        range(data_pass * 120, (data_pass + 1) * 120), at
    )
    begins = batch[:, 0].tolist()
    assert len(set(begins)) == len(begins) == 120


def test_rows_stand_in_the_order_of_their_positions_whatever_they_are_drawn_from() -> None:
    mixture = Mixture(mixed(0.5), [corpus_of(counting(5000)), corpus_of(counting(3000)[::-1].copy())])
    positions = [9, 3, 77, 3, 1000, 8]
    together = mixture.batch(positions, 150.0)
    for row, position in zip(together, positions, strict=True):
        assert torch.equal(row, mixture.batch([position], 150.0)[0])


def test_a_mixture_needs_the_text_of_every_rewarm_that_brings_one() -> None:
    with pytest.raises(AssertionError, match="one of each re-warm"):
        Mixture(mixed(0.5), [filled(0, 5)])
    with pytest.raises(CorpusError, match="too little"):
        Mixture(mixed(0.5), [filled(0, 5), corpus_of(counting(16))])


@given(length=st.integers(9, 3000), sequences=st.integers(1, 60))
def test_evaluation_sequences_are_disjoint_and_spread_over_the_text(length: int, sequences: int) -> None:
    validation = np.random.default_rng(0).integers(0, 256, length, dtype=np.uint8)
    evaluation = EvaluationSet(corpus_of(counting(9), validation), sequences=sequences, sequence_tokens=8)
    fitting = (length - 1) // 8
    assert len(evaluation) == min(sequences, fitting)
    places = [k * fitting // len(evaluation) for k in range(len(evaluation))]
    gaps = np.diff([*places, fitting + places[0]])
    assert gaps.max() - gaps.min() <= 1
    for row, place in zip(evaluation.tokens_BS, places, strict=True):
        assert row.tolist() == validation[8 * place : 8 * place + 9].tolist()


def test_too_little_validation_text_is_an_error() -> None:
    with pytest.raises(CorpusError, match="the validation text has 8 bytes"):
        EvaluationSet(corpus_of(counting(100), counting(8)), sequences=4, sequence_tokens=8)


def test_the_digest_tells_evaluation_sets_apart() -> None:
    def digest(length: int = 900, sequences: int = 4, sequence_tokens: int = 8) -> str:
        corpus = corpus_of(counting(9), counting(length))
        return EvaluationSet(corpus, sequences=sequences, sequence_tokens=sequence_tokens).digest

    assert digest() == digest() == "023baf7c5f18d3a8"
    assert len({digest(), digest(length=1800), digest(sequences=5), digest(sequence_tokens=9)}) == 4


def test_the_loss_of_a_set_is_the_mean_over_its_sequences() -> None:
    model = build(PRESETS["nano"], 0)
    evaluation = EvaluationSet(corpus_of(counting(9), counting(2000)), sequences=5, sequence_tokens=16)
    one_by_one = [model.loss(row[None]).item() for row in evaluation.tokens_BS]
    whole = evaluation.loss(model, batch_size=8)
    assert whole == pytest.approx(sum(one_by_one) / 5, rel=1e-6)
    assert evaluation.loss(model, batch_size=2) == pytest.approx(whole, rel=1e-6), "the last batch is smaller"
    assert evaluation.loss(model, batch_size=8) == whole, "bit for bit"


@pytest.mark.parametrize("training", [True, False])
def test_scoring_leaves_the_model_as_it_was(training: bool) -> None:
    model = build(PRESETS["nano"], 0).train(training)
    modes: list[tuple[bool, bool]] = []
    model.norm.register_forward_pre_hook(lambda module, _: modes.append((module.training, torch.is_grad_enabled())))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    evaluation = EvaluationSet(corpus_of(counting(9), counting(200)), sequences=2, sequence_tokens=8)
    evaluation.loss(model, batch_size=2)
    assert modes == [(False, False)], "evaluation mode, and no graph is recorded"
    assert model.training is training
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


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
