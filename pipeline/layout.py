"""Layout files, and the switch to another layout in two phases."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from farloop.algo.stages import Hop, Stage, StageLayout
from farloop.algo.stages import Path as Way
from farloop.monitoring.addresses import parse_tcp
from farloop.node.errors import LayoutError
from farloop.pipeline.messages import Prepare, Switch
from farloop.wire.messages import validate
from farloop.wire.reasons import RemoteProtocolError

# --- Layout files: the output of `farloop plan --json`, plus the addresses of the nodes
#
#     {"epoch": 1,
#      "stages": [{"layers": [0, 2], "nodes": ["oslo", "bonn"]}, {"layers": [2, 4], "nodes": ["rome", "lyon"]}],
#      "paths": [{"nodes": ["oslo", "rome"]}, {"nodes": ["bonn", "lyon"]}],
#      "addresses": {"oslo": "tcp://10.0.0.1:7800", "bonn": "tcp://10.0.0.2:7800", …}}
#
# Every node of a pipeline reads the same file. Other keys of a plan are ignored.


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageEntry:
    layers: tuple[int, int]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PathEntry:
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    stages: tuple[_StageEntry, ...]
    paths: tuple[_PathEntry, ...]
    epoch: int = 1
    addresses: dict[str, str] = field(default_factory=dict)


def read_layout(path: Path) -> tuple[StageLayout, dict[str, str]]:
    """The layout, and the address of every node of it. Raises LayoutError: one line with the file and what is wrong."""
    try:
        file = validate(_File, json.loads(path.read_bytes()))
    except OSError as error:
        raise LayoutError(f"cannot read the layout {path}: {error.strerror}") from error
    except ValueError as error:
        raise LayoutError(f"{path} is not JSON: {error}") from error
    except RecursionError:
        raise LayoutError(f"{path}: nested too deeply") from None
    except RemoteProtocolError as error:
        raise LayoutError(f"{path}: {str(error).removeprefix('_File.')}") from error
    layout = _layout(file)
    if fault := next(layout.faults(), ""):
        raise LayoutError(f"{path}: {fault}")
    for stage in layout.stages:
        for node in stage.replicas:
            if node not in file.addresses:
                raise LayoutError(f"{path}: addresses has none of {node}; every stage must be reachable by the others")
            try:
                parse_tcp(file.addresses[node])
            except ValueError as error:
                raise LayoutError(f"{path}: addresses of {node}: {error}") from error
    return layout, dict(file.addresses)


def layout_json(layout: StageLayout, addresses: Mapping[str, str]) -> str:
    """The text of the file. The way back from `read_layout`."""
    plain = {
        "epoch": layout.epoch,
        "stages": [{"layers": [stage.first, stage.stop], "nodes": list(stage.replicas)} for stage in layout.stages],
        "paths": [{"nodes": [hop.node for hop in path.hops]} for path in layout.paths],
        "addresses": dict(addresses),
    }
    return json.dumps(plain, indent=1, allow_nan=False)


def _layout(file: _File) -> StageLayout:
    stages = tuple(Stage(first=one.layers[0], stop=one.layers[1], replicas=one.nodes) for one in file.stages)
    stage_of = {node: number for number, stage in enumerate(stages) for node in stage.replicas}
    # A node that no stage has is put where `faults` finds it.
    ways = tuple(
        Way(hops=tuple(Hop(stage=stage_of.get(node, len(stages)), node=node) for node in path.nodes))
        for path in file.paths
    )
    return StageLayout(epoch=file.epoch, stages=stages, paths=ways)


# --- Switching to a new layout, in two phases
#
# First every reachable node prepares the layout, then each node adopts it at the end of a round. One node conducts: the
# one that was given the layout. A refusal cancels the switch. Sources choose the moment, at the end of a round; the
# other nodes follow when all of their sources have switched.

Letters = list[tuple[str, Prepare | Switch]]  # messages by receiver


class Switching:
    """The next layout, as one node knows it."""

    def __init__(self) -> None:
        self.layout: StageLayout | None = None  # the prepared layout that is not followed yet
        self.committed = False
        self._addresses: dict[str, str] = {}  # of the newest layout
        self._asked: set[str] = set()  # nodes that this conductor asked and that have not answered

    @property
    def epoch(self) -> int | None:
        return self.layout.epoch if self.layout is not None else None

    def prepare(self, layout: StageLayout, addresses: Mapping[str, str]) -> None:
        self.layout, self._addresses, self.committed = layout, dict(addresses), False

    def commit(self, epoch: int) -> None:
        self.committed = self.committed or self.epoch == epoch

    def finish(self) -> None:
        self.layout, self.committed, self._asked = None, False, set()

    # --- as the conductor

    def conduct(self, peers: Collection[str]) -> Letters:
        """Ask these peers, all that can be reached, to prepare this node's next layout."""
        assert self.layout is not None
        self._asked = set(peers)
        if not peers:
            return self._second_phase(peers)
        return [(peer, Prepare(layout=self.layout, addresses=self._addresses)) for peer in sorted(peers)]

    def answered(self, peer: str, peers: Collection[str], *, refused: bool = False) -> Letters:
        """A peer has prepared, or is gone. After the last one, tell all to switch; a refusal ends the switch."""
        if peer not in self._asked:
            return []
        if refused:
            self.finish()
            return []
        self._asked.remove(peer)
        return [] if self._asked else self._second_phase(peers)

    def once_more(self, peer: str, present: StageLayout) -> Letters:
        """Messages for a node that missed the switch to the present layout."""
        return [(peer, Prepare(layout=present, addresses=self._addresses)), (peer, Switch(epoch=present.epoch))]

    def _second_phase(self, peers: Collection[str]) -> Letters:
        assert self.layout is not None
        self.committed = True
        return [(peer, Switch(epoch=self.layout.epoch)) for peer in sorted(peers)]


def why_not(layout: StageLayout, present: StageLayout, node: str) -> str:
    """Why a node of the present layout cannot follow this one; empty if it can."""
    if layout.epoch <= present.epoch:
        return f"its epoch {layout.epoch} is not above the present one's, {present.epoch}"
    if fault := next(layout.faults(), ""):
        return fault
    cut, cut_now = ([(stage.first, stage.stop) for stage in one.stages] for one in (layout, present))
    if cut != cut_now:
        return f"its stages hold the layers {cut}, the run's {cut_now}: that takes a new start"
    if layout.stage_of(node) != present.stage_of(node):
        return f"{node} would hold stage {layout.stage_of(node)}, now {present.stage_of(node)}: start it anew"
    return ""
