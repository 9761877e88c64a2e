"""Which evaluations are waited for: of the nodes that were asked, one answer each (protocol J). Pure.

An evaluation is kept for as long as the run, and shown to everybody: nobody can add one unasked.
"""

from collections.abc import Sequence
from typing import Final

from farloop.algo.spec import NodeId
from farloop.coordinator.admission import last_position
from farloop.coordinator.ledger import Ledger

_MEMORY: Final = 16
"""Questions without an answer that are remembered: a node may go away before it gives one."""


class Evaluations:
    """The open questions of one incarnation of the coordinator. Versions are those of the last fragment."""

    def __init__(self, ledger: Ledger) -> None:
        """Whom the incarnation before has asked is not known: what it may have asked for, any node may answer once."""
        self._ledger, self._last = ledger, len(ledger.versions) - 1
        self._asked: dict[int, NodeId] = {}
        known = [evaluation.versions[self._last] for evaluation in ledger.evaluations]
        asks = ledger.spec.identity.evaluation_set != "none"
        self._before = range(max(known, default=0) + 1, ledger.versions[self._last] + 1 if asks else 0)

    @property
    def evaluator(self) -> NodeId | None:
        """Who was asked last, and has not answered."""
        return self._asked[max(self._asked)] if self._asked else None

    def ask(self, version: int, node: NodeId) -> None:
        """This node is asked to score its anchors once it holds this version."""
        self._asked[version] = node
        if len(self._asked) > _MEMORY:
            del self._asked[min(self._asked)]

    def asked(self, node: NodeId, versions: Sequence[int], position: float = 0.0) -> int | None:
        """The version that an evaluation of these versions was asked for with; None where it was not, or says that it
        is of a schedule position which the run does not have.

        A node that merges several versions at once answers with the newest.
        """
        ledger = self._ledger
        if not ledger.is_vector(versions) or not 0.0 <= position <= last_position(ledger):
            return None
        if not all(0 <= held <= current for held, current in zip(versions, ledger.versions, strict=True)):
            return None
        held = versions[self._last]
        if held in self._before:
            return held
        return max((version for version, who in self._asked.items() if who == node and version <= held), default=None)

    def answered(self, version: int) -> None:
        """The question of this version is answered, and with it those that the same node was asked before."""
        if version in self._before:
            self._before = range(version + 1, self._before.stop)
        elif node := self._asked.get(version):
            self._asked = {v: who for v, who in self._asked.items() if who != node or v > version}
