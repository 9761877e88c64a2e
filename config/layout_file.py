"""Write a plan as the layout file of a pipeline, with the lines for RUN.toml.

An existing file has the layout of the running pipeline. Its stages are kept, because fragments are cut by them; only
the paths are planned again, under the next epoch, and only if they gain enough.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farloop.algo.stages import StageLayout
from farloop.config.exit_codes import CommandError, cannot_write
from farloop.config.sources import dump_toml
from farloop.coordinator.storage.files import DISK
from farloop.monitoring.units import seconds_text
from farloop.node.errors import LayoutError
from farloop.pipeline.layout import layout_json, read_layout
from farloop.planner.inventory import COORDINATOR, Inventory, Node
from farloop.planner.mode import NotPredicted, present_step_s
from farloop.planner.plan import Plan
from farloop.planner.sync_plan import WORTH, worth_switching

_MARGIN = f"{100 * WORTH:.0f} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """The layout of an existing file, which a running pipeline may follow."""

    layout: StageLayout
    addresses: Mapping[str, str]


def present(path: Path) -> Present | None:
    """The layout in the file, or None without a file. Raises CommandError if it is no layout: it is not overwritten."""
    if not path.exists():
        return None
    try:
        layout, addresses = read_layout(path)
    except LayoutError as error:
        raise CommandError(f"{error}; nothing is written over it: name another file, or remove it") from error
    return Present(layout=layout, addresses=addresses)


def next_epoch(path: Path, now: Present | None, asked: int | None) -> int:
    """The epoch to write. Raises CommandError if nodes would not follow the requested one."""
    least = 1 if now is None else now.layout.epoch + 1
    if asked is not None and asked < least:
        why = "epochs count from 1" if now is None else f"{path} has {now.layout.epoch}"
        raise CommandError(f"--epoch is {asked}; {why}, so it is at least {least}")
    return least if asked is None else asked


def kept(inventory: Inventory, path: Path, now: Present) -> Inventory:
    """The inventory restricted to the nodes of the present layout, with its cut.
    Raises CommandError: a stage has none of the inventory's nodes, or the model has another number of layers."""
    layout = now.layout
    nodes = [
        replace(node, stage=number, address=node.address or now.addresses[node.name])
        for node in inventory.nodes
        if (number := layout.stage_of(node.name)) is not None
    ]
    anew = f"remove {path} to plan the stages anew, for a new run"
    for place, stage in enumerate(layout.stages):
        if not {node.name for node in nodes} & set(stage.replicas):
            raise CommandError(f"no node of stage {place} is there, of {', '.join(stage.replicas)}; {anew}")
    if layout.stages[-1].stop != inventory.model.layers:
        had = f"{path} has {layout.stages[-1].stop} layers, [model] {inventory.model.layers}"
        raise CommandError(f"{had}; {anew}")
    if inventory.wish.stages not in (None, len(layout.stages)):
        raise CommandError(f"{path} has {len(layout.stages)} stages, {inventory.wish.stages} are asked for; {anew}")
    places = {COORDINATOR, *(name for node in nodes for name in (node.name, node.site))}
    links = {ends: link for ends, link in inventory.links.items() if places.issuperset(ends)}
    wish, cut = replace(inventory.wish, stages=len(layout.stages)), tuple(stage.layers for stage in layout.stages)
    return replace(inventory, nodes=tuple(nodes), links=links, wish=wish, cut=cut)


def runnable(plan: Plan, epoch: int, *, keeps: bool) -> StageLayout:
    """The plan's layout as nodes run it.

    Replicas without a microbatch are left out: the windows of their stage would wait for them. With `keeps` they stay,
    because a running node cannot leave its stage by a layout.
    Raises CommandError: the plan has no pipeline.
    """
    layout = plan.layout
    if len(layout.stages) < 2:
        raise CommandError(
            f"mode {plan.mode.value}, one stage: every node holds the whole model, so that there is no pipeline and no "
            "layout; run it as it is, or ask for --stages 2"
        )
    visited = layout.visited
    stages = tuple(
        replace(stage, replicas=tuple(node for node in stage.replicas if keeps or node in visited))
        for stage in layout.stages
    )
    if (empty := next((number for number, stage in enumerate(stages) if not stage.replicas), None)) is not None:
        raise CommandError(f"no microbatch visits stage {empty}, which would never learn; give a smaller --skip")
    return replace(layout, epoch=epoch, stages=stages)


