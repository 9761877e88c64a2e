"""Covers `node/model/residuals.py`: a residual is settled by outcomes, gone with a dropped delta, never sent twice
(protocol E, Q, S)."""

import dataclasses
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from node_story import delta
from safetensors.torch import load_file, save_file
from slow_cases import examples
from stories import StoryText, all_stories, check_story, python
from torch import Tensor

from farloop.algo import spec
from farloop.algo.spec import BlobId
from farloop.node.model.residuals import R_STALE, Residual, Residuals
from farloop.quant import registry, spelling
from farloop.quant.codec import Traits
from farloop.quant.formats.q4 import Q4, Q4Codec

CPU = torch.device("cpu")
FEEDBACK = "q4:beta=0.5"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sparse(Q4Codec):
    """`q4` that says it is sparse: a residual of it is kept on disk."""

    @property
    def traits(self) -> Traits:
        return dataclasses.replace(self.declared, sparse=True)


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> str:
    """The spelling of a codec whose residual is durable."""
    fields = {f.name: getattr(Q4, f.name) for f in dataclasses.fields(Q4) if f.init}
    codec = Sparse(**{**fields, "name": "sparse", "beta": 0.95})
    monkeypatch.setattr(registry, "CODECS", {**registry.CODECS, "sparse": codec})
    monkeypatch.setattr(spelling, "PARAMETERS", {**spelling.PARAMETERS, "sparse": spelling.PARAMETERS["q4"]})
    return "sparse"


class Kept:
    """The residuals of one start; every delta is for the window after version 3, 4, …"""

    def __init__(self, folder: Path | None = None, run: str = "run", codec: str = FEEDBACK) -> None:
        self.codec = codec
        self.own = Residuals(run, lambda _: torch.zeros(300), folder, lambda job: job())

    def send(self, seq: int, value: float, window: int = 4) -> "Kept":
        """An encoding that loses `value` everywhere."""
        buffer = self.own.for_delta(delta(window, seq), self.codec)
        assert buffer is not None
        buffer.fill_(value)
        self.own.encoded(delta(window, seq), self.codec, None)
        return self

    def settle(self, seq: int, merged_in: int | None = 4, window: int = 4) -> "Kept":
        self.own.on_outcome(delta(window, seq), merged_in)
        return self

    def install(self, version: int) -> "Kept":
        self.own.installed(0, version, self.codec)
        return self

    def next(self, version: int = 4, codec: str = "") -> float:
        """What is added to the next delta from this version: the same everywhere."""
        buffer = self.own.for_delta(delta(version + 1, 99), codec or self.codec)
        assert buffer is not None
        (value,) = set(buffer.tolist())
        return float(value)


@pytest.mark.parametrize(
    ("case", "version", "found"),
    [
        ("a later version", 6, 2.0),
        ("too old", 9, 0.0),
        ("sent again", 4, 0.0),  # it is part of that blob now
        ("another run", 4, 0.0),
        ("another history", 4, 0.0),
        ("cut off", 4, 0.0),
        ("not a number", 4, 0.0),
    ],
)
def test_a_restart_finds_a_sparse_residual_again_unless_it_does_not_fit(
    tmp_path: Path, sparse: str, case: str, version: int, found: float, caplog: pytest.LogCaptureFixture
) -> None:
    kept, path = Kept(tmp_path, codec=sparse).send(1, 2.0).settle(1), tmp_path / "residual-0.safetensors"
    match case:
        case "sent again":
            kept.send(2, 3.0, window=5)
        case "cut off":
            path.write_bytes(path.read_bytes()[:-100])
        case "not a number":
            broken = load_file(path)["residual"].fill_(torch.nan)
            save_file({"residual": broken}, path, {"run": "run", "fragment": "0", "codec": "sparse", "version": "4"})
    run = {"another run": "other", "another history": "run.8"}.get(case, "run")
    with caplog.at_level(logging.WARNING):
        again = Kept(tmp_path, run, sparse).install(version)
    assert again.next(version) == found
    assert bool(caplog.records) == (case in ("cut off", "not a number"))


def test_a_run_that_was_wound_back_ends_it_in_memory_and_on_disk(tmp_path: Path, sparse: str) -> None:
    """S: it is of deltas that the run knows nothing of any more."""
    kept = Kept(tmp_path, codec=sparse).send(1, 2.0).settle(1)
    kept.own.begin_again("run.8")
    assert not list(tmp_path.iterdir())
    assert kept.install(4).next() == 0.0


def test_a_full_disk_costs_the_copy_and_nothing_else(
    tmp_path: Path, sparse: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("farloop.node.model.residuals.save_file", full)
    with caplog.at_level(logging.WARNING):
        kept = Kept(tmp_path, codec=sparse).send(1, 2.0).settle(1)
    assert "residual not saved fragment=0: [Errno 28]" in caplog.text
    assert not list(tmp_path.iterdir()) and kept.next() == 2.0


# --- one residual

Event = Callable[[Residual], None]


def fresh(folder: Path | None = None, *, durable: bool = False) -> Residual:
    return Residual("run", 0, "topk", lambda _: torch.zeros(GRAINS), folder, lambda job: job(), durable=durable)


def encoded(seq: int, window: int = 4) -> Event:
    def event(residual: Residual) -> None:
        residual.for_delta().fill_(float(seq))
        residual.encoded(delta(window, seq))

    return event


def merged(seq: int, window: int = 4) -> Event:
    return lambda residual: residual.merged(delta(window, seq), window)


def dropped(seq: int, window: int = 4) -> Event:
    return lambda residual: residual.dropped(delta(window, seq))


RESET: Event = Residual.reset


def added(*events: Event) -> float:
    """What is added to the next delta, everywhere."""
    residual = fresh()
    for event in events:
        event(residual)
    (value,) = set(residual.for_delta().tolist())
    return float(value)


@all_stories(__file__, "residuals")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(vars(spec), globals()), rewrite=rewrite)


