"""Detects that the state directory is an old copy: nodes have seen more than it knows.

Nodes are told only what is durable. So a node that has met a higher epoch, or that holds (or was told of) a version
which this state lacks or has with other content, proves that the state is an old copy, or that another coordinator
continued from one:

    same     it holds what this state holds
    behind   it holds less, all of it from this history
    lost     it follows a history that the run was rewound from: what it holds counts for nothing
    ahead    it has met a higher epoch, or holds a newer version
    forked   it holds a version with other content

The last two hold the run: merging on would make one of two histories worthless, and only a person can choose. Once a
start of the coordinator has served nodes for `TRUSTED_AFTER_S`, every live node has returned, and the claim of a single
node no longer stops the others: it is kept out, with an alarm.

A hold by a single node ends after the same time if another node contradicts it: one that took part in this state's last
commits and has met nothing newer. Any other hold ends when a person decides: by another start, or with `farloop
release`. A released run still waits for a node that is not kept out: if all nodes have seen more, the state is an old
copy, and any commit would fork the run.
"""

import dataclasses
from dataclasses import dataclass
from typing import Final, Literal

from farloop.algo.spec import NodeId
from farloop.algo.stages import fragments_of
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.run_state import Decisions, RunState
from farloop.wire.messages import Hello, Refused
from farloop.wire.reasons import Reason

Kind = Literal["same", "behind", "lost", "ahead", "forked"]

ALARM: Final = "history"  # the alarm that names the proofs and what a person can do, while the run is held
FORGOTTEN_S: Final = 600.0  # the alarm of a node that is kept out ends when it has not dialled for this long
TRUSTED_AFTER_S: Final = 60.0  # many times the longest redial pause

MOST_STARTS: Final = 1 << 20  # epochs that a node may be ahead; more is impossible

_IF_HELD: Final = "start once with --adopt-from-nodes, which goes on from the newest versions that nodes hold"

_IF_ONLY_MET: Final = (
    "if there is none, for the run was begun again on purpose, end coordinator and nodes, delete the nodes' state "
    "folders (state_dir in NODE.toml), which remember the former one, and start all again"
)

_WAYS_OUT: Final = (
    "this state folder looks like an old copy: put the newer one back and start again; or {}; or start once with "
    "farloop coordinator RUN.toml --rewind, which takes this one for the truth and gives up what came after it; or, if "
    "this node is wrong and others have seen nothing newer, farloop run release, which goes on without it"
)

_IF_NEW: Final = (
    "this state folder is new: if you deleted the old one on purpose, start once with --rewind, or end all and delete "
    "the nodes' state folders (state_dir in NODE.toml) too; if not, "
)

_NOBODY_ELSE: Final = (
    "{} kept out, and no other node has come yet; it goes on with the first that has seen nothing newer: another node, "
    "or one of these, started again with an empty state folder (state_dir in NODE.toml); or start the coordinator once "
    "with --rewind, which takes this state for the truth"
)

