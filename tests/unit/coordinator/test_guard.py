"""A run does not go on with a few while many are live: it is said, and held (protocol, Participation)."""

import dataclasses
from typing import Any

import pytest
from plain_runs import plain_hello, plain_offer, plain_progress

from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.closing import ALARM, ROUNDS
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

BERGEN, OSLO, TROMSO, PARIS = NODES = tuple(map(NodeId, ("bergen", "oslo", "tromso", "paris")))
REPORT = plain_progress(position=0.0, inner_steps=0, tokens=0, loss=None, tokens_per_s=0.0, compute_share=0.0)


class Run:
    """Nodes that train; every window is served by those of them who are good, and refused to the others."""

    def __init__(
        self, spec: RunSpec, nodes: tuple[NodeId, ...] = NODES, share: float | None = None, **terms: Any
    ) -> None:
        terms = {"steps": 1000, "min_nodes": len(nodes), **terms}
        spec = dataclasses.replace(spec, terms=spec.terms.replace(**terms))
        self.ledger, self.share, self.now = Ledger.begin(rec.RunStarted(spec=spec, epoch=1)), share, 0.0
        self.nodes = nodes
        self.seq = 0
        self.begin()
        for node in nodes:
            self.say(node, msg.Ready())

    def begin(self, round_index: int | None = None) -> None:
        self.machine = CoordinatorMachine(self.ledger, now=self.now, floor_share=self.share)
        for node in self.nodes:
            self.greet(node, round_index)

    def greet(self, node: NodeId, round_index: int | None, session: int = 0) -> None:
        hello = plain_hello(node=node, round=round_index, device="cpu")
        self.handle(ev.NodeHello(session=session or NODES.index(node) + 1, node=node, hello=hello))

    def say(self, node: NodeId, message: msg.Message) -> None:
        self.handle(ev.NodeMessage(session=NODES.index(node) + 1, node=node, message=message))

    def handle(self, event: ev.Event) -> None:
        for command in self.machine.handle(event, self.now):
            if isinstance(command, ev.Commit):
                self.handle(ev.CommitDone(record=command.draft))
        self.machine.check()

    def offer(self, node: NodeId, fragment: int) -> msg.Offer:
        window = self.machine.windows[fragment].terms.window
        self.seq += 1
        return plain_offer(node, window, fragment=fragment, seq=self.seq)

    def turn(self, *good: NodeId) -> None:
        """One window of each fragment, in the order of the slots that are due."""
        for fragment in (1, 0):
            version = self.machine.ledger.versions[fragment]
            for node in (*(n for n in self.nodes if n not in good), *good):
                window = self.machine.windows[fragment]
                if self.machine.ledger.versions[fragment] == version and node in window.missing:
                    offer = self.offer(node, fragment)
                    if node in good:
                        self.handle(ev.InputStored(offer=offer))
                    else:
                        self.handle(ev.InputFailed(offer=offer, reason=Reason.CORRUPT, detail="again"))

    def rounds(self, count: int, *good: NodeId) -> None:
        for _ in range(count):
            self.turn(*good)

    @property
    def round(self) -> int:
        return self.machine.ledger.current_round

    @property
    def held(self) -> bool:
        return self.machine.guard.holds

    @property
    def alarm(self) -> str:
        return self.machine.alarms.get(ALARM, "")


def test_a_run_in_which_all_are_merged_is_never_held(spec: RunSpec) -> None:
    run = Run(spec)
    run.rounds(20, *NODES)
    assert run.round >= 18 and not run.held and not run.alarm and run.machine.guard.share() == 1.0


def test_a_run_of_which_only_one_of_four_is_merged_is_held_and_says_who_is_left_out(spec: RunSpec) -> None:
    run = Run(spec)
    run.rounds(2, *NODES)
    run.rounds(20, BERGEN)
    assert run.held
    assert run.alarm.startswith(
        f"3 of 4 live nodes were merged in none of the last {ROUNDS} rounds (oslo, paris, tromso)"
    )
    held_at = run.round
    assert held_at <= 2 + ROUNDS + 2, "not for long without them"
    run.rounds(5, BERGEN)
    assert run.round == held_at and run.held


def test_half_of_them_is_enough(spec: RunSpec) -> None:
    run = Run(spec)
    run.rounds(15, BERGEN, OSLO)
    assert run.round >= 12 and not run.held and not run.alarm
    assert run.machine.guard.share() == 0.5


