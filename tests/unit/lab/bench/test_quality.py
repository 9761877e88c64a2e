"""Whole runs: equal specs give equal numbers, and nothing is run twice."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faulty_world import run
from simulated_faults import NodeSetup, Scenario
from torch import Tensor

from farloop.algo import schedule
from farloop.algo.spec import NodeId, RunSpec
from farloop.algo.terms import LearningRate, Rewarm
from farloop.lab.bench import quality
from farloop.lab.bench.quality import Kept, QualityPlan, RunFailed, RunResult, Variant, Watch, run_all, run_key, run_one
from farloop.lab.bench.training import BuiltIn
from farloop.node.data.corpus import Corpus, Mixture, Samples, data_name, load_corpus
from farloop.node.errors import DataError
from farloop.node.model.built_in import GPT, build, from_json
from farloop.node.model.inner_optimizer import default_optimizer
from farloop.node.trainer import EVALUATION_BATCH, check_data

SpecOf = Callable[..., RunSpec]

FP32 = {"codec_up": "fp32", "codec_down": "fp32"}
Q4 = {"codec_up": "q4", "codec_down": "q4"}


def result(key: str, loss: float) -> RunResult:
    return RunResult(
        key=key, seed=3, nodes=2, loss=loss, bytes_up=5, bytes_down=6, syncs=4 / 3, inner_steps=8, tokens=128, cpu_s=0.7
    )  # fmt: skip


@pytest.fixture
def newer(tmp_path: Path) -> Corpus:
    (tmp_path / "newer.txt").write_text("0123456789 " * 200)
    return load_corpus(tmp_path / "newer.txt")


@pytest.fixture
def spec(spec_of: SpecOf, corpus: Corpus, newer: Corpus) -> RunSpec:
    """New data alone from position 3 on, of 6."""
    plain = spec_of(steps=6)
    lr = LearningRate(warmup_steps=0, rewarms=(Rewarm(start=3, peak=1e-3, replay=0.0),))
    return dataclasses.replace(
        plain,
        terms=plain.terms.replace(lr=lr),
        identity=dataclasses.replace(plain.identity, data=data_name([corpus, newer])),
    )


# --- one run


STREAMING = {"method": "streaming", "h": 3, "tau": 1}
DATA_PARALLEL = {"method": "data-parallel", "h": 1, "tau": None}


@pytest.mark.parametrize("fields", [STREAMING, FP32, DATA_PARALLEL], ids=["streaming", "diloco", "data-parallel"])
def test_equal_specs_give_the_same_result_bit_for_bit(
    spec_of: SpecOf, corpus: Corpus, fields: dict[str, object]
) -> None:
    torch.set_num_threads(2)
    steps: list[None] = []
    first, second = (run_one(spec_of(**fields), corpus, lambda: steps.append(None)) for _ in range(2))
    assert dataclasses.replace(first, cpu_s=0.0) == dataclasses.replace(second, cpu_s=0.0)
    assert first.inner_steps == 2 * 4 and len(steps) == 2 * 8, "every inner step of every node is reported"
    assert torch.get_num_threads() == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_trains_the_same_run_in_bfloat16(spec_of: SpecOf, corpus: Corpus) -> None:
    spec = spec_of(method="streaming", h=3, tau=1)
    here, there = run_one(spec, corpus), run_one(spec, corpus, device="cuda")
    assert there.loss == pytest.approx(here.loss, rel=0.02)
    assert (there.syncs, there.inner_steps, there.tokens) == (here.syncs, here.inner_steps, here.tokens)
    assert there.key != here.key, "kept beside it, not in its place"


def test_seeds_and_codecs_show_in_loss_and_bytes(spec_of: SpecOf, corpus: Corpus) -> None:
    q4, other, exact = (run_one(spec_of(**fields), corpus) for fields in (Q4, {"seed": 1}, FP32))
    assert len({q4.loss, other.loss, exact.loss}) == 3
    for small, large in ((q4.bytes_up, exact.bytes_up), (q4.bytes_down, exact.bytes_down)):
        assert 5.0 < large / small < 7.53, "32 / 4.25, less headers and control messages"


@pytest.mark.slow
@pytest.mark.parametrize("codecs", [{}, Q4])
def test_a_goal_of_bytes_chooses_rounds_that_meet_it(codecs: dict[str, Any], spec_of: SpecOf, corpus: Corpus) -> None:
    """Counted as they are sent: headers, control messages and the flush too."""
    spec = spec_of(model="nano", method="streaming", steps=60, h=None, tau=None, bytes_goal=60.0, **codecs)
    found = run_one(spec, corpus)
    assert 60.0 <= 8.0 * spec.identity.layout.num_parameters * 60 / (found.bytes_up + found.bytes_down) < 75.0


def test_one_node_plainly_averaged_is_the_model_trained_alone(spec_of: SpecOf, corpus: Corpus) -> None:
    """The optimizer, the learning rate, clipping, the samples and the evaluation are the trainer's."""
    spec = spec_of(**FP32, method="diloco", nodes=1, steps=6, outer_lr=1.0, outer_momentum=0.0, lr=0.01)
    module = build(from_json(spec.identity.model), spec.identity.seed)
    optimizer, samples = default_optimizer(module, spec.terms), Samples(corpus, 16, spec.identity.seed)
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(spec.terms, step)
        module.zero_grad()
        torch.autograd.backward(module.loss(samples.batch([step])))
        torch.nn.utils.clip_grad_norm_(module.parameters(), spec.terms.inner.clip)
        optimizer.step()
    expected = check_data(spec, corpus).loss(module, EVALUATION_BATCH)
    assert run_one(spec, corpus).loss == pytest.approx(expected, rel=1e-5)


