"""Covers `config/run_spec.py`: which codecs a run takes, its rates and its rounds."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from farloop.algo.methods import method_named
from farloop.algo.schedule import first_rounds
from farloop.algo.spec import Identity
from farloop.algo.terms import LearningRate, Rewarm, Terms
from farloop.cli.check import _h_text
from farloop.config.run_config import RunConfig, terms_of
from farloop.config.run_spec import plan_run
from farloop.node.data.corpus import load_corpus, load_mixture, num_samples
from farloop.node.data.token_file import TokenWriter
from farloop.node.errors import CorpusError
from farloop.node.model.built_in import from_json
from farloop.node.settings import PRESETS, DataConfig, ModelConfig, Share
from farloop.quant import codec_checks
from farloop.quant.codec import Codec
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.registry import codec_named

DATA = DataConfig(max_bytes=100_000)


def test_only_a_codec_that_decodes_exactly_may_be_the_downlink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else anchors could differ in the last bit between two machines."""

    def with_a_rounding_q8(name: str) -> Codec:
        codec = codec_named(name)
        assert isinstance(codec, BlockCodec)
        return dataclasses.replace(codec, declared=dataclasses.replace(codec.declared, exact_decode=name != "q8"))

    monkeypatch.setattr(codec_checks, "codec_named", with_a_rounding_q8)
    with pytest.raises(ValueError, match="codec_down 'q8' does not decode exactly"):
        plan_run(RunConfig(model="nano", codec_down="q8"), DATA)


VARIATES = {"method": "diloco", "steps": 60, "outer_momentum": 0.0, "control_variates": True}


def test_increments_may_leave_out_what_the_next_ones_bring() -> None:
    """And need no error feedback."""
    terms = plan_run(RunConfig(model="nano", method="scafcom", steps=60, variates_rate=0.2), DATA).spec.terms
    assert (terms.codecs.up, terms.inner.control_variates, terms.inner.optimizer) == ("topk:beta=0", True, "adamw")
    assert (terms.outer.lr, terms.outer.momentum, terms.inner.variates_rate) == (1.0, 0.0, 0.2)


def test_the_way_down_rounds_to_nearest_and_has_no_residual_unless_told_otherwise() -> None:
    terms = plan_run(RunConfig(model="nano", codec_up="q4r", codec_down="q4r:step=0.7"), DATA).spec.terms
    assert (terms.codecs.up, terms.codecs.down) == ("q4r", "q4r:step=0.7,rounding=nearest")
    assert plan_run(RunConfig(model="nano", **VARIATES), DATA).spec.terms.inner.control_variates  # type: ignore[arg-type]


def test_a_goal_of_bytes_counts_what_single_nodes_send_otherwise() -> None:
    """One of two nodes sends four times the bits: rounds are longer, and by the mean of both."""
    goal = {"model": "nano", "steps": 600, "bytes_goal": 60.0}
    h = [
        plan_run(RunConfig(**goal, codec_up_of=of), DATA).spec.terms.schedule.h  # type: ignore[arg-type]
        for of in (None, "oslo=q8", "oslo=q8 rome=q8")
    ]
    assert h[0] < h[1] < h[2] and h[1] - h[0] == pytest.approx(h[2] - h[1], abs=1)


def planned(**choices: Any) -> Terms:
    config = RunConfig(**{"method": "diloco", "steps": 900, "h": 30, **choices})
    return terms_of(config, method_named(config.method))[0]


def test_nodes_choose_tau_where_the_run_leaves_it_open_and_waits_for_updates() -> None:
    streaming = planned(method="streaming").schedule
    assert (streaming.tau, streaming.own_tau) == (1, True)
    pinned = ({"method": "streaming", "tau": 5}, {"method": "streaming", "lag": 1}, {}, {"method": "decoupled"})
    assert not any(planned(**given).schedule.own_tau for given in (*pinned, {"method": "co2"}))


