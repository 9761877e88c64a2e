"""Control variates on one node (`algo/local_update.py`): d_i of every fragment, and how each merge updates it.

The executor reports what it does, in order; this module derives d_i from it.

    applied(version, update) ── settled(own delta, merged in that version) ──▶ d_i updated      merged ──▶ Ση = 0

d_i is updated from a version that the same nodes made as the one before. If other nodes made it (one died, joined or
was late), all nodes reset d_i to 0 at the same announcement: the remaining d_i would no longer sum to zero and would
bias the model for the rest of the run.

Of SCAFCOM c begins anew on the coordinator too, with the deltas of that version: so each node's c_i does.

A dropped delta and a snapshot leave d_i as it is; a node that lost an anchor knows its update, and still uses it. The
sum is not exactly zero, until the set of nodes changes, in two cases: after a node restarted so quickly that no version
was made without it (its d_i is gone: it is not kept on disk), and while the learning rate of a late joiner is ramped,
because its Ση differs from the others'.
"""

from collections.abc import Callable
from dataclasses import dataclass

from farloop.algo.outer_settings import sums_increments
from farloop.algo.spec import BlobId, NodeId
from farloop.algo.terms import Terms
from farloop.node import events as ev
from farloop.node.model.replica import Replica
from farloop.quant.errors import BadBlob
from farloop.wire.messages import Committed, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """The nodes that made a version of a fragment."""

    version: int
    nodes: frozenset[NodeId]
    final: bool

    def continues(self, before: "_Made | None") -> bool:
        """Whether the same nodes made the version before; the first version has none."""
        if before is None or before.version != self.version - 1:
            return self.version == 1
        return before.nodes == self.nodes


class ControlVariates:
    """When d_i of a fragment changes, and from what; the replica keeps it. Without control variates it does nothing."""

    def __init__(self, replica: Replica, terms: Terms, terms_of: Callable[[int, int], Terms] | None = None) -> None:
        """`terms_of`: terms of a fragment's window; `terms` by default."""
        self._replica, self._terms_of = replica, terms_of or (lambda fragment, window: terms)
        self._on, self._rate = terms.inner.control_variates, terms.inner.variates_rate
        self._increments = sums_increments(terms)
        self._lr_sums = {fragment.index: 0.0 for fragment in replica.fragments}  # Ση since the last merge
        self._sent: dict[int, tuple[ev.Encode, float]] = {}  # with Ση of the inner steps inside it
        self._announced: dict[tuple[int, int], _Made] = {}
        self._made: dict[int, _Made] = {}  # the last version that was applied
        self._updates: dict[int, tuple[ev.Apply, bytes | bytearray]] = {}  # versions that can be learned from

    def stepped(self, lr: float) -> None:
        """After an inner step at that rate: y ← y − η·d_i."""
        if not self._on:
            return
        for fragment in self._replica.fragments:
            self._lr_sums[fragment.index] += lr
            self._replica.correct(fragment.index, lr)

    def sent(self, command: ev.Encode) -> None:
        """Before the delta is taken."""
        if self._on:
            fragment = command.blob.fragment
            lr_sum = self._lr_sums[fragment]
            self._sent[fragment] = command, lr_sum
            if self._increments:
                self._replica.take_increment(fragment, lr_sum, self._rate)

    def on_message(self, message: Message) -> None:
        if self._on and isinstance(message, Committed):
            nodes = frozenset(share.node for share in message.merged)
            made = _Made(version=message.version, nodes=nodes, final=message.next_window is None)
            self._announced[message.fragment, message.version] = made

    def applied(self, command: ev.Apply, update: bytes | bytearray) -> None:
        """The anchor was brought to this version by this blob, or should have been."""
        if not self._on:
            return
        fragment, version = command.fragment, command.version
        made = self._announced[fragment, version]
        self._announced = {at: who for at, who in self._announced.items() if at[0] != fragment or at[1] > version}
        self._updates.pop(fragment, None)
        if not (continues := made.continues(self._made.get(fragment))):
            self._replica.forget_drift(fragment)  # the sum of increments begins anew with those of this version
        if (continues or self._increments) and not made.final:  # the run's last step is by another ν; nothing follows
            self._updates[fragment] = command, update
        self._made[fragment] = made

    def on_outcome(self, blob: BlobId, merged_in: int | None, data: bytes | bytearray | None, epoch: int) -> None:
        """The node's own delta, as sent, became part of that version; None: it never will."""
        index = blob.fragment
        if index not in self._sent or self._sent[index][0].blob != blob:
            return
        encode, lr_sum = self._sent.pop(index)
        if data is None or index not in self._updates or not lr_sum > 0.0:
            return
        apply, update = self._updates[index]
        if merged_in != apply.version:
            return
        try:
            own = self._replica.parsed(index, encode.window, blob.version, encode.codec, epoch, data)
            merged = self._replica.parsed(index, merged_in, merged_in - 1, apply.codec, epoch, update)
        except BadBlob:  # the anchor did not get it either, and is lost
            return
        outer_lr = self._terms_of(index, merged_in).outer.lr
        self._replica.learn(index, own, merged, outer_lr=outer_lr, lr_sum=lr_sum, alpha=self._rate)

    def merged(self, fragment: int) -> None:
        """The local weights equal the anchor: the work of the next delta begins."""
        self._lr_sums[fragment] = 0.0
        self._updates.pop(fragment, None)
