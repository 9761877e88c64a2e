"""The fragments that a node holds: their state, the outcomes of its deltas, and when updates are merged."""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from farloop.algo.outer_optimizers import step_gain
from farloop.algo.outer_settings import usual
from farloop.algo.schedule import own_of_window
from farloop.algo.spec import BlobId, BlobKind, Fragment, NodeId, RunSpec, WindowTerms
from farloop.algo.stages import Part, fragments_of
from farloop.algo.terms import Terms
from farloop.node import events as ev
from farloop.wire.messages import Committed, Offer, Welcome
from farloop.wire.reasons import Reason

# --- One fragment


@dataclass(slots=True, kw_only=True)
class PendingDelta:
    """A delta whose outcome is not known yet."""

    blob: BlobId
    terms: WindowTerms
    sent_at: int  # inner steps done when it was taken
    tau: int  # overlap, in inner steps of this node
    steps: int  # inner steps inside it
    merged: bool = False
    """With a lag: the merge that follows it is done, and training goes on while its own commit is awaited."""
    session: int = 0  # number of the session that was open when it was taken, or of the last one
    offer: Offer | None = None  # set once encoded
    stored: bool = False  # the coordinator has it on disk
    dropped: Reason | None = None

    def is_due(self, inner_steps: int) -> bool:
        return inner_steps >= self.sent_at + self.tau


