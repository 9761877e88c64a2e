"""Who may say what, and when. Everything that moves a session's state is in this file.

    NODE         OPENING ── Welcome delivered ──► OPEN ── Leave sent ──► CLOSING ── acknowledged ──► CLOSED
    COORDINATOR  OPENING ── Welcome sent ───────► OPEN ── Leave sent ──► CLOSING ── acknowledged ──► CLOSED
                 OPENING ── Refused sent ───────► CLOSING

From every state, the peer's Leave or Refused, its silence, and `Session.close` lead to CLOSED.
"""

from enum import Enum

from farloop.wire.errors import LocalProtocolError, RemoteProtocolError
from farloop.wire.frames import ControlFrame
from farloop.wire.messages import (
    FROM_NODES,
    SINCE,
    Committed,
    Credit,
    Echo,
    Finished,
    Grant,
    Heartbeat,
    Hello,
    Leave,
    Message,
    Offer,
    Outcome,
    Probe,
    Recall,
    Refused,
    Revised,
    Start,
    Stored,
    Welcome,
)

MAX_EPOCH = (1 << 32) - 1
"""The epoch's field in a frame."""


class Role(Enum):
    """Which end of the link this is."""

    NODE = "node"
    COORDINATOR = "coordinator"


class State(Enum):
    """Where a session stands; the chart is in the module's docstring."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


_EITHER: frozenset[type[Message]] = frozenset({Offer, Credit, Leave, Heartbeat})
_SAYS: dict[Role, frozenset[type[Message]]] = {
    Role.NODE: FROM_NODES,
    Role.COORDINATOR: _EITHER
    | {Welcome, Refused, Start, Stored, Outcome, Committed, Grant, Finished, Revised, Echo, Probe, Recall},
}
"""What each end may say on the control lane."""

_OPENINGS: tuple[type[Message], ...] = (Hello, Welcome, Refused)
"""What stands first, and only first, in either direction."""

_PEER = {Role.NODE: Role.COORDINATOR, Role.COORDINATOR: Role.NODE}


class Handshake:
    """The state of one end, and the run and epoch that all of its frames must carry once they are known."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.state = State.OPENING
        self.run = 0
        """The run's fingerprint as a number; 0, like `epoch`, until the session is open."""
        self.epoch = 0
        self.lane_token = b""
        self.protocol = 0
        """The version that both ends speak; 0 until the session is open."""
        self.farewell: Leave | Refused | None = None
        """The message with which this end leaves."""
        self._greeted = False
        """Whether Hello was sent (node) or delivered (coordinator)."""

    def check_open(self) -> None:
        """Raise LocalProtocolError unless the session is open."""
        if self.state is not State.OPEN:
            raise LocalProtocolError(f"the session is {self.state.value}")

    def check_send(self, message: Message) -> None:
        """Check that this end may say `message` now.

        Raises:
            LocalProtocolError: another role says it, or it has another place in the session.
        """
        name = type(message).__name__
        if type(message) not in _SAYS[self.role]:
            raise LocalProtocolError(f"a {self.role.value} does not send {name}")
        if not isinstance(message, _OPENINGS):
            self.check_open()
        elif self.state is not State.OPENING or self._greeted == isinstance(message, Hello):
            raise LocalProtocolError(f"{name} has its place at the beginning, once")
        if self.protocol < (since := SINCE.get(type(message), 0)):
            raise LocalProtocolError(f"{name} needs version {since} of the protocol, the session has {self.protocol}")
        if isinstance(message, Welcome) and not 0 < message.epoch <= MAX_EPOCH:
            raise LocalProtocolError(f"epoch {message.epoch}")

    def sent(self, message: Message) -> None:
        """This end has said `message`."""
        match message:
            case Hello():
                self._greeted = True
            case Welcome():
                self._open(message)
            case Leave() | Refused():
                self.state = State.CLOSING
                self.farewell = message
            case _:
                pass

    def delivered(self, message: Message) -> None:
        """The peer's next message is `message`."""
        match message:
            case Hello():
                self._greeted = True
            case Welcome():
                self._open(message)
            case _:
                pass

    def admit(self, frame: ControlFrame, message: Message | None) -> bool:
        """Check that the peer may say `message`, in this frame. False for a frame that overtook Welcome: not wrong, but
        not yet to be judged; it will be sent again. None is a message unknown here, which may be passed over.

        Raises:
            RemoteProtocolError: it may not.
        """
        if message is not None and type(message) not in _SAYS[_PEER[self.role]]:
            raise RemoteProtocolError(f"a {_PEER[self.role].value} does not send {type(message).__name__}")
        opens = isinstance(message, _OPENINGS)
        if (opens or isinstance(message, Heartbeat)) != (frame.seq == 0):
            raise RemoteProtocolError(f"frame {frame.seq} holds {type(message).__name__}")
        if opens:
            self._check_opening(frame, message)
        elif self.role is Role.NODE and self.state is State.OPENING:
            return False
        else:
            self.check_run(frame.run, frame.epoch)
        return True

    def check_run(self, run: int, epoch: int) -> None:
        """Raise RemoteProtocolError unless a frame is of the open session's run and epoch (protocol S)."""
        if (run, epoch) != (self.run, self.epoch) or epoch == 0:
            raise RemoteProtocolError(f"run {run:016x} epoch {epoch}, here {self.run:016x} epoch {self.epoch}")

    def _check_opening(self, frame: ControlFrame, message: Message | None) -> None:
        name = type(message).__name__
        expected = (run_tag(message), message.epoch) if isinstance(message, Welcome) else (0, 0)
        if (frame.run, frame.epoch) != expected:
            raise RemoteProtocolError(f"{name} in a frame of run {frame.run:016x} epoch {frame.epoch}")
        if isinstance(message, Welcome):
            if self.state is not State.OPENING:
                self.check_run(frame.run, frame.epoch)
            elif frame.epoch == 0:
                raise RemoteProtocolError("epochs begin at 1")
        if not isinstance(message, Hello) and frame.ack == 0:
            raise RemoteProtocolError(f"{name} answers no Hello")

    def _open(self, welcome: Welcome) -> None:
        self.state = State.OPEN
        self.run = run_tag(welcome)
        self.epoch = welcome.epoch
        self.protocol = welcome.protocol
        self.lane_token = welcome.lane_token


def run_tag(welcome: Welcome) -> int:
    """The run's fingerprint as the number that frames carry."""
    return int(welcome.spec.identity.fingerprint(), 16)