def test_a_node_sees_the_same_samples_whatever_the_codec(spec_of: SpecOf, corpus: Corpus) -> None:
    """And no two nodes, and no two steps, the same."""

    def losses(spec: RunSpec) -> list[float]:
        problem = BuiltIn(spec, corpus)
        return [problem.learner(NodeId("n"), node).backward([step]) for node in (0, 1) for step in (0, 1)]

    first = losses(spec_of())
    assert first == losses(spec_of(**FP32, h=4))
    assert len(set(first)) == 4


def test_another_text_is_refused_and_so_is_a_run_without_its_later_data(
    spec_of: SpecOf, spec: RunSpec, corpus: Corpus
) -> None:
    with pytest.raises(DataError, match="corpus"):
        run_one(spec_of(), dataclasses.replace(corpus, digest="0" * 16))
    with pytest.raises(DataError, match="phase 1 is missing"):
        BuiltIn(spec, corpus)


def test_syncs_and_tokens_add_up(spec_of: SpecOf, corpus: Corpus) -> None:
    """A model is sent once a round, and once more at an end within one."""
    found = run_one(spec_of(), corpus)
    assert (found.nodes, found.tokens, found.syncs) == (2, 2 * 4 * 16, 2.0)
    assert run_one(spec_of(steps=5, h=2), corpus).syncs == 3.0
    assert run_one(spec_of(**DATA_PARALLEL), corpus).syncs == 4.0


# --- what was run is kept