IF_RIGHT: Final = (
    "if it is right, stop the coordinator and put the newer state folder back, or start once with --adopt-from-nodes"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloStanding:
    kind: Kind
    detail: str = ""  # what it proves, with both values; empty if nothing is wrong

    @property
    def is_in_doubt(self) -> bool:
        return self.kind in ("ahead", "forked")


def standing_of(hello: Hello, ledger: Ledger) -> HelloStanding:
    """Compare a node's greeting with the ledger. Its fragments are those of the layout."""
    kind: Kind = "same"
    proofs: list[str] = []
    if hello.epoch_seen > ledger.epoch:
        kind = "ahead"
        proofs.append(f"has met epoch {hello.epoch_seen}, this start has {ledger.epoch}")
    if hello.history > ledger.history:
        kind = "ahead"
        proofs.append(f"follows history {hello.history}, this is {ledger.history}")
    elif hello.history < ledger.history:
        return HelloStanding(kind="ahead", detail=proofs[0]) if proofs else HelloStanding(kind="lost")
    for verb, refs in (("holds", hello.anchors), ("was told of", hello.announced)):
        for ref in refs:
            version = ledger.versions[ref.fragment]
            known = ledger.anchor_digest(ref.fragment, ref.version)  # of the last versions alone
            if ref.version > version:
                kind = "ahead" if kind != "forked" else kind
                proofs.append(f"{verb} version {ref.version} of fragment {ref.fragment}, here it is at {version}")
            elif known is not None and known != ref.digest:
                kind = "forked"
                other = f"digest {ref.digest:016x}, here it has {known:016x}"
                proofs.append(f"{verb} version {ref.version} of fragment {ref.fragment} with {other}")
    if kind == "same" and {ref.fragment: ref.version for ref in hello.anchors} != dict(enumerate(ledger.versions)):
        kind = "behind"
    return HelloStanding(kind=kind, detail=_joined(proofs))


def of_this_run(hello: Hello, ledger: Ledger) -> Hello:
    """The greeting without an epoch that the node met in another run."""
    foreign = hello.epoch_run not in ("", ledger.spec.identity.fingerprint())
    return dataclasses.replace(hello, epoch_seen=0) if foreign else hello


def epoch_met(hello: Hello) -> int:
    """The highest epoch that a node knows, including that of a history which it has not followed yet."""
    return max(hello.epoch_seen, hello.history)


def unbelievable(hello: Hello, ledger: Ledger) -> Refused | None:
    """Refuse an impossible epoch: it would use up the epochs."""
    if epoch_met(hello) <= ledger.epoch + MOST_STARTS:
        return None
    claim = f"the node says it has met epoch {epoch_met(hello)}, this is {ledger.epoch}"
    return Refused(reason=Reason.MALFORMED, detail=claim, retriable=False)


def as_newcomer(hello: Hello) -> Hello:
    """The greeting of a node of a lost history, as that of a node that holds nothing."""
    return dataclasses.replace(hello, anchors=(), announced=(), round=None)


class RollbackGuard:
    """Holds the run while nodes prove that its state is an old copy."""

    def __init__(self, run: RunState, decisions: Decisions) -> None:
        self._run, self._decisions = run, decisions
        self._ledger, self._alarms = run.ledger, run.alarms
        self._trusted_at: float | None = None
        """Time from which the claim of a single node holds only itself; None before the first node was let in."""
        self.held_s = 0.0  # duration of the last hold
        self._held_at = 0.0
        self._claims: dict[NodeId, str] = {}  # proofs of the nodes that hold the run
        self._against: set[NodeId] = set()  # nodes that contradict them
        self._kept_out_at: dict[NodeId, float] = {}  # when each node that is kept out was last heard of
        self._disbelieved: set[NodeId] = set()  # nodes that are kept out since a hold by their claim was released

    def refusal(self, node: NodeId, hello: Hello, now: float) -> Refused | None:
        """Why this node is not let in; None lets it in. Holds the run if necessary."""
        if refused := unbelievable(hello, self._ledger):
            return refused
        standing = standing_of(hello, self._ledger)
        self._weigh(node, hello, standing, now)
        if standing.is_in_doubt:
            epoch = epoch_met(hello)
            if epoch > max(self._ledger.epoch, self._ledger.epoch_seen):
                # A start that rewinds the run must claim a higher one before it meets any node.
                self._decisions.record(rec.EpochSeen(epoch=epoch))
            trusted = self._run.held is None and self._trusted_at is not None and now >= self._trusted_at
            if trusted or node in self._disbelieved:
                self._exclude(node, standing.detail, "another history of this run goes on", now)
                return Refused(reason=Reason.FENCED, detail=f"node {node} {standing.detail}", retriable=True)
            if self._run.held is None or self._claims == {node: standing.detail}:  # the first claim, or since a release
                self._held_at = now if self._run.held is None else self._held_at
                known = hello.anchors or hello.announced
                ways_out = _WAYS_OUT.format(_IF_HELD if known else _IF_ONLY_MET)
                if known and not any(self._ledger.versions):
                    ways_out = _IF_NEW + ways_out
                self._hold(f"node {node} {standing.detail}; {ways_out}")
        else:
            if self._run.held is not None and not self._claims and self._disbelieved:
                self._end_hold(now, trusted_at=None)  # it was released, and this is the first node to go on with
            self._disbelieved.discard(node)
        if self._run.held is not None:
            return Refused(reason=Reason.HOLDING, detail=self._run.held, retriable=True)
        if self._trusted_at is None:
            self._trusted_at = now + TRUSTED_AFTER_S
        self._end_alarm(node)
        return None

    @property
    def claims(self) -> dict[NodeId, str]:
        """The nodes that hold the run, with their proofs."""
        return dict(self._claims) if self._run.held is not None else {}

    def release(self, now: float, why: str) -> None:
        """Keep out the nodes that hold the run, if any do, until they withdraw their claims, and continue: at once if a
        node contradicts them, else with the first node that has seen nothing newer."""
        if self._run.held is None:
            return
        for node, detail in self._claims.items():
            self._exclude(node, detail, why, now)
        self._disbelieved |= self._claims.keys()
        self._claims = {}
        if self._against:
            return self._end_hold(now, trusted_at=now)
        self._hold(_NOBODY_ELSE.format(_names(self._disbelieved)))

    def _hold(self, why: str) -> None:
        self._run.held = self._alarms[ALARM] = f"the run is held: {why}"

    def _end_hold(self, now: float, *, trusted_at: float | None) -> None:
        del self._alarms[ALARM]
        self._run.held, self.held_s, self._trusted_at = None, now - self._held_at, trusted_at

    def pass_time(self, now: float) -> None:
        """End the alarm of a node that stopped dialling. It stays kept out."""
        for node in [node for node, at in self._kept_out_at.items() if at + FORGOTTEN_S <= now]:
            self._end_alarm(node)

    def _end_alarm(self, node: NodeId) -> None:
        self._kept_out_at.pop(node, None)
        self._alarms.pop(_of(node), None)

    def _exclude(self, node: NodeId, detail: str, why: str, now: float) -> None:
        self._kept_out_at[node] = now
        self._alarms[_of(node)] = f"it is kept out: it {detail}; {why}; {IF_RIGHT}"

    def _weigh(self, node: NodeId, hello: Hello, standing: HelloStanding, now: float) -> None:
        """Count the node's claim, and end a hold by a single node that others contradict."""
        if standing.is_in_doubt:
            self._against.discard(node)
            trusted = self._trusted_at is not None and now >= self._trusted_at
            if node not in self._disbelieved and not trusted:
                self._claims[node] = standing.detail
        elif self._was_here_last(hello, standing):
            self._against.add(node)
            self._claims.pop(node, None)
        alone = len(self._claims) <= 1 and bool(self._against)
        if self._run.held is not None and alone and now >= self._held_at + TRUSTED_AFTER_S:
            self.release(now, f"{', '.join(sorted(self._against)[:4])} contradicts it, and the run goes on")

    def _was_here_last(self, hello: Hello, standing: HelloStanding) -> bool:
        """Whether a node knows the last commits of this state, all but one at most, and nothing newer."""
        ledger, newest = self._ledger, dict[int, int]()
        for ref in (*hello.anchors, *hello.announced):
            if ledger.anchor_digest(ref.fragment, ref.version) == ref.digest:
                newest[ref.fragment] = max(ref.version, newest.get(ref.fragment, 0))
        held = [fragment.index for fragment in fragments_of(hello.holds, ledger.spec.identity.layout)]
        return standing.kind in ("same", "behind") and all(newest.get(f, -2) + 1 >= ledger.versions[f] for f in held)

    def clock_jumped(self, seconds: float) -> None:
        self._held_at += seconds
        self._kept_out_at = {node: at + seconds for node, at in self._kept_out_at.items()}
        if self._trusted_at is not None:
            self._trusted_at += seconds


def _names(nodes: set[NodeId], most: int = 4) -> str:
    more = [f"{len(nodes) - most} more"] if len(nodes) > most else []
    names = [*sorted(nodes)[:most], *more]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _of(node: NodeId) -> str:
    return f"{ALARM} of {node}"


def _joined(proofs: list[str], most: int = 3) -> str:
    """The first few proofs: a model can have thousands of fragments."""
    more = [f"{len(proofs) - most} more like these"] if len(proofs) > most else []
    return " and ".join([*proofs[:most], *more])
