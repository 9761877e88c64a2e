"""A node of one fragment whose coordinator is the test: its run, and what it hears."""

from plain_runs import plain_terms

from farloop.algo import schedule
from farloop.algo.spec import BlobId, BlobKind, Fragment, Identity, Layout, NodeId, RunSpec, TensorSlot
from farloop.node import events as ev
from farloop.node.machine import NodeMachine
from farloop.wire import messages as msg

A, B = NodeId("a"), NodeId("b")
LAYOUT = Layout(
    slots=1,
    fragments=(Fragment(index=0, slot=0, numel=256, tensors=(TensorSlot(name="t", shape=(256,), offset=0),)),),
)
IDENTITY = Identity(
    name="again", model="own", layout=LAYOUT, anchor_digests=(0,), data="own", num_samples=0, evaluation_set="none",
    seed=0,
)  # fmt: skip
TERMS = plain_terms(h=4, tau=2, mix=0.5)
ROUNDS = schedule.first_rounds(TERMS, count=10)
FIRST = schedule.first_windows(TERMS, LAYOUT)[0]


def welcome(*, epoch: int, history: int = 0, version: int = 0) -> msg.Welcome:
    window = FIRST
    for _ in range(version):
        following = schedule.window_after(TERMS, LAYOUT, window, {plan.index: plan for plan in ROUNDS})
        assert following is not None
        window = following
    return msg.Welcome(
        protocol=1, epoch=epoch, spec=RunSpec(identity=IDENTITY, terms=TERMS), lane_token=b"", versions=(version,),
        windows=(window,), rounds=ROUNDS, history=history,
    )  # fmt: skip


def committed(version: int, digest: int) -> msg.Committed:
    window = welcome(epoch=1, version=version).windows[0]
    return msg.Committed(
        fragment=0, version=version, size=1, digest=0, anchor_digest=digest,
        merged=(msg.Share(node=A, weight=0.5), msg.Share(node=B, weight=0.5)), drops=(), next_window=window,
        rounds=ROUNDS,
    )  # fmt: skip


def snapshot(version: int) -> ev.BlobArrived:
    return ev.BlobArrived(blob=BlobId(kind=BlobKind.SNAPSHOT, fragment=0, version=version))


def update(version: int) -> BlobId:
    return BlobId(kind=BlobKind.UPDATE, fragment=0, version=version)


def hear(machine: NodeMachine, message: msg.Message) -> list[ev.Command]:
    commands = machine.handle(ev.Received(message=message))
    machine.check()
    return commands


def undecided() -> NodeMachine:
    """It trains from version 3, and has sent a delta for window 4."""
    machine = NodeMachine(name=A, incarnation=1)
    hear(machine, welcome(epoch=5, version=3))
    machine.handle(snapshot(3))
    hear(machine, msg.Start(round=ROUNDS[3], lease=None))
    for _ in range(4):
        machine.handle(ev.StepDone(tokens=10))
    assert machine.fragments[0].sent and machine.versions == (3,)
    return machine