def addresses_of(layout: StageLayout, nodes: tuple[Node, ...], where: str) -> dict[str, str]:
    """The addresses of all nodes of the layout. Raises CommandError if one is missing or not unique."""
    told = {node.name: node.address for node in nodes}
    found = {node: told[node] for stage in layout.stages for node in stage.replicas}
    if missing := next((node for node, address in found.items() if not address), None):
        number = layout.stage_of(missing)
        raise CommandError(
            f"{where}: {missing} has stage {number} and no address, at which the other stages reach it; "
            'give [[nodes]] address = "tcp://host:port" there, or [node] address on it'
        )
    address, times = Counter(found.values()).most_common(1)[0]
    if times > 1:
        one, other = [node for node, to in found.items() if to == address][:2]
        raise CommandError(f"{where}: {one} and {other} have the same address, {address}; give each its own")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    path: Path
    layout: StageLayout  # the layout in the file now
    keeps: bool  # whether the file existed and its stages are kept
    written: bool = True
    step_s: float  # predicted time of an inner step
    present_step_s: float | None = None
    """The same along the former paths; None if there were none or it cannot be predicted."""
    away: frozenset[str] = frozenset()  # absent nodes that have a stage
    why: str = ""  # why the file was overwritten or not; empty for a new file

    @property
    def run(self) -> dict[str, str | int]:
        """The lines for [run]: the cut of the model, and the smallest number of replicas of a stage."""
        stages = self.layout.stages
        cut = ",".join(str(stage.first) for stage in stages[1:])
        return {"stages": cut, "nodes": min(len(stage.replicas) for stage in stages)}

    def json(self) -> dict[str, Any]:
        return {
            "epoch": self.layout.epoch,
            "run": self.run,
            "written": self.written,
            "written_why": self.why,
            "present_step_s": self.present_step_s,
        }

    def lines(self) -> list[str]:
        """As text, with the lines for RUN.toml."""
        layout, epoch = self.layout, self.layout.epoch
        nodes = sum(len(stage.replicas) for stage in layout.stages)
        if not self.keeps:
            told = f" layout  {self.path}, epoch {epoch}: {len(layout.stages)} stages of {nodes} nodes. In RUN.toml:"
            return [told, "", *dump_toml({"run": self.run}).splitlines()]
        if self.written:
            found = [f" layout  {self.path}, epoch {epoch}: the stages as they were, and {len(layout.paths)} paths"]
        else:
            found = [f" layout  {self.path} stays as it is, epoch {epoch}: {self.why}; --force writes the plan anyway"]
        if self.present_step_s is not None:
            now = seconds_text(self.present_step_s)
            found.append(f" a step  {now} along the paths that it had, {seconds_text(self.step_s)} along those planned")
        elif self.why:
            found.append(
                f" a step  {seconds_text(self.step_s)}; nothing is predicted of the paths that it had: {self.why}"
            )
        served = layout.visited | self.away
        for stage in layout.stages:
            found += [
                f" {node} gets no microbatch, and the windows of its stage may wait for it: stop it"
                for node in stage.replicas
                if node not in served
            ]
        return found


def write(
    path: Path,
    inventory: Inventory,
    plan: Plan,
    *,
    now: Present | None,
    epoch: int | None,
    where: str,
    force: bool = False,
    away: frozenset[str] = frozenset(),
) -> Outcome:
    """Write the file atomically if it is new or the plan gains enough.

    Args:
        now: the layout in the file; None where there is none.
        epoch: requested epoch; it is written regardless of the gain, as with `force`.
        where: source of the nodes, for error messages.
        away: absent nodes; they keep their stages.

    Raises CommandError: nodes could not follow the plan, or the file cannot be written.
    """
    layout = runnable(plan, next_epoch(path, now, epoch), keeps=now is not None)
    addresses = addresses_of(layout, inventory.nodes, where)
    if now is not None:  # absent nodes stay in their former stages, on no path
        stages = tuple(
            replace(stage, replicas=(*stage.replicas, *(node for node in old.replicas if node in away)))
            for stage, old in zip(layout.stages, now.layout.stages, strict=True)
        )
        layout = replace(layout, stages=stages)
        addresses |= {node: now.addresses[node] for stage in layout.stages for node in stage.replicas if node in away}
    outcome = Outcome(path=path, layout=layout, keeps=now is not None, step_s=plan.step_s, away=away)
    if now is not None:
        outcome = _beside(now, outcome, inventory, addresses, asked=force or epoch is not None)
        if not outcome.written:
            return outcome
    try:
        with DISK.replacing(path) as unfinished:
            unfinished.write_text(layout_json(layout, addresses) + "\n", encoding="utf-8")
    except OSError as error:
        raise cannot_write(path, error) from error
    return outcome


def _beside(
    now: Present, outcome: Outcome, inventory: Inventory, addresses: Mapping[str, str], *, asked: bool
) -> Outcome:
    """Compare the plan with the present layout: whether it replaces it, and why."""
    try:
        present_s = present_step_s(now.layout, inventory)
    except NotPredicted as error:
        return replace(outcome, why=str(error))
    outcome = replace(outcome, present_step_s=present_s)
    old, new = set(now.layout.paths), set(outcome.layout.paths)
    moved = next((node for node, address in addresses.items() if now.addresses.get(node) != address), None)
    begun = next((path.source for path in outcome.layout.paths if not now.layout.paths_from(path.source)), None)
    if moved is not None:
        return replace(outcome, why=f"{moved} has another address")
    if begun is not None:
        return replace(outcome, why=f"{begun} had no path")
    if worth_switching(present_s, outcome.step_s):
        return replace(outcome, why=f"more than {_MARGIN} is gained")
    if asked:
        return replace(outcome, why="it was asked for")
    why = "the plan has the same paths" if old == new else f"less than {_MARGIN} is gained"
    return replace(outcome, layout=now.layout, written=False, why=why)
