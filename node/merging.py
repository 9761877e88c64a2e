"""What is merged now, by either policy for updates that are late (protocol E, F). Pure."""

from dataclasses import dataclass

from farloop.algo.correction import usual
from farloop.algo.outer_settings import step_gain
from farloop.algo.spec import Terms
from farloop.node import events as ev
from farloop.node.fragment_state import FragmentState


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """A merge that is due: the anchor is brought up to date, then mixed into the local weights."""

    versions: list[int]
    """To be applied first, in order; none where the anchor that is held is the one to begin the next round from."""
    mix: float
    """Share of the local weights that stays."""
    loses_steps: bool = False
    """What was done since the last merge is part of no delta that counts, and goes."""


def merging_when_waiting(state: FragmentState, terms: Terms, inner_steps: int, *, training: bool) -> Merging | None:
    """Where training waits for updates: once after every send, τ steps later, with the version that it waits for.

    That is the one that holds the delta, or, with a lag, the one before: the delta's own comes during the next round.
    Who has sent nothing, nor done anything that could be sent, merges what comes when it comes. `training` is False at
    the end, where nothing is waited for.
    """
    last, versions = state.last, state.ready_versions()
    if training and last is not None and not last.is_due(inner_steps):
        return None
    if last is None or last.merged:
        # With a lag the base of what was done since the last merge still serves the next window.
        works_on = bool(terms.lag) and (last is not None or inner_steps > state.counted_from)
        if not versions or (training and works_on and not state.is_behind(terms)):
            return None
        return Merging(versions=versions, mix=_mix_unsent(state, versions[-1], inner_steps), loses_steps=True)
    wanted = last.terms.window - terms.lag
    if (versions[-1] if versions else state.version) < wanted or (terms.eager and last.offer is None):
        return None
    if terms.lag:
        newest = max(state.pending, default=0)
        if training and newest <= wanted + terms.lag:  # else the next delta would come too late from there
            versions = [version for version in versions if version <= wanted]
        return Merging(versions=versions, mix=0.0)
    if state.undecided_is_in(last) == last.terms.window:
        return Merging(versions=versions, mix=last.terms.mix)
    return Merging(versions=versions, mix=0.0, loses_steps=True)


def _mix_unsent(state: FragmentState, version: int, inner_steps: int) -> float:
    """What survives of weights that nobody was told of (protocol E)."""
    terms = state.terms_of.get(version)
    return terms.mix if terms and inner_steps > state.joined_at else 0.0


def merging_when_going_on(state: FragmentState, terms: Terms, inner_steps: int, *, training: bool) -> Merging | None:
    """Where updates are not waited for: once after every send, τ steps later, or when the delta is decided.

    Earlier, half of it would be in the weights and not in the anchor, and once more in the next delta. More often,
    others would mix the anchor in at their pace.
    """
    versions = state.ready_versions()
    if not versions or versions[-1] < state.owed or state.sent:
        return None
    has_worked = inner_steps > state.joined_at
    turn_comes = state.merge_at is not None and inner_steps >= state.merge_at
    if training and has_worked and not turn_comes:
        return None
    mix = 0.0 if state.discard or not has_worked else state.terms_for(versions[-1], terms).mix
    return Merging(versions=versions, mix=mix, loses_steps=state.discard)


def merge_command(state: FragmentState, terms: Terms, mix: float) -> ev.Merge:
    """The merge with the held anchor; an eager node adds its own deltas that are not in it yet."""
    own = tuple((undecided.blob, undecided.terms) for undecided in state.sent if not undecided.dropped)
    if not terms.eager or not own or state.last is None:
        return ev.Merge(fragment=state.fragment.index, mix=mix)
    share = 1 / terms.min_nodes if state.share is None else state.share
    factor = share * step_gain(usual(terms), state.last.terms.gap)
    return ev.Merge(fragment=state.fragment.index, mix=mix, own=own, factor=factor)
