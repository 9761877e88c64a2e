"""Runs side by side: nothing is run twice, and what breaks says which one it was."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from farloop.algo.spec import RunSpec
from farloop.bench import quality
from farloop.bench.quality import QualityPlan, RunFailed, RunResult, Variant, Watch, run_all, run_each, run_key, run_one
from farloop.node.data import Corpus
from farloop.node.errors import DataError

SpecOf = Callable[..., RunSpec]


def plan_of(spec_of: SpecOf, folder: Path, *, seeds: int = 2) -> QualityPlan:
    codecs = {"fp32/fp32": "fp32", "q4/q4": "q4"}
    variants = tuple(
        Variant(label=label, specs=tuple(spec_of(seed=seed, codec_up=codec, codec_down=codec) for seed in range(seeds)))
        for label, codec in codecs.items()
    )
    return QualityPlan(variants=variants, folder=folder)


def test_variants_need_names_of_their_own_and_the_same_seeds(spec_of: SpecOf, tmp_path: Path) -> None:
    first, second = plan_of(spec_of, tmp_path).variants
    with pytest.raises(ValueError, match="named twice"):
        QualityPlan(variants=(first, dataclasses.replace(second, label=first.label)), folder=tmp_path)
    for specs in (second.specs[:1], ()):
        with pytest.raises(ValueError, match="the same seeds"):
            QualityPlan(variants=(first, dataclasses.replace(second, specs=specs)), folder=tmp_path)


def test_pairs_are_run_side_by_side_and_equal_runs_once(spec_of: SpecOf, tmp_path: Path) -> None:
    plan = plan_of(spec_of, tmp_path)
    order = [(spec.identity.seed, spec.terms.codec_up) for spec in plan.runs.values()]
    assert order == [(0, "fp32"), (0, "q4"), (1, "fp32"), (1, "q4")]
    again = Variant(label="the same", specs=plan.variants[0].specs)
    assert dataclasses.replace(plan, variants=(*plan.variants, again)).runs == plan.runs


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, corpus: Corpus) -> list[str]:
    """Runs without worker processes; collects the keys of what was run."""
    done: list[str] = []

    def one_by_one(
        plan: QualityPlan, runs: Mapping[str, RunSpec], jobs: int, progress: Callable[[int], None]
    ) -> Iterator[tuple[RunSpec, RunResult | RunFailed]]:
        for place, (key, spec) in enumerate(runs.items()):
            done.append(key)
            try:
                yield spec, quality._work(plan, spec, place)
            except RunFailed as error:
                yield spec, error
            progress(8 * len(done))

    monkeypatch.setattr(quality, "_pooled", one_by_one)
    monkeypatch.setattr(quality, "_corpus", lambda data, max_bytes: corpus)
    monkeypatch.setattr(quality, "_steps", [0] * 8)
    return done


def test_what_is_finished_is_kept_and_not_repeated(
    spec_of: SpecOf, corpus: Corpus, tmp_path: Path, in_this_process: list[str]
) -> None:
    told: list[tuple[str, bool]] = []
    watch = Watch(finished=lambda spec, result, kept: told.append((result.key, kept)))
    small = plan_of(spec_of, tmp_path, seeds=1)
    first = run_all(small, jobs=1, watch=watch)
    assert first["q4/q4"][0].loss == run_one(small.variants[1].specs[0], corpus).loss
    plan = plan_of(spec_of, tmp_path)
    results = run_all(plan, jobs=1, watch=watch)
    assert [results[label][0] for label in results] == [first[label][0] for label in first]
    assert in_this_process == [*small.runs, *(run_key(variant.specs[1]) for variant in plan.variants)]
    assert [kept for _, kept in told] == [False, False, True, True, False, False]
    assert run_all(plan, jobs=1) == results
    assert len(in_this_process) == 4


def test_progress_counts_what_was_there_before(spec_of: SpecOf, tmp_path: Path, in_this_process: list[str]) -> None:
    run_all(plan_of(spec_of, tmp_path, seeds=1), jobs=1)
    in_this_process.clear()
    seen: list[int] = []
    run_all(plan_of(spec_of, tmp_path), jobs=1, watch=Watch(progress=seen.append))
    assert seen == [24, 32]


def test_a_run_that_cannot_be_says_which_one(
    spec_of: SpecOf, corpus: Corpus, tmp_path: Path, in_this_process: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "_corpus", lambda data, max_bytes: dataclasses.replace(corpus, digest="0" * 16))
    with pytest.raises(RunFailed, match=r"diloco, 2 nodes, fp32/fp32, seed 0: .*corpus") as caught:
        run_all(plan_of(spec_of, tmp_path), jobs=1)
    again = copy.copy(caught.value)  # as on the way from a worker process
    assert (str(again), again.exit_code) == (str(caught.value), DataError.exit_code)


def test_where_a_broken_run_is_none_the_others_go_on(
    spec_of: SpecOf, tmp_path: Path, in_this_process: list[str]
) -> None:
    """A step of 1e30 leaves what fp32 holds."""
    good, wild = (spec_of(lr=lr, min_lr=0.0, warmup_steps=0, h=1) for lr in (1e-3, 1e30))
    variants = (Variant(label="good", specs=(good,)), Variant(label="wild", specs=(wild,)))
    plan, told = QualityPlan(variants=variants, folder=tmp_path), list[str]()
    watch = Watch(failed=lambda spec, error: told.append(str(error)))
    results = run_each(plan, jobs=1, watch=watch, broken_is_none=True)
    assert list(results) == [run_key(good)]
    assert len(told) == 1 and "NaN or Inf" in told[0]
    with pytest.raises(RunFailed, match="NaN or Inf"):
        run_all(plan, jobs=1)


def test_a_worker_whose_parent_is_gone_stops(
    spec_of: SpecOf, tmp_path: Path, in_this_process: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = SimpleNamespace(is_alive=lambda: False)
    monkeypatch.setattr(quality.multiprocessing, "parent_process", lambda: dead)
    with pytest.raises(SystemExit):
        run_all(plan_of(spec_of, tmp_path), jobs=1)
