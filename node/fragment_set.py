"""The fragments that a node holds, each with its state: all of the run's, or those of its part of the model."""

from collections.abc import Iterable, Iterator

from farloop.algo.parts import Part, fragments_of
from farloop.algo.spec import RunSpec
from farloop.node.fragment_state import FragmentState
from farloop.wire.messages import Welcome


class FragmentSet:
    """States in the layout's order, each found by its fragment's number."""

    def __init__(self, states: Iterable[FragmentState] = ()) -> None:
        self._states = {state.fragment.index: state for state in states}

    @classmethod
    def begin(cls, spec: RunSpec, part: Part) -> "FragmentSet":
        """Of a node that has none of its anchors yet."""
        held = fragments_of(part, spec.identity.layout)
        return cls(FragmentState(fragment=fragment, lag=spec.terms.lag) for fragment in held)

    def __iter__(self) -> Iterator[FragmentState]:
        return iter(self._states.values())

    def __getitem__(self, index: int) -> FragmentState:
        """Raises KeyError for a fragment that this node does not hold."""
        return self._states[index]

    def __contains__(self, index: object) -> bool:
        return index in self._states

    def learn(self, welcome: Welcome) -> None:
        """The terms of the windows that are open now; a fragment without one is final."""
        windows = {terms.fragment: terms for terms in welcome.windows}
        for index, state in self._states.items():
            if terms := windows.get(index):
                state.learn_terms(terms)
            else:
                state.final = welcome.versions[index]

    @property
    def joined_at(self) -> int:
        """Inner steps done when the first snapshots of all of them were asked for."""
        return min(state.joined_at for state in self)

    @property
    def versions(self) -> tuple[int, ...]:
        """Of their anchors, in order; −1 for one that is not here yet."""
        return tuple(state.version for state in self)

    def newest_round(self, slots: int) -> int:
        """The run's round as far as this node knows: that of the last slot's open window (protocol A: jump)."""
        newest = [
            max(state.terms_of.values(), key=lambda terms: terms.window).round
            for state in self
            if state.fragment.slot == slots - 1 and state.terms_of
        ]
        return min(newest, default=0)

    def begun_again(self, inner_steps: int) -> "FragmentSet":
        """The same fragments before their first snapshots. The counts of the work inside the next deltas go on."""
        return FragmentSet(
            FragmentState(
                fragment=state.fragment,
                lag=state.lag,
                joined_at=inner_steps,
                merged_at=state.merged_at,
                counted_from=state.counted_from,
                tokens_from=state.tokens_from,
            )
            for state in self
        )