@dataclass(slots=True, kw_only=True)
class FragmentState:
    """One fragment on one node."""

    fragment: Fragment
    lag: int = 0  # of the run's terms
    version: int = -1  # version of the anchor, and of the last merge (its base); −1 before the first snapshot
    lost: bool = False  # the anchor's digest did not match: nothing is sent or applied until a snapshot comes
    pending: dict[int, Committed] = field(default_factory=dict)  # announced versions that are not merged yet
    arrived: set[int] = field(default_factory=set)  # versions whose bytes are here
    snapshot: int | None = None  # version of an arrived snapshot that is not installed yet
    terms_of: dict[int, WindowTerms] = field(default_factory=dict)  # terms of the windows from version + 1 on
    final: int | None = None  # the run's last version of it, once that is known
    sent: list[PendingDelta] = field(default_factory=list)
    """Deltas without an outcome, the oldest first: one, and one more for each round of lag."""
    overlapped: bool = False
    """A delta was refused because another one of this node, or the same, is in a version that was not announced."""
    share: float | None = None  # what its own delta weighed in the last merge that held one
    merge_at: int | None = None
    """If training does not wait for updates: inner step from which the next merge is due; None: after the next send."""
    owed: int = 0  # version with the last delta: before it is merged, another delta would hold the same work again
    discard: bool = False
    """The work since the last merge is lost: the next merge discards it, and nothing is sent before."""
    sent_round: int = 0  # round of the last send
    merged_at: int = 0  # inner steps done at the last merge
    joined_at: int = 0
    """Inner steps done when its first snapshot was requested: until there are more, everything that comes is merged."""
    counted_from: int = 0  # inner steps done when the work inside the next delta began
    tokens_from: int = 0

    @property
    def undecided(self) -> PendingDelta | None:
        """The oldest delta without an outcome."""
        return self.sent[0] if self.sent else None

    @property
    def last(self) -> PendingDelta | None:
        """The newest delta without an outcome."""
        return self.sent[-1] if self.sent else None

    @property
    def terms(self) -> WindowTerms | None:
        """Terms of the next delta; None if the fragment is final, or they have not come."""
        served = self.version
        if self.lag:  # the base serves the window that is open, even if the versions before that are not here yet
            served = max([served, *self.pending, *(undecided.terms.window for undecided in self.sent)])
        return self.terms_of.get(served + 1)

    def is_behind(self, terms: Terms) -> bool:
        """Whether the base is too old for any window."""
        return max(self.pending, default=0) > self.version + terms.admission.max_staleness + terms.schedule.lag

    def is_free(self, lag: int) -> bool:
        """Whether another delta may be taken: the local weights hold no work that was sent."""
        return not self.lost and (self.last is None or (self.last.merged and len(self.sent) <= lag))

    def pass_by(self, inner_steps: int, *, behind: bool) -> None:
        """A turn passes at which the fragment cannot be sent, and training does not wait for updates.

        The fragment is merged all the same, or an old base would stay too old: work on it is lost.
        """
        if self.merge_at is None and not self.sent:
            self.merge_at, self.discard = inner_steps, behind

    def stand_still(self, inner_steps: int, *, behind: bool) -> None:
        """Training waits: no step leads to a turn or to the end of the overlap."""
        if self.merge_at is not None:
            self.merge_at = min(self.merge_at, inner_steps)
        elif behind:
            self.pass_by(inner_steps, behind=True)

    @property
    def is_final(self) -> bool:
        return self.final is not None and self.version >= self.final

    def awaited(self) -> int:
        """The window whose commit training waits for, if it waits."""
        if self.last is None:
            return self.owed
        return self.last.terms.window - (0 if self.last.merged else self.lag)

    def learn_terms(self, terms: WindowTerms) -> None:
        if terms.window > self.version:
            self.terms_of[terms.window] = terms

    def terms_for(self, window: int, run: Terms) -> WindowTerms:
        """The terms of a window after the held version.

        The run's terms if its own did not come: they are sent with the version before, which a snapshot may overtake,
        and then the link may break. If those are wrong, an anchor's digest will not match, and a snapshot repairs it.
        """
        told, own = self.terms_of.get(window), own_of_window(run, self.fragment)
        return told or WindowTerms(fragment=self.fragment.index, window=window, round=0, **own)

    def announce(self, committed: Committed) -> None:
        if committed.next_window is None:
            self.final = committed.version
        else:
            self.learn_terms(committed.next_window)
        if committed.version > self.version:
            self.pending[committed.version] = committed

    def on_arrived(self, blob: BlobId) -> BlobId | None:
        """The bytes of an update or a snapshot arrived. Returns those that became useless: an update that is merged
        already, or an earlier snapshot."""
        if blob.kind is not BlobKind.SNAPSHOT:
            if blob.version <= self.version:
                return blob
            self.arrived.add(blob.version)
            return None
        before, self.snapshot = self.snapshot, blob.version
        return None if before in (None, blob.version) else dataclasses.replace(blob, version=before)

    def undecided_is_in(self, undecided: PendingDelta) -> int | None:
        """The version that holds an undecided delta, as far as announced.

        Announcements name nodes. After a restart, the share may belong to the incarnation before, and after an overlap
        to the delta before, unless this delta is known to have arrived: a coordinator takes one of them at a time.
        """
        blob, window = undecided.blob, undecided.terms.window
        if undecided.dropped or not (undecided.stored or (blob.incarnation == 1 and not self.overlapped)):
            return None
        for version, committed in sorted(self.pending.items()):
            if version >= window and any(share.node == blob.node for share in committed.merged):
                return version
        return None

    def can_be_taken(self, undecided: PendingDelta, max_staleness: int, newest: int | None = None) -> bool:
        """Whether an open or later window can take it, the fragment being at `newest`: by default the last announced
        version.

        A refused delta is given up with the commit of its window, so that it is not made again for the same one.
        """
        newest = max(self.pending, default=self.version) if newest is None else newest
        if undecided.dropped and newest >= undecided.terms.window:
            return False
        is_over = self.final is not None and newest >= self.final
        return not is_over and newest < undecided.terms.window + max_staleness

    def named(self, blob: BlobId) -> PendingDelta | None:
        return next((undecided for undecided in self.sent if undecided.blob == blob), None)

    def offer_again(self, newest: int, max_staleness: int, *, restarted: bool) -> list[Offer]:
        """Deltas to offer again to a coordinator that holds `newest`. After a restart it may have reopened a window
        that had closed without them, and it does not know whose delta it refused, and would wait for that one for
        ever."""
        for undecided in self.sent:
            if restarted:
                undecided.dropped = None
        wanted = [u for u in self.sent if not u.dropped and self.can_be_taken(u, max_staleness, newest)]
        return [undecided.offer for undecided in wanted if undecided.offer]

    def learn_share(self, version: int, node: NodeId) -> None:
        """Learn what this node's delta weighed: the next one will likely weigh the same."""
        for share in self.pending[version].merged if version in self.pending else ():
            if share.node == node:
                self.share = share.weight

    def give_up(self) -> None:
        """Give the oldest undecided delta up. Its work is lost, unless a snapshot has replaced its base."""
        self.discard = self.sent.pop(0).blob.version == self.version

    def ready_versions(self) -> list[int]:
        versions: list[int] = []
        while (
            not self.lost and (version := self.version + 1 + len(versions)) in self.pending and version in self.arrived
        ):
            versions.append(version)
        return versions

    def advance(self, version: int, inner_steps: int, tokens: int, *, mixed: bool) -> None:
        """The anchor reached `version`, and was merged into the local weights.

        `mixed`: part of the anchor went into them, so the next delta's work begins here. With a mix of 1 it began at
        the last send.
        """
        self.version = version
        self.pending = {v: c for v, c in self.pending.items() if v > version}
        self.arrived = {v for v in self.arrived if v > version}
        self.terms_of = {w: t for w, t in self.terms_of.items() if w > version}
        self.merged_at = inner_steps
        if mixed:
            self.counted_from, self.tokens_from = inner_steps, tokens

    def check(self) -> None:
        windows = [undecided.terms.window for undecided in self.sent]
        assert windows == sorted(set(windows)), "a window takes one delta of a node"
        assert all(undecided.merged for undecided in self.sent[:-1]), "each send is followed by its merge"
        assert all(version > self.version for version in self.pending)
        assert all(version > self.version for version in self.arrived)
        assert all(window > self.version for window in self.terms_of)
        assert self.snapshot is None or self.snapshot >= 0


