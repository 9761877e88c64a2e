"""What a coordinator over an old copy of its state asks of nodes, and what they answer (protocol, Adoption). From
version 4 of the protocol on."""

from dataclasses import dataclass

from farloop.algo.spec import Lease, Revision, RoundPlan, WindowTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorRef:
    """An anchor that the sender holds."""

    fragment: int
    version: int
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Node → coordinator, in answer to a Welcome that recalls: all that the coordinator's old copy may not know."""

    anchors: tuple[AnchorRef, ...]
    """What it holds now; no more changes of it come before the session's end."""
    windows: tuple[WindowTerms, ...]
    """Terms of the window after each of these versions, as far as they were told."""
    final: tuple[int, ...]
    """Fragments of which no window follows."""
    rounds: tuple[RoundPlan, ...]
    revisions: tuple[Revision, ...]
    """Of the run's terms, as of `Welcome`; the last is what it goes by."""
    unused: tuple[Lease, ...] = ()
    """What is left of its samples."""
    granted_to: int = 0
    """One past the last sample that it was ever granted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Coordinator → node, in such a session: send your anchor of this fragment, as a snapshot."""

    fragment: int
