"""Covers `node/data/corpus.py`, and of `node/trainer.py` what needs no coordinator (protocol J, Z)."""

import dataclasses
import json
import os
import sysconfig
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from node_story import identity
from numpy.typing import NDArray
from plain_runs import plain_terms
from stories import StoryText, all_stories, check_story, python

from farloop.algo.sample_order import sample_index
from farloop.algo.spec import Layout, RunSpec
from farloop.algo.terms import LearningRate, Rewarm
from farloop.node.data import corpus
from farloop.node.data.corpus import (
    Corpus,
    EvaluationSet,
    Mixture,
    Samples,
    _split,
    data_name,
    load_corpus,
    load_mixture,
    mixture_of,
    num_samples,
)
from farloop.node.data.token_file import TokenWriter
from farloop.node.errors import CorpusError
from farloop.node.model.built_in import build
from farloop.node.settings import PRESETS, Share
from farloop.node.trainer import check_data, evaluation_name, evaluation_sequences


def corpus_of(train: NDArray[np.uint8], validation: NDArray[np.uint8] | None = None, digest: str = "0" * 16) -> Corpus:
    validation = train if validation is None else validation
    return Corpus(train=train, validation=validation, digest=digest, files=1, duplicates=0, skipped=0)


def counting(length: int) -> NDArray[np.uint8]:
    """Bytes that say where they stand, modulo 251 (prime, so no sequence length divides it)."""
    return (np.arange(length) % 251).astype(np.uint8)


# --- samples


@pytest.mark.parametrize(("length", "expected"), [(9, 1), (16, 1), (17, 2), (8 * 100, 99), (8 * 100 + 1, 100)])
def test_a_sample_needs_its_last_target_too(length: int, expected: int) -> None:
    assert num_samples(corpus_of(counting(length)), 8) == expected


def test_a_data_pass_predicts_every_token_but_the_first_once() -> None:
    tokens = counting(8 * 30 + 1)
    samples = Samples(corpus_of(tokens), 8, seed=4)
    assert samples.num_samples == 30
    batch = samples.batch(range(60, 90))
    assert (batch.shape, batch.dtype) == ((30, 9), torch.int64)
    order = np.argsort([sample_index(position, 30, 4) for position in range(60, 90)])
    assert batch[order, 1:].flatten().tolist() == tokens[1:].tolist()
    assert batch[order, 0].tolist() == tokens[:-1:8].tolist()


def test_a_position_always_gives_the_same_sample_and_passes_and_seeds_have_orders_of_their_own(tmp_path: Path) -> None:
    text = counting(16 * 100 + 1)
    text.flags.writeable = False
    (tmp_path / "train").write_bytes(text.tobytes())
    mapped = np.memmap(tmp_path / "train", dtype=np.uint8, mode="r")
    samples = Samples(corpus_of(text), 16, seed=1)
    together = samples.batch([7, 100_000, 8])
    assert torch.equal(together, Samples(corpus_of(mapped), 16, seed=1).batch([7, 100_000, 8]))
    samples.batch([100_000]).zero_()
    assert torch.equal(together[1:2], samples.batch([100_000])), "a batch is a copy"
    for other in (samples.batch(range(100, 200)), Samples(corpus_of(text), 16, seed=2).batch(range(100))):
        assert not torch.equal(samples.batch(range(100)), other)


# --- new data


def mixed(*replays: float, seed: int = 1) -> RunSpec:
    """A run of sequences of 16 tokens, with new data at positions 100, 200, …"""
    rewarms = tuple(Rewarm(start=100 * k, peak=1e-3, replay=replay) for k, replay in enumerate(replays, start=1))
    terms = plain_terms(method="diloco", steps=900, h=30, lr=LearningRate(rewarms=rewarms), sequence_tokens=16)
    return RunSpec(identity=identity(Layout(slots=1, fragments=()), seed=seed), terms=terms)


def filled(byte: int, sequences: int) -> Corpus:
    """A text of one byte."""
    return corpus_of(np.full(16 * sequences + 1, byte, dtype=np.uint8))


@given(positions=st.lists(st.integers(0, 2**50), max_size=5), at=st.floats(0, 900), seed=st.integers(0, 2**63 - 1))
def test_a_run_without_new_data_has_the_samples_of_its_corpus(positions: list[int], at: float, seed: int) -> None:
    corpus = corpus_of(counting(5000))
    batch = Mixture(mixed(seed=seed), [corpus]).batch(positions, at)
    assert batch.shape == (len(positions), 17) and batch.dtype == torch.int64
    assert not positions or torch.equal(batch, Samples(corpus, 16, seed).batch(positions))


