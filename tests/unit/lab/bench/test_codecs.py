"""The codec benchmark: errors as theory has them, rows of speeds, and the commands. No test asks for a speed."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from command_line import farloop, found

from farloop.algo.spec import Fragment, TensorSlot
from farloop.lab.bench import training
from farloop.lab.bench.codec_quality import (
    DISTRIBUTIONS,
    OUTER,
    Sample,
    codec_quality,
    compared,
    outer_sample,
    random_sample,
)
from farloop.lab.bench.codec_speed import (
    Bench,
    Pace,
    Where,
    codec_rows,
    matrices,
)
from farloop.lab.bench.codec_tables import error_text, summary_of
from farloop.lab.bench.codecs import OPS, CodecReport, Plan, places, run
from farloop.lab.bench.training import OuterGradients, Settings, cpu_threads, default_threads, outer_gradients
from farloop.lab.plots.codecs import plot_quality
from farloop.quant.registry import CODECS, codec_named
from farloop.quant.spelling import PARAMETERS

# --- errors

# On a Gaussian of 4 Mi numbers (measured); a matrix of 256² is within a few percent.
GAUSSIAN_ERRORS = {"bf16": 2.8e-6, "q8": 4.9e-5, "q4": 9.1e-3, "e3m0": 3.5e-2, "q4r": 0.167, "q4r:step=0.7": 8.2e-2}


@pytest.mark.parametrize("spelling", [*GAUSSIAN_ERRORS, *CODECS])
def test_a_gaussian_loses_what_it_should_and_never_less_than_the_rate_distortion_bound(spelling: str) -> None:
    row = codec_quality(codec_named(spelling), random_sample("gauss", 256))
    assert row.codec == spelling and (row.rel_mse == 0.0 or row.rel_mse > 0.97 * 4.0**-row.bits)
    if spelling in GAUSSIAN_ERRORS:
        assert row.rel_mse == pytest.approx(GAUSSIAN_ERRORS[spelling], rel=0.06)
    if spelling == "fp32":
        assert (row.rel_mse, row.bits, row.cosine) == (0.0, 32.0, pytest.approx(1.0))


def test_bits_are_those_of_the_blob_after_its_entropy_stage() -> None:
    zeros = Sample(name="zeros", fragment=random_sample("gauss", 64).fragment, vectors=(torch.full((4096,), 1e-3),))
    assert codec_quality(codec_named("q4"), zeros).bits == 4.25
    assert codec_quality(codec_named("q4r"), zeros).bits < 1.0


def test_distributions_have_their_size_and_are_the_same_every_time() -> None:
    for name in DISTRIBUTIONS:
        (x,), (again,) = random_sample(name, 64).vectors, random_sample(name, 64).vectors
        assert torch.equal(x, again) and x.shape == (4096,)
    assert float(random_sample("gauss", 256).vectors[0].std()) == pytest.approx(1e-3, rel=0.02)


def test_outer_gradients_have_a_vector_of_each_node_and_padding_costs_bits() -> None:
    slots = [TensorSlot(name=n, shape=(c,), offset=o) for n, c, o in (("a", 2000, 0), ("b", 1024, 2048))]
    fragment = Fragment(index=0, slot=0, numel=3072, tensors=tuple(slots))
    generator = torch.Generator().manual_seed(1)
    deltas = [torch.randn(3072, generator=generator) for _ in range(4)]
    for delta in deltas:
        delta[2000:2048] = 0
    sample = outer_sample(OuterGradients(fragment=fragment, deltas=tuple(deltas), before=tuple(deltas)))
    row = codec_quality(codec_named("fp32"), sample)
    assert row.data == OUTER and row.bits == pytest.approx(32 * 3072 / 3024)


def test_the_sender_starts_from_its_last_payload() -> None:
    """A second power iteration of a matrix of rank 8 finds more of it than the first."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(128, 8, generator=generator) @ torch.randn(8, 128, generator=generator)
    cold = Sample(name="x", fragment=random_sample("gauss", 128).fragment, vectors=(x.view(-1),))
    warm = dataclasses.replace(cold, before=(x.view(-1),))
    codec = codec_named("lowrank")
    assert codec_quality(codec, warm).rel_mse < codec_quality(codec, cold).rel_mse


