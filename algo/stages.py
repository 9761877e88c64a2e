"""Pipeline stages: which layers a stage holds, and which fragments a node holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from farloop.algo.spec import Fragment, Layout

# --- Pipeline layout: layers of each node, and the path of a microbatch
#
# The planner makes a layout, the pipeline of a node runs it, and neither knows of the other. Pure data, stdlib only.
# Source of the constraints: SkipPipe (arXiv 2502.19913), as its published code has them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive layers [first, stop) of the model, and the nodes that each hold a copy of them."""

    first: int
    stop: int
    replicas: tuple[str, ...]

    @property
    def layers(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One visit of a microbatch: at this stage, on this node."""

    stage: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The visits of one microbatch in order; the first is its source, at stage 0, where its loss is computed too."""

    hops: tuple[Hop, ...]

    @property
    def source(self) -> str:
        return self.hops[0].node


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """Stages, and the paths that each source sends its microbatches along, in turn.

    `epoch` numbers layouts: messages of another epoch are refused. With an empty `paths` of a source, it has no work.
    """

    epoch: int
    stages: tuple[Stage, ...]
    paths: tuple[Path, ...]

    def stage_of(self, node: str) -> int | None:
        """The stage that a node replicates, None when it has none."""
        return next((number for number, stage in enumerate(self.stages) if node in stage.replicas), None)

    def paths_from(self, source: str) -> tuple[Path, ...]:
        """The paths of one source, in the order in which it uses them."""
        return tuple(path for path in self.paths if path.source == source)

    @property
    def visited(self) -> frozenset[str]:
        """Nodes that some microbatch comes by."""
        return frozenset(hop.node for path in self.paths for hop in path.hops)

    def faults(self) -> Iterator[str]:
        """What is wrong with this layout, a sentence each; a sound one has none."""
        if not self.stages:
            yield "there is no stage"
            return
        if self.stages[0].first != 0:
            yield f"stage 0 begins at layer {self.stages[0].first}, not at 0"
        for number, (before, after) in enumerate(zip(self.stages, self.stages[1:], strict=False)):
            if before.stop != after.first:
                yield f"stage {number} ends before layer {before.stop}, stage {number + 1} begins at {after.first}"
        for number, stage in enumerate(self.stages):
            if stage.layers < 1:
                yield f"stage {number} has no layer"
            if not stage.replicas:
                yield f"stage {number} has no node"
        names = [name for stage in self.stages for name in stage.replicas]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"node {name} replicates {names.count(name)} stages, at most 1 is possible"
        for path in self.paths:
            yield from self._faults_of(path)

    def _faults_of(self, path: Path) -> Iterator[str]:
        if not path.hops:
            yield "a path has no hop"
            return
        if path.hops[0].stage != 0:
            yield f"the path of {path.source} begins at stage {path.hops[0].stage}, not at 0"
        visited = [hop.stage for hop in path.hops]
        if len(set(visited)) != len(visited):
            yield f"the path of {path.source} visits a stage twice: {visited}"
        for hop in path.hops:
            if not 0 <= hop.stage < len(self.stages) or hop.node not in self.stages[hop.stage].replicas:
                yield f"the path of {path.source} visits stage {hop.stage} on {hop.node}, which does not hold it"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderLimits:
    """Limits of a path's deviation from the order of stages."""

    max_jump: int = 4  # stages forward at once, from the highest one visited: at most three in a row are left out
    max_swap: int = 1  # stages that one visit may lie behind the highest one visited
    max_swaps: int = 2  # visits that may lie behind
    max_swapped: int = 2  # sum of the distances behind


PUBLISHED = OrderLimits()

IN_ORDER = OrderLimits(max_swap=0, max_swaps=0, max_swapped=0)


def order_fault(stages: Sequence[int], limits: OrderLimits = PUBLISHED) -> str:
    """What is wrong with this order of stages, a sentence; empty when it is allowed."""
    if not stages or stages[0] != 0:
        return "a path begins at stage 0"
    if len(set(stages)) != len(stages):
        return f"a stage is visited twice: {list(stages)}"
    highest, swaps, swapped = 0, 0, 0
    for stage in stages[1:]:
        if stage > highest + limits.max_jump:
            return f"a jump from stage {highest} to {stage}; at most {limits.max_jump} stages at once"
        if stage < highest:
            swaps, swapped = swaps + 1, swapped + highest - stage
            if highest - stage > limits.max_swap or swaps > limits.max_swaps or swapped > limits.max_swapped:
                return f"stage {stage} after stage {highest}: too far out of order"
        highest = max(highest, stage)
    return ""


# --- Parts: which stages of the model a node holds
#
# A part is a tuple of stages, and None is the whole model. Whoever holds stage 0 is a source: the embedding and the
# head are there, so that samples begin and losses end there. Standard library only.


Part = tuple[int, ...] | None


def fault_of(part: Part, layout: Layout) -> str | None:
    """What is wrong with a part, as the rest of a sentence that begins with its node; None for a sound one."""
    if part is None:
        return None
    if not part:
        return "holds no stage of the model: a node without any has nothing to train"
    stages, wrong = layout.num_stages, [stage for stage in part if not 0 <= stage < layout.num_stages]
    if wrong:
        known = f"stages 0 to {stages - 1}" if stages > 1 else "one stage, 0: it is not cut into more"
        return f"holds stage {wrong[0]}, and the run's model has {known}"
    if list(part) != sorted(set(part)):
        return "names its stages more than once, or out of order"
    return None


def is_in(fragment: Fragment, part: Part) -> bool:
    return part is None or fragment.stage in part


def fragments_of(part: Part, layout: Layout) -> tuple[Fragment, ...]:
    return tuple(fragment for fragment in layout.fragments if is_in(fragment, part))


def is_whole(part: Part, layout: Layout) -> bool:
    return part is None or len(part) == layout.num_stages


def is_source(part: Part) -> bool:
    """Whether its node brings samples into the model; the others train on what comes by."""
    return part is None or 0 in part


def described(part: Part) -> str:
    """In words: "all", or its stages."""
    return "all" if part is None else ", ".join(map(str, part))