@given(seed=st.integers(0, 2**63 - 1), data_pass=st.integers(0, 1000), at=st.sampled_from([0.0, 100.0]))
def test_in_a_pass_over_a_corpus_none_of_its_samples_comes_twice(seed: int, data_pass: int, at: float) -> None:
    """Every sample of either begins with a byte of its own."""
    old, new = (np.repeat(np.arange(start, start + 121), 16).astype(np.uint8)[:-15] for start in (0, 121))
    mixture = Mixture(mixed(0.4, seed=seed), [corpus_of(old), corpus_of(new)])
    begins = mixture.batch(range(data_pass * 120, (data_pass + 1) * 120), at)[:, 0].tolist()
    assert len(set(begins)) == len(begins) == 120


def test_rows_stand_in_the_order_of_their_positions_whatever_they_are_drawn_from() -> None:
    mixture = Mixture(mixed(0.5), [corpus_of(counting(5000)), corpus_of(counting(3000)[::-1].copy())])
    positions = [9, 3, 77, 3, 1000, 8]
    for row, position in zip(mixture.batch(positions, 150.0), positions, strict=True):
        assert torch.equal(row, mixture.batch([position], 150.0)[0])


# --- parts of a mixture, token files


def test_each_part_gives_its_share_of_the_samples_and_every_sample_once_a_pass() -> None:
    parts = [corpus_of(np.full(16 * n + 1, byte, np.uint8), digest=f"{byte}" * 16) for byte, n in ((1, 30), (2, 5000))]
    mixture = mixture_of(parts, [3, 1])
    samples = Samples(mixture, 16, seed=3)
    assert num_samples(mixture, 16) == samples.num_samples == len(samples) == 5030
    drawn = samples.batch(range(10_000))[:, 0]
    assert [(drawn == byte).sum().item() for byte in (1, 2)] == [7500, 2500]
    indices = [samples.index(position) for position in range(20_000)]
    of_second = [index for index in indices if index >= 30]
    assert len(set(of_second)) == len(of_second) == 5000, "two blocks are a pass over the second"
    counts = np.bincount([index for index in indices if index < 30])
    assert counts.tolist() == [500] * 30
    with pytest.raises(IndexError, match="there is no sample 5030 of 5030"):
        samples[5030]


def test_each_part_has_its_share_of_the_evaluation_set() -> None:
    parts = [corpus_of(counting(9), np.full(900, byte, np.uint8)) for byte in (1, 2)]
    rows = EvaluationSet(mixture_of(parts, [3, 1]), sequences=8, sequence_tokens=8).tokens_BS
    assert rows[:, 0].tolist() == [1] * 6 + [2] * 2


def token_file(path: Path, tokens: list[int], *, validation: int = 40) -> Corpus:
    with TokenWriter(path, vocabulary=70_000, end_token=0, tokenizer="0123456789abcdef") as writer:
        writer.add(tokens, closes=True, held_out=False)
        writer.finish(validation / (len(tokens) + 1))
    return load_corpus(path)