def test_compared_by_hand() -> None:
    assert compared(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == pytest.approx((16 / 25, 9 / 15))
    assert compared(torch.ones(2), torch.zeros(2)) == (1.0, 0.0)


# --- speeds

BRIEF = Pace(budget_s=0.0, least=2)
HERE = Where(device="cpu", threads=1)


@pytest.fixture
def bench() -> Bench:
    return Bench(HERE, 8192, BRIEF)


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_has_its_rows(name: str, bench: Bench) -> None:
    with cpu_threads(1):
        rows = list(codec_rows(bench, CODECS[name], ("encode", "decode", "add", "sum8", "fused")))
    assert [row.op for row in rows] == ["encode", "decode", "add", "sum8", "fused"]
    for row in rows:
        assert row.codec == name and row.path in ("numba", "torch") and row.gb_per_s > 0 and row.warmup_s > 0
        assert row.ratio_to_memcpy == row.gb_per_s / row.memcpy_gb_per_s


def test_operations_are_chosen_and_what_is_timed_does_its_work(bench: Bench) -> None:
    assert [row.op for row in codec_rows(bench, codec_named("q4"), ("decode",))] == ["decode"]
    list(codec_rows(bench, codec_named("fp32"), ("encode", "decode")))
    assert torch.equal(bench.y, bench.x) and bool(bench.x.any())


def test_eight_vectors_count_eight_times_and_a_copy_comes_before_every_repetition(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(bench, "_copies", [lambda: events.append("copy")])
        bench.row("x", "torch", "encode", lambda: events.append("call"))
    assert events == ["call", "copy", "call", "copy", "call"]
    ticks = itertools.count(1.0)
    monkeypatch.setattr(bench, "_seconds", lambda call: next(ticks))
    row = bench.row("x", "torch", "sum8", lambda: None, vectors=8)
    # First call 1 s; then copy 2, call 3, copy 4, call 5.
    size_gb = 4e-9 * 8192
    assert (row.warmup_s, row.gb_per_s, row.memcpy_gb_per_s) == pytest.approx((1.0, 8 * size_gb / 3, size_gb / 2))


def test_a_vector_is_cut_into_square_matrices() -> None:
    shapes = {2 * 1024**2 + 300: [(1024, 1024)] * 2 + [(300,)], 4096**2: [(4096, 4096)], 100: [(100,)]}
    for count, expected in shapes.items():
        assert [slot.shape for slot in matrices(count).tensors] == expected
    with pytest.raises(ValueError, match="nothing to measure"):
        Bench(HERE, 0, BRIEF)


def test_threads_double_up_to_all_cores_and_their_number_is_restored() -> None:
    assert [default_threads(cores) for cores in (1, 2, 6)] == [(1,), (1, 2), (1, 2, 4, 6)]
    before = torch.get_num_threads()
    with cpu_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    assert places([1, 3], ["cpu"]) == (Where(device="cpu", threads=1), Where(device="cpu", threads=3))
    assert [where.device for where in places(None, ["cuda"])] == ["cuda"]


# --- outer gradients

TINY = Settings(model="nano", nodes=2, h=2, rounds=2, batch_sequences=1, sequence_tokens=16)


def test_outer_gradients_are_made_once_and_kept_with_zeros_between_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outer_gradients(TINY, folder=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(training, "_train", lambda *given: pytest.fail("trained again"))
        again = outer_gradients(TINY, folder=tmp_path)
    assert found.fragment == again.fragment
    assert all(map(torch.equal, (*found.deltas, *found.before), (*again.deltas, *again.before)))
    outer_gradients(dataclasses.replace(TINY, nodes=1, h=1), folder=tmp_path)
    assert len(list(tmp_path.glob("outer-gradients-*.safetensors"))) == 2, "other settings are another file"
    with pytest.raises(ValueError, match="two rounds or more"):
        Settings(rounds=1)
    one, other = found.deltas
    assert len(found.before) == 2 and one.shape == (found.fragment.numel,) and bool(one.any())
    assert not torch.equal(one, other) and not torch.equal(one, found.before[0])
    used = torch.zeros(found.fragment.numel, dtype=torch.bool)
    for slot in found.fragment.tensors:
        used[slot.offset : slot.offset + slot.numel] = True
    assert not bool(one[~used].any())


# --- a report

MEASURED_CODECS = ("fp32", "q4", "q4r:step=0.7")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> CodecReport:
    return run(
        Plan(
            codecs=tuple(map(codec_named, MEASURED_CODECS)), places=places([1, 2], ["cpu"]), elements=4096, side=32,
            pace=Pace(budget_s=0.0, least=1), outer=TINY, folder=tmp_path_factory.mktemp("outer"),
        )
    )  # fmt: skip


def test_a_report_has_a_row_for_every_codec_operation_place_and_kind_of_data(report: CodecReport) -> None:
    speeds = {(row.codec, row.op, row.threads) for row in report.speed}
    assert speeds >= {(c, op, n) for c in MEASURED_CODECS for op in set(OPS) - {"outer"} for n in (1, 2)}
    assert {("memcpy", "copy", 1), ("memcpy", "copy", 2)} <= speeds
    assert {(row.codec, row.data) for row in report.quality} == {
        (name, data) for name in MEASURED_CODECS for data in ("gauss", "laplace", "student3", "outer")
    }


def test_the_json_has_what_is_promised(report: CodecReport) -> None:
    plain = json.loads(json.dumps(dataclasses.asdict(report)))
    assert plain["elements"] == {"cpu": 4096}
    keys = {"codec", "op", "device", "threads", "gb_per_s", "ratio_to_memcpy", "warmup_s"}
    assert all(keys <= row.keys() for row in plain["speed"])
    assert all({"codec", "data", "bits", "rel_mse", "cosine"} <= row.keys() for row in plain["quality"])


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_the_plot_is_written(report: CodecReport, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "made" / f"quality.{kind}"
    plot_quality(path, report)
    assert path.stat().st_size > 5000
    assert kind == "png" or all(name in path.read_text() for name in MEASURED_CODECS[1:])


def test_what_begins_is_said_and_after_the_deadline_no_codec_is_timed() -> None:
    said: list[str] = []
    plan = Plan(
        codecs=(codec_named("fp32"),), places=places([1], ["cpu"]), elements=256, ops=("encode",),
        pace=Pace(budget_s=0.0, least=1), samples=("gauss",), side=16, outer=None,
    )  # fmt: skip
    run(plan, said.append)
    assert said == ["errors: gauss", "CPU, 1 thread: fp32"]
    late = run(dataclasses.replace(plan, deadline_s=-1.0))
    assert [row.op for row in late.speed] == ["copy"] and len(late.quality) == 1


# --- the commands


def test_the_list_has_every_codec_its_summary_and_its_parameters_and_fits() -> None:
    lines = farloop("lab", "codecs", "--no-measure", columns=110).stdout.splitlines()
    assert max(map(len, lines)) <= 110
    text = "\n".join(lines)
    assert "…" not in text.replace("beta=0…1", "")
    for codec in CODECS.values():
        assert sum(line.split()[:1] == [codec.name] for line in lines) == 2
        assert all(f"{name}=" in text for name in PARAMETERS[codec.name])
        assert len(summary_of(codec)) > 20 and not summary_of(codec).startswith(("`", codec.name)), codec.name


def test_the_list_for_programs_holds_all_that_is_declared() -> None:
    listed = {entry["codec"]: entry for entry in found("lab", "codecs", "--no-measure")}
    assert list(listed) == list(CODECS)
    q4r = listed["q4r"]
    assert q4r["unbiased"] and q4r["entropy_coded"] and q4r["downlink"] and q4r["measured"] is None
    assert {"name": "rounding", "default": "stochastic"}.items() <= q4r["parameters"][1].items()
    downlinks = {name for name, entry in listed.items() if entry["downlink"]}
    assert downlinks >= {"q4", "fp32"} and all(CODECS[name].traits.exact_decode for name in downlinks)


def test_the_benchmark_writes_json_and_plots(tmp_path: Path) -> None:
    words = ["--codec", "q4", "--codec", "q8", "--threads", "1", "--device", "cpu", "--elements", "4096", "--quick"]
    words = ["lab", "bench", "codecs", *words, "--no-quality", "--out", str(tmp_path)]
    told = found(*words)
    assert all(told[key] for key in ("command", "date", "machine", "commit"))
    assert {row["codec"] for row in told["speed"]} >= {"memcpy", "q4", "q8"}
    assert json.loads((tmp_path / "codecs.json").read_text()) == told
    assert [path.name for path in tmp_path.iterdir()] == ["codecs.json"]
    shown = farloop(*words, columns=110).stdout
    assert "CPU, 1 thread: GB/s, and % of a memcpy's" in shown
    assert max(map(len, shown.splitlines())) <= 110 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--codec", "q44"], "q44"),
        (["--codec", "q4r:steq=1"], "has no parameter 'steq'"),
        (["--threads", "0"], "--threads"),
        (["--device", "tpu"], "--device is cpu or cuda, not 'tpu'"),
        (["--elements", "many"], "--elements"),
        (["--no-speed", "--no-quality"], "nothing is left to measure"),
    ],
)
def test_words_that_cannot_be_used_end_in_one_line(words: list[str], complaint: str) -> None:
    result = farloop("lab", "bench", "codecs", *words)
    assert result.exit_code == 2 and complaint in result.stderr


def test_errors_are_short() -> None:
    assert [error_text(value) for value in (0.0, 8.6e-3, 0.1667, 15.02)] == ["0", "8.6e-3", "0.17", "15"]
