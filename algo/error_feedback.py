"""Error feedback on the uplink: which residual a node's buffer holds, and whether the next delta may add it.

A node that encodes a delta v keeps what the codec lost, e = v − decoded, and adds β·e to the fragment's next delta.
`Residual` tracks the state of e for one fragment under one codec; the caller holds the numbers.

    empty ──encoded──▶ tentative(blob) ──merged──▶ settled(version) ──encoded──▶ tentative(blob) …
    tentative ──dropped──▶ empty      any ──reset──▶ empty      empty ──restore, at a start──▶ settled(version)

A dropped delta takes its residual along, and its payload is never added back: the node goes on from weights that hold
the others' progress, so the work would count twice. A residual is added to one blob only: the next residual holds what
that blob lost. So one buffer is enough, and the encoder overwrites the old residual with the new one.
"""

from dataclasses import dataclass

from farloop.algo.spec import BlobId, BlobKind

R_STALE = 4  # versions after which a residual on disk is of no more use: the weights that it was about have moved on


# --- States


@dataclass(frozen=True, slots=True, kw_only=True)
class Empty:
    """There is no residual: it is zero, whatever the buffer holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tentative:
    """The buffer holds what the codec lost of a delta whose outcome is not known."""

    blob: BlobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The buffer holds what the codec lost of a delta that is part of `version`."""

    version: int


State = Empty | Tentative | Settled


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """What a residual on disk belongs to."""

    run: str  # fingerprint of the run's identity
    fragment: int
    codec: str  # as the terms spell it, parameters included
    version: int


# --- Commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """Fill the buffer with zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Write the buffer to disk under this tag, whole or not at all, before the fragment's next encoding begins."""

    tag: Tag


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Remove the copy on disk, if there is one; when it follows `encoded`, before the blob is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Read the copy on disk into the buffer; where that fails, `reset`."""


Command = Zero | Persist | Forget | Load


class Residual:
    """One fragment's residual on one node. Methods are events; each returns what is to be done, in order.

    For another codec or another run `reset` this one, and make a new one.
    """

    def __init__(self, *, run: str, fragment: int, codec: str, durable: bool) -> None:
        """`durable`: the residual outlives a crash. Worth its writes for sparse codecs alone, where |e| ≫ |delta|."""
        self.run, self.fragment, self.codec, self.durable = run, fragment, codec, durable
        self.state: State = Empty()
        self.copy: Tag | None = None  # what is on disk, once all commands are done; unknown before the first event
        self._restorable = True

    @property
    def usable(self) -> bool:
        """Whether the next delta is delta + β·e. If not, its encoder must not read the buffer.

        Zeroing the buffer is not enough: an encoding under way at a reset still writes into it.
        """
        return isinstance(self.state, Settled)

    def encoded(self, blob: BlobId) -> list[Command]:
        """The buffer holds what the codec lost of this delta. Call before the blob is sent; gives up an open delta."""
        assert blob.kind is BlobKind.DELTA and blob.fragment == self.fragment, blob
        may_be_on_disk = self.copy is not None or (self.durable and self._restorable)
        self.state, self.copy, self._restorable = Tentative(blob=blob), None, False
        return [Forget()] if may_be_on_disk else []  # it is part of this blob now: a restart must not send it again

    def merged(self, blob: BlobId, *, version: int) -> list[Command]:
        """The delta is part of `version`. Late and repeated outcomes change nothing."""
        if self.state != Tentative(blob=blob):
            return []
        assert version > blob.version, f"a delta of base {blob.version} cannot be part of version {version}"
        self.state = Settled(version=version)
        if not self.durable:
            return []
        self.copy = Tag(run=self.run, fragment=self.fragment, codec=self.codec, version=version)
        return [Persist(tag=self.copy)]

    def dropped(self, blob: BlobId) -> list[Command]:
        """The delta will never be merged. Late and repeated outcomes change nothing."""
        if self.state != Tentative(blob=blob):
            return []
        self.state = Empty()
        return [Zero()]

    def reset(self) -> list[Command]:
        """What the residual was about is gone: a snapshot came, an anchor was lost, the codec or the run is another."""
        self.state, self.copy, self._restorable = Empty(), None, False
        return [Zero(), Forget()] if self.durable else [Zero()]

    def restore(self, tag: Tag | None, *, version: int) -> list[Command]:
        """After a start, with the first anchor at `version`: load the residual on disk if it fits, else reset.

        `tag`: that of the residual on disk, or None.
        """
        assert self._restorable, "a residual is restored once, before anything else"
        self._restorable = False
        if tag is None:
            return []
        wanted = Tag(run=self.run, fragment=self.fragment, codec=self.codec, version=tag.version)
        fresh = 0 <= tag.version <= version <= tag.version + R_STALE
        if not (self.durable and tag == wanted and fresh):
            return [Forget()]
        self.state, self.copy = Settled(version=tag.version), tag
        return [Load()]

    def check(self) -> None:
        match self.state:
            case Tentative(blob=blob):
                assert blob.kind is BlobKind.DELTA and blob.fragment == self.fragment
                assert self.copy is None, "the copy is part of what was sent"
            case Settled(version=version):
                assert version >= 0
                tag = Tag(run=self.run, fragment=self.fragment, codec=self.codec, version=version)
                assert self.copy == (tag if self.durable else None)
            case Empty():
                assert self.copy is None
        assert not self._restorable or self.state == Empty()
