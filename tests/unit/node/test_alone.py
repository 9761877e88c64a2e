"""A node that trains alone says so (protocol, Participation)."""

import pytest

from farloop.algo.spec import NodeId
from farloop.node.metrics import Metrics
from farloop.node.reports import AWAY_S, ROUNDS, SENTENCES, Isolation
from farloop.wire import messages as msg

A, B = NodeId("oslo"), NodeId("bergen")


def committed(*names: NodeId) -> msg.Committed:
    return msg.Committed(
        fragment=0, version=1, size=1, digest=1, anchor_digest=1, drops=(), next_window=None, rounds=(),
        merged=tuple(msg.Share(node=name, weight=1 / len(names)) for name in names),
    )  # fmt: skip


class Scene:
    def __init__(self) -> None:
        self.alone, self.round, self.now = Isolation(A), 5, 100.0

    def how(self, *, connected: bool = True, trains: bool = True) -> str:
        return self.alone.how(trains=trains, connected=connected, round_index=self.round, now=self.now)

    def go_on(self, rounds: int, *names: NodeId) -> str:
        for _ in range(rounds):
            self.round += 1
            self.how()
            if names:
                self.alone.heard(committed(*names), self.round)
        return self.how()


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    assert scene.how() == ""
    return scene


def test_a_node_among_others_is_not_alone(scene: Scene) -> None:
    assert scene.go_on(20, A, B) == ""


def test_a_node_of_which_nothing_is_merged_says_so_until_something_is(scene: Scene) -> None:
    assert scene.go_on(ROUNDS, B) == ""
    assert scene.go_on(1, B) == "not merged"
    assert scene.go_on(1, A, B) == ""


def test_a_node_that_is_merged_alone_says_so(scene: Scene) -> None:
    assert scene.go_on(ROUNDS, A) == ""
    assert scene.go_on(1, A) == "merged alone"
    assert scene.go_on(1, A, B) == ""


def test_a_node_that_goes_on_without_the_coordinator_says_so_after_a_while(scene: Scene) -> None:
    assert scene.how(connected=False) == ""
    scene.now += AWAY_S - 0.1
    assert scene.how(connected=False) == ""
    scene.now += 0.1
    assert scene.how(connected=False) == "without the coordinator"
    assert scene.how() == ""
    scene.now += 0.1
    assert scene.how(connected=False) == "", "the time counts from each loss"


def test_who_does_not_train_is_not_alone_and_begins_anew(scene: Scene) -> None:
    scene.go_on(9)
    assert scene.how(trains=False, connected=False) == ""
    assert scene.go_on(1) == ""


def test_every_way_has_a_sentence_and_the_metric_and_the_page_show_it() -> None:
    report = msg.Progress(
        state="training", position=0.0, round=0, inner_steps=0, tokens=0, loss=None, tokens_per_s=0.0,
        compute_share=0.0, blocked_s=0.0, lost_steps=0, sample_watermark=0, bytes_up=0, bytes_down=0, bytes_state=0,
        detail=SENTENCES["not merged"],
    )  # fmt: skip
    assert len(set(SENTENCES.values())) == len(SENTENCES)
    metrics = Metrics(A)
    for alone in (True, False):
        metrics.saw(report, versions={0: 0}, connected=True, alone=alone)
        assert f'farloop_node_alone{{node="oslo"}} {float(alone)}' in metrics.exposition().decode()
    assert metrics.standing == (True, "training: nothing of it was merged in the last 3 rounds")
