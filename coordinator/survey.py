"""What nodes say that they hold, against each other and against an old copy of the state (protocol, Adoption). Pure.

Of each fragment it finds the newest version that somebody can bring, and what speaks against going on from there: two
digests of one version, terms or rounds that nobody tells.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from farloop.algo.parts import is_in
from farloop.algo.revisions import Revisions
from farloop.algo.schedule import round_after
from farloop.algo.spec import NodeId, Revision, RoundPlan, WindowTerms
from farloop.coordinator.ledger import Ledger
from farloop.wire.messages import SINCE, AnchorRef, Held, Hello

RECALLED_SINCE: Final = SINCE[Held]
"""Version of the protocol in which a node can be asked for what it holds."""

MOST: Final = 1 << 60
"""No run has had so many samples, steps, rounds or versions: who says so is not believed."""

MOST_ROUNDS: Final = 1 << 20
"""That a copy can be behind: they are found one by one."""


@dataclass(slots=True, kw_only=True)
class Claim:
    """What one node says that it holds."""

    hello: Hello
    heard_at: float
    """When it greeted, or its session ended."""
    session: int | None = None
    held: Held | None = None
    """Its answer, in this session."""
    asked: int | None = None
    """The fragment that it is to send, or is sending."""
    offers_until: float | None = None
    """When another one is asked instead; None once the anchor is on its way."""
    failed: int = 0
    """Anchors that it did not bring."""
    spoiled: set[tuple[int, int]] = field(default_factory=set)
    """Fragments and versions whose bytes were not what it says."""

    @property
    def can_be_asked(self) -> bool:
        """Whether its farloop knows how to answer, and there is something to ask for."""
        return self.hello.protocol_max >= RECALLED_SINCE and bool(self.hello.anchors)

    @property
    def answers(self) -> bool:
        """Whether it is here, and has said what it holds."""
        return self.session is not None and self.held is not None

    @property
    def anchors(self) -> list[AnchorRef]:
        """What it can bring."""
        said = self.held.anchors if self.held is not None else self.hello.anchors
        return [ref for ref in said if (ref.fragment, ref.version) not in self.spoiled]


Claims = Mapping[NodeId, Claim]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What the nodes of the newest history hold."""

    claims: Claims
    """Theirs. Who follows an older one has nothing that counts."""
    wanted: Mapping[int, AnchorRef]
    """By fragment, the newest version that somebody holds and the state does not."""
    lost: tuple[AnchorRef, ...]
    """Newer versions that were told of, or are spoiled, and that nobody holds."""
    fault: str = ""
    """Why nothing of it can be taken; empty where it can."""

    def holders(self, ref: AnchorRef) -> list[NodeId]:
        """Who says that it holds this very anchor; whoever failed to bring one comes last."""
        found = [node for node, claim in self.claims.items() if ref in claim.anchors]
        return sorted(found, key=lambda node: (self.claims[node].failed, node))

    def witnesses(self, ref: AnchorRef) -> list[NodeId]:
        """Who holds this very anchor, or was told of its commit."""
        return sorted(n for n, claim in self.claims.items() if ref in claim.anchors or ref in claim.hello.announced)

    def known_to_one(self, ledger: Ledger) -> AnchorRef | None:
        """A wanted anchor of which one node alone speaks, where the run has more that hold its fragment: its bytes were
        held against that node's own word."""
        for index, ref in self.wanted.items():
            fragment = ledger.fragment(index)
            others = {node for node, claim in self.claims.items() if is_in(fragment, claim.hello.holds)}
            if len(others.union(ledger.holders(index))) > 1 and len(self.witnesses(ref)) < 2:
                return ref
        return None

    def told(self, ref: AnchorRef) -> list[Held]:
        """The answers of those that do."""
        answers = (self.claims[node].held for node in self.holders(ref))
        return [held for held in answers if held is not None]


def survey(claims: Claims, ledger: Ledger, *, gone: Claims | None = None) -> Survey:
    """What these claims come to. `gone`: those of nodes that were here before, and that nothing can be had from."""
    history = max([ledger.history, *(claim.hello.history for claim in claims.values())])
    ours = {node: claim for node, claim in claims.items() if claim.hello.history == history}
    newest = _newest(ref for claim in ours.values() for ref in claim.anchors)
    wanted = {f: ref for f, ref in newest.items() if ref.version > ledger.versions[f]}
    fault = next(_forks(ours, ledger if history == ledger.history else None), "")
    if not fault and history != ledger.history:
        fault = next(_unlike(newest, ledger, history), "")
    reached = {f: wanted[f].version if f in wanted else version for f, version in enumerate(ledger.versions)}
    hellos = [claim.hello for claim in (*ours.values(), *(gone or {}).values()) if claim.hello.history == history]
    known = _newest(ref for hello in hellos for ref in (*hello.announced, *hello.anchors))
    lost = tuple(ref for f, ref in known.items() if ref.version > reached[f])
    return Survey(claims=ours, wanted=wanted, lost=lost, fault=fault)


