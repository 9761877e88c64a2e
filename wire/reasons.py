"""Why a session or a node was refused, and the errors of the wire format."""

from enum import IntEnum
from typing import Self

# --- Reasons: a number for the wire, a sentence for people


class Reason(IntEnum):
    """Numbers are never reused. Each has what a person should read as its `sentence`."""

    sentence: str

    def __new__(cls, number: int, sentence: str) -> Self:
        reason = int.__new__(cls, number)
        reason._value_, reason.sentence = number, sentence
        return reason

    NONE = 0, "no reason was given"
    PROTOCOL_VERSION = 1, "the two ends share no protocol version"
    WRONG_RUN = 2, "the node was set up for another run (fingerprints differ)"
    WRONG_LAYOUT = 3, "the node's model has different parameters from the run's"
    WRONG_KEY = 4, "the key is not on the coordinator's allow-list"
    NAME_TAKEN = 5, "a newer start of a node with this name is connected"
    FENCED = 6, "the coordinator's state is older than one this node has seen (lower epoch)"
    MALFORMED = 7, "a message was damaged or violates the protocol"
    OLD_INCARNATION = 8, "a newer start of this node replaced it"
    LATE = 9, "the window had closed before the delta arrived"
    STALE_BASE = 10, "the delta's base version is too old"
    UNKNOWN_WINDOW = 11, "the delta names a window that is neither open nor next"
    OVERLAP = 12, "one of its contributors is already in the window"
    NOT_A_PARTICIPANT = 13, "the node has not started training yet"
    CORRUPT = 14, "the bytes do not match their announced digest, size or layout"
    NON_FINITE = 15, "the delta holds NaN or Inf"
    CLOSED = 16, "the connection closed"
    SILENT = 17, "no message arrived within the liveness timeout"
    DRAINED = 18, "the node left after finishing its work"
    SUPERSEDED = 19, "a newer session of the same node took over"
    RUN_FINISHED = 20, "the run is finished"
    COORDINATOR_STOPPING = 21, "the coordinator is shutting down and can be restarted"
    WRONG_CODEC = 22, "the blob's codec is not the window's codec"
    TOO_LARGE = 23, "the blob is larger than its fragment allows"
    STALLED = 24, "its training makes no progress, although its connection is alive"
    IMPLAUSIBLE = 25, "the delta's claims about its work are impossible"
    HOLDING = 26, "the coordinator's state looks like an old copy: the run is held until a person decides"
    FOREIGN = 27, "the delta's base belongs to a discarded history of the run"
    WRONG_PART = 28, "the node's part of the model is not a stage of the run"
    NOT_HELD = 29, "the node does not hold the delta's fragment"
    TOO_OFTEN = 32, "it connected too often and is ignored for a while"
    CROWDED = 33, "the coordinator has its maximum number of sessions"
    IDLE = 34, "the delta's bytes were requested and did not arrive in time"
    TAKES_NOTHING = 35, "the node accepts no bytes, although its connection is alive"
    BEHIND = 36, "too many messages wait for the node, which acknowledges them too slowly or not at all"
    FAULT = 37, "unexpected error in this session; the coordinator's log has the traceback"
    WRONG_FROZEN = 38, "the node's frozen weights, buffers or adapter settings differ from those of other nodes"
    ENDED = 39, "the frame is of a session, or of a lane, that has ended"
    # The next six: what is found in a delta that is well-formed, came in time, and is not merged all the same.
    OUTLIER = 40, "the delta is much longer than usual for its fragment"
    REPLAYED = 41, "the node has sent the same numbers before"
    COPIED = 42, "another node has sent the same numbers before"
    QUARANTINED = 43, "the node is in quarantine: its deltas are measured and not merged until they are good again"
    TOO_MUCH = 44, "the sum with this delta overflows fp32"
    VOID = 45, "its window ended with fewer good deltas than a merge needs"
    FAILED = 46, "the node ended with an error of its own"
    OUT_OF_TIME = 47, "the node left at its deadline, before it knew whether its last deltas were merged"

    @property
    def code(self) -> str:
        """What a program should read: the value of labels and of `reason` fields."""
        return self.name.lower()


# --- Errors
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