def test_a_run_goes_on_when_who_was_left_out_is_merged_again(spec: RunSpec) -> None:
    run = Run(spec)
    run.rounds(12, BERGEN)
    assert run.held
    before = run.round
    for node in (OSLO, TROMSO):  # back with fresh sessions: the windows that were held take them in again
        run.handle(ev.NodeDisconnected(session=NODES.index(node) + 1, node=node, reason=Reason.CLOSED))
        run.greet(node, run.round, session=NODES.index(node) + 1)
    run.rounds(4, BERGEN, OSLO, TROMSO)
    assert not run.held and not run.alarm and run.round > before


def test_a_run_goes_on_when_who_was_left_out_leaves(spec: RunSpec) -> None:
    run = Run(spec)
    run.rounds(12, BERGEN)
    assert run.held
    versions = list(run.machine.ledger.versions)
    for node in (OSLO, TROMSO, PARIS):
        run.say(node, msg.Leave(reason=Reason.DRAINED))
    assert not run.held and not run.alarm and run.machine.ledger.versions != versions, "what was held is committed"


def test_when_nobody_is_left_nothing_is_wrong_any_more(spec: RunSpec) -> None:
    run = Run(spec)
    run.rounds(12, BERGEN)
    assert run.held
    for node in NODES:
        run.handle(ev.NodeDisconnected(session=NODES.index(node) + 1, node=node, reason=Reason.CLOSED))
    assert not run.held and not run.alarm


@pytest.mark.parametrize("state", ["draining", "paused"])
def test_who_has_reason_not_to_send_is_not_missed(spec: RunSpec, state: msg.NodeState) -> None:
    run = Run(spec)
    for node in (OSLO, TROMSO, PARIS):
        run.say(node, dataclasses.replace(REPORT, state=state))
    run.rounds(12, BERGEN)
    assert not run.held and not run.alarm


def test_who_is_gone_is_not_missed(spec: RunSpec) -> None:
    """A run may shrink to one node."""
    run = Run(spec)
    for node in (OSLO, TROMSO, PARIS):
        run.handle(ev.NodeDisconnected(session=NODES.index(node) + 1, node=node, reason=Reason.SILENT))
    run.machine.handle_timer(run.now)
    run.rounds(12, BERGEN)
    assert run.round >= 10 and not run.held and not run.alarm


def test_a_run_of_one_node_is_never_held(spec: RunSpec) -> None:
    run = Run(spec, (BERGEN,))
    run.rounds(12, BERGEN)
    assert run.round >= 10 and not run.held


def test_a_restart_gives_everybody_the_same_time_again(spec: RunSpec) -> None:
    run = Run(spec)
    run.rounds(ROUNDS, BERGEN)
    run.begin(run.round)
    run.rounds(1, BERGEN)
    assert not run.held
    run.rounds(12, BERGEN)
    assert run.held


def test_with_a_quorum_it_is_said_and_nothing_is_held(spec: RunSpec) -> None:
    run = Run(spec, quorum=1)
    run.rounds(12, BERGEN)
    assert run.round >= 10 and not run.held and run.alarm.endswith("the run goes on with the others")


@pytest.mark.parametrize(("share", "held"), [(0.0, False), (0.2, False), (0.3, True)])
def test_the_share_can_be_chosen(spec: RunSpec, share: float, held: bool) -> None:
    run = Run(spec, share=share)
    run.rounds(14, BERGEN)
    assert run.held is held


def test_a_window_that_lacks_nothing_any_more_says_nothing(spec: RunSpec) -> None:
    run = Run(spec, (BERGEN, OSLO), floor=2)
    run.handle(ev.InputStored(offer=run.offer(BERGEN, 1)))
    run.handle(ev.NodeDisconnected(session=2, node=OSLO, reason=Reason.SILENT))
    run.machine.handle_timer(run.now)
    lacking = "window 1 is held with 1 of the 2 contributions it needs, without oslo (silent)"
    assert run.machine.alarms["floor of fragment 1"] == lacking and run.machine.ledger.versions == [0, 0]
    run.greet(OSLO, 0, session=2)
    run.handle(ev.InputStored(offer=run.offer(OSLO, 1)))
    assert run.machine.ledger.versions[1] == 1 and "floor of fragment 1" not in run.machine.alarms
