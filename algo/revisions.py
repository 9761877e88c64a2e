"""Which terms may change in a live run, and from which window or round."""

import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from farloop.algo.spec import Identity, Layout, Revision, RunSpec
from farloop.algo.terms import FLAT, LearningRate, Terms, field_of
from farloop.algo.validation import OF_NODES, check, given_as
from farloop.monitoring.units import ascii_number, nearest

# --- Which revision a window or a round runs under
#
# Both daemons ask here, so that the terms of a window are the same on all machines, whenever they heard of a change.


BELONG_TO_ROUNDS: Final = frozenset(
    {
        "steps",
        "h",
        "h_rule",
        "h_alpha",
        "h_init",
        "h_max",
        "h_switch",
        "lr",
        "max_stale_rounds",
        "evaluate_every_rounds",
        "h_share_of",
    }
)
"""Names of terms that a round has, and all windows in it; the others are those of a window."""


@dataclasses.dataclass(frozen=True, slots=True)
class Revisions:
    """In rising order, each from where the one before it ends. A value: it never changes."""

    kept: tuple[Revision, ...]
    """One at least; the oldest is taken to hold from the run's start."""

    @classmethod
    def of(cls, spec: RunSpec, kept: Sequence[Revision] = ()) -> "Revisions":
        """Those that came with a spec; without any, its terms alone, from the start."""
        whole = Revision(
            number=spec.revision, terms=spec.terms, windows=(0,) * len(spec.identity.layout.fragments), round=0
        )
        return cls(tuple(kept) or (whole,))

    @property
    def newest(self) -> Revision:
        """The last that was given, whether anything runs under it yet or not."""
        return self.kept[-1]

    def and_then(self, revision: Revision) -> "Revisions":
        """With a further one; the same where it is known."""
        return self if revision.number <= self.newest.number else Revisions((*self.kept, revision))

    def of_round(self, index: int) -> Terms:
        """What a round runs under; of what belongs to windows, it says what the round's revision does."""
        return self._at_round(index).terms

    def of_window(self, fragment: int, window: int, round_index: int | None = None) -> Terms:
        """What a window of this round runs under. Without a round, only terms that change by window are right."""
        ours = self._at_window(fragment, window)
        theirs = ours if round_index is None else self._at_round(round_index)
        return ours.terms if theirs is ours else composed(ours.terms, theirs.terms)

    def number_of(self, fragment: int, window: int) -> int:
        """Of the revision that says what belongs to this window; 0 for the terms that the run began with."""
        return self._at_window(fragment, window).number

    def from_window(self, fragment: int, window: int) -> Iterator[Terms]:
        """What this window of a fragment and those after it run under, as far as it was given; the oldest first."""
        later = [r.terms for r in self.kept if r.windows[fragment] > window]
        yield from (self.of_window(fragment, window), *later)

    def needed(self, versions: Sequence[int], round_index: int) -> "Revisions":
        """Without those that end before these versions and this round. The newest and the one before it stay."""
        kept = list(self.kept)
        while len(kept) > 2:
            following = kept[1]
            over = all(first <= version for first, version in zip(following.windows, versions, strict=True))
            if not over or following.round > round_index:
                break
            del kept[0]
        return Revisions(tuple(kept))

    def _at_window(self, fragment: int, window: int) -> Revision:
        return next((r for r in reversed(self.kept) if r.windows[fragment] <= window), self.kept[0])

    def _at_round(self, index: int) -> Revision:
        return next((r for r in reversed(self.kept) if r.round <= index), self.kept[0])


def composed(of_window: Terms, of_round: Terms) -> Terms:
    """The terms of a window in a round of another revision: each by what belongs to it."""
    return of_window.replace(**{name: of_round.value(name) for name in BELONG_TO_ROUNDS})


# --- Which terms may change in a live run
#
# Every field of `Terms` is here once: those that belong to rounds and to windows in the two sets,
# and with a reason in `STAY` what could not change without making bytes unreadable that exist, or what a node built
# from it wrong. A refusal is a ValueError of one sentence, with the nearest that can be had.


