"""Covers `node/data.py` (protocol "Data leases", J)."""

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
from farloop.algo.spec import Identity, Layout, LearningRate, Rewarm, RunSpec
from farloop.node.data import Corpus, CorpusError, EvaluationSet, Mixture, Samples, num_samples
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
