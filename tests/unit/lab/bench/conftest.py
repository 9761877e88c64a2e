"""The smallest runs: two nodes, a tiny model, a few steps of single short sequences of a made-up text."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from farloop.algo.spec import RunSpec
from farloop.config.run_config import RunConfig
from farloop.config.run_spec import plan_run
from farloop.node.data.corpus import Corpus, load_corpus
from farloop.node.settings import PRESETS, DataConfig, ModelConfig

SpecOf = Callable[..., RunSpec]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More would only wait for each other on models of this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(40)]
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    path.write_text(" ".join(rng.choices(words, k=4000)))
    return path


@pytest.fixture(scope="session")
def corpus(text: Path) -> Corpus:
    return load_corpus(text)


@pytest.fixture
def spec_of(text: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> SpecOf:
    """A spec from fields of `RunConfig`. Meanwhile there is a model called pico: 18,000 parameters in two blocks."""
    monkeypatch.setitem(PRESETS, "pico", ModelConfig(layers=2, dim=24, heads=2, hidden=48, context=32))

    def make(**fields: object) -> RunSpec:
        smallest = {
            "model": "pico", "method": "diloco", "nodes": 2, "steps": 4, "h": 2, "tau": 0, "batch_sequences": 1,
            "sequence_tokens": 16, "evaluation_sequences": 4,
        }  # fmt: skip
        return plan_run(RunConfig(**{**smallest, **fields}), DataConfig(path=text), corpus).spec  # type: ignore[arg-type]

    return make
