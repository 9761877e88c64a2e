"""Pipelines whose stages are nodes of their own, as far as the coordinator sees them: whole runs (protocol G)."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pipeline_world
import pytest
import simulated_faults as sc
from faulty_world import World, run
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_layouts import example_delay, layout_of
from pipeline_world import Costs
from simulated_outcome import Outcome
from simulated_runs import scenario_of
from slow_cases import examples
from stories import Scripted, StoryText, all_stories, check_story

from farloop.algo.spec import NodeId
from farloop.algo.stages import StageLayout
from farloop.coordinator.decide import records as rec
from farloop.node.settings import PipelineConfig
from farloop.pipeline import events as ev
from farloop.pipeline.messages import Kind

A0, B0, A1, B1 = map(NodeId, ("a0", "b0", "a1", "b1"))
PARTS = {A0: (0,), B0: (0,), A1: (1,), B1: (1,)}
NODES = tuple(sc.NodeSetup(name=name, seed=number, holds=holds) for number, (name, holds) in enumerate(PARTS.items()))


def pipelines(method: str = "streaming", *faults: sc.Fault, **changes: object) -> sc.Scenario:
    """Two nodes for each of two stages of two blocks."""
    fields = {"steps": 36, "h": 6, "tau": 1, "codec_up": "q4", "codec_down": "q4", "min_nodes": 2}
    return scenario_of(method, *faults, nodes=NODES, blocks=4, stages=(2,), **{**fields, **changes})


def checked(scenario: sc.Scenario) -> Outcome:
    outcome = run(scenario)
    outcome.check()
    return outcome


def rounds_apart(outcome: Outcome) -> int:
    """How many rounds the last slot of one stage was ever closed before that of the other."""
    newest, apart = [-1, -1], 0
    last = {f.index: f.stage for f in outcome.layout.fragments if f.slot == outcome.layout.slots - 1}
    for commit in outcome.commits:
        if commit.fragment in last:
            newest[last[commit.fragment]] = commit.round
            apart = max(apart, abs(newest[0] - newest[1]))
    return apart


@pytest.mark.parametrize("method", ["streaming", "diloco", "co2", "decoupled", "async"])
def test_the_replicas_of_every_stage_end_equal_by_every_method(method: str) -> None:
    outcome = checked(pipelines(method, tau=0 if method == "co2" else 1))
    for commit in outcome.commits:
        stage = outcome.layout.fragments[commit.fragment].stage
        assert set(commit.contributors) <= {name for name, holds in PARTS.items() if stage in holds}
    for name, holds in PARTS.items():
        (start,) = outcome.nodes[name]
        held = [f.index for f in outcome.layout.fragments if f.stage in holds]
        assert start.stage == "finished"
        assert start.anchor_digests == tuple(outcome.anchor_digests[index] for index in held)


def test_a_stage_syncs_as_if_it_were_a_model_of_its_own() -> None:
    """The other stage shows in nothing: what is merged, with which weights, into which bits."""
    outcome = run(pipelines())
    elsewhere = dataclasses.replace(pipelines(), nodes=tuple(
        dataclasses.replace(node, seed=node.seed + (7 if node.holds == (1,) else 0)) for node in NODES
    ))  # fmt: skip
    other = run(elsewhere)
    first = [f.index for f in outcome.layout.fragments if f.stage == 0]
    assert [outcome.anchor_digests[f] for f in first] == [other.anchor_digests[f] for f in first]
    assert outcome.anchor_digests != other.anchor_digests


def test_a_fast_stage_waits_for_a_slow_one() -> None:
    """A: without it the fast one would be done when the other has hardly begun."""
    nodes = tuple(dataclasses.replace(node, step_s=0.02 if node.holds == (0,) else 0.4) for node in NODES)
    outcome = run(dataclasses.replace(pipelines(), nodes=nodes))
    outcome.check()
    assert rounds_apart(outcome) <= 2


def test_only_the_first_stage_uses_up_samples() -> None:
    outcome = checked(pipelines(num_samples=50))
    used = {name: len(starts[0].diary.samples) for name, starts in outcome.nodes.items()}
    assert used == {A0: 72, B0: 72, A1: 0, B1: 0}


def test_one_replica_of_a_stage_dies_and_the_run_goes_on() -> None:
    outcome = checked(pipelines("streaming", sc.CrashNode(node=B1, at=2.0)))
    final = {commit.fragment: commit.contributors for commit in outcome.commits}
    stage = {f.index: f.stage for f in outcome.layout.fragments}
    assert all(names == ((A0, B0), (A1,))[stage[index]] for index, names in final.items())


def test_a_stage_that_no_node_holds_stops_the_run_until_a_node_does() -> None:
    """And nothing is lost by that: every window of every fragment is committed, by whoever holds it."""
    dead = tuple(sc.CrashNode(node=name, at=1.5, down_s=30.0 if name == A1 else None) for name in (A1, B1))
    world = World(pipelines("streaming", *dead))
    seen = list[dict[str, str]]()
    world.agenda.at(25.0, lambda: seen.append(dict(world.coordinator.machine.alarms) if world.coordinator else {}))
    outcome = world.run()
    outcome.check()
    assert "no node that trains holds it" in seen[0]["stage 1"]
    assert outcome.seconds > 31.0 and rounds_apart(outcome) <= 2
    undisturbed = run(pipelines())
    assert outcome.versions == undisturbed.versions


def test_what_nodes_hold_survives_the_coordinator() -> None:
    outcome = checked(pipelines("streaming", sc.CrashCoordinator(at=2.0, down_s=1.0)))
    started = [record for record in outcome.records if isinstance(record, rec.NodeStarted)]
    assert {record.node: record.holds for record in started} == PARTS
    assert outcome.anchor_digests == run(pipelines()).anchor_digests, "nothing was lost to it"


def test_a_node_with_all_of_the_model_takes_part_beside_the_pipelines() -> None:
    whole = sc.NodeSetup(name=NodeId("w"), seed=9)
    outcome = run(dataclasses.replace(pipelines(min_nodes=3), nodes=(*NODES, whole)))
    outcome.check()
    assert {commit.contributors for commit in outcome.commits} == {(A0, B0, "w"), (A1, B1, "w")}
    assert outcome.evaluations, "and is the one who can score all of it"


FAR = 3_000.0
"""Virtual seconds, far beyond what any of these runs takes."""


class PipelineWorld(pipeline_world.World):
    """Nodes die, and come back."""

    notice_s = 1.0  # until the others notice a death

    def settle(self, seconds: float) -> None:
        """So much longer: what is under way arrives."""
        end = self.agenda.now + seconds
        while self.agenda.now < end and self.agenda.step():
            pass

    def kill(self, name: str, at_s: float) -> None:
        """The node dies, and what it has sent still arrives."""
        self.agenda.at(at_s, lambda: self._kill(name))

    def revive(self, name: str, at_s: float) -> None:
        """It comes back, and knows nothing."""

        def comes() -> None:
            if not self.processes[name].alive:
                self._start(name)
                self._connect(name)
                self.processes[name].after(0.0, lambda: self._begin(name))

        self.agenda.at(at_s, comes)

    def _kill(self, name: str) -> None:
        if not self.processes[name].alive:
            return
        self.processes[name].kill()
        life = self._lives[name]

        def notice(other: str) -> None:
            if self._lives[name] == life:
                self._handle(other, ev.Down(peer=name))

        for other in self.nodes:
            if other != name:
                self.processes[other].after(self.notice_s, partial(notice, other))


def news(world: PipelineWorld, source: str) -> bool:
    """Whether it began or ended a step so lately that not everybody can have heard: 5 s of delay, 2 s between words."""
    record = world.records[source]
    return world.agenda.now - max([0.0, *record.began_at, *record.over_at]) < 10.0


class Told(PipelineWorld, Scripted):
    """Stages and paths as `ab,cd` and `ac,bd`. Its stories have these words:

    kill b 30.0 | revive b 60.0              at 30 s, at 60 s
    offer a ab,cd ad,bc epoch=2 at=25.0      a is given another layout
    a                                        what became of a once all are done; `seconds a`: how long its steps took
    """

    def __init__(
        self, *, stages: str, paths: str, steps: int, microbatches: int, epoch: int = 1, slow: str = "",
        delays: str = "", **settings: Any,
    ) -> None:  # fmt: skip
        """`slow` nodes compute four times as long. `delays`: ac2.0,bc2.4, or those of the worked example."""
        costs = {name: Costs(forward_s=4.0, backward_s=6.0) if name in slow else Costs() for name in stages}
        known = {word[:2]: float(word[2:]) for word in delays.split(",") if word and delays != "example"}
        super().__init__(
            _layout(stages, paths, epoch),
            steps=steps,
            microbatches=microbatches,
            costs=costs,
            delay=example_delay if delays == "example" else lambda u, v: known.get(u + v, 0.0),
            config=PipelineConfig(**settings),
        )

    def offer(self, node: str, stages: str, paths: str, *, epoch: int, at: float) -> None:
        layout = _layout(stages, paths, epoch)
        self.agenda.at(at, lambda: self._handle(node, ev.Offered(layout=layout, addresses={})))

    def __getattr__(self, node: str) -> list[str]:
        if node not in self.nodes:
            raise AttributeError(node)
        self.run(FAR)
        record, machine = self.records[node], self.machines[node]
        counted = {name: machine.counted[name] for name in ("rerouted", "skipped") if machine.counted[name]}
        dropped = [summary.dropped for summary in record.summaries]
        reissued = sum(summary.reissued for summary in record.summaries)
        return [
            f"{len(record.summaries)} steps of {' '.join(str(summary.microbatches) for summary in record.summaries)}",
            *([f"dropped {' '.join(map(str, dropped))}"] if any(dropped) else []),
            *([f"reissued {reissued}"] if reissued else []),
            f"forward {record.visits[Kind.FORWARD]}",
            f"backward {record.visits[Kind.BACKWARD]}",
            *(f"{name} {count}" for name, count in counted.items()),
            f"inputs {record.peak_inputs}",
            f"layout {machine.epoch}",
            *([record.stopped] if record.stopped else []),
            *record.notes[:1],
        ]

    def seconds(self, source: object) -> list[float]:
        """Of each step of a source but the first, in which the nodes meet."""
        self.run(FAR)
        record = self.records[str(source)]
        return [round(over - began, 6) for began, over in zip(record.began_at, record.over_at, strict=True)][1:]


def _layout(stages: str, paths: str, epoch: int) -> StageLayout:
    return layout_of(stages.split(","), [path for path in paths.split(",") if path], epoch=epoch)


@all_stories(__file__, "pipelines")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Told(**story.settings).told, rewrite=rewrite)


# --- laws


@st.composite
def layouts(draw: st.DrawFn) -> StageLayout:
    """One to four stages of one to three replicas, and for every source one or two ways through some of them."""
    letters = iter("abcdefghijkl")
    replicas = ["".join(next(letters) for _ in range(draw(st.integers(1, 3)))) for _ in range(draw(st.integers(1, 4)))]
    paths = []
    for source in replicas[0]:
        for _ in range(draw(st.integers(1, 2))):
            kept = [stage for stage in range(1, len(replicas)) if draw(st.integers(0, 3))]
            if len(kept) > 1 and draw(st.booleans()):
                kept[0], kept[1] = kept[1], kept[0]
            paths.append(source + "".join(draw(st.sampled_from(replicas[stage])) for stage in kept))
    return layout_of(replicas, paths)


@settings(max_examples=examples(6))
@given(data=st.data(), layout=layouts())
def test_every_microbatch_is_completed_or_dropped_whatever_dies(data: st.DataObject, layout: StageLayout) -> None:
    """Machines check their own invariants after every event; at the end nothing of what is settled is kept anywhere."""
    nodes = [name for stage in layout.stages for name in stage.replicas]
    delays = {u + v: data.draw(st.floats(0.0, 5.0)) for u in nodes for v in nodes}
    microbatches, steps = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    behaviour = PipelineConfig(
        credit=data.draw(st.integers(1, 4)),
        memory=data.draw(st.integers(1, 4)),
        patience_s=data.draw(st.sampled_from([20.0, 40.0])),  # 4 steps of 5 microbatches, 3 trips each, end before FAR
        late_s=data.draw(st.sampled_from([1.0, 20.0])),
    )
    world = PipelineWorld(
        layout, steps=steps, microbatches=microbatches, delay=lambda u, v: delays[u + v], config=behaviour
    )
    world.notice_s = data.draw(st.floats(0.0, 10.0))
    for name in data.draw(st.lists(st.sampled_from(nodes), max_size=4, unique=True)):
        at_s = data.draw(st.floats(0.0, 100.0))
        world.kill(name, at_s)
        if data.draw(st.booleans()):
            world.revive(name, at_s + data.draw(st.floats(0.0, 50.0)))
    world.run(FAR)
    for name in layout.stages[0].replicas:
        record, alive = world.records[name], world.processes[name].alive
        for summary in record.summaries:
            assert summary.completed + summary.dropped == microbatches
        if alive and layout.paths_from(name):
            assert len(record.summaries) == steps, f"{name} stands still: {world.machines[name].waiting}"
            assert not world.machines[name].desk.held and not world.machines[name].desk.queue
    world.settle(60.0)
    for name in nodes:
        machine = world.machines[name]
        if world.processes[name].alive and not world.records[name].stopped:
            for trip in machine.desk.trips(lambda trip: True):
                source = world.machines[trip.source]
                assert source.flights is not None
                assert source.flights.is_flying(trip) or news(world, trip.source), f"{name} keeps {trip}"


@settings(max_examples=examples(10))
@given(layout=layouts(), microbatches=st.integers(1, 5), credit=st.integers(1, 4), data=st.data())
def test_where_nothing_dies_nothing_is_lost(
    layout: StageLayout, microbatches: int, credit: int, data: st.DataObject
) -> None:
    """Every microbatch has one loss and as many backwards as forwards, of every stage of its path once."""
    nodes = [name for stage in layout.stages for name in stage.replicas]
    delays = {u + v: data.draw(st.floats(0.0, 3.0)) for u in nodes for v in nodes}
    world = PipelineWorld(
        layout,
        steps=2,
        microbatches=microbatches,
        delay=lambda u, v: delays[u + v],
        config=PipelineConfig(credit=credit, patience_s=10_000.0, late_s=10_000.0),
    )
    world.run(2_000.0)
    wanted = dict.fromkeys(nodes, 0)
    for source in {path.source for path in layout.paths}:
        paths = layout.paths_from(source)
        for index in range(microbatches):
            for hop in paths[index % len(paths)].hops:
                wanted[hop.node] += 2
        assert [summary.completed for summary in world.records[source].summaries] == [microbatches] * 2
        assert world.records[source].visits[Kind.LOSS] == 2 * microbatches
    for name in nodes:
        visits = world.records[name].visits
        assert visits[Kind.FORWARD] == visits[Kind.BACKWARD] == wanted[name]