def test_a_token_file_is_a_corpus_of_tokens(tmp_path: Path) -> None:
    tokens = [number * 7 % 70_000 for number in range(50_000)]
    corpus = token_file(tmp_path / "t.bin", tokens)
    samples = Samples(corpus, 16, seed=0)
    assert (samples.num_samples, corpus.size, corpus.vocabulary) == (49_960 // 16, 50_001, 70_000)
    for index in (0, 1, samples.num_samples - 1):
        assert samples[index].tolist() == tokens[16 * index : 16 * index + 17]
    row = samples.batch([5])[0]
    assert row.dtype == torch.int64 and row.tolist() == samples[samples.index(5)].tolist()
    evaluation = EvaluationSet(corpus, sequences=2, sequence_tokens=16)
    assert evaluation.tokens_BS.max() > 65_535 and len(evaluation) == 2
    with pytest.raises(CorpusError, match="the validation text has 40 tokens, too little for one sequence of 64"):
        EvaluationSet(corpus, sequences=2, sequence_tokens=64)


def test_a_process_that_is_sent_a_token_file_maps_it_itself(tmp_path: Path) -> None:
    samples = Samples(token_file(tmp_path / "t.bin", list(range(20_000))), 16, seed=0)
    sent = ForkingPickler.dumps(samples)
    assert len(sent) < 2000
    again = ForkingPickler.loads(sent)
    assert torch.equal(again[77], samples[77])
    text = Samples(corpus_of(counting(500)), 16, seed=0)
    assert torch.equal(ForkingPickler.loads(ForkingPickler.dumps(text))[3], text[3])


def test_shares_of_settings_are_loaded(tmp_path: Path) -> None:
    write(tmp_path, a="alpha " * 50, b="beta " * 50)
    shares = [Share(path=tmp_path / name, weight=weight) for name, weight in (("a", 2.0), ("b", 1.0))]
    assert load_mixture(shares).digest == mixture_of([load_corpus(share.path) for share in shares], [2, 1]).digest
    assert load_mixture(shares, max_bytes=50).size == 100


# --- evaluation


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


def test_the_digest_tells_evaluation_sets_apart() -> None:
    def digest(length: int = 900, sequences: int = 4, sequence_tokens: int = 8) -> str:
        corpus = corpus_of(counting(9), counting(length))
        return EvaluationSet(corpus, sequences=sequences, sequence_tokens=sequence_tokens).digest

    assert digest() == digest() == "023baf7c5f18d3a8"
    assert len({digest(), digest(length=1800), digest(sequences=5), digest(sequence_tokens=9)}) == 4


@pytest.mark.parametrize("training", [True, False])
def test_the_loss_of_a_set_is_the_mean_over_its_sequences_and_leaves_the_model_as_it_was(training: bool) -> None:
    model = build(PRESETS["nano"], 0).train(training)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    evaluation = EvaluationSet(corpus_of(counting(9), counting(2000)), sequences=5, sequence_tokens=16)
    one_by_one = [model.loss(row[None]).item() for row in evaluation.tokens_BS]
    modes: set[tuple[bool, bool]] = set()
    model.norm.register_forward_pre_hook(lambda module, _: modes.add((module.training, torch.is_grad_enabled())))
    whole = evaluation.loss(model, batch_size=8)
    assert whole == pytest.approx(sum(one_by_one) / 5, rel=1e-6)
    assert evaluation.loss(model, batch_size=2) == pytest.approx(whole, rel=1e-6), "the last batch is smaller"
    assert evaluation.loss(model, batch_size=8) == whole, "bit for bit"
    assert modes == {(False, False)}, "evaluation mode, and no graph is recorded"
    assert model.training is training
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


# --- the text


def text_of(corpus: Corpus) -> bytes:
    """Validation comes first: the two are cut from one text."""
    return corpus.validation.tobytes() + corpus.train.tobytes()


def documents_of(corpus: Corpus) -> list[bytes]:
    *documents, rest = text_of(corpus).split(b"\0")
    assert rest == b"", "the last document is closed too"
    return documents


def write(folder: Path, **files: str | bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def test_a_folder_gives_each_of_its_texts_once_and_leaves_the_rest_alone(tmp_path: Path) -> None:
    """Empty, binary and foreign ones are counted; hidden ones, linked folders and pipes are not even opened."""
    root = write(tmp_path / "data", a="first text", b="second text", c="first text", d="", good="größer als nötig")
    write(root, **{".hidden": "hidden", "latin.txt": "größer".encode("latin-1"), "image": b"plain, but\0binary"})
    write(root / "sub" / "deep", e="third text")
    write(root / ".git", config="hidden in a folder")
    write(root / "sub" / "__pycache__", **{"f.pyc": b"\0compiled"})
    (root / "round").symlink_to(root)
    os.mkfifo(root / "pipe")
    corpus = load_corpus(root)
    assert sorted(documents_of(corpus)) == sorted(
        [b"first text", b"second text", b"third text", "größer als nötig".encode()]
    )
    assert (corpus.files, corpus.duplicates, corpus.skipped) == (4, 1, 2)


def test_neither_names_nor_folders_show_in_the_corpus_and_any_byte_does(tmp_path: Path) -> None:
    """The digest is part of a run's identity: nodes of two releases have to agree on it."""
    assert load_corpus(write(tmp_path / "ever", a="alpha " * 50, b="beta " * 50)).digest == "72716399162bbcea"
    texts = [f"document {i} " * 20 for i in range(30)]
    for folder, order in (("one", texts), ("two", texts[::-1]), ("other", [*texts[1:], "document 0."])):
        for i, text in enumerate(order):
            write(tmp_path / folder / ("sub" if i % 2 else ""), **{f"{i}.txt": text})
    one, two, other = (load_corpus(tmp_path / folder) for folder in ("one", "two", "other"))
    assert one.digest == two.digest != other.digest
    assert np.array_equal(one.train, two.train) and np.array_equal(one.validation, two.validation)
    for array in (one.train, one.validation):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=40))
def test_the_split_loses_nothing_and_keeps_its_share(documents: list[bytes]) -> None:
    validation, train = _split(documents)
    assert validation + train == b"".join(document + b"\0" for document in documents)
    aim = int(0.05 * len(validation + train))
    assert aim / 2 <= len(validation) <= 2 * aim


