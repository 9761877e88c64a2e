"""A run's state folder as format version 1 left it on the disk: it opens, and all of it comes back (protocol P, Z).

`golden/state-v1` is what a coordinator left behind that died in the fourth round of a run of the real daemons, with one
of two deltas of a window stored, without its older snapshots and the room behind the journal's last record.
`golden/state-v1.json` is what it held then. A later version must still open it, so it is not recorded anew for a new
field; another format gets a folder of its own.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import stored_runs
from stored_runs import recovered

from farloop.algo.spec import to_plain
from farloop.coordinator.change_terms import revision_asked_for
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.records import TermsChanged
from farloop.coordinator.storage.store import Store
from farloop.quant.digest import digest

GOLDEN = stored_runs.GOLDEN / "state-v1"
VERSIONS = [2, 3]
"""Of the two fragments: the first is at its last snapshot, the other has a commit behind it."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy: a recovery writes."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "state"))


def held(store: Store) -> dict[str, Any]:
    """What a coordinator has to know, in plain values; digests of what it has to hold."""
    ledger = plain(store.ledger.saved())
    commits, evaluations = ledger.pop("commits"), ledger.pop("evaluations")
    return {
        "ledger": ledger,
        "commits": [[commit["fragment"], commit["version"], f"{commit['anchor_digest']:016x}"] for commit in commits],
        "evaluations": len(evaluations),
        "buffers": [
            {
                "version": buffers.version,
                "anchor": f"{digest(buffers.anchor):016x}",
                "target": f"{digest(buffers.target):016x}",
                "outer": f"{buffers.outer_digest():016x}",
            }
            for buffers in store.buffers
        ],
        "inputs": [len(store.read_input(blob)) for blob in store.ledger.inputs],
    }


def plain(value: object) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(to_plain(value)))


def holds(now: Any, then: Any) -> bool:
    """Whether all that was held then is held now; fields may have come since."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(key in now and holds(now[key], then[key]) for key in then)
    if isinstance(then, list):
        return isinstance(now, list) and len(now) == len(then) and all(map(holds, now, then))
    return bool(now == then)


def test_a_state_folder_of_version_1_opens_and_all_of_it_comes_back(folder: Path) -> None:
    """P, Z."""
    recorded = json.loads(GOLDEN.with_suffix(".json").read_text())
    store = recovered(folder)
    assert store.alarms == {}, "target and momentum came out as they were"
    assert store.ledger.epoch == recorded["ledger"].pop("epoch") + 1
    assert holds(held(store), recorded)
    assert store.ledger.versions == VERSIONS and len(store.ledger.inputs) == 1
    store.close()
    machine = CoordinatorMachine(store.ledger.copy(), now=0.0)
    machine.check()
    assert [machine.windows[f].terms.window for f in (0, 1)] == [version + 1 for version in VERSIONS]
    assert [machine.windows[f].missing for f in (0, 1)] == [{"b"}, {"a", "b"}]


def test_a_run_of_version_1_can_be_given_other_terms(folder: Path) -> None:
    """Z: what was journaled before the change is repeated under the terms that it had."""
    store = recovered(folder)
    before = held(store)["buffers"]
    revision = revision_asked_for(CoordinatorMachine(store.ledger.copy(), now=0.0), {"outer_lr": "0.25", "codec": "q4"})
    assert revision.windows == tuple(version + 2 for version in VERSIONS)
    store.append(TermsChanged(revision=revision))
    store.sync()
    store.close()
    again = recovered(folder)
    assert (again.alarms, held(again)["buffers"]) == ({}, before)
    assert again.ledger.spec.terms == revision.terms and again.ledger.spec.revision == 1
    assert [again.ledger.terms_of(f, v + 1).outer.lr for f, v in enumerate(VERSIONS)] == [0.6, 0.6]
    again.close()
