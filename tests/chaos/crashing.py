"""A daemon, but for one thing: at a point of its work it is gone, as if by a power cut.

The product has no hooks for this: functions of it are wrapped here, before the command begins. Segments and snapshots
are small, so that within seconds everything happens that happens to a long run.

    python crashing.py POINT HIT coordinator RUN.toml
    python crashing.py POINT HIT node ADDRESS NAME FOLDER

The first is `farloop coordinator`, the second a loop of its own (`plain_node.py`). The process kills itself with
SIGKILL when the point is reached for the HIT-th time, counted from the first commit or merge on, or, for the points of
`ONCE`, from its own begin.
"""

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plain_node import train

from farloop.cli.main import main
from farloop.coordinator import executor as coordinator
from farloop.coordinator.decide import records as rec
from farloop.coordinator.storage import files, journal, snapshots, store
from farloop.node import events as node_ev
from farloop.node import executor, link, machine, state_dir
from farloop.node.model import anchor_files, replica
from farloop.wire import messages as msg

SEGMENT_BYTES = 80 << 10
"""Room for a reserved record is 64 KiB of these."""

SNAPSHOT_EVERY = 2

Strike = Callable[[], None]
When = Callable[..., bool]


def _always(*_: Any, **__: Any) -> bool:
    return True


def before(owner: Any, name: str, when: When = _always, *, late: bool = False) -> Callable[[Strike], None]:
    """Where a function is called, or `late`: where it has returned, if its arguments are such."""

    def install(strike: Strike) -> None:
        called = getattr(owner, name)

        @functools.wraps(called)
        def wrapped(*args: Any, **named: Any) -> Any:
            if not late and when(*args, **named):
                strike()
            result = called(*args, **named)
            if late and when(*args, **named):
                strike()
            return result

        setattr(owner, name, wrapped)

    return install


after = functools.partial(before, late=True)


