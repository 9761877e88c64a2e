"""One run: equal specs give equal numbers, and what was run is kept."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from farloop.algo import schedule
from farloop.algo.spec import NodeId, RunSpec
from farloop.bench import training
from farloop.bench.quality import Kept, RunResult, run_key, run_one
from farloop.bench.training import BuiltIn
from farloop.node.data import Corpus, Samples
from farloop.node.errors import DataError
from farloop.node.inner_optimizer import default_optimizer
from farloop.node.model import build, from_json
from farloop.node.trainer import EVALUATION_BATCH, check_data

SpecOf = Callable[..., RunSpec]


def fp32(**fields: object) -> dict[str, object]:
    return {"codec_up": "fp32", "codec_down": "fp32", **fields}


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "streaming", "h": 3, "tau": 1},
        {"method": "diloco", **fp32()},
        {"method": "data-parallel", "h": 1, "tau": None},
    ],
    ids=["streaming", "diloco", "data-parallel"],
)
def test_equal_specs_give_the_same_result_bit_for_bit(
    spec_of: SpecOf, corpus: Corpus, fields: dict[str, object]
) -> None:
    first, second = (run_one(spec_of(**fields), corpus) for _ in range(2))
    assert dataclasses.replace(first, cpu_s=0.0) == dataclasses.replace(second, cpu_s=0.0)
    assert first.inner_steps == 2 * 4
    assert [position for position, _ in first.curve][-1] == 4.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_trains_the_same_run_in_bfloat16(spec_of: SpecOf, corpus: Corpus) -> None:
    spec = spec_of(method="streaming", h=3, tau=1)
    here, there = run_one(spec, corpus), run_one(spec, corpus, device="cuda")
    assert there.loss == pytest.approx(here.loss, rel=0.02)
    assert (there.syncs, there.inner_steps, there.tokens) == (here.syncs, here.inner_steps, here.tokens)
    assert there.key != here.key, "kept beside it, not in its place"


def test_seeds_and_codecs_show_in_the_loss(spec_of: SpecOf, corpus: Corpus) -> None:
    losses = {run_one(spec_of(**fields), corpus).loss for fields in ({}, {"seed": 1}, fp32())}
    assert len(losses) == 3


def test_four_bits_are_an_eighth_of_the_bytes(spec_of: SpecOf, corpus: Corpus) -> None:
    q4, exact = (run_one(spec_of(**fields), corpus) for fields in ({}, fp32()))
    for small, large in ((q4.bytes_up, exact.bytes_up), (q4.bytes_down, exact.bytes_down)):
        assert 5.0 < large / small < 7.53, "32 / 4.25, less what headers and control take"


def test_one_node_plainly_averaged_is_the_model_trained_alone(spec_of: SpecOf, corpus: Corpus) -> None:
    """The optimizer, the learning rate, clipping, the samples and the evaluation are the trainer's."""
    spec = spec_of(**fp32(method="diloco", nodes=1, steps=6, outer_lr=1.0, outer_momentum=0.0, lr=0.01))
    module = build(from_json(spec.identity.model), spec.identity.seed)
    optimizer, samples = default_optimizer(module, spec.terms), Samples(corpus, 16, spec.identity.seed)
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(spec.terms, step)
        module.zero_grad()
        torch.autograd.backward(module.loss(samples.batch([step])))
        torch.nn.utils.clip_grad_norm_(module.parameters(), spec.terms.clip)
        optimizer.step()
    expected = check_data(spec, corpus).loss(module, EVALUATION_BATCH)
    assert run_one(spec, corpus).loss == pytest.approx(expected, rel=1e-5)


def test_a_node_sees_the_same_samples_whatever_the_codec(spec_of: SpecOf, corpus: Corpus) -> None:
    """And no two nodes, and no two steps, the same."""

    def losses(spec: RunSpec) -> list[float]:
        problem = BuiltIn(spec, corpus)
        return [problem.learner(NodeId("n"), node).backward([step]) for node in (0, 1) for step in (0, 1)]

    first = losses(spec_of())
    assert first == losses(spec_of(**fp32(h=4)))
    assert len(set(first)) == 4


