"""What becomes of a node's deltas: part of a version, refused, too late, or overtaken by a snapshot. Pure.

Each function is asked with the fragment's state as it was before, changes it, and says what the shell is to do.
"""

from farloop.algo.spec import BlobId, BlobKind, NodeId, Terms
from farloop.node import events as ev
from farloop.node.fragment_state import FragmentState


def forgotten(state: FragmentState, kind: BlobKind, version: int) -> ev.ForgetBlob:
    """Bytes that came, and will not be used."""
    return ev.ForgetBlob(blob=BlobId(kind=kind, fragment=state.fragment.index, version=version))


def settled(state: FragmentState, version: int, node: NodeId, lag: int) -> tuple[list[ev.Command], int]:
    """The anchor is about to be at `version`: what became of the deltas for the windows up to there is known.

    Returns what is to be done, and how many inner steps are lost; without a lag, that is seen at the merge.
    """
    commands, lost_steps = list[ev.Command](), 0
    for undecided in [u for u in state.sent if u.terms.window <= version]:
        window = undecided.terms.window
        merged_in = window if state.undecided_is_in(undecided) == window else None
        if merged_in is None and lag:
            lost_steps += undecided.steps
        commands.append(ev.ForgetBlob(blob=undecided.blob, merged_in=merged_in))
        state.sent.remove(undecided)
        state.learn_share(window, node)
    return commands, lost_steps


def decided(state: FragmentState, max_staleness: int) -> list[ev.Command]:
    """Where updates are not waited for: a commit was announced, or an outcome: of the undecided delta, or one that
    leaves no way for it.

    Drops do not tell: who was removed from a window may still be merged by a later one.
    """
    if (undecided := state.undecided) is None:
        return []
    merged_in = state.undecided_is_in(undecided)
    if merged_in is not None:
        state.sent.remove(undecided)
        state.owed = merged_in
    elif not state.can_be_taken(undecided, max_staleness):
        state.give_up()
    else:
        return []
    return [ev.ForgetBlob(blob=undecided.blob, merged_in=merged_in)]


def overtaken(state: FragmentState, version: int, terms: Terms) -> list[ev.Command]:
    """A snapshot takes the anchor's place: of what was sent, only what a later window can take is still of use."""
    commands = list[ev.Command]()
    for undecided in [u for u in state.sent if not state.can_be_taken(u, terms.max_staleness, version)]:
        commands.append(ev.ForgetBlob(blob=undecided.blob))
        state.sent.remove(undecided)
    if terms.lag and state.last is not None:
        state.last.merged = version >= state.last.terms.window - terms.lag
    skipped = sorted(arrived for arrived in state.arrived if arrived <= version)
    return [*commands, *(forgotten(state, BlobKind.UPDATE, update) for update in skipped)]


def dropped(state: FragmentState) -> list[ev.Command]:
    """Another history begins: deltas without an outcome go, and bytes that came and were not used yet."""
    commands: list[ev.Command] = [ev.ForgetBlob(blob=undecided.blob) for undecided in state.sent]
    commands += [forgotten(state, BlobKind.UPDATE, version) for version in sorted(state.arrived)]
    if state.snapshot is not None:
        commands.append(forgotten(state, BlobKind.SNAPSHOT, state.snapshot))
    return commands
