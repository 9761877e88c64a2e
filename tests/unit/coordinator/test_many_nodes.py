"""What an event costs does not grow with the number of nodes, and a commit costs each of them the same."""

import dataclasses
from unittest import mock

import pytest
from coordinator_run import Run
from interpreter_work import work_of
from plain_runs import plain_offer, plain_progress

from farloop.algo import schedule
from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide.windows import Window
from farloop.coordinator.net.link_table import COORDINATOR, LinkTable
from farloop.coordinator.observe.straggler_monitor import SlowLinks
from farloop.coordinator.uploads import DeltaIntake
from farloop.quant.blob import blob_bytes
from farloop.quant.registry import codec_named
from farloop.wire import messages as msg
from farloop.wire.messages import Role
from farloop.wire.session import Session

FEW, MANY = 16, 96
GROWTH = 1.5
"""Of what a node costs, from few nodes to six times as many; where each event looks at every node, it is up to 6."""


class Round:
    """One more window, after some that all nodes were part of: what its events cost a node."""

    def __init__(self, spec: RunSpec, num_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes = [NodeId(f"node-{number:03d}") for number in range(num_nodes)]
        self.run = Run(RunSpec(identity=spec.identity, terms=spec.terms.replace(steps=1000)), self.nodes)
        monkeypatch.setattr(self.run.machine, "check", lambda: None)
        self.payloads = 0
        for steps in range(1, 4):
            for node in self.nodes:
                self.run.now += 0.01
                self.hear(node, self._progress(steps))
        for _ in range(3):
            for fragment in (0, 1):
                for node in self.nodes:
                    self.payloads += 1
                    self.run.store(node, fragment, payload=self.payloads)
                self.run.durable(fragment)

    def hear(self, node: NodeId, message: msg.Message) -> None:
        self.handle(ev.NodeMessage(session=self.run.sessions[node], node=node, message=message))

    def handle(self, event: ev.Event) -> list[ev.Command]:
        return self.run.machine.handle(event, self.run.now)

    def costs(self) -> dict[str, float]:
        """Work of each kind of event, divided by the nodes."""
        offers = {node: self.run.offer(node, 0) for node in self.nodes}
        first, last = list(offers.values())[:-1], list(offers.values())[-1]
        closing = list[ev.Command]()

        def commit() -> None:
            (draft,) = (command.draft for command in closing if isinstance(command, ev.Commit))
            self.handle(ev.CommitDone(record=dataclasses.replace(draft, update_size=50)))

        costs = {
            "reports": work_of(lambda: [self.hear(node, self._progress(9)) for node in self.nodes]),
            "offers": work_of(lambda: [self.hear(node, offer) for node, offer in offers.items()]),
            "deltas": work_of(lambda: [self._store(offer) for offer in first]),
            "one look at the time": work_of(self.run.machine.next_timer),
            "the close": work_of(lambda: closing.extend(self._store(last))),
            "the commit": work_of(commit),
        }
        return {what: work / len(self.nodes) for what, work in costs.items()}

    def _store(self, offer: msg.Offer) -> list[ev.Command]:
        self.payloads += 1
        return self.handle(ev.InputStored(offer=offer, payload=self.payloads))

    def _progress(self, steps: int) -> msg.Progress:
        return plain_progress(inner_steps=steps, tokens=steps, loss=None, tokens_per_s=0.0, compute_share=0.0)


def test_a_node_costs_decisions_the_same_among_many_as_among_few(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = Round(spec, FEW, monkeypatch).costs()
    many = Round(spec, MANY, monkeypatch).costs()
    grown = {what: many[what] / few[what] for what in few}
    assert max(grown.values()) < GROWTH, grown


@pytest.mark.parametrize("look", ["status", "round"])
def test_a_nodes_link_costs_a_look_at_all_links_the_same_among_many_as_among_few(look: str) -> None:
    def per_node(count: int) -> float:
        table, places, nodes = LinkTable(), SlowLinks(), [f"node-{number:03d}" for number in range(count)]
        for node in nodes:
            for ends in ((node, COORDINATOR), (COORDINATOR, node)):
                table.transfer(ends, msg.Transfer(num_bytes=1 << 20, seconds=0.5), 1.0)
        return work_of(lambda: table.rows(2.0) if look == "status" else places.on_round_end(table, nodes)) / count

    assert per_node(MANY) < GROWTH * per_node(FEW)


def test_an_offer_costs_the_intake_the_same_among_many_partial_deltas_as_among_few(spec: RunSpec) -> None:
    fragment = spec.identity.layout.fragments[0]
    terms = schedule.first_windows(spec.terms, spec.identity.layout)[0]
    size = blob_bytes(codec_named(terms.codec_up), fragment)

    def per_offer(count: int) -> float:
        intake = DeltaIntake()
        offers = [plain_offer(NodeId(f"node-{number}"), size=size) for number in range(count)]
        window, session = Window(terms=terms, expected=set()), Session(Role.COORDINATOR, 0.0)
        with mock.patch.object(session, "expect", lambda blob, size, digest, reassembly, now: reassembly):
            work = work_of(lambda: [intake.admit(session, o, window, fragment, terms.codec_up, 0.0) for o in offers])
        assert intake.held_bytes == count * size
        return work / count

    assert per_offer(MANY) < GROWTH * per_offer(FEW)
