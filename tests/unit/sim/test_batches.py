"""Nodes whose inner steps have different numbers of tokens, under every method."""

import dataclasses
from collections import Counter

import pytest

from farloop.algo.methods import METHODS
from farloop.algo.spec import NodeId
from farloop.coordinator.decide import records as rec
from farloop.sim.problems import BATCH_SEQUENCES, SEQUENCE_TOKENS, terms_of
from farloop.sim.scenario import NodeSetup, Scenario
from farloop.sim.world import run

BATCH = BATCH_SEQUENCES * SEQUENCE_TOKENS
STEPS = 48


@pytest.mark.parametrize("method", METHODS)
def test_the_size_of_the_batch_decides_the_weight_of_a_delta_and_not_the_steps_of_a_node(method: str) -> None:
    """A, H: three nodes at one pace, one of them with a quarter of the batch."""
    choices = {} if "h" in METHODS[method].fixed else {"h": 12}
    terms = terms_of(method, steps=STEPS, min_nodes=3, **choices)
    nodes = tuple(NodeSetup(name=NodeId(name), seed=seed, step_s=0.1) for seed, name in enumerate("abc"))
    small = dataclasses.replace(nodes[2], tokens=BATCH // 4)
    outcome = run(Scenario(terms=terms, nodes=(*nodes[:2], small)))
    outcome.check()
    assert not [r for r in outcome.records if isinstance(r, rec.RoundFixed) and r.round.node_steps]
    assert {outcome.nodes[node.name][0].inner_steps for node in nodes} == {STEPS}
    # A node that is ready a moment after the others begins at a later slot of the first round.
    merged = Counter(name for commit in outcome.commits if commit.round for name in commit.contributors)
    assert len(set(merged.values())) == 1, merged
    for record in outcome.records:
        if isinstance(record, rec.WindowCommitted) and len(record.blobs) == 3 and not record.flush:
            weights = {addend.blob.node: addend.weight for addend in record.blobs}
            assert weights[NodeId("c")] < 0.3 * weights[NodeId("a")], weights
