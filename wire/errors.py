"""What can go wrong on the wire.

WireError
├── LocalProtocolError    the session cannot do what this side asked for
│   ├── AlreadyUnderWay   the blob is being sent, or is expected, already
│   └── LimitReached      the session holds as much as it may: the peer takes it too slowly, or not at all
└── RemoteProtocolError   the peer, or something in between, sent what the protocol forbids; end the session
    └── OutOfBounds       an intact message says what no honest peer can: it would be sent again for ever
"""


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