def test_a_curve_ends_where_the_run_does(spec_of: SpecOf, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small set curve and end look at the same sequences, on a large one only the end looks at all."""
    monkeypatch.setattr(training, "CURVE_SEQUENCES", 8)
    small, large = (run_one(spec_of(evaluation_sequences=count), corpus) for count in (4, 40))
    assert small.curve[-1] == (4.0, small.loss)
    assert large.curve[-1][1] == pytest.approx(large.loss, rel=0.01)
    assert large.curve[-1][1] != large.loss


def test_every_inner_step_of_every_node_is_told(spec_of: SpecOf, corpus: Corpus) -> None:
    steps: list[None] = []
    run_one(spec_of(), corpus, lambda: steps.append(None))
    assert len(steps) == 8


def test_the_threads_of_the_process_are_as_before(spec_of: SpecOf, corpus: Corpus) -> None:
    torch.set_num_threads(2)
    run_one(spec_of(), corpus)
    assert torch.get_num_threads() == 2


def test_another_text_is_refused(spec_of: SpecOf, corpus: Corpus) -> None:
    with pytest.raises(DataError, match="corpus"):
        run_one(spec_of(), dataclasses.replace(corpus, digest="0" * 16))


def test_a_node_sends_its_model_once_a_round_and_once_more_at_an_end_within_one(
    spec_of: SpecOf, corpus: Corpus
) -> None:
    assert run_one(spec_of(steps=4, h=2), corpus).syncs == 2.0
    assert run_one(spec_of(steps=5, h=2), corpus).syncs == 3.0
    assert run_one(spec_of(method="data-parallel", h=1, tau=None), corpus).syncs == 4.0


def test_bytes_and_tokens_add_up_along_the_curve(spec_of: SpecOf, corpus: Corpus) -> None:
    """Two nodes, four steps of a sequence of 16 tokens; after half of the steps half of the deltas are sent."""
    found = run_one(spec_of(evaluate_every_rounds=1), corpus)
    assert (found.nodes, found.tokens) == (2, 2 * 4 * 16)
    assert [position for position, _ in found.curve] == [2.0, 4.0]
    total = found.bytes_up + found.bytes_down
    assert found.moved == pytest.approx((total / 2, total), abs=1)


def test_an_option_that_farloop_learns_later_leaves_the_keys_as_they_are(
    spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field that is as its default, of the terms or of the learning rate, is as if it were not there."""
    spec, before = spec_of(), run_key(spec_of())
    assert spec.terms.outer_restart == 0 and spec.terms.lr.decay == "sqrt"
    known = dataclasses.fields

    def earlier(value: object) -> tuple[dataclasses.Field[Any], ...]:
        return tuple(f for f in known(value) if f.name not in ("outer_restart", "decay"))  # type: ignore[arg-type]

    monkeypatch.setattr(dataclasses, "fields", earlier)
    assert run_key(spec) == before


def test_a_key_is_of_the_settings_and_not_of_the_name(spec_of: SpecOf) -> None:
    keys = [
        run_key(spec_of(**fields))
        for fields in ({}, {"seed": 1}, {"steps": 5}, {"codec_up": "q8"}, {"lr": 1e-3}, {"outer_restart": 3})
    ]
    assert len(set(keys)) == len(keys)
    assert run_key(spec_of(name="another")) == keys[0]


RESULT = RunResult(
    key="k" * 16,
    seed=3,
    nodes=2,
    loss=1 / 3,
    curve=((2.0, 0.1), (4.0, 1 / 3)),
    bytes_up=5,
    bytes_down=6,
    moved=(7, 11),
    syncs=4 / 3,
    inner_steps=8,
    tokens=128,
    cpu_s=0.7,
)


def test_a_kept_result_comes_back_exactly(spec_of: SpecOf, tmp_path: Path) -> None:
    kept = Kept(tmp_path / "runs")
    assert kept.get(RESULT.key) is None
    kept.put(spec_of(), RESULT)
    assert kept.get(RESULT.key) == RESULT
    assert [path.name for path in kept.folder.iterdir()] == [f"{RESULT.key}.json"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"result": {"seed": 3}}', "another"])
def test_a_file_that_is_not_the_result_counts_as_none(spec_of: SpecOf, tmp_path: Path, damage: str) -> None:
    kept = Kept(tmp_path)
    kept.put(spec_of(), RESULT)
    path, other = tmp_path / f"{RESULT.key}.json", tmp_path / "0123.json"
    other.write_text(path.read_text())
    path.write_text(damage)
    assert kept.get(RESULT.key) is None
    assert kept.get("0123") is None