@pytest.mark.parametrize(("h", "tau"), [(30, 1), (2, 1), (1, 0)])
def test_an_open_tau_fits_into_a_short_round(h: int, tau: int) -> None:
    assert planned(method="streaming", h=h).schedule.tau == tau
    rounds = {"h_rule": "qsr", "h_alpha": 0.011, "h_init": h}
    assert planned(method="streaming", h=30, **rounds).schedule.tau == tau
    assert planned(method="streaming", h=30, h_rule="post-local", h_switch=90).schedule.tau == 0


def test_muon_is_the_default_where_the_model_has_matrices_for_it_and_the_daemon_trains_it(tmp_path: Path) -> None:
    assert planned().inner.optimizer == plan_run(RunConfig(model="nano"), DATA).spec.terms.inner.optimizer == "muon"
    first = tmp_path / "first.safetensors"
    save_file({"0.weight": torch.zeros(8, 8)}, first)
    for given in (VARIATES, {"method": "data-parallel"}, {"init": first}, {"inner_optimizer": "adamw"}):
        assert planned(**given).inner.optimizer == "adamw"
    assert planned(init=first, inner_optimizer="muon").inner.optimizer == "muon", "as it was asked for"
    terms, notes = terms_of(RunConfig(), method_named("streaming"), has_matrices=False)
    assert (terms.inner.optimizer, notes[0][:40]) == ("adamw", "the model has no matrices of layers for ")
    _, notes = terms_of(RunConfig(h=700, warmup_steps=0), method_named("diloco"))
    assert notes[0] == "h = 700 is more than the 600 steps of the run: its one round ends with it"


def test_what_is_left_open_follows_from_the_peak_and_the_length() -> None:
    """Momentum of AdamW is worth its while with 30 rounds of h steps; where rounds grow, there are 15."""
    terms = planned(inner_optimizer="adamw")
    assert terms.schedule.lr == LearningRate(peak=2e-3, minimum=2e-4, warmup_steps=90)
    assert (terms.schedule.h_rule, terms.schedule.h_max, terms.outer.momentum) == ("constant", None, 0.9)
    lr = planned(schedule="infinite", anneal_at=800).schedule.lr
    assert (lr.constant, lr.cooldown_steps, lr.anneal_at) == (1.1e-3, 225, 800)
    assert planned(schedule="infinite", constant_lr=1e-3, cooldown_steps=0).schedule.lr.constant == 1e-3
    grown = planned(h_rule="qsr", h_alpha=0.011, inner_optimizer="adamw")
    assert len(first_rounds(grown, 20)) < 20 and (grown.outer.lr, grown.outer.momentum) == (1.0, 0.0)
    assert planned(h_rule="qsr", h_alpha=0.011, outer_momentum=0.9).outer.momentum == 0.9
    longest = planned(h_rule="qsr", h_alpha=0.011, steps=2**40)
    assert (longest.outer.lr, longest.outer.momentum) == (0.8, 0.6)
    assert _h_text(longest) == "30 to 30 in the first 10,000 rounds (qsr)"
    (note,) = terms_of(RunConfig(method="diloco", h=1), method_named("diloco"))[1]
    assert note == "h = 1 is too short for momentum: plain averaging (outer_lr 1, momentum 0)"


def test_an_open_h_is_the_methods_with_a_step_for_every_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    method = method_named("streaming")
    assert [terms_of(RunConfig(), method, slots=slots)[0].schedule.h for slots in (1, 15, 28)] == [15, 15, 28]
    assert terms_of(RunConfig(h=20), method, slots=28)[0].schedule.h == 20, "as it was asked for; `check` refuses it"
    parallel = RunConfig(method="data-parallel")
    assert terms_of(parallel, method_named("data-parallel"), slots=3)[0].schedule.h == 1
    monkeypatch.setitem(PRESETS, "nano", ModelConfig(layers=20, dim=16, heads=2, hidden=16, context=128))
    assert plan_run(RunConfig(model="nano", blocks_per_fragment=1), DATA).spec.terms.schedule.h == 21


