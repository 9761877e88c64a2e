"""A bad day of every method in the simulator, as one line of JSON: digests of all that the machines heard and did.

In processes whose strings hash to other numbers it is the same line.

    PYTHONPATH=tests/cases PYTHONHASHSEED=N python tests/integration/simulated.py
"""

import hashlib
import json
import sys

from faulty_world import run
from simulated_faults import CrashCoordinator, CrashNode, NodeSetup, Scenario
from toy_problem import terms_of

from farloop.algo.methods import METHODS
from farloop.algo.spec import NodeId
from farloop.sim.network import HOSTILE_LINK

NAMES = ("paris", "oslo", "tokyo", "lima")


def digest_of(method: str) -> str:
    nodes = tuple(NodeSetup(name=NodeId(name), seed=seed, step_s=0.1 + 0.02 * seed) for seed, name in enumerate(NAMES))
    faults = (CrashNode(node=NodeId("lima"), at=2.0, down_s=1.0), CrashCoordinator(at=4.0))
    terms = terms_of(method, steps=16, min_nodes=len(nodes))
    outcome = run(Scenario(terms=terms, nodes=nodes, faults=faults, weather=HOSTILE_LINK, seed=1, num_samples=1000))
    outcome.check()
    return hashlib.sha256(repr((outcome.tape, outcome.anchor_digests)).encode()).hexdigest()


if __name__ == "__main__":
    sys.stdout.write(json.dumps({method: digest_of(method) for method in METHODS}))