def _newest(refs: Iterable[AnchorRef]) -> dict[int, AnchorRef]:
    """By fragment, in order."""
    newest: dict[int, AnchorRef] = {}
    for ref in refs:
        if ref.fragment not in newest or newest[ref.fragment].version < ref.version:
            newest[ref.fragment] = ref
    return dict(sorted(newest.items()))


def _forks(claims: Claims, ledger: Ledger | None) -> Iterator[str]:
    """Versions that are two things. `ledger`: of the same history as the claims."""
    known: dict[tuple[int, int], tuple[int, str]] = {}
    for node, claim in sorted(claims.items()):
        for ref in (*claim.anchors, *claim.hello.announced):
            ours = ledger.anchor_digest(ref.fragment, ref.version) if ledger is not None else None
            first = (ref.digest, f"node {node}") if ours is None else (ours, "this state")
            digest, who = known.setdefault((ref.fragment, ref.version), first)
            if digest != ref.digest:
                yield (
                    f"version {ref.version} of fragment {ref.fragment} has digest {digest:016x} for {who} and "
                    f"{ref.digest:016x} for node {node}: two runs went on from one, and which is the right one, only "
                    "you can say; --rewind goes on from this state and gives up what all of them did since"
                )


def _unlike(newest: Mapping[int, AnchorRef], ledger: Ledger, history: int) -> Iterator[str]:
    """Why the nodes' history cannot be taken over by a state that is of an older one."""
    for fragment, version in enumerate(ledger.versions):
        ref = newest.get(fragment)
        if ref is None:
            yield f"no node holds fragment {fragment} of history {history}, and this state is of {ledger.history}"
        elif ref.version < version or (
            ref.version == version and ref.digest != ledger.anchor_digest(fragment, version)
        ):
            yield (
                f"nodes follow history {history}, in which fragment {fragment} is at version {ref.version}, and this "
                f"state is of history {ledger.history}, where it is at {version}: only --rewind goes on from here"
            )


class Unknown(Exception):
    """Nobody who answers tells something without which the run cannot go on; one sentence."""


def terms_after(ref: AnchorRef, held: Sequence[Held]) -> WindowTerms | None:
    """The window that follows this version; None where it is the last. Raises Unknown."""
    for one in held:
        for terms in one.windows:
            if (terms.fragment, terms.window) == (ref.fragment, ref.version + 1):
                return terms
        if ref.fragment in one.final:
            return None
    raise Unknown(f"nobody tells under which terms fragment {ref.fragment} goes on after version {ref.version}")


def revisions_since(ledger: Ledger, held: Sequence[Held]) -> tuple[Revision, ...]:
    """Of the terms, what was changed since the copy, in order. Raises Unknown."""
    told: dict[int, Revision] = {}
    for revision in (revision for one in held for revision in one.revisions if revision.number > ledger.spec.revision):
        if told.setdefault(revision.number, revision) != revision:
            raise Unknown(f"nodes tell two revisions {revision.number} of the terms")
    return tuple(told[number] for number in sorted(told))


def rounds_since(
    ledger: Ledger, held: Sequence[Held], revisions: Sequence[Revision], windows: Sequence[WindowTerms]
) -> tuple[RoundPlan, ...]:
    """The rounds that were fixed since the copy, up to the newest of these windows: those after it are fixed anew.

    Nodes forget rounds that are over: what is missing in between follows from the rule of the run. Raises Unknown.
    """
    terms: Revisions = ledger.revisions
    for revision in revisions:
        terms = terms.and_then(revision)
    for window in windows:
        ours = terms.of_window(window.fragment, window.window)
        if dict(window.codec_up_of).keys() != dict(ours.codec_up_of).keys():
            raise Unknown(f"window {window.window} of fragment {window.fragment} is told of with codecs of other nodes")
    told = {plan.index: plan for one in held for plan in one.rounds}
    plans = dict(ledger.rounds)
    last = max([max(plans), *(window.round for window in windows)])
    if last > max(plans) + MOST_ROUNDS:
        raise Unknown(f"a window of round {last} is told of, and this state is at round {max(plans)}")
    for index in range(min(plans) + 1, last + 1):
        before = plans[index - 1]
        plan = told.get(index) or plans.get(index) or round_after(terms.of_round(index), before)
        if plan is None or plan.start != before.start + before.length:
            raise Unknown(f"nobody tells where round {index} begins, and by the run's rule the others do not fit")
        plans[index] = plan
    return tuple(plan for index, plan in plans.items() if ledger.rounds.get(index) != plan)