GRAINS = 100
"""Work that can be told apart: every delta has three new grains, and a codec sends some."""


@dataclasses.dataclass(slots=True)
class Sent:
    """The coordinator's view of one delta, and the one outcome that it gets."""

    blob: BlobId
    payload: frozenset[int]
    merged_in: int | None = None
    dropped: bool = False


@settings(max_examples=examples(20), stateful_step_count=30)
class Feedback(RuleBasedStateMachine):
    """A node and its disk, a coordinator, and a network that delays, repeats and loses outcomes; β = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = tempfile.TemporaryDirectory()
        self.version, self.seq = 3, 0
        self.sent: list[Sent] = []

    def teardown(self) -> None:
        self.disk.cleanup()

    @initialize(durable=st.booleans())
    def start(self, durable: bool) -> None:
        self.durable = durable
        self.residual = fresh(Path(self.disk.name), durable=durable)

    @property
    def copy(self) -> Path:
        return Path(self.disk.name) / "residual-0.safetensors"

    @rule(data=st.data(), outcome=st.sampled_from(["merged", "dropped", "open"]))
    def send(self, data: st.DataObject, outcome: str) -> None:
        """Mostly the outcome comes at once."""
        if self.seq >= GRAINS // 3:
            return
        buffer, new = self.residual.for_delta(), range(3 * self.seq, 3 * self.seq + 3)
        before = self.settled
        work = {*buffer.nonzero().flatten().tolist(), *new}
        assert work == {*before, *new}
        payload = data.draw(st.sets(st.sampled_from(sorted(work))))
        buffer.zero_()
        for grain in work - payload:
            buffer[grain] = 1.0
        self.seq += 1
        self.sent.append(Sent(delta(self.version + 1, self.seq), frozenset(payload)))
        self.residual.encoded(self.sent[-1].blob)
        self.held, self.settled = frozenset(work - payload), frozenset()
        if outcome != "open":
            self.decide(self.sent[-1], outcome == "merged")
            self.tell(self.sent[-1])

    held: frozenset[int] = frozenset()  # what the last delta lost
    settled: frozenset[int] = frozenset()  # ... once it is merged
    settled_at = 0

    def decide(self, sent: Sent, merge: bool) -> None:
        """At the coordinator; the node does not know yet."""
        if merge:
            self.version = max(self.version, sent.blob.version) + 1
            sent.merged_in = self.version
        else:
            sent.dropped = True

    def tell(self, sent: Sent) -> None:
        """An outcome arrives; that of the last delta counts."""
        is_last = sent is self.sent[-1] and bool(self.held)
        if sent.merged_in is not None:
            self.residual.merged(sent.blob, sent.merged_in)
            if is_last:
                self.settled, self.settled_at = self.held, sent.merged_in
        else:
            self.residual.dropped(sent.blob)
        if is_last:
            self.held = frozenset()

    @rule(merge=st.booleans(), data=st.data())
    def decide_any(self, merge: bool, data: st.DataObject) -> None:
        if undecided := [sent for sent in self.sent if sent.merged_in is None and not sent.dropped]:
            self.decide(data.draw(st.sampled_from(undecided)), merge)

    @rule(data=st.data())
    def tell_any(self, data: st.DataObject) -> None:
        """In any order, any number of times."""
        if decided := [sent for sent in self.sent if sent.merged_in is not None or sent.dropped]:
            self.tell(data.draw(st.sampled_from(decided)))

    @rule()
    def rejoin(self) -> None:
        """A snapshot comes, and what was being encoded for the old anchor is written after it."""
        under_way: Tensor = self.residual.for_delta()
        self.residual.reset()
        under_way.fill_(1.0)
        self.held = self.settled = frozenset()
        assert not self.copy.exists()

    @rule(away=st.integers(0, R_STALE + 2))
    def crash_and_restart(self, away: int) -> None:
        self.version += away
        self.residual = fresh(Path(self.disk.name), durable=self.durable)
        self.residual.restore(self.version)
        if not (self.durable and self.version - self.settled_at <= R_STALE):
            self.settled = frozenset()
        self.held = frozenset()

    @invariant()
    def what_is_on_disk_is_settled(self) -> None:
        """With what is part of a sent blob, a restart would send it twice."""
        assert self.durable or not self.copy.exists()
        if self.copy.exists():
            kept = load_file(self.copy)["residual"].nonzero().flatten().tolist()
            assert set(kept) == self.settled
        else:
            assert not (self.durable and self.settled)


TestFeedback = Feedback.TestCase