def torn(strike: Strike) -> None:
    """A record of which only a part reaches the file."""
    whole = files.write_all

    def half(fd: int, path: Path, parts: Any, offset: int) -> None:
        data = b"".join(bytes(part) for part in parts)
        whole(fd, path, [data[: len(data) // 2]], offset)
        strike()
        whole(fd, path, [data], offset)

    files.write_all = half


def durable_before_memory(strike: Strike) -> None:
    """A commit is synced, and neither the buffers nor any node knows of it."""
    committing = False
    commit, sync = store.Store.commit, journal.Journal.sync

    def wrapped_commit(self: store.Store, *args: Any) -> Any:
        nonlocal committing
        committing = True
        try:
            return commit(self, *args)
        finally:
            committing = False

    def wrapped_sync(self: journal.Journal) -> int:
        durable_records = sync(self)
        if committing:
            strike()
        return durable_records

    setattr(store.Store, "commit", wrapped_commit)  # noqa: B010
    setattr(journal.Journal, "sync", wrapped_sync)  # noqa: B010


def published_to_one(strike: Strike) -> None:
    """One node is told of a commit, the others are not."""
    publish = coordinator.CoordinatorExecutor._publish

    def wrapped(self: coordinator.CoordinatorExecutor, nodes: Any, committed: msg.Committed) -> None:
        if len(nodes) > 1:
            publish(self, nodes[:1], committed)
            strike()
            nodes = nodes[1:]
        publish(self, nodes, committed)

    setattr(coordinator.CoordinatorExecutor, "_publish", wrapped)  # noqa: B010


def _names(pattern: str) -> When:
    return lambda first, *rest, **_: Path(rest[0] if rest else first).match(pattern)


def _tells(kind: type[Any]) -> When:
    return lambda self, peer, message: isinstance(message, kind)


def _appends(kind: type[Any]) -> When:
    return lambda self, record, *rest: isinstance(record, kind)


POINTS: dict[str, Callable[[Strike], None]] = {
    "record-write-before": before(journal.Tail, "write"),
    "record-write-torn": torn,
    "record-write-after": after(journal.Tail, "write"),
    "journal-sync-before": before(journal.Tail, "sync"),
    "journal-sync-after": after(journal.Tail, "sync"),
    "delta-spooled": after(store.Store, "append", _appends(rec.InputStored)),
    "allocate-before": before(files.OsFile, "allocate"),
    "allocate-after": after(files.OsFile, "allocate"),
    "segment-begin-before": before(journal, "create_tail"),
    "segment-rename-before": before(os, "replace", _names("journal-*.log")),
    "segment-rename-after": after(os, "replace", _names("journal-*.log")),
    "segment-begin-after": after(journal, "create_tail"),
    "prune-before": before(files.OsFiles, "delete", _names("journal-*.log")),
    "prune-unlinked": after(Path, "unlink", _names("journal-*.log")),
    "prune-after": after(files.OsFiles, "delete", _names("journal-*.log")),
    "commit-before": before(store.Store, "commit"),
    "commit-durable": durable_before_memory,
    "commit-after": after(store.Store, "commit"),
    "snapshot-before": before(store.Store, "save"),
    "snapshot-rename-before": before(os, "replace", _names("f*.safetensors")),
    "snapshot-rename-after": after(os, "replace", _names("f*.safetensors")),
    "snapshot-older-deleted": after(snapshots, "_delete_older"),
    "snapshot-saved": after(store, "_save_snapshot"),
    "snapshot-noted": after(store.Store, "append", _appends(rec.SnapshotTaken)),
    "publish-one-of-several": published_to_one,
    "stored-told-before": before(coordinator.CoordinatorExecutor, "_send", _tells(msg.Stored)),
    "stored-told-after": after(coordinator.CoordinatorExecutor, "_send", _tells(msg.Stored)),
    "start-told-before": before(coordinator.CoordinatorExecutor, "_send", _tells(msg.Start)),
    "finish-noted": after(store.Store, "append", _appends(rec.RunFinished)),
    "export-before": before(snapshots, "export"),
    "export-after": after(snapshots, "export"),
    "begin-snapshots": after(store, "_save_snapshot"),
    "begin-record-before": before(store.Store, "append", _appends(rec.RunStarted)),
    "begin-record-after": after(store.Store, "append", _appends(rec.RunStarted)),
    "begin-epoch-before": before(store, "claim_epoch"),
    "begin-epoch-after": after(store, "claim_epoch"),
    "restart-settled": after(journal, "settle"),
    "restart-tail-cut": after(journal.Tail, "cut"),
    "restart-epoch-before": before(store, "claim_epoch"),
    "restart-epoch-written": before(os, "replace", _names("epoch")),
    "restart-epoch-renamed": after(os, "replace", _names("epoch")),
    "restart-epoch-after": after(store, "claim_epoch"),
    "restart-record-after": after(store.Store, "append", _appends(rec.EpochClaimed)),
}

ADOPT_POINTS: dict[str, Callable[[Strike], None]] = {
    "adopt-anchor-before": before(store.Store, "append", _appends(rec.AnchorFetched)),
    "adopt-anchor-after": after(store.Store, "append", _appends(rec.AnchorFetched)),
    "adopt-before": before(store.Store, "adopt"),
    "adopt-record-before": before(store.Store, "append", _appends(rec.Adopted)),
    "adopt-record-after": after(store.Store, "append", _appends(rec.Adopted)),
    "adopt-snapshot-before": before(store.Store, "save"),
    "adopt-snapshot-after": after(store.Store, "saved"),
    "adopt-after": after(store.Store, "adopt"),
}
"""Of a coordinator over an old copy of its state, that goes on from what the nodes hold."""


def _hears(kind: type[Any]) -> When:
    return lambda self, event: isinstance(event, node_ev.Received) and isinstance(event.message, kind)


NODE_POINTS: dict[str, Callable[[Strike], None]] = {
    "node-start-counted-before": before(state_dir.NodeState, "_save"),
    "node-start-counted-after": after(state_dir.NodeState, "_save"),
    "node-snapshot-installed": after(executor.NodeExecutor, "_install"),
    "node-delta-encoded": before(executor.NodeExecutor, "_encoded"),
    "node-delta-queued": after(link.NodeLink, "send_blob"),
    "node-delta-stored": before(machine.NodeMachine, "handle", _hears(msg.Stored)),
    "node-commit-heard": before(machine.NodeMachine, "handle", _hears(msg.Committed)),
    "node-update-before": before(replica.Replica, "apply"),
    "node-update-after": after(replica.Replica, "apply"),
    "node-merge-before": before(replica.Replica, "merge"),
    "node-merge-after": after(replica.Replica, "merge"),
    "node-anchor-written": before(anchor_files.AnchorFiles, "finish"),
    "node-head-before": before(anchor_files, "_as_bytes"),
    "node-anchors-pruned": before(anchor_files.AnchorFiles, "_delete_before"),
    "node-good-bye-before": before(executor.NodeExecutor, "say_goodbye"),
}

NODE_ONCE = (*list(NODE_POINTS)[:3], "node-good-bye-before")

BEGIN = (*(point for point in POINTS if point.startswith("begin-")), "start-told-before")
"""Reached while a run begins."""

RESTART = tuple(point for point in POINTS if point.startswith("restart-"))
"""Reached by a coordinator that goes on with a run."""

ONCE = (*BEGIN, *RESTART, *ADOPT_POINTS, *NODE_ONCE, "finish-noted", "export-before", "export-after")
"""Reached once in the life of a process, or of a run."""


class Count:
    """Kills this process at the `hit`-th strike that counts."""

    def __init__(self, hit: int, *, armed: bool) -> None:
        self._left, self.armed = hit, armed

    def __call__(self) -> None:
        if not self.armed:
            return
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def _arm_after_first(owner: Any, name: str, count: Count) -> None:
    called = getattr(owner, name)

    def wrapped(*args: Any) -> Any:
        result = called(*args)
        count.armed = True
        return result

    setattr(owner, name, wrapped)


def crash_at(point: str, hit: int) -> None:
    """From here on this process will not live beyond that."""
    assert files.os is os  # what is wrapped is what is called
    count = Count(hit, armed=point in ONCE)
    (POINTS | ADOPT_POINTS | NODE_POINTS)[point](count)
    _arm_after_first(store.Store, "commit", count)
    _arm_after_first(replica.Replica, "merge", count)


def keep_everything_small() -> None:
    """Segments and snapshots as a long run has them, in a short one."""
    store.SNAPSHOT_EVERY = SNAPSHOT_EVERY
    for way_in in (store.Store.create, store.Store.recover):
        defaults = way_in.__func__.__kwdefaults__  # type: ignore[attr-defined]
        assert "segment_bytes" in defaults
        defaults["segment_bytes"] = SEGMENT_BYTES


if __name__ == "__main__":
    keep_everything_small()
    if sys.argv[1] != "never":
        crash_at(sys.argv[1], int(sys.argv[2]))
    if sys.argv[3] == "node":
        address, name, folder = sys.argv[4:]
        train(address, name, Path(folder), lambda *told: None, threading.Event())
    else:
        sys.argv = ["farloop", *sys.argv[3:]]
        main()