BELONG_TO_WINDOWS: Final = frozenset(
    {
        "tau",
        "own_tau",
        "mix",
        "codec_up",
        "codec_up_of",
        "codec_down",
        "outer_lr",
        "outer_momentum",
        "outer_clip",
        "outer_restart",
        "outer_correction",
        "rewarm_momentum",
        "quorum",
        "floor",
        "min_nodes",
        "max_staleness",
        "screen",
        "norm_band",
        "merge",
    }
)
"""Terms that hold from a fragment's next window on."""

STAY: Final[Mapping[str, str]] = {
    "method": "what nodes and coordinator keep of a fragment depends on it",
    "lag": "deltas on their way would change their base",
    "eager": "what nodes added to their weights would not be taken out again",
    "clip": "it belongs to the nodes' inner optimizers, which are built once",
    "weight_decay": "it belongs to the nodes' inner optimizers, which are built once",
    "inner_optimizer": "the nodes' inner optimizers are built once",
    "batch_sequences": "the samples of granted leases are counted in it",
    "sequence_tokens": "samples are numbered by it",
    "on_late_update": "what nodes count as sent and merged depends on it",
    "control_variates": "nodes keep the corrections from their first step on",
    "variates_rate": "nodes keep the corrections from their first step on",
    "outer_buffer": "the outer momentum is half-way through a buffer of this size",
    "outer_spread": "the outer momentum is half-way through a buffer spread like this",
}
"""Terms that never change, and why."""

LEARNING_RATE_STAYS: Final[Mapping[str, str]] = {"rewarms": "the data that they bring are part of the run's identity"}
"""The same of `LearningRate`, which else belongs to rounds."""

_AS_IN_RUN_TOML: Final[Mapping[str, tuple[str, ...]]] = {
    "lr": ("lr.peak",),
    "min_lr": ("lr.minimum",),
    "schedule": ("lr.shape",),
    "constant_lr": ("lr.constant",),
    "rewarms": ("lr.rewarms",),
    "nodes": ("min_nodes",),
    **{
        name: (f"lr.{name}",)
        for name in ("warmup_steps", "drops", "drop_factor", "decay_share", "decay", "cooldown_steps", "anneal_at")
    },
}
"""What a RUN.toml calls otherwise."""

