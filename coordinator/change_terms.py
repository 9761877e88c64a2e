"""Terms from outside: those that the admin socket sets, and those that nodes report in an adoption.

The machine loads no torch and knows no codecs, so codec names are checked here.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from farloop.algo import validation
from farloop.algo.revisions import LEARNING_RATE_STAYS, STAY, changes
from farloop.algo.spec import Revision, RoundPlan, WindowTerms
from farloop.coordinator.admin import Handler, over
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide.adoption import MOST
from farloop.coordinator.decide.closing import ROUNDS
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.revising import changes_text, described
from farloop.coordinator.errors import NotNow
from farloop.planner.sync_plan import Advice, NotInPlace, settings_of
from farloop.quant.codec_checks import check_codecs, check_downlink
from farloop.quant.errors import BadParameter, CodecError, UnknownCodec, UnsoundPairing
from farloop.quant.registry import codec_named
from farloop.quant.spelling import downlink_spelling
from farloop.wire.messages import Held

_log = logging.getLogger(__name__)

_POLL_S: Final = 0.02  # how often the journal is looked at for a change that waits to be durable


def revision_asked_for(machine: CoordinatorMachine, given: Mapping[str, str]) -> Revision:
    """The revision that sets these values, text by key. Raises ValueError, one sentence, if the run cannot have it."""
    spelled = dict(given)
    if "codec" in spelled:
        both = spelled.pop("codec")
        spelled = {"codec_up": both, "codec_down": both, **spelled}
    try:
        if "codec_down" in spelled:
            spelled["codec_down"] = downlink_spelling(spelled["codec_down"])
        revision = machine.revision_for(spelled)
        check_codecs(revision.terms)
    except (UnknownCodec, BadParameter, UnsoundPairing) as error:
        raise ValueError(str(error)) from error
    return revision


def lightened(machine: CoordinatorMachine, advice: Advice) -> Revision:
    """The revision that sets the advised terms of one node. Raises ValueError, one sentence: the run cannot have it."""
    try:
        spec = machine.ledger.spec
        given = settings_of(advice, spec.terms, machine.ledger.h, in_stages=spec.identity.layout.num_stages > 1)
    except NotInPlace as error:
        raise ValueError(str(error)) from error
    return revision_asked_for(machine, given)


class Requests:
    def __init__(
        self, machine: CoordinatorMachine, durable: Ledger, happened: Callable[[ev.Event], None], state: Path
    ) -> None:
        """`durable` is what the journal says, `state` the state folder; `happened` hands an event to the machine."""
        self._machine, self._durable, self._happened, self._state = machine, durable, happened, state
        self.handlers: dict[str, Handler] = {"set": self.set, "release": self.release, "forget": self.forget}

    async def release(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Release a hold by nodes that report newer versions, or by too few merged ones. Returns what held the run,
        and what still holds it.

        `nodes` names all nodes that hold the run; it may be left out if that is one. Raises ValueError: nothing that
        can be released holds the run (NotNow), or other nodes than the named ones; one sentence.
        """
        claims, guard, alarms = self._machine.hold_claims, self._machine.guard, self._machine.alarms
        if not claims and not guard.holds:
            raise NotNow("; ".join(["there is nothing to release", *list(alarms.values())[:4]]))
        named = request.get("nodes") or []
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise ValueError("release needs nodes: a list of names")
        said = "; ".join(f"node {node} {claim}" for node, claim in sorted(claims.items()))
        said = said or f"nothing of {', '.join(guard.left_out())} was merged in the last {ROUNDS} rounds"
        command = " ".join(["farloop run release", *(f"--node {node}" for node in sorted(claims))])
        if set(named) != set(claims) and (named or len(claims) > 1):
            what = (
                "Where several nodes have seen more, the state folder is probably an old copy: put the newer one back, "
                "or start once with --adopt-from-nodes. If you know that all of them are wrong"
            )
            raise ValueError(f"this is what holds the run: {said}. {what if claims else 'Without --node'}: {command}")
        self._happened(ev.HoldReleased())
        _log.warning("hold released held=%r", said)
        return {"held": said, "still": self._machine.holding}

    async def forget(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Forget the node `node`, which is not connected. Returns the names that are still known, once it is durable.
        Raises ValueError or NotNow, one sentence."""
        if self._machine.holding is not None:
            raise NotNow(self._machine.holding)
        name, members = request.get("node"), self._machine.members
        node = next((known for known in members if known == name), None)
        if node is None:
            raise ValueError(f"expected one of the nodes {', '.join(sorted(members)) or '(none yet)'}; got {name!r}")
        if members[node].session is not None:
            raise NotNow(f"node {node} is connected: stop it first, or run farloop keys revoke")
        self._happened(ev.NodeForgotten(node=node))
        _log.warning("node forgotten node=%s", node)
        while node in self._durable.started and node not in members:  # noqa: ASYNC110 - the journal wakes no waiter
            await asyncio.sleep(_POLL_S)
        return {"nodes": sorted(members)}

    async def set(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Set terms. Returns what changes and from which window or round on, once it is durable. `dry_run` changes
        nothing. Raises ValueError: it cannot be; one sentence."""
        given, dry_run = request.get("given"), request.get("dry_run", False)
        if not isinstance(given, dict) or not given or not all(isinstance(text, str) for text in given.values()):
            raise ValueError("set needs given: text by key")
        ledger = self._machine.ledger
        before = ledger.spec.terms
        if ledger.finished:
            raise NotNow(over(ledger.spec.identity.name, before.schedule.steps, self._state))
        revision = revision_asked_for(self._machine, given)
        answer = {"revision": revision.number, "changes": described(before, revision), "dry_run": bool(dry_run)}
        if dry_run:
            return answer
        self._happened(ev.TermsGiven(revision=revision))
        _log.info("terms changed revision=%d changes=%r", revision.number, changes_text(before, revision))
        while self._durable.spec.revision < revision.number:  # noqa: ASYNC110 - the journal wakes no waiter
            await asyncio.sleep(_POLL_S)
        return answer


# --- What nodes report besides their anchors, in an adoption (protocol, Adoption)
#
# Anchors are compared with a digest. Terms, rounds and revisions have none: impossible ones would end the coordinator
# windows later, or every later start.


def untrue(held: Held, ledger: Ledger) -> str | None:
    """What is impossible in an answer, as a sentence; None otherwise."""
    faults = itertools.chain(
        (fault for terms in held.windows for fault in _of_window(terms, ledger)),
        (fault for plan in held.rounds for fault in _of_round(plan)),
        (fault for one in held.revisions if one.number > ledger.spec.revision for fault in _of_revision(one, ledger)),
    )
    return next(faults, None)


def _of_window(terms: WindowTerms, ledger: Ledger) -> Iterator[str]:
    window = f"window {terms.window} of fragment {terms.fragment}"
    if not 0 <= terms.fragment < len(ledger.versions):
        yield f"there is no fragment {terms.fragment}"
    names = [node for node, _ in terms.codec_up_of]
    if (
        not all(0 <= number < MOST for number in (terms.window, terms.round, terms.tau))
        or not (0.0 <= terms.mix <= 1.0 and math.isfinite(terms.gap))
        or names != sorted(set(names))
    ):
        yield f"{window} runs under no such terms"
    try:
        for codec in (terms.codec_up, *(codec for _, codec in terms.codec_up_of)):
            codec_named(codec)
        check_downlink(codec_named(terms.codec_down))
    except CodecError as error:
        yield f"{window}: {error}"


def _of_round(plan: RoundPlan) -> Iterator[str]:
    if not (0 <= plan.index < MOST and 0 <= plan.start < MOST and 1 <= plan.length < MOST):
        yield f"round {plan.index} has {plan.length} steps from position {plan.start} on"
    for node, steps in plan.node_steps:
        if not 1 <= steps <= plan.length:
            yield f"{node} does {steps} of {plan.length} steps in round {plan.index}"


def _of_revision(revision: Revision, ledger: Ledger) -> Iterator[str]:
    name, layout = f"revision {revision.number}", ledger.spec.identity.layout
    firsts = (revision.number, revision.round, *revision.windows)
    if len(revision.windows) != len(layout.fragments) or not all(0 <= first < MOST for first in firsts):
        yield f"{name} does not say from where on it holds"
    for change in changes(ledger.spec.terms, revision.terms):
        if change.key in STAY or change.key.removeprefix("lr.") in LEARNING_RATE_STAYS:
            yield f"{name} changes {change.key}, which stays"
    try:
        validation.check(revision.terms, layout)
        check_codecs(revision.terms)
    except ValueError as error:
        yield f"{name}: {error}"
