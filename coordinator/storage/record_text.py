"""Journal records as text: a short sentence for people, plain fields for programs."""

from datetime import UTC, datetime
from typing import Any

from farloop.algo.spec import BlobId, to_plain
from farloop.algo.stages import described
from farloop.coordinator.decide import records as rec
from farloop.coordinator.storage.segment import Entry
from farloop.monitoring.units import size_text
from farloop.wire.messages import Drop

KINDS: dict[type[rec.Record], str] = {
    rec.RunStarted: "begin",
    rec.EpochClaimed: "epoch",
    rec.EpochSeen: "epoch-seen",
    rec.Rewound: "rewind",
    rec.NodeStarted: "start",
    rec.NodeLeft: "leave",
    rec.LeaseGranted: "lease",
    rec.RoundFixed: "round",
    rec.InputStored: "delta",
    rec.InputDropped: "drop",
    rec.WindowCommitted: "commit",
    rec.SnapshotTaken: "snapshot",
    rec.EvaluationTaken: "evaluation",
    rec.RunFinished: "finish",
    rec.LedgerSaved: "summary",
    rec.TermsChanged: "terms",
    rec.AnchorFetched: "fetch",
    rec.Adopted: "adopt",
    rec.KeysChanged: "keys",
}
"""Names of record kinds on the command line."""


def kind_of(record: rec.Record) -> str:
    """The kind; a record class without one gives its own name."""
    return KINDS.get(type(record), type(record).__name__.lower())


def fragment_of(record: rec.Record) -> int | None:
    """The fragment of a record; None for none or all."""
    match record:
        case rec.InputStored(blob=blob) | rec.InputDropped(blob=blob):
            return blob.fragment
        case rec.WindowCommitted(fragment=fragment) | rec.SnapshotTaken(fragment=fragment):
            return fragment
        case rec.AnchorFetched(anchor=anchor):
            return anchor.fragment
        case _:
            return None


def nodes_of(record: rec.Record) -> set[str]:
    match record:
        case (
            rec.NodeStarted(node=node)
            | rec.NodeLeft(node=node)
            | rec.LeaseGranted(node=node)
            | rec.AnchorFetched(node=node)
        ):
            return {node}
        case rec.KeysChanged(added=added, removed=removed):
            return {key.node for key in (*added, *removed)}
        case rec.Adopted(anchors=anchors):
            return {anchor.node for anchor in anchors}
        case rec.InputStored(blob=blob) | rec.InputDropped(blob=blob):
            return {blob.node}
        case rec.WindowCommitted(merged=merged, drops=drops):
            return {share.node for share in merged} | {drop.node for drop in drops}
        case _:
            return set()


