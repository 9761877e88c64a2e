"""Why a session or a node was refused, and the errors of the wire format."""

from enum import IntEnum

# --- Why a node was refused, a delta dropped, or a session ended: a number for the wire, a sentence for people.


class Reason(IntEnum):
    """Numbers are never reused."""

    NONE = 0
    PROTOCOL_VERSION = 1
    WRONG_RUN = 2
    WRONG_LAYOUT = 3
    WRONG_KEY = 4
    NAME_TAKEN = 5
    FENCED = 6
    MALFORMED = 7
    OLD_INCARNATION = 8
    LATE = 9
    STALE_BASE = 10
    UNKNOWN_WINDOW = 11
    OVERLAP = 12
    NOT_A_PARTICIPANT = 13
    CORRUPT = 14
    NON_FINITE = 15
    CLOSED = 16
    SILENT = 17
    DRAINED = 18
    SUPERSEDED = 19
    RUN_FINISHED = 20
    COORDINATOR_STOPPING = 21
    WRONG_CODEC = 22
    TOO_LARGE = 23
    STALLED = 24
    IMPLAUSIBLE = 25
    HOLDING = 26
    FOREIGN = 27
    WRONG_PART = 28
    NOT_HELD = 29
    TOO_OFTEN = 32
    CROWDED = 33
    IDLE = 34
    TAKES_NOTHING = 35
    BEHIND = 36
    FAULT = 37
    # From here on: what is found in a delta that is well-formed, came in time, and is not merged all the same.
    OUTLIER = 40
    REPLAYED = 41
    COPIED = 42
    QUARANTINED = 43
    TOO_MUCH = 44
    VOID = 45

    @property
    def code(self) -> str:
        """What a program should read: the value of labels and of `reason` fields."""
        return self.name.lower()

    @property
    def sentence(self) -> str:
        """What a person should read."""
        return _SENTENCES[self]


_SENTENCES = {
    Reason.NONE: "no reason was given",
    Reason.PROTOCOL_VERSION: "no protocol version is spoken by both ends",
    Reason.WRONG_RUN: "the node was set up for another run (fingerprints differ)",
    Reason.WRONG_LAYOUT: "the node's model has other parameters than the run's",
    Reason.WRONG_KEY: "the key is not on the coordinator's allow-list",
    Reason.NAME_TAKEN: "a node of this name is connected, and its incarnation is newer",
    Reason.FENCED: "the coordinator's state is older than one this node has seen (lower epoch)",
    Reason.MALFORMED: "a message was damaged, or is not one that the protocol allows",
    Reason.OLD_INCARNATION: "a newer start of this node has taken its place",
    Reason.LATE: "the window had closed before the delta came",
    Reason.STALE_BASE: "the delta was taken from a version too far behind",
    Reason.UNKNOWN_WINDOW: "the delta names a window that is neither open nor next",
    Reason.OVERLAP: "one of its contributors is already in the window",
    Reason.NOT_A_PARTICIPANT: "the node has not started training yet",
    Reason.CORRUPT: "the bytes do not match their announced digest, size or layout",
    Reason.NON_FINITE: "the delta holds NaN or Inf",
    Reason.CLOSED: "the connection closed",
    Reason.SILENT: "nothing was heard for the liveness time-out",
    Reason.DRAINED: "the node left after finishing what it had begun",
    Reason.SUPERSEDED: "a newer session of the same node took over",
    Reason.RUN_FINISHED: "the run is finished",
    Reason.COORDINATOR_STOPPING: "the coordinator is shutting down; it can be started again",
    Reason.WRONG_CODEC: "the blob's codec is not the one its window asks for",
    Reason.TOO_LARGE: "the blob is larger than its fragment allows",
    Reason.STALLED: "its training has made no progress for too long, though its connection lives",
    Reason.IMPLAUSIBLE: "what the delta says of the work in it cannot be true",
    Reason.HOLDING: "the coordinator's state looks like an old copy: the run is held until a person decides",
    Reason.FOREIGN: "the delta was taken from an anchor of a history that the run was wound back from",
    Reason.WRONG_PART: "the part of the model that the node holds is none of the run's",
    Reason.NOT_HELD: "the delta is of a fragment that its node does not hold",
    Reason.TOO_OFTEN: "it came more often than an honest node ever would; it is heard again after a while",
    Reason.CROWDED: "there are as many sessions as the coordinator takes",
    Reason.IDLE: "none of the delta's bytes came for too long, though they were asked for",
    Reason.TAKES_NOTHING: "the node took none of the bytes sent to it for too long, though its connection lives",
    Reason.BEHIND: "too many messages wait for the node: it acknowledges them too slowly, or not at all",
    Reason.FAULT: "the coordinator met an unexpected error in this session's work; its log has the traceback",
    Reason.OUTLIER: "the delta is far longer than those of its fragment are",
    Reason.REPLAYED: "the node has sent the same numbers before",
    Reason.COPIED: "another node has sent the same numbers before",
    Reason.QUARANTINED: "deltas of this node were refused before: it is measured, and not merged, until they are good",
    Reason.TOO_MUCH: "with this delta the sum is more than fp32 holds",
    Reason.VOID: "its window ended with fewer good deltas than a merge needs",
}


# --- What can go wrong on the wire.
#
# WireError
# ├── LocalProtocolError    the session cannot do what this side asked for
# │   ├── AlreadyUnderWay   the blob is being sent, or is expected, already
# │   └── LimitReached      the session holds as much as it may: the peer takes it too slowly, or not at all
# └── RemoteProtocolError   the peer, or something in between, sent what the protocol forbids; end the session
#     └── OutOfBounds       an intact message says what no honest peer can: it would be sent again for ever


class WireError(Exception):
    """Base of both."""


class LocalProtocolError(WireError):
    """This side asked the session for something its state does not allow. Nothing was changed."""


class AlreadyUnderWay(LocalProtocolError):
    """The blob is being sent already, or is expected already. Harmless where it was offered or announced twice."""


class LimitReached(LocalProtocolError):
    """One of the session's `Limits` is reached. Ask again when something has ended, or end the session."""


class RemoteProtocolError(WireError):
    """Bytes from outside broke a rule. Nothing was changed; the frame is to be counted and dropped."""


class OutOfBounds(RemoteProtocolError):
    """A message that came intact holds a number, text or list beyond its bounds: end the session at once."""
