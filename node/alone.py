"""Whether a node trains alone, as far as it can tell: its work reaches nobody, or nobody else's reaches it. Pure.

It goes on all the same, as its method says; but it says so, for its numbers alone look as good as ever.
"""

from typing import Final, Literal

from farloop.algo.spec import NodeId
from farloop.wire import messages as msg

ROUNDS: Final = 3
"""Without a merge, after which it is worth a word: more than a joiner takes to its first, or a late delta."""

AWAY_S: Final = 10.0
"""Without a session; shorter ones are dialled again, and cost nothing."""

How = Literal["", "without the coordinator", "not merged", "merged alone"]

SENTENCES: Final[dict[How, str]] = {
    "": "",
    "without the coordinator": "trains without the coordinator: no session",
    "not merged": f"nothing of it was merged in the last {ROUNDS} rounds",
    "merged alone": f"nobody else was merged in the last {ROUNDS} rounds",
}


class Alone:
    """What one node has seen of the others. `round_index` is the node's own round."""

    def __init__(self, name: NodeId) -> None:
        self._name = name
        self._own_round: int | None = None
        self._others_round: int | None = None
        self._away_since: float | None = None

    def heard(self, message: msg.Message, round_index: int) -> None:
        """A commit says who is in it."""
        if not isinstance(message, msg.Committed):
            return
        names = {share.node for share in message.merged}
        if self._name in names:
            self._own_round = round_index
        if names - {self._name}:
            self._others_round = round_index

    def how(self, *, trains: bool, connected: bool, round_index: int, now: float) -> How:
        """In what way it trains alone now, if it does; to be asked about every second."""
        if connected or not trains:
            self._away_since = None
        elif self._away_since is None:
            self._away_since = now
        if not trains:
            self._own_round = self._others_round = None
            return ""
        if self._own_round is None or self._others_round is None:  # it has only just begun
            self._own_round = round_index if self._own_round is None else self._own_round
            self._others_round = round_index if self._others_round is None else self._others_round
        if self._away_since is not None and now - self._away_since >= AWAY_S:
            return "without the coordinator"
        if round_index - self._own_round > ROUNDS:
            return "not merged"
        if round_index - self._others_round > ROUNDS:
            return "merged alone"
        return ""
