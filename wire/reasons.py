"""Why a session or a node was refused, and the errors of the wire format."""

from enum import IntEnum

# --- Reasons: a number for the wire, a sentence for people


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
    WRONG_FROZEN = 38
    ENDED = 39
    # The next six: what is found in a delta that is well-formed, came in time, and is not merged all the same.
    OUTLIER = 40
    REPLAYED = 41
    COPIED = 42
    QUARANTINED = 43
    TOO_MUCH = 44
    VOID = 45
    FAILED = 46
    OUT_OF_TIME = 47

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
    Reason.PROTOCOL_VERSION: "the two ends share no protocol version",
    Reason.WRONG_RUN: "the node was set up for another run (fingerprints differ)",
    Reason.WRONG_LAYOUT: "the node's model has different parameters from the run's",
    Reason.WRONG_KEY: "the key is not on the coordinator's allow-list",
    Reason.NAME_TAKEN: "a newer start of a node with this name is connected",
    Reason.FENCED: "the coordinator's state is older than one this node has seen (lower epoch)",
    Reason.MALFORMED: "a message was damaged or violates the protocol",
    Reason.OLD_INCARNATION: "a newer start of this node replaced it",
    Reason.LATE: "the window had closed before the delta arrived",
    Reason.STALE_BASE: "the delta's base version is too old",
    Reason.UNKNOWN_WINDOW: "the delta names a window that is neither open nor next",
    Reason.OVERLAP: "one of its contributors is already in the window",
    Reason.NOT_A_PARTICIPANT: "the node has not started training yet",
    Reason.CORRUPT: "the bytes do not match their announced digest, size or layout",
    Reason.NON_FINITE: "the delta holds NaN or Inf",
    Reason.CLOSED: "the connection closed",
    Reason.SILENT: "no message arrived within the liveness timeout",
    Reason.DRAINED: "the node left after finishing its work",
    Reason.SUPERSEDED: "a newer session of the same node took over",
    Reason.RUN_FINISHED: "the run is finished",
    Reason.COORDINATOR_STOPPING: "the coordinator is shutting down and can be restarted",
    Reason.WRONG_CODEC: "the blob's codec is not the window's codec",
    Reason.TOO_LARGE: "the blob is larger than its fragment allows",
    Reason.STALLED: "its training makes no progress, although its connection is alive",
    Reason.IMPLAUSIBLE: "the delta's claims about its work are impossible",
    Reason.HOLDING: "the coordinator's state looks like an old copy: the run is held until a person decides",
    Reason.FOREIGN: "the delta's base belongs to a discarded history of the run",
    Reason.WRONG_PART: "the node's part of the model is not a stage of the run",
    Reason.NOT_HELD: "the node does not hold the delta's fragment",
    Reason.TOO_OFTEN: "it connected too often and is ignored for a while",
    Reason.CROWDED: "the coordinator has its maximum number of sessions",
    Reason.IDLE: "the delta's bytes were requested and did not arrive in time",
    Reason.TAKES_NOTHING: "the node accepts no bytes, although its connection is alive",
    Reason.BEHIND: "too many messages wait for the node, which acknowledges them too slowly or not at all",
    Reason.FAULT: "unexpected error in this session; the coordinator's log has the traceback",
    Reason.WRONG_FROZEN: "the node's frozen weights, buffers or adapter settings differ from those of other nodes",
    Reason.ENDED: "the frame is of a session, or of a lane, that has ended",
    Reason.OUTLIER: "the delta is much longer than usual for its fragment",
    Reason.REPLAYED: "the node has sent the same numbers before",
    Reason.COPIED: "another node has sent the same numbers before",
    Reason.QUARANTINED: "the node is in quarantine: its deltas are measured and not merged until they are good again",
    Reason.TOO_MUCH: "the sum with this delta overflows fp32",
    Reason.VOID: "its window ended with fewer good deltas than a merge needs",
    Reason.FAILED: "the node ended with an error of its own",
    Reason.OUT_OF_TIME: "the node left at its deadline, before it knew whether its last deltas were merged",
}


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