def words(at: Entry) -> str:
    size = size_text(at.attachment.size)
    match at.record:
        case rec.RunStarted(spec=spec, epoch=epoch):
            count = len(spec.identity.layout.fragments)
            return f"run {spec.identity.name}, {spec.terms.method}, {count} fragments, epoch {epoch}"
        case rec.EpochClaimed(epoch=epoch):
            return f"epoch {epoch}: the coordinator started again"
        case rec.EpochSeen(epoch=epoch):
            return f"a node has met epoch {epoch}: this state looks like an old copy"
        case rec.Rewound(epoch=epoch):
            return f"epoch {epoch}: the run was wound back to what this state holds"
        case rec.AnchorFetched(anchor=anchor, node=node):
            return f"{node} brought f{anchor.fragment} at version {anchor.version}, {size}"
        case rec.Adopted() as adopted:
            return _adopted(adopted)
        case rec.NodeStarted(node=node, incarnation=incarnation, round=round_index, holds=holds):
            part = "" if holds is None else f", holds stages {described(holds)}"
            return f"{node} trains from round {round_index} on (incarnation {incarnation}{part})"
        case rec.NodeLeft(node=node, reason=reason):
            return f"{node} left: {reason.sentence}"
        case rec.LeaseGranted(node=node, lease=lease):
            return f"{node} got samples {lease.start} to {lease.start + lease.count - 1}"
        case rec.RoundFixed(round=plan):
            return f"round {plan.index}: {plan.length} steps from position {plan.start}"
        case rec.InputStored(blob=blob, window=window, contributors=contributors):
            steps = sum(contribution.steps for contribution in contributors)
            return f"{_delta(blob, window)}, {steps} steps, {size}"
        case rec.InputDropped(blob=blob, reason=reason, detail=detail):
            return f"{_delta(blob, None)} dropped: {reason.code}: {detail}"
        case rec.WindowCommitted() as commit:
            shares = ", ".join(f"{share.node} {share.weight:.3g}" for share in commit.merged)
            lost = f"; without {without(commit.drops)}" if commit.drops else ""
            what = f"f{commit.fragment}:{commit.version}{', final' if commit.flush else ''}, round {commit.round}"
            return f"{what}: {shares}{lost}; {commit.why}, {size}"
        case rec.SnapshotTaken(fragment=fragment, version=version):
            return f"f{fragment} at version {version}"
        case rec.EvaluationTaken(loss=loss, versions=versions, position=position):
            return f"loss {loss:.4f} at position {position:g}, versions {_list(versions)}"
        case rec.RunFinished():
            return "every fragment is final"
        case rec.KeysChanged(time_s=time_s, added=added, removed=removed):
            when = datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
            return f"{when}: {_keys('allowed', added)}{'; ' * bool(added and removed)}{_keys('removed', removed)}"
        case rec.TermsChanged(revision=revision):
            windows = " ".join(f"f{fragment}:{window}" for fragment, window in enumerate(revision.windows[:8]))
            more = f" … ({len(revision.windows)})" if len(revision.windows) > 8 else ""
            return (
                f"revision {revision.number} of the terms, from windows {windows}{more} and round {revision.round} on"
            )
        case rec.LedgerSaved(versions=versions, epoch=epoch):
            return f"all before it: versions {_list(versions)}, epoch {epoch}"


def plain(at: Entry) -> dict[str, Any]:
    return {
        "sequence": at.sequence,
        "segment": at.attachment.segment,
        "offset": at.offset,
        "kind": kind_of(at.record),
        "words": words(at),
        "attached_bytes": at.attachment.size,
        "record": to_plain(at.record),
    }


def without(drops: tuple[Drop, ...]) -> str:
    """`tromso (silent), oslo (late)`."""
    return ", ".join(f"{drop.node} ({drop.reason.code})" for drop in drops)


def _delta(blob: BlobId, window: int | None) -> str:
    name = f"f{blob.fragment}" + ("" if window is None else f":{window}")
    return f"{blob.node}'s delta for {name}, base {blob.version}"


def _adopted(adopted: rec.Adopted) -> str:
    told = [f"f{anchor.fragment} {anchor.before} → {anchor.version} ({anchor.node})" for anchor in adopted.anchors]
    more = f" … ({len(told)})" if len(told) > 8 else ""
    lost = ", ".join(f"f{ref.fragment} {ref.version}" for ref in adopted.lost[:8])
    notes = [f"; lost {lost}"] * bool(lost)
    notes += [f"; {adopted.uncertain} samples may come twice"] * bool(adopted.uncertain)
    notes += [f"; nothing was heard of {', '.join(adopted.missing)}"] * bool(adopted.missing)
    what = ", ".join(told[:8]) + more or "nothing that was not here"
    return f"epoch {adopted.epoch}: the run goes on from what nodes held: {what}{''.join(notes)}"


def _keys(what: str, keys: tuple[rec.AllowedKey, ...]) -> str:
    return f"{what} {', '.join(f'{key.node} {key.fingerprint}' for key in keys)}" if keys else ""


def _list(numbers: tuple[int, ...]) -> str:
    shown = " ".join(map(str, numbers[:8]))
    return shown + (f" … ({len(numbers)})" if len(numbers) > 8 else "")
