"""Covers `node/data/loader.py`: batches are the samples that are granted, whoever loads them."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from node_story import identity
from plain_runs import plain_terms
from slow_cases import examples
from stories import StoryText, all_stories, check_story, python
from torch import Tensor, nn

import farloop.node.data.corpus
from farloop.algo.sample_order import sample_index
from farloop.algo.spec import Layout, RunSpec
from farloop.algo.terms import LearningRate, Rewarm
from farloop.node.cluster import Cluster, Decision
from farloop.node.data.corpus import Corpus, Mixture, load_corpus, mixture_of, num_samples
from farloop.node.data.loader import Batches
from farloop.node.data.token_file import TokenWriter
from farloop.node.library import Node

BATCH = 4
OWN = "0123456789abcdef"


class Granted:
    """In a node's place: grants samples in order, and tells of as many steps ahead as a test wants."""

    def __init__(
        self, data: str = OWN, samples: int = 1000, *, steps: int = 12, known: int = 99, rewarm: bool = False
    ) -> None:
        lr = LearningRate(rewarms=(Rewarm(start=4, peak=1e-3, replay=0.5),)) if rewarm else LearningRate()
        terms = plain_terms(method="diloco", steps=900, h=30, lr=lr, sequence_tokens=16, batch_sequences=BATCH)
        run = identity(Layout(slots=1, fragments=()), data=data, num_samples=samples, seed=5)
        self.spec, self.module = RunSpec(identity=run, terms=terms), nn.Linear(1, 1)
        self.step, self.steps, self.known = 0, steps, known
        self.start = 40  # position of the first sample
        self.asked = 0

    @property
    def running(self) -> bool:
        return self.step < self.steps

    @property
    def position(self) -> float:
        return float(self.step)

    @property
    def samples(self) -> tuple[int, ...]:
        first = self.start + BATCH * self.step
        return tuple(range(first, first + BATCH))

    def samples_ahead(self, steps: int) -> tuple[tuple[int, ...], ...]:
        """As with a node: of as many as were asked for before this step."""
        asked, self.asked = self.asked, steps
        first = self.start + BATCH * (self.step + 1)
        return tuple(tuple(range(i, i + BATCH)) for i in range(first, first + BATCH * min(asked, self.known), BATCH))


class Squares:
    """A dataset of the user's own."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, index * index])


def batches(node: Granted, dataset: Any, **options: Any) -> Batches:
    return Batches(cast(Node, node), dataset, **options)


def taken(node: Granted, dataset: Any, **options: Any) -> list[Any]:
    found = []
    for batch in batches(node, dataset, **options):
        found.append(batch)
        node.step += 1
    return found


def token_file(path: Path, size: int = 5000, vocabulary: int = 300) -> Corpus:
    with TokenWriter(path, vocabulary=vocabulary, end_token=0, tokenizer=OWN) as writer:
        writer.add([number % vocabulary for number in range(size)], closes=True, held_out=False)
        writer.finish(0.1)
    return load_corpus(path)


def own_indices(node: Granted) -> list[list[int]]:
    first = [node.start + BATCH * step for step in range(node.steps)]
    return [[sample_index(position, 1000, 5) for position in range(i, i + BATCH)] for i in first]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "prefetch_factor": 5}], ids=str)
def test_a_batch_is_the_samples_of_the_step_whoever_loads_it(options: dict[str, Any]) -> None:
    node = Granted()
    found = taken(node, Squares(), digest=OWN, **options)
    assert [batch[:, 0].tolist() for batch in found] == own_indices(node)
    assert all((batch[:, 1] == batch[:, 0] ** 2).all() for batch in found)


def test_batches_are_loaded_ahead_as_far_as_samples_are_known() -> None:
    node = Granted()
    loading = batches(node, Squares(), digest=OWN, num_workers=2, prefetch_factor=2)
    ahead = []
    for _ in loading:
        ahead.append(len(loading._loading))
        node.step += 1
    assert ahead[:3] == [0, 4, 4] and node.asked == 4
    few = Granted(known=1)
    assert [batch[:, 0].tolist() for batch in taken(few, Squares(), digest=OWN, num_workers=2)] == own_indices(few)


def test_other_samples_than_were_announced_are_loaded_anew() -> None:
    """As after a broken session."""
    node = Granted()
    loading = batches(node, Squares(), digest=OWN, num_workers=1, prefetch_factor=3)
    for step in range(6):
        node.start += 400 if step == 3 else 0
        expected = [sample_index(position, 1000, 5) for position in node.samples]
        assert next(loading)[:, 0].tolist() == expected, step
        node.step += 1


def parts(folder: Path) -> list[Corpus]:
    return [token_file(folder / "a.bin"), token_file(folder / "b.bin", 2000)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_of_token_files_gives_what_the_daemon_would_train_on(tmp_path: Path, workers: int) -> None:
    """A mixture, and new data from step 4 on."""
    first, later = mixture_of(parts(tmp_path), [3, 1]), token_file(tmp_path / "c.bin", 3000)
    node = Granted(f"{first.digest}+{later.digest}", num_samples(first, 16), rewarm=True)
    mixture = Mixture(node.spec, [first, later])
    expected = []
    for step in range(node.steps):
        node.step = step
        expected.append(mixture.batch(node.samples, node.position))
    node.step = 0
    found = taken(node, mixture, num_workers=workers)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    indices = {mixture.index(position, 9.0) for position in range(400)}
    assert any(index >= num_samples(first, 16) for index in indices), "some of the new data"


@settings(max_examples=examples(10))
@given(weights=st.lists(st.floats(0.1, 9), min_size=2, max_size=2), steps=st.lists(st.integers(1, 50), max_size=8))
def test_a_position_is_the_same_tokens_however_positions_are_grouped(
    tmp_path_factory: pytest.TempPathFactory, weights: Sequence[float], steps: Sequence[int]
) -> None:
    corpus = mixture_of(parts(tmp_path_factory.mktemp("parts")), weights)
    mixture = Mixture(Granted(corpus.digest).spec, [corpus])
    one_by_one = [mixture[mixture.index(position, 0.0)] for position in range(sum(steps))]
    ends = iter(one_by_one)
    start = 0
    for count in steps:
        for row in mixture.batch(range(start, start + count), 0.0):
            assert torch.equal(row, next(ends))
        start += count


def test_the_loop_s_own_random_numbers_stay_as_they_were() -> None:
    node = Granted(steps=3)
    before = torch.random.get_rng_state()
    taken(node, Squares(), digest=OWN, num_workers=1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_rank_knows_its_parts_of_the_next_batches_once_it_asks() -> None:
    decision = Decision(running=True, lr=1.0, samples=(0, 1, 2, 3), ahead=tuple(range(4, 14)))
    executor = SimpleNamespace(look_ahead=0)
    for rank, size, parts in ((0, 1, ((4, 5, 6, 7), (8, 9, 10, 11))), (1, 2, ((5, 7), (9, 11)))):
        lead = SimpleNamespace(
            executor=executor, spec=Granted().spec, _decision=decision, cluster=Cluster(data_rank=rank, data_size=size)
        )
        node = cast(Node, lead)
        assert Node.samples_ahead(node, 9) == parts, "a part of a batch is not told"
        assert (Node.samples_ahead(node, 1), executor.look_ahead) == (parts[:1], 1)


@all_stories(__file__, "loader")
def test_stories(path: Path, story: StoryText, rewrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_story(path, story, python(vars(farloop.node.data.corpus), globals()), rewrite=rewrite)
