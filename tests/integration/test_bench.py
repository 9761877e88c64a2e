"""`farloop lab bench quality`, `sync`, `loop` and `gpu` as a person calls them, with processes of their own."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from farloop.cli.main import app
from farloop.lab.bench import gpu
from farloop.lab.bench.processes import run_together
from farloop.lab.bench.sync_trace import STAGES

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_methods_are_trained_on_equal_tokens_drawn_and_kept(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text\n" for number in range(2000)))
    grid = tmp_path / "grid.toml"
    grid.write_text(
        """
        model = "nano"
        steps = 4
        global_batch = 4
        seeds = 2
        [set]
        sequence_tokens = 16
        evaluation_sequences = 4
        [[variant]]
        method = "data-parallel"
        nodes = 2
        [[variant]]
        method = ["single", "diloco"]
        h = 2
        """
    )
    words = f"lab bench quality --grid {grid} --data {text} --out {tmp_path / 'out'}".split()
    result = CliRunner().invoke(app, [*words, "--json"], env={"NO_COLOR": "1"}, prog_name="farloop")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [one["label"] for one in found["variants"]] == ["data-parallel nodes=2", "single h=2", "diloco h=2"]
    assert {one["tokens"] for one in found["variants"]} == {4 * 4 * 16}
    parallel, single, diloco = found["variants"]
    assert abs(single["mean_percent"]) < 0.01, "data parallel is a single node that sees the same batches"
    assert (single["fewer_bytes"], parallel["fewer_bytes"]) == (None, 1.0)
    assert diloco["fewer_bytes"] > 10
    for name in ("frontier.svg", "frontier.png"):
        assert (tmp_path / "out" / name).stat().st_size > 0
    drawn = (tmp_path / "out" / "frontier.svg").read_text()
    assert all(one["label"] in drawn for one in found["variants"]) and "times fewer bytes" in drawn
    assert "--variant 'single h=2'" in found["command"]

    again = CliRunner().invoke(app, words, env={"COLUMNS": "140", "NO_COLOR": "1"}, prog_name="farloop")
    assert again.exit_code == 0 and again.stdout.count("kept from earlier") == 6, again.output
    for line in ("diloco h=2, seed 1: loss", "baseline", "in ±1 %"):
        assert line in again.stdout
    assert json.loads((tmp_path / "out" / "quality.json").read_text())["variants"] == found["variants"]


def test_the_peak_of_a_process_is_its_own_and_not_that_of_the_one_that_starts_it(tmp_path: Path) -> None:
    held = b"." * (600 << 20)
    waits = {"held": ["-c", "import time; time.sleep(1.0)"]}
    assert run_together(waits, tmp_path)["held"] < len(held) // 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_peak_memory_of_two_processes_is_about_what_was_predicted(tmp_path: Path) -> None:
    """In a model as small as this one nearly all of it is the process itself."""
    words = ("lab", "bench", "memory", "--model", "nano", "--out", str(tmp_path / "out"), "--json", "--bulk", "store")
    result = CliRunner().invoke(app, words, prog_name="farloop")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["who"] for row in found["rows"]] == ["coordinator", "node", "coordinator by store", "node by store"]
    assert all(0.2 < row["ratio"] < 1.0 for row in found["rows"]), found
    again = CliRunner().invoke(app, words, prog_name="farloop")
    assert again.exit_code == 2 and "is not empty" in again.output


@pytest.mark.slow
def test_a_synchronisation_is_measured_beside_gloo(tmp_path: Path) -> None:
    words = "lab bench sync --parameters 204800 --rounds 2 --link 1gbit/1ms --trace --bulk store --json"
    result = CliRunner().invoke(app, [*words.split(), "--out", str(tmp_path)], prog_name="farloop")
    assert result.exit_code == 0, result.output
    gloo, *ours, store = json.loads(result.stdout)["rows"]
    assert store["system"] == "by store" and store["bit_equal"]
    assert (gloo["codec"], gloo["rounds"], gloo["bit_equal"]) == ("fp32", 4, True)
    assert [(row["codec"], row["rounds"], row["bit_equal"], row["link"]) for row in ours] == [
        ("q4", 2, True, ""),
        ("q4", 2, True, "1gbit/1ms"),
    ]
    # 17/32 of a byte a parameter, two nodes, up and down, and at most 40 kB of control in all four rounds.
    payload = 4 * 204_800 * 17 // 32
    for row in ours:
        assert 0 < row["s_per_round_min"] <= row["s_per_round_median"] <= row["s_per_round_max"]
        assert payload < row["bytes_per_round"] < payload + 10_000
        stages = row["trace"]["stages"]
        assert [stage["name"] for stage in stages] == [name for name in STAGES.values() if name]
        mean = (row["s_per_round_min"] + row["s_per_round_max"]) / 2  # of two rounds
        assert sum(stage["s_mean"] for stage in stages) == pytest.approx(mean, rel=0.2), "they add up to the round"
        assert set(row["trace"]["cpu_s_per_round"]) == {"coordinator", "node-0", "node-1"}
    assert ours[0]["s_floor"] is None
    assert ours[1]["s_per_round_min"] > ours[1]["s_floor"] > payload / 2 / 125e6, "no faster than its link"


@pytest.mark.slow
def test_a_loop_is_measured_alone_and_with_farloop_in_turns(tmp_path: Path) -> None:
    words = ["lab", "bench", "loop", "--model", "nano", "--h", "12", "--turns", "2", "--link", "100mbit/10ms"]
    words += ["--bulk", "store"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out"), "--json"], prog_name="farloop")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [(row["loop"], row["steps"]) for row in rows] == [("alone", 24), ("farloop", 24), ("by store", 24)]
    alone, by_session, by_store = rows
    assert 0.0 == alone["bytes_per_s"] < min(by_session["bytes_per_s"], by_store["bytes_per_s"])
    log = (tmp_path / "out" / "by-store" / "coordinator.log").read_text()
    assert "object store fail" not in log and "went by the session" not in log
    for row in rows:
        for spent in (row["compute"], row["update"]):
            assert spent["core"] > 0.0 and spent["queue"] >= 0.0 and spent["core"] < 1.5 * spent["wall"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("coordinator --parameters inf", "--parameters"),
        ("coordinator --nodes 2 --nodes 0", "--nodes"),
        ("loop --h 2", "--h"),
        ("loop --bulk disk", "--bulk: there is no 'disk'; there are session, store"),
        ("memory --bulk store --ranks 2", "leave out --ranks"),
        ("sync --rounds 1 --trace", "--trace needs --rounds 2 or more"),
        ("quality --variant dilco", "farloop: error: 'dilco': 'dilco' is neither a method nor KEY=VALUE"),
        ("sync --link fast", "'fast' is not a link: write rate/round-trip time"),
        ("loop --model huge", "--model: there is no 'huge'; there are nano, micro, tiny"),
        ("gpu --dry-run --parts laws,copys", "--parts 'copys': there are laws, tests, copies"),
    ],
)
def test_a_bench_is_refused_before_anything_is_started(words: str, said: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["lab", "bench", *words.split(), "--out", str(out)], prog_name="farloop")
    assert result.exit_code == 2 and said in result.stderr and not [*out.glob("*")], result.output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_gpu_is_measured_with_runs_on_a_cpu(tmp_path: Path) -> None:
    """Every part, so that its first run on a GPU does not end at a typo; on a CPU it claims nothing."""
    result = CliRunner().invoke(app, ["lab", "bench", "gpu", "--dry-run", "--out", str(tmp_path)], prog_name="farloop")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert rows[0]["what"] == "CPU, dry run: the numbers say nothing"
    assert {row["part"] for row in rows} == {"machine", *gpu.PARTS} and not any("failed" in row for row in rows)
    assert all("tests collected" in row["said"] for row in rows if row["part"] in ("laws", "tests"))
    assert rows[-1] == {"part": "compiled", "what": "torch.compile over merges, eager", "error": 0.0}
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"] == rows[1:]


def test_a_part_that_fails_or_is_too_slow_is_a_row_and_loses_nothing(tmp_path: Path) -> None:
    rows = list[gpu.Row]()
    for code in ("import time; time.sleep(60)", "raise SystemExit(3)", "pass"):
        line = f"""print('{{"what": "copy", "gb_per_s": 2}}', flush=True); {code}"""
        gpu._run("copies", ["python", "-c", line], tmp_path, 5.0, rows.append)
    told = {"part": "copies", "what": "copy", "gb_per_s": 2}
    assert rows[0] == rows[2] == rows[4] == told and len(rows) == 5
    assert "not done after 5 s" in rows[1]["failed"] and "exit code 3" in rows[3]["failed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_nothing_is_measured_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["lab", "bench", "gpu", "--out", str(tmp_path)], prog_name="farloop")
    assert result.exit_code == 2 and "no CUDA device: nothing was measured" in result.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_start_is_measured_on_the_folder_of_a_coordinator_that_was_killed(tmp_path: Path) -> None:
    words = "lab bench recovery --parameters 50000 --rounds 2 --json"
    result = CliRunner().invoke(app, [*words.split(), "--out", str(tmp_path / "out")], prog_name="farloop")
    assert result.exit_code == 0, result.output
    cold, warm = json.loads(result.stdout)["starts"]
    assert (cold["cold"], warm["cold"]) == (True, False)
    assert cold["commits"] >= 2 * 16 and cold["state_bytes"] >= 12 * cold["parameters"]
    assert cold["read_bytes"] > cold["state_bytes"] and cold["large_s"] > cold["seconds"] > 0


@pytest.mark.slow
def test_a_coordinator_is_measured_with_nodes_that_have_no_model(tmp_path: Path) -> None:
    words = "lab bench coordinator --nodes 3 --parameters 5000 --rounds 2 --processes 2 --bulk store --standby"
    result = CliRunner().invoke(app, [*words.split(), "--out", str(tmp_path / "out"), "--json"], prog_name="farloop")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    both = [(bulk, on) for bulk in ("session", "store") for on in (False, True)]
    assert [(row["bulk"], row["standby"]) for row in rows] == both
    for row in rows:
        assert row["nodes"] == 3 and (row["mirrored_bytes"] > 3 * 4 * 5000) == row["standby"]
        assert 0 < row["told_s_p50"] <= row["told_s_p99"] and row["told_s_p50"] <= row["held_s_p50"]
        assert row["gb_per_s"] > 0 and row["cpu_s_per_commit_and_node"] > 0 and row["peak_bytes"] > 1 << 20