def test_co2_is_eager_unless_told_otherwise() -> None:
    assert planned(method="co2").schedule.eager and not planned(method="co2", eager=False).schedule.eager
    assert not planned(method="streaming", lag=1).schedule.eager


def test_positions_are_read_from_text() -> None:
    lr = planned(schedule="step", drops="300, 600", drop_factor=0.5, rewarms="700:1e-3").schedule.lr
    assert (lr.drops, lr.drop_factor, lr.rewarms) == ((300, 600), 0.5, (Rewarm(start=700, peak=1e-3),))
    rewarms = planned(rewarms="300:1e-3, 700:5e-4:0.05, 800:5e-4:0").schedule.lr.rewarms
    assert [rewarm.replay for rewarm in rewarms] == [None, 0.05, 0.0], "with a replay, even of 0, there is new data"
    for choices, line in (
        ({"rewarms": "700:1e-3:1.5"}, r"lr\.rewarms has a replay of 1\.5; .* at least 0 and below 1"),
        ({"h_rule": "qsr"}, "h_alpha is missing; h_rule = qsr needs one above 0"),
    ):
        with pytest.raises(ValueError, match=line):
            planned(**choices)


# --- data of loops of one's own, mixtures and tokens


def test_with_init_the_coordinator_grants_samples_of_the_data_that_are_named(tmp_path: Path) -> None:
    text, own = text_of(tmp_path, "a.txt"), tmp_path / "own.safetensors"
    save_file({"weight": torch.zeros(4, 4)}, own)
    more: dict[str, Any] = {"init": own, "method": "diloco"}
    bare = identity_of(DataConfig(), **more)
    assert (bare.data, bare.num_samples, bare.evaluation_set) == ("own", 0, "none")
    granted = identity_of(DataConfig(path=text), **more)
    samples = num_samples(load_corpus(text), 16)
    assert granted == dataclasses.replace(bare, data=load_corpus(text).digest, num_samples=samples)
    named = identity_of(DataConfig(digest="mine-1", samples=77), **more)
    assert named == dataclasses.replace(bare, data="mine-1", num_samples=77)
    mixture = (Share(path=text, weight=1.0), Share(path=text_of(tmp_path, "b.txt", "w"), weight=1.0))
    assert identity_of(DataConfig(mixture=mixture), **more).data == load_mixture(mixture).digest


@pytest.mark.parametrize(
    ("weights", "line"),
    [
        (torch.tensor([[1.0, 2.0], [torch.nan, 4.0]]), "the first weights have NaN or Inf in 'weight'"),
        (torch.tensor([[1.0, torch.inf]]), "the first weights have NaN or Inf in 'weight'"),
        (torch.ones(2, 2, dtype=torch.int8), "'weight' is int8, expected floating point"),
        (torch.ones(2, 2, dtype=torch.complex64), "'weight' is complex64, expected floating point"),
    ],
)
def test_weights_that_cannot_be_trained_are_refused_before_the_run(tmp_path: Path, weights: Tensor, line: str) -> None:
    save_file({"bias": torch.zeros(4), "weight": weights}, tmp_path / "own.safetensors")
    with pytest.raises(ValueError, match=line):
        identity_of(DataConfig(), init=tmp_path / "own.safetensors", method="diloco")


