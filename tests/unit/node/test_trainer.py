"""Covers `node/trainer.py` as far as it needs no coordinator (protocol J, Z)."""

import numpy as np
import pytest
from plain_runs import plain_terms

from farloop.algo.spec import Identity, Layout, RunSpec
from farloop.node.data import Corpus, EvaluationSet
from farloop.node.errors import DataError
from farloop.node.trainer import check_data, data_name, evaluation_name, evaluation_sequences

TOKENS = 8


def corpus(digest: str = "0123456789abcdef", length: int = 400) -> Corpus:
    text = (np.arange(length) % 251).astype(np.uint8)
    return Corpus(train=text, validation=text, digest=digest, files=1, duplicates=0, skipped=0)


def evaluation_of(length: int = 400, sequences: int = 5) -> EvaluationSet:
    return EvaluationSet(corpus(length=length), sequences=sequences, sequence_tokens=TOKENS)


def spec(**identity: str) -> RunSpec:
    values = {"data": "0123456789abcdef", "evaluation_set": evaluation_name(evaluation_of())} | identity
    return RunSpec(
        identity=Identity(
            name="run",
            model="own",
            layout=Layout(slots=1, fragments=()),
            anchor_digests=(),
            num_samples=49,
            seed=0,
            **values,
        ),
        terms=plain_terms(method="diloco", steps=10, h=5, weight_decay=0.1, batch_sequences=4, sequence_tokens=TOKENS),
    )


def test_the_run_s_corpus_gives_the_run_s_evaluation_set() -> None:
    """J: its hash is in the run's identity."""
    evaluation = check_data(spec(), corpus())
    assert evaluation_name(evaluation) == spec().identity.evaluation_set
    assert len(evaluation) == evaluation_sequences(spec().identity.evaluation_set) == 5


def test_another_corpus_is_refused_with_both_digests_and_the_mend() -> None:
    with pytest.raises(DataError, match="corpus is ffff, the run's is 0123456789abcdef; give every node the same"):
        check_data(spec(), corpus("ffff"))


def test_a_run_with_later_data_names_all_of_it_and_one_without_names_its_corpus() -> None:
    assert data_name([corpus("aa")]) == "aa"
    assert data_name([corpus("aa"), corpus("bb"), corpus("cc")]) == "aa+bb+cc"


def test_the_evaluation_set_is_that_of_the_first_corpus_whatever_comes_later() -> None:
    later = corpus("bb", length=300)
    evaluation = check_data(spec(data="0123456789abcdef+bb"), corpus(), later)
    assert evaluation_name(evaluation) == spec().identity.evaluation_set


@pytest.mark.parametrize(
    ("data", "phases", "sentence"),
    [
        (
            "0123456789abcdef+bb",
            (),
            "phase 1 is missing, the run's is bb; give every node the same files with .data. p",
        ),
        ("0123456789abcdef", ("bb",), "phase 1 is bb, the run's is none"),
        ("0123456789abcdef+bb+cc", ("bb", "dd"), "phase 2 is dd, the run's is cc"),
        ("0123456789abcdef+bb+cc", ("cc", "bb"), "phase 1 is cc, the run's is bb"),
        ("ee+bb", ("bb",), "this node's corpus is 0123456789abcdef, the run's is ee;"),
    ],
)
def test_later_data_that_is_not_the_run_s_is_refused_with_its_number(
    data: str, phases: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        check_data(spec(data=data), corpus(), *(corpus(digest) for digest in phases))


def test_a_run_whose_samples_come_from_the_nodes_own_loops_is_refused() -> None:
    with pytest.raises(DataError, match="own loops"):
        check_data(spec(data="own"), corpus())


def test_an_evaluation_set_cut_in_another_way_is_refused() -> None:
    """J, Z: the same text, and other numbers."""
    other = evaluation_name(evaluation_of(length=800))
    with pytest.raises(DataError, match=f"the run's is {other}"):
        check_data(spec(evaluation_set=other), corpus())


def test_the_name_of_an_evaluation_set_holds_its_size_and_digest() -> None:
    evaluation = evaluation_of(sequences=3)
    assert evaluation_name(evaluation) == f"3x{evaluation.digest}"
