"""Covers what `node/library.py` decides without a coordinator; the rest needs sockets."""

import dataclasses

import pytest
from plain_runs import plain_terms

from farloop.algo.spec import Identity, Layout, RunSpec
from farloop.node.cluster import Cluster
from farloop.node.errors import TermsMismatch
from farloop.node.library import _check_ranks, _check_tau

SPEC = RunSpec(
    identity=Identity(
        name="run", model="own", layout=Layout(slots=1, fragments=()), anchor_digests=(), data="own", num_samples=0,
        evaluation_set="none", seed=0,
    ),
    terms=plain_terms(method="diloco", steps=900, h=30, weight_decay=0.1, batch_sequences=4, sequence_tokens=16),
)  # fmt: skip


def test_a_node_s_own_overlap_is_held_against_the_run_once_that_is_known() -> None:
    """D: whether a send can meet its own merge depends on the run's rounds and slots."""
    for tau in (None, 0, 29):
        _check_tau(SPEC, tau)
    with pytest.raises(TermsMismatch, match="this node's own tau is 30; diloco with rounds of 30 steps") as caught:
        _check_tau(SPEC, 30)
    assert (caught.value.exit_code, caught.value.retriable) == (2, False)


def test_a_run_whose_updates_come_a_round_late_allows_no_overlap_beside_it() -> None:
    late = dataclasses.replace(SPEC, terms=SPEC.terms.replace(lag=1))
    _check_tau(late, None)
    with pytest.raises(TermsMismatch, match="lag = 1"):
        _check_tau(late, 0)


def test_what_corrects_the_steps_of_one_process_alone_is_refused_to_several() -> None:
    corrected = dataclasses.replace(SPEC, terms=SPEC.terms.replace(control_variates=True))
    _check_ranks(corrected, Cluster())
    _check_ranks(SPEC, Cluster(size=2))
    with pytest.raises(TermsMismatch, match="control_variates, which this node's 2 processes would not share"):
        _check_ranks(corrected, Cluster(size=2))
