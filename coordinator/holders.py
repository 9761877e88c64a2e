"""Whether every stage of the model has nodes that hold it. Pure.

A stage that nobody holds is told, and nothing else is done about it: its windows stay open, for nobody is expected in
them, and those of other stages a round later (`Ledger.is_too_far_ahead`), until a node comes that has it. To skip them
would be to train on a model of which a part has stopped, and nobody would know when that began.
"""

from collections.abc import Collection, Iterable, MutableMapping

from farloop.coordinator.ledger import Ledger
from farloop.coordinator.roster import Member


def stages_held(members: Iterable[Member], ledger: Ledger) -> dict[int, int]:
    """How many of these members hold each stage of the model."""
    parts = [member.holds for member in members]
    stages = range(ledger.spec.identity.layout.num_stages)
    return {stage: sum(part is None or stage in part for part in parts) for stage in stages}


def too_few_to_begin(ready: Iterable[Member], ledger: Ledger) -> bool:
    """Whether a stage is held by fewer of those who are ready than a run waits for before it starts."""
    return min(stages_held(ready, ledger).values()) < ledger.spec.terms.min_nodes


def look_after_stages(members: Collection[Member], ledger: Ledger, alarms: MutableMapping[str, str]) -> None:
    """Tell which stages of a run that goes on nobody holds."""
    fragments = ledger.spec.identity.layout.fragments
    waiting = {fragments[index].stage for index in ledger.windows}
    for stage, count in stages_held([m for m in members if m.counts], ledger).items():
        alarms.pop(f"stage {stage}", None)
        if not count and stage in waiting:
            which = ", ".join(str(f.index) for f in fragments if f.stage == stage)
            alarms[f"stage {stage}"] = f"no node that trains holds it: the windows of fragments {which} wait for one"