def test_an_option_that_farloop_learns_later_leaves_the_keys_as_they_are(
    spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field that is as its default, of the terms or of the learning rate, is as if it were not there."""
    spec, before = spec_of(), run_key(spec_of())
    assert spec.terms.outer.restart == 0 and spec.terms.schedule.lr.decay == "sqrt"
    known = dataclasses.fields

    def earlier(value: object) -> tuple[dataclasses.Field[Any], ...]:
        return tuple(f for f in known(value) if f.name not in ("outer_restart", "decay"))  # type: ignore[arg-type]

    monkeypatch.setattr(dataclasses, "fields", earlier)
    assert run_key(spec) == before


def test_a_key_is_of_the_settings_and_not_of_the_name(spec_of: SpecOf) -> None:
    changes = ({}, {"seed": 1}, {"steps": 5}, {"codec_up": "q8"}, {"lr": 1e-3}, {"outer_restart": 3})
    keys = [run_key(spec_of(**fields)) for fields in changes]
    assert len(set(keys)) == len(keys) and run_key(spec_of(name="another")) == keys[0]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"result": {"seed": 3}}', "another"])
def test_a_kept_result_comes_back_exactly_and_a_damaged_file_counts_as_none(
    spec_of: SpecOf, tmp_path: Path, damage: str
) -> None:
    kept, mine = Kept(tmp_path / "runs"), result("k" * 16, 1 / 3)
    assert kept.get(mine.key) is None
    kept.put(spec_of(), mine)
    assert kept.get(mine.key) == mine
    (path,) = kept.folder.iterdir()
    assert path.name == f"{mine.key}.json"
    path.with_name("0123.json").write_text(path.read_text())
    path.write_text(damage)
    assert kept.get(mine.key) is None and kept.get("0123") is None, "of another run"


# --- all runs of a plan


def two_codecs(spec_of: SpecOf, folder: Path, *, seeds: int = 2) -> QualityPlan:
    codecs = {"fp32/fp32": "fp32", "q4/q4": "q4"}
    variants = tuple(
        Variant(label=label, specs=tuple(spec_of(seed=seed, codec_up=codec, codec_down=codec) for seed in range(seeds)))
        for label, codec in codecs.items()
    )
    return QualityPlan(variants=variants, folder=folder)


def test_pairs_are_run_side_by_side_and_equal_runs_once(spec_of: SpecOf, tmp_path: Path) -> None:
    plan = two_codecs(spec_of, tmp_path)
    order = [(spec.identity.seed, spec.terms.codecs.up) for spec in plan.runs.values()]
    assert order == [(0, "fp32"), (0, "q4"), (1, "fp32"), (1, "q4")]
    first, second = plan.variants
    again = dataclasses.replace(first, label="the same")
    assert dataclasses.replace(plan, variants=(first, second, again)).runs == plan.runs
    for changes, what in (
        ({"label": first.label}, "named twice"),
        ({"specs": second.specs[:1]}, "the same seeds"),
        ({"specs": ()}, "the same seeds"),
    ):
        with pytest.raises(ValueError, match=what):
            QualityPlan(variants=(first, dataclasses.replace(second, **changes)), folder=tmp_path)  # type: ignore[arg-type]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, corpus: Corpus) -> list[str]:
    """Runs without worker processes; collects the keys of what was run."""
    done: list[str] = []

    def one_by_one(
        plan: QualityPlan, runs: Mapping[str, RunSpec], jobs: int, progress: Callable[[int], None]
    ) -> Iterator[tuple[RunSpec, RunResult]]:
        for place, (key, spec) in enumerate(runs.items()):
            done.append(key)
            yield spec, quality._work(plan, spec, place)
            progress(8 * len(done))

    monkeypatch.setattr(quality, "_pooled", one_by_one)
    monkeypatch.setattr(quality, "_corpus", lambda data, max_bytes: corpus)
    monkeypatch.setattr(quality, "_steps", [0] * 8)
    return done


def test_what_is_finished_is_kept_and_not_repeated(
    spec_of: SpecOf, corpus: Corpus, tmp_path: Path, in_this_process: list[str]
) -> None:
    told: list[bool] = []
    seen: list[int] = []
    watch = Watch(finished=lambda spec, result, kept: told.append(kept), progress=seen.append)
    small = two_codecs(spec_of, tmp_path, seeds=1)
    first = run_all(small, jobs=1, watch=watch)
    assert first["q4/q4"][0].loss == run_one(small.variants[1].specs[0], corpus).loss
    plan = two_codecs(spec_of, tmp_path)
    in_this_process.clear()
    seen.clear()
    results = run_all(plan, jobs=1, watch=watch)
    assert [results[label][0] for label in results] == [first[label][0] for label in first]
    assert in_this_process == [run_key(variant.specs[1]) for variant in plan.variants]
    assert told == [False, False, True, True, False, False] and seen == [24, 32], "what was there is counted"
    assert run_all(plan, jobs=1) == results and len(in_this_process) == 2


def test_a_run_that_cannot_be_says_which_one(
    spec_of: SpecOf, corpus: Corpus, tmp_path: Path, in_this_process: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "_corpus", lambda data, max_bytes: dataclasses.replace(corpus, digest="0" * 16))
    with pytest.raises(RunFailed, match=r"diloco, 2 nodes, fp32/fp32, seed 0: .*corpus") as caught:
        run_all(two_codecs(spec_of, tmp_path), jobs=1)
    again = copy.copy(caught.value)  # as on the way from a worker process
    assert (str(again), again.exit_code) == (str(caught.value), DataError.exit_code)


def test_a_worker_whose_parent_is_gone_stops(
    spec_of: SpecOf, tmp_path: Path, in_this_process: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = SimpleNamespace(is_alive=lambda: False)
    monkeypatch.setattr(quality.multiprocessing, "parent_process", lambda: dead)
    with pytest.raises(SystemExit):
        run_all(two_codecs(spec_of, tmp_path), jobs=1)


# --- new data at a re-warm


def test_a_learner_trains_on_new_data_from_its_position_on(spec: RunSpec, corpus: Corpus, newer: Corpus) -> None:
    learner = BuiltIn(spec, corpus, phases=[newer]).learner(NodeId("a"), 0)
    assert isinstance(learner.module, GPT)
    for text, at in ((corpus, 2.5), (newer, 3.0)):
        tokens_BS = Samples(text, spec.terms.inner.sequence_tokens, spec.identity.seed).batch([0])
        expected = learner.module.loss(tokens_BS).item()
        assert learner.backward([0], at) == pytest.approx(expected)


def test_a_simulated_node_asks_for_samples_at_its_schedule_position(
    spec: RunSpec, corpus: Corpus, newer: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    batch = Mixture.batch

    def noted(mixture: Mixture, positions: Sequence[int], at: float) -> Tensor:
        asked.append(at)
        return batch(mixture, positions, at)

    monkeypatch.setattr(Mixture, "batch", noted)
    nodes = tuple(NodeSetup(name=NodeId(name), seed=number) for number, name in enumerate("ab"))
    run(Scenario(terms=spec.terms, nodes=nodes, problem=BuiltIn(spec, corpus, phases=[newer]), frugal=True))
    assert sorted(asked) == [float(step) for step in range(6) for _ in nodes]