# --- Outcomes of deltas
#
# Each function gets the fragment's state as it was before, changes it, and returns the commands that follow.


def forgotten(state: FragmentState, kind: BlobKind, version: int) -> ev.ForgetBlob:
    return ev.ForgetBlob(blob=BlobId(kind=kind, fragment=state.fragment.index, version=version))


def outcomes_up_to(state: FragmentState, version: int, node: NodeId, lag: int) -> tuple[list[ev.Command], int]:
    """Outcomes of the deltas for windows up to `version`, which the anchor is about to reach.

    Returns the commands, and the number of lost inner steps; without a lag, the merge counts those.
    """
    commands, lost_steps = list[ev.Command](), 0
    for undecided in [u for u in state.sent if u.terms.window <= version]:
        window = undecided.terms.window
        merged_in = window if state.undecided_is_in(undecided) == window else None
        if merged_in is None and lag:
            lost_steps += undecided.steps
        commands.append(ev.ForgetBlob(blob=undecided.blob, merged_in=merged_in))
        state.sent.remove(undecided)
        state.learn_share(window, node)
    return commands, lost_steps


def decided(state: FragmentState, max_staleness: int) -> list[ev.Command]:
    """If training does not wait for updates: handle a commit or an outcome that decides the undecided delta.

    Drops decide nothing: a node that was removed from a window may still be merged by a later one.
    """
    if (undecided := state.undecided) is None:
        return []
    merged_in = state.undecided_is_in(undecided)
    if merged_in is not None:
        state.sent.remove(undecided)
        state.owed = merged_in
    elif not state.can_be_taken(undecided, max_staleness):
        state.give_up()
    else:
        return []
    return [ev.ForgetBlob(blob=undecided.blob, merged_in=merged_in)]


def overtaken(state: FragmentState, version: int, terms: Terms) -> list[ev.Command]:
    """A snapshot replaces the anchor: keep the deltas that a later window can take."""
    commands = list[ev.Command]()
    for undecided in [u for u in state.sent if not state.can_be_taken(u, terms.admission.max_staleness, version)]:
        commands.append(ev.ForgetBlob(blob=undecided.blob))
        state.sent.remove(undecided)
    if terms.schedule.lag and state.last is not None:
        state.last.merged = version >= state.last.terms.window - terms.schedule.lag
    skipped = sorted(arrived for arrived in state.arrived if arrived <= version)
    return [*commands, *(forgotten(state, BlobKind.UPDATE, update) for update in skipped)]


def dropped(state: FragmentState) -> list[ev.Command]:
    """Another history begins: drop undecided deltas, and bytes that were not used yet."""
    commands: list[ev.Command] = [ev.ForgetBlob(blob=undecided.blob) for undecided in state.sent]
    commands += [forgotten(state, BlobKind.UPDATE, version) for version in sorted(state.arrived)]
    if state.snapshot is not None:
        commands.append(forgotten(state, BlobKind.SNAPSHOT, state.snapshot))
    return commands


# --- Merge policies, one for each `on_late_update`


@dataclass(frozen=True, slots=True, kw_only=True)
class DueMerge:
    """A merge that is due: the anchor is brought up to date, then mixed into the local weights."""

    versions: list[int]  # versions to apply first, in order; empty if the next round begins from the held anchor
    mix: float  # share of the local weights that stays
    loses_steps: bool = False  # the work since the last merge is in no delta that counts, and is lost