_IDENTITY: Final = frozenset(field.name for field in dataclasses.fields(Identity)) | {
    "init",
    "blocks_per_fragment",
    "stages",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    key: str  # as `outer_lr`, `lr.peak` or `codec_up_of.rome`
    before: object
    after: object  # None of what a node has of its own: it has, or had, what all have

    @property
    def of_rounds(self) -> bool:
        """Whether it holds from a round on, else from every fragment's own window."""
        return self.key.partition(".")[0] in BELONG_TO_ROUNDS


def revised(terms: Terms, layout: Layout, given: Mapping[str, str]) -> Terms:
    """The terms with these values, each given as text under its key (`outer_lr`, `lr.peak`, or as in a RUN.toml). What
    a node has of its own is given under `codec_up_of.rome`, and that of all nodes at once as in a RUN.toml. A `tau`
    that is given holds for all nodes that have none of their own, unless `own_tau` is given too.
    Raises ValueError, one sentence: one cannot change, is no such value, or the run cannot have them together."""
    changed: dict[str, Any] = {}
    check_keys(given)
    for key, text in given.items():
        for name in _AS_IN_RUN_TOML.get(key, (key,)):
            if (term := name.partition(".")[0]) in OF_NODES:
                changed[term] = given_as(name, text, changed.get(term, terms.value(term)))
            else:
                changed[name] = _parsed(name, text)
    if "tau" in changed:
        changed.setdefault("own_tau", False)
    rate = {name.removeprefix("lr."): changed.pop(name) for name in list(changed) if name.startswith("lr.")}
    after = terms.replace(**changed, lr=dataclasses.replace(terms.schedule.lr, **rate))
    if after == terms:
        flat = dict(_flat(terms))
        names = [name for key in given for name in _AS_IN_RUN_TOML.get(key, (key,))]
        raise ValueError(
            "nothing would change: " + ", ".join(f"{name} is {_shown(flat, name)} already" for name in names)
        )
    mix = terms.schedule.mix
    if 1.0 in (mix, after.schedule.mix) and mix != after.schedule.mix:
        least = "stays" if mix == 1.0 else "can be at most 0.99"
        raise ValueError(f"mix is {mix} and {least}: with 1 the work inside a delta counts from the send before")
    check(after, layout)
    try:  # windows change first: some of the new ones lie in rounds of the old length
        check(composed(after, terms), layout)
    except ValueError as error:
        raise ValueError(f"{error}, until the rounds have changed: set what belongs to windows after that") from error
    return after


def changes(before: Terms, after: Terms) -> list[Change]:
    was, now = dict(_flat(before)), dict(_flat(after))
    keys = dict.fromkeys((*was, *now))
    return [Change(key=k, before=was.get(k), after=now.get(k)) for k in keys if was.get(k) != now.get(k)]


def _flat(terms: Terms) -> Iterator[tuple[str, object]]:
    for name, value in terms.flat().items():
        if name in OF_NODES:
            yield from ((f"{name}.{node}", own) for node, own in value)
        elif name != "lr":
            yield name, value
    for field in dataclasses.fields(LearningRate):
        yield f"lr.{field.name}", getattr(terms.schedule.lr, field.name)


def check_keys(keys: Iterable[str]) -> None:
    """Raise ValueError unless a run can change each of them; one sentence."""
    for key in sorted(keys):
        for name in _AS_IN_RUN_TOML.get(key, (key,)):
            _check_key(name, key)


def _check_key(name: str, key: str) -> None:
    """Raise ValueError unless the run can change this one."""
    if key in _IDENTITY:
        raise ValueError(f"{key} is part of the run's identity, which never changes: begin a new run for another")
    if key == "bytes_goal":
        raise ValueError("bytes_goal chose h when the run began: set h")
    allowed = sorted(BELONG_TO_WINDOWS | (BELONG_TO_ROUNDS - {"lr"}) | set(_rate_hints()) | set(_AS_IN_RUN_TOML))
    name = name.partition(".")[0] if name.partition(".")[0] in OF_NODES else name
    why = STAY.get(name) or (LEARNING_RATE_STAYS.get(name.removeprefix("lr.")) if name.startswith("lr.") else None)
    if why is None and name not in allowed and name in FLAT:
        why = "the effect of a change is not defined"  # a field that is in no class yet
    if why is not None:
        raise ValueError(f"{key} stays as the run began: {why}")
    if name not in allowed:
        raise ValueError(f"there is no term {key!r} that can change; {nearest(name, allowed)}")


def _rate_hints() -> dict[str, Any]:
    hints = get_type_hints(LearningRate)
    return {f"lr.{name}": hint for name, hint in hints.items() if name not in LEARNING_RATE_STAYS}


def _parsed(name: str, text: str) -> Any:
    hint = _rate_hints()[name] if name.startswith("lr.") else field_of(name).type
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    text = text.strip()
    if type(None) in kinds and text.lower() in ("", "none"):
        return None
    kind = next(kind for kind in kinds if kind is not type(None))
    if get_origin(kind) is Literal:
        if text in get_args(kind):
            return text
        raise ValueError(f"{name}: there is no {text!r}; {nearest(text, get_args(kind))}")
    wanted = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "positions, as 300,450")
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if get_origin(kind) is tuple:
            return tuple(int(ascii_number(word)) for word in text.split(",") if word.strip())
        if kind is float:
            return float(ascii_number(text)) + 0.0  # -0 is 0
        return int(ascii_number(text)) if kind is int else kind(text)
    except (ValueError, KeyError):
        none = ", or none" if type(None) in kinds else ""
        raise ValueError(f"{name} is {wanted}{none}, not {text!r}") from None


def _shown(flat: Mapping[str, object], name: str) -> object:
    """A term that one of them gives the value of; of what nodes have of their own, all of it."""
    if name.partition(".")[0] not in OF_NODES:
        return flat[name]
    if "." in name:
        return flat.get(name, "that of all nodes")
    return " ".join(f"{k.partition('.')[2]}={own}" for k, own in flat.items() if k.startswith(f"{name}.")) or "none"
