"""What a node's machine knows of one fragment: the version it holds, what has arrived, what it has sent. Pure."""

import dataclasses
from dataclasses import dataclass, field

from farloop.algo.spec import BlobId, BlobKind, Fragment, NodeId, Terms, WindowTerms
from farloop.wire.messages import Committed, Offer
from farloop.wire.reasons import Reason


@dataclass(slots=True, kw_only=True)
class Undecided:
    """A delta whose outcome is not known yet."""

    blob: BlobId
    terms: WindowTerms
    sent_at: int
    """Inner steps done when it was taken."""
    tau: int
    """Overlap, in inner steps of this node."""
    steps: int
    """Inner steps inside it."""
    merged: bool = False
    """With a lag: the merge that follows it is done, and training goes on while its own commit is awaited."""
    session: int = 0
    """Number of the session that was open when it was taken, or of the last one."""
    offer: Offer | None = None
    """Set once encoded."""
    stored: bool = False
    """It is known to be durable."""
    dropped: Reason | None = None

    def is_due(self, inner_steps: int) -> bool:
        """Whether the overlap is over."""
        return inner_steps >= self.sent_at + self.tau


@dataclass(slots=True, kw_only=True)
class FragmentState:
    """One fragment on one node. `check` states what always holds."""

    fragment: Fragment
    lag: int = 0
    """Of the run's terms."""
    version: int = -1
    """The anchor's version, which is also the one last merged (its base); −1 before the first snapshot."""
    lost: bool = False
    """The anchor's digest did not fit: nothing is sent or applied until a snapshot comes."""
    pending: dict[int, Committed] = field(default_factory=dict)
    """Announced versions that are not merged yet."""
    arrived: set[int] = field(default_factory=set)
    """Versions whose bytes are here."""
    snapshot: int | None = None
    """Version of an arrived snapshot that is not installed yet."""
    terms_of: dict[int, WindowTerms] = field(default_factory=dict)
    """Terms of the windows from version + 1 on."""
    final: int | None = None
    """The run's last version of it, once that is known."""
    sent: list[Undecided] = field(default_factory=list)
    """Deltas without an outcome, the oldest first: one, and one more for each round of lag."""
    share: float | None = None
    """What its own delta weighed in the last merge that held one."""
    merge_at: int | None = None
    """Where updates are not waited for: inner steps from which what is there is merged; None: after the next send."""
    owed: int = 0
    """Version that holds the last delta: until it is merged, another delta would hold the same work again."""
    discard: bool = False
    """What was done since the last merge will never be part of a version: at the next one nothing of it stays (protocol
    E), and nothing is sent before that."""
    sent_round: int = 0
    """Round of the last send."""
    merged_at: int = 0
    """Inner steps done at the last merge."""
    joined_at: int = 0
    """Inner steps done when its first snapshot was asked for: until there are more, all that comes is merged."""
    counted_from: int = 0
    """Inner steps done when the work inside the next delta began."""
    tokens_from: int = 0

    @property
    def undecided(self) -> Undecided | None:
        """The oldest delta without an outcome."""
        return self.sent[0] if self.sent else None

    @property
    def last(self) -> Undecided | None:
        """The newest delta without an outcome."""
        return self.sent[-1] if self.sent else None

    @property
    def terms(self) -> WindowTerms | None:
        """What the next delta runs under; None when the fragment is final, or its terms have not come."""
        served = self.version
        if self.lag:  # the base serves the window that is open, even if the versions before that are not here yet
            served = max([served, *self.pending, *(undecided.terms.window for undecided in self.sent)])
        return self.terms_of.get(served + 1)

    def is_behind(self, terms: Terms) -> bool:
        """Whether the base is too old for any window."""
        return max(self.pending, default=0) > self.version + terms.max_staleness + terms.lag

    def is_free(self, lag: int) -> bool:
        """Whether no delta is in the way of another one: the local weights hold nothing of what was sent."""
        return not self.lost and (self.last is None or (self.last.merged and len(self.sent) <= lag))

    def pass_by(self, inner_steps: int, *, behind: bool) -> None:
        """A turn comes at which the fragment cannot be sent, and updates are not waited for.

        It is merged all the same, or a base that has become too old would stay so: work on it is lost.
        """
        if self.merge_at is None and not self.sent:
            self.merge_at, self.discard = inner_steps, behind

    def stand_still(self, inner_steps: int, *, behind: bool) -> None:
        """No step is done until something comes: neither a turn nor the end of the overlap would ever be reached."""
        if self.merge_at is not None:
            self.merge_at = min(self.merge_at, inner_steps)
        elif behind:
            self.pass_by(inner_steps, behind=True)

    @property
    def is_final(self) -> bool:
        """Whether the run's last version is held."""
        return self.final is not None and self.version >= self.final

    def awaited(self) -> int:
        """The window whose commit training waits for, where it does."""
        if self.last is None:
            return self.owed
        return self.last.terms.window - (0 if self.last.merged else self.lag)

    def learn_terms(self, terms: WindowTerms) -> None:
        """Remember the terms of a window that is still ahead."""
        if terms.window > self.version:
            self.terms_of[terms.window] = terms

    def terms_for(self, window: int, run: Terms) -> WindowTerms | Terms:
        """What a window from the held version on runs under.

        By the run's terms where its own did not come: they are told with the version before, which a snapshot may
        overtake, and then the link may break. If those are others by now, an anchor's digest will not fit, and a
        snapshot mends it.
        """
        return self.terms_of.get(window, run)

    def announce(self, committed: Committed) -> None:
        """A commit was announced; one that is held already changes nothing."""
        if committed.next_window is None:
            self.final = committed.version
        else:
            self.learn_terms(committed.next_window)
        if committed.version > self.version:
            self.pending[committed.version] = committed

    def came(self, blob: BlobId) -> BlobId | None:
        """The bytes of an update or a snapshot are here. Returns those that are of no use now: of an update that is
        merged already, of the snapshot before."""
        if blob.kind is not BlobKind.SNAPSHOT:
            if blob.version <= self.version:
                return blob
            self.arrived.add(blob.version)
            return None
        before, self.snapshot = self.snapshot, blob.version
        return None if before in (None, blob.version) else dataclasses.replace(blob, version=before)

    def undecided_is_in(self, undecided: Undecided) -> int | None:
        """The version that an undecided delta is part of, as far as it was announced.

        Announcements name nodes. After a restart the share may be that of the incarnation before, unless this delta is
        known to have come: a coordinator takes one of them at a time.
        """
        blob, window = undecided.blob, undecided.terms.window
        if undecided.dropped or not (undecided.stored or blob.incarnation == 1):
            return None
        for version, committed in sorted(self.pending.items()):
            if version >= window and any(share.node == blob.node for share in committed.merged):
                return version
        return None

    def can_be_taken(self, undecided: Undecided, max_staleness: int, newest: int | None = None) -> bool:
        """Whether a window that is open, or will be, can take it, the fragment being at `newest`: the last version that
        was announced, unless given.

        One that was refused is given up with the commit of its window, so that it is not made anew for the same one.
        """
        newest = max(self.pending, default=self.version) if newest is None else newest
        if undecided.dropped and newest >= undecided.terms.window:
            return False
        is_over = self.final is not None and newest >= self.final
        return not is_over and newest < undecided.terms.window + max_staleness

    def named(self, blob: BlobId) -> Undecided | None:
        """The undecided delta of that name."""
        return next((undecided for undecided in self.sent if undecided.blob == blob), None)

    def offer_again(self, newest: int, max_staleness: int, *, restarted: bool) -> list[Offer]:
        """What a coordinator that holds `newest` may not have got. One that was restarted may have opened the window
        again that had closed without it, and wait for it; nor does it know whose delta it has refused in one that is
        open, and would wait for that one for ever."""
        for undecided in self.sent:
            if restarted:
                undecided.dropped = None
        wanted = [u for u in self.sent if not u.dropped and self.can_be_taken(u, max_staleness, newest)]
        return [undecided.offer for undecided in wanted if undecided.offer]

    def learn_share(self, version: int, node: NodeId) -> None:
        """What this node's delta weighed in an announced version: the next one will likely weigh the same."""
        for share in self.pending[version].merged if version in self.pending else ():
            if share.node == node:
                self.share = share.weight

    def give_up(self) -> None:
        """The oldest undecided delta will never be merged. The work in it goes, unless a snapshot has replaced its
        base."""
        self.discard = self.sent.pop(0).blob.version == self.version

    def ready_versions(self) -> list[int]:
        """Versions that can be applied now, in order, without a gap."""
        versions: list[int] = []
        while (
            not self.lost and (version := self.version + 1 + len(versions)) in self.pending and version in self.arrived
        ):
            versions.append(version)
        return versions

    def advance(self, version: int, inner_steps: int, tokens: int, *, mixed: bool) -> None:
        """The anchor is at `version` now, and the local weights were merged with it.

        `mixed`: something of the anchor went into them, so that the next delta's work begins here. With a = 1 nothing
        did: it began at the last send (protocol H).
        """
        self.version = version
        self.pending = {v: c for v, c in self.pending.items() if v > version}
        self.arrived = {v for v in self.arrived if v > version}
        self.terms_of = {w: t for w, t in self.terms_of.items() if w > version}
        self.merged_at = inner_steps
        if mixed:
            self.counted_from, self.tokens_from = inner_steps, tokens

    def check(self) -> None:
        """The invariants."""
        windows = [undecided.terms.window for undecided in self.sent]
        assert windows == sorted(set(windows)), "a window takes one delta of a node"
        assert all(undecided.merged for undecided in self.sent[:-1]), "each send is followed by its merge"
        assert all(version > self.version for version in self.pending)
        assert all(version > self.version for version in self.arrived)
        assert all(window > self.version for window in self.terms_of)
        assert self.snapshot is None or self.snapshot >= 0