def test_each_record_of_a_jsonl_file_is_a_document(tmp_path: Path) -> None:
    records = [{"text": "eins"}, {"text": "zwei ü", "id": 2}, {"text": "eins"}, {"text": ""}]
    lines = "\n".join(json.dumps(record) for record in records) + "\n\n"
    corpus = load_corpus(write(tmp_path, **{"data.jsonl": lines}) / "data.jsonl")
    assert sorted(documents_of(corpus)) == [b"eins", "zwei ü".encode()]
    assert (corpus.files, corpus.duplicates) == (1, 1)


@given(max_bytes=st.integers(2, 400))
def test_the_cap_is_kept_to_the_byte_and_no_character_is_halved(
    tmp_path_factory: pytest.TempPathFactory, max_bytes: int
) -> None:
    lines = "\n".join(json.dumps({"text": f"{i}𝄞" * 3}) for i in range(5))
    folder = write(tmp_path_factory.mktemp("cap"), a="ü" * 60, b="€" * 40, **{"c.jsonl": lines, "d": b"\x80" * 500})
    try:
        corpus = load_corpus(folder, max_bytes=max_bytes)
    except CorpusError:
        assert max_bytes <= 4, "room for one character of four bytes"
        return
    size, everything = len(text_of(corpus)), 60 * 2 + 40 * 3 + 5 * 15 + 7
    assert size <= max_bytes
    assert size == everything or size >= max_bytes - 4, "less than a character and its separator is left"
    for document in documents_of(corpus):
        document.decode()


def test_a_capped_folder_is_a_sample_that_depends_on_nothing_but_its_files(tmp_path: Path) -> None:
    texts = {f"{i:03}": f"{i:03} " + "y" * 96 for i in range(100)}
    write(tmp_path / "one", **texts)
    write(tmp_path / "two", **dict(reversed(texts.items())))
    one, two = (load_corpus(tmp_path / folder, max_bytes=2020) for folder in ("one", "two"))
    chosen = {int(document[:3]) for document in documents_of(one)}
    assert one.digest == two.digest and len(chosen) == 20
    assert min(chosen) < 33 and max(chosen) > 66, "not the first files of the folder"


def test_an_unreadable_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    write(tmp_path, a="text")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CorpusError, match=r"cannot read .*a: Permission denied"):
        load_corpus(tmp_path)


def test_the_standard_library_is_a_corpus() -> None:
    corpus = load_corpus()
    assert 5_000_000 < len(text_of(corpus)) <= 16_000_000
    assert 0.025 < len(corpus.validation) / len(text_of(corpus)) < 0.1
    documents, root = set(documents_of(corpus)), Path(sysconfig.get_path("stdlib"))
    assert (root / "dataclasses.py").read_bytes() in documents
    left_out = [*root.glob("_sysconfigdata*.py"), *root.glob("config-*/*.py"), *root.glob("test/support/__init__.py")]
    assert not documents & {file.read_bytes() for file in left_out}


# --- the run's data

OWN = "0123456789abcdef"


def evaluation_of(length: int = 400, sequences: int = 5) -> EvaluationSet:
    return EvaluationSet(corpus_of(counting(length)), sequences=sequences, sequence_tokens=8)


def spec(**changes: str) -> RunSpec:
    values = {"data": OWN, "evaluation_set": evaluation_name(evaluation_of()), "num_samples": 49} | changes
    return RunSpec(identity=identity(Layout(slots=1, fragments=()), **values), terms=plain_terms(sequence_tokens=8))


def test_the_run_s_corpus_gives_the_run_s_evaluation_set_whatever_comes_later() -> None:
    """J: its hash is in the run's identity."""
    for phases in ([], [corpus_of(counting(300), digest="bb")]):
        corpora = [corpus_of(counting(400), digest=OWN), *phases]
        evaluation = check_data(spec(data=data_name(corpora)), *corpora)
        assert evaluation_name(evaluation) == spec().identity.evaluation_set == f"5x{evaluation.digest}"
        assert len(evaluation) == evaluation_sequences(spec().identity.evaluation_set) == 5


def text_in(files: dict[str, str | bytes], name: str = "") -> None:
    """Of a folder with these files, or one of them."""
    load_corpus(write(Path("text"), **files) / name)


def record(line: str) -> None:
    write(Path("text"), **{"data.jsonl": '{"text": "fine"}\n' + line + "\n"})
    load_corpus(Path("text/data.jsonl"))


def checked(corpora: list[str], **changes: str) -> None:
    """Corpora of these digests, against a run with these changes."""
    check_data(spec(**changes), *(corpus_of(counting(400), digest=digest) for digest in corpora))


@all_stories(__file__, "data")
def test_stories(path: Path, story: StoryText, rewrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_story(path, story, python(vars(dataclasses), vars(corpus), globals()), rewrite=rewrite)
