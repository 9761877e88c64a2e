"""What can go wrong on the wire.

WireError
├── LocalProtocolError    this side misused the session; a bug here
└── RemoteProtocolError   the peer, or something in between, sent what the protocol forbids; end the session
"""


class WireError(Exception):
    """Base of both."""


class LocalProtocolError(WireError):
    """This side asked the session for something its state does not allow. Nothing was changed."""


class RemoteProtocolError(WireError):
    """Bytes from outside broke a rule. Nothing was changed; the frame is to be counted and dropped."""