def merging_when_waiting(state: FragmentState, terms: Terms, inner_steps: int, *, training: bool) -> DueMerge | None:
    """If training waits for updates: once after every send, τ steps later, with the awaited version.

    That version holds the delta or, with a lag, is the one before. A node that has sent nothing, and has no work to
    send, merges at once. `training` is False at the end, when nothing is awaited.
    """
    last, versions = state.last, state.ready_versions()
    if training and last is not None and not last.is_due(inner_steps):
        return None
    if last is None or last.merged:
        # With a lag the base of what was done since the last merge still serves the next window.
        works_on = bool(terms.schedule.lag) and (last is not None or inner_steps > state.counted_from)
        if not versions or (training and works_on and not state.is_behind(terms)):
            return None
        window = state.terms_of.get(versions[-1])
        mix = window.mix if window and inner_steps > state.joined_at else 0.0  # of unsent work, what survives
        return DueMerge(versions=versions, mix=mix, loses_steps=True)
    wanted = last.terms.window - terms.schedule.lag
    if (versions[-1] if versions else state.version) < wanted or (terms.schedule.eager and last.offer is None):
        return None
    if terms.schedule.lag:
        newest = max(state.pending, default=0)
        if training and newest <= wanted + terms.schedule.lag:  # else the next delta would come too late from there
            versions = [version for version in versions if version <= wanted]
        return DueMerge(versions=versions, mix=0.0)
    if state.undecided_is_in(last) == last.terms.window:
        return DueMerge(versions=versions, mix=last.terms.mix)
    return DueMerge(versions=versions, mix=0.0, loses_steps=True)


def merging_when_going_on(state: FragmentState, terms: Terms, inner_steps: int, *, training: bool) -> DueMerge | None:
    """If training does not wait for updates: once after every send, τ steps later, or when the delta is decided.

    Earlier, half of the delta would be in the weights but not in the anchor, and again in the next delta. More often,
    other nodes would set the pace of the merges.
    """
    versions = state.ready_versions()
    if not versions or versions[-1] < state.owed or state.sent:
        return None
    has_worked = inner_steps > state.joined_at
    turn_comes = state.merge_at is not None and inner_steps >= state.merge_at
    if training and has_worked and not turn_comes:
        return None
    mix = 0.0 if state.discard or not has_worked else state.terms_for(versions[-1], terms).mix
    return DueMerge(versions=versions, mix=mix, loses_steps=state.discard)


def merge_command(state: FragmentState, terms: Terms, mix: float) -> ev.Merge:
    """The merge with the held anchor; an eager node adds its own deltas that the anchor lacks."""
    own = tuple((undecided.blob, undecided.terms) for undecided in state.sent if not undecided.dropped)
    if not terms.schedule.eager or not own or state.last is None:
        return ev.Merge(fragment=state.fragment.index, mix=mix)
    share = 1 / terms.admission.min_nodes if state.share is None else state.share
    factor = share * step_gain(usual(terms), state.last.terms.gap)
    return ev.Merge(fragment=state.fragment.index, mix=mix, own=own, factor=factor)


# --- All fragments that the node holds


class FragmentSet:
    """States in the layout's order, each found by its fragment's number."""

    def __init__(self, states: Iterable[FragmentState] = ()) -> None:
        self._states = {state.fragment.index: state for state in states}

    @classmethod
    def begin(cls, spec: RunSpec, part: Part) -> "FragmentSet":
        held = fragments_of(part, spec.identity.layout)
        return cls(FragmentState(fragment=fragment, lag=spec.terms.schedule.lag) for fragment in held)

    def __iter__(self) -> Iterator[FragmentState]:
        return iter(self._states.values())

    def __getitem__(self, index: int) -> FragmentState:
        """Raises KeyError for a fragment that this node does not hold."""
        return self._states[index]

    def __contains__(self, index: object) -> bool:
        return index in self._states

    def learn(self, welcome: Welcome) -> None:
        """Learn the terms of the open windows; a fragment without one is final."""
        windows = {terms.fragment: terms for terms in welcome.windows}
        for index, state in self._states.items():
            if terms := windows.get(index):
                state.learn_terms(terms)
            else:
                state.final = welcome.versions[index]

    @property
    def joined_at(self) -> int:
        """Inner steps done when all first snapshots had been requested."""
        return min(state.joined_at for state in self)

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions of the anchors, in order; −1 without an anchor."""
        return tuple(state.version for state in self)

    def newest_round(self, slots: int) -> int:
        """The run's round as far as this node knows: that of the last slot's open window."""
        newest = [
            max(state.terms_of.values(), key=lambda terms: terms.window).round
            for state in self
            if state.fragment.slot == slots - 1 and state.terms_of
        ]
        return min(newest, default=0)

    def begun_again(self, inner_steps: int) -> "FragmentSet":
        """The same fragments before their first snapshots; counts of unsent work continue."""
        return FragmentSet(
            FragmentState(
                fragment=state.fragment,
                lag=state.lag,
                joined_at=inner_steps,
                merged_at=state.merged_at,
                counted_from=state.counted_from,
                tokens_from=state.tokens_from,
            )
            for state in self
        )