def test_a_built_in_model_has_the_vocabulary_of_the_data(tmp_path: Path) -> None:
    for name, vocabulary in (("a", 300), ("b", 301)):
        with TokenWriter(tmp_path / name, vocabulary=vocabulary, end_token=0, tokenizer="0" * 16) as writer:
            writer.add([5, 299] * 200, closes=True, held_out=False)
            writer.finish(0.1)
    identity = identity_of(DataConfig(path=tmp_path / "a"))
    assert from_json(identity.model).vocabulary == 300 and '"vocabulary":300' in identity.model
    assert "vocabulary" not in identity_of(DataConfig(path=text_of(tmp_path, "c"))).model, "of bytes, as ever"
    mixture = tuple(Share(path=tmp_path / name, weight=1.0) for name in "ab")
    with pytest.raises(
        CorpusError, match=r"mixture: .*/b has the tokenizer 0000000000000000 \(301 tokens\), the first"
    ):
        identity_of(DataConfig(mixture=mixture))
    with pytest.raises(CorpusError, match=r"phases: .*/b has the tokenizer"):
        identity_of(DataConfig(path=tmp_path / "a", phases=(tmp_path / "b",)), rewarms="200:1e-3:0.05")


# --- later data


def text_of(folder: Path, name: str, byte: str = "x") -> Path:
    path = folder / name
    path.write_text(f"{byte}yz " * 400)
    return path


def identity_of(data: DataConfig, **choices: Any) -> Identity:
    smallest = {"model": "nano", "steps": 300, "sequence_tokens": 16, "evaluation_sequences": 2}
    return plan_run(RunConfig(**{**smallest, **choices}), data).spec.identity


def test_later_data_changes_the_data_of_the_identity_alone(tmp_path: Path) -> None:
    first, second = text_of(tmp_path, "a.txt"), text_of(tmp_path, "b.txt", "w")
    before = identity_of(DataConfig(path=first))
    assert before.data == load_corpus(first).digest
    after = identity_of(DataConfig(path=first, phases=(second,)), rewarms="200:1e-3:0.05")
    assert after == dataclasses.replace(before, data=f"{before.data}+{load_corpus(second).digest}")
    assert identity_of(DataConfig(path=first, phases=()), rewarms="200:1e-3") == before


def test_every_rewarm_with_a_replay_brings_one_text(tmp_path: Path) -> None:
    text, own = text_of(tmp_path, "a.txt"), tmp_path / "own.safetensors"
    save_file({"weight": torch.zeros(4, 4)}, own)
    for phases, rewarms, more, sentence in (
        ((), "200:1e-3:0.05", {}, r"rewarms: 1 with a replay .* but \[data\] phases names 0 texts"),
        ((text,), "200:1e-3", {}, "rewarms: none with a replay .* names 1 text;"),
        ((text, text), "200:1e-3:0", {}, "rewarms: 1 with a replay .* names 2 texts"),
        ((), "200:1e-3:0.05", {"init": own, "method": "diloco"}, "rewarms: one has a replay, but with init the nodes'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            identity_of(DataConfig(path=None if more else text, phases=phases), rewarms=rewarms, **more)
    (tmp_path / "short").write_text("a")
    with pytest.raises(CorpusError, match=r"phases: .*/short: the training text has"):
        identity_of(DataConfig(phases=(tmp_path / "short",), max_bytes=100_000), rewarms="200:1e-3:0.05")


def test_the_weights_file_has_statistics_where_the_run_averages_them(tmp_path: Path) -> None:
    own, plain = tmp_path / "own.safetensors", tmp_path / "plain.safetensors"
    save_file({"0.weight": torch.ones(4), "0.running_var": torch.ones(4)}, own)
    save_file({"0.weight": torch.ones(4)}, plain)
    layout = identity_of(DataConfig(), init=own, method="diloco", buffers="average").layout
    assert [fragment.averaged for fragment in layout.fragments] == [True, False]
    with pytest.raises(ValueError, match=r"^buffers is own, but .* have '0\.running_var': take average, or leave it"):
        identity_of(DataConfig(), init=own, method="diloco")
    with pytest.raises(ValueError, match=r"^buffers is average, but .* have no running_mean or running_var: take own$"):
        identity_of(DataConfig(), init=plain, method="diloco", buffers="average")
