"""`farloop journal` and `farloop explain` on a state folder: what they print, and how they end."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import stored_runs
from command_line import farloop, found
from plain_runs import plain_terms
from typer.testing import Result

from farloop.algo.spec import Fragment, Identity, Layout, RunSpec, TensorSlot
from farloop.config.exit_codes import ExitCode
from farloop.coordinator.decide import records as rec
from farloop.coordinator.storage.record_text import KINDS
from farloop.coordinator.storage.segment import segment_paths
from farloop.coordinator.storage.store import SNAPSHOT_EVERY, Store

ROUNDS = SNAPSHOT_EVERY + 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layout = Layout(
        slots=2,
        fragments=tuple(
            Fragment(index=i, slot=i, numel=256, tensors=(TensorSlot(name=f"t{i}", shape=(200,), offset=0),))
            for i in range(2)
        ),
    )
    identity = Identity(
        name="small", model="own", layout=layout, anchor_digests=(0, 0), data="own", num_samples=0,
        evaluation_set="none", seed=7,
    )  # fmt: skip
    spec = RunSpec(identity=identity, terms=plain_terms(h=10, tau=2, mix=0.5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        store = stored_runs.begun(tmp_path_factory.mktemp("run") / "state", spec)
        stored_runs.run_rounds(store, ROUNDS)
        store.close()
    line = {
        "event": "decision", "t": 754.0, "epoch": 1, "fragment": 0, "version": ROUNDS, "round": ROUNDS, "final": False,
        "why": "all 2 expected came, 1 removed", "open_s": 12.5, "quorum": None, "quorum_s": None, "grace_s": None,
        "floor": 1, "expected": ["bergen", "oslo", "tromso"],
        "arrived": [
            {"node": node, "after_s": after, "base": ROUNDS - 1, "window": ROUNDS, "weight": 0.5, "steps": 10,
             "tokens": 640, "norm": 0.25}
            for node, after in (("bergen", 3.5), ("oslo", 4.25))
        ],
        "missing": [{"node": "tromso", "code": "silent", "sentence": "no message arrived within the liveness timeout"}],
        "refused": [{"node": "oslo", "after_s": 1.5, "code": "corrupt", "detail": "a flipped bit"}],
        "h": 10, "outer_lr": 0.6, "outer_momentum": 0.9, "delta_scale": 1.0, "codec_up": "q4", "codec_down": "q4",
        "update_bytes": 200, "anchor_digest": "00000000000000ff", "norm": 0.2, "merge_s": 0.01, "journal_s": 0.02,
    }  # fmt: skip
    pruned = {**line, "fragment": 1, "version": 1, "why": "quorum of 2 reached, without tromso", "quorum": 2,
              "quorum_s": 4.0, "grace_s": 2.0}  # fmt: skip
    lines = [json.dumps(row) for row in (pruned, {**line, "version": 10 * ROUNDS}, line)]
    (store.directory / "decisions.jsonl").write_text("\n".join([*lines, lines[0][:40]]))
    return store.directory


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farloop.coordinator.storage.state_reader.LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def call(folder: Path, *words: str, columns: int = 120) -> Result:
    return farloop(*words, "--state", str(folder), columns=columns)


def rows(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_show_lists_the_last_records_and_says_what_it_left_out(folder: Path) -> None:
    result = call(folder, "journal", "show", "--last", "3")
    assert result.exit_code == 0
    *_, foot = result.stdout.splitlines()
    assert (
        result.stdout.count("000001:") == 3 and "commit" in result.stdout and "without tromso (silent)" in result.stdout
    )
    total = len(rows(call(folder, "journal", "show", "--all", "--json")))
    assert foot.strip() == f"{total} records of {total}; {total - 3} earlier ones are left out, --all shows them"


def test_show_can_go_on_with_what_comes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "state"))
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        """While the reader waits, the coordinator starts again; then it is Ctrl-C."""
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt
        store = Store.recover(copy)
        assert store is not None
        store.close()

    monkeypatch.setattr("farloop.cli.journal.time.sleep", pause)
    result = call(copy, "journal", "show", "--json", "--last", "1", "--follow")
    assert result.exit_code == ExitCode.INTERRUPTED
    assert [row["words"] for row in rows(result)[1:] if row["kind"] == "epoch"] == [
        f"epoch {epoch}: the coordinator started again" for epoch in (2, 3)
    ]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["--kind", "commit"], 2 * ROUNDS),
        (["--kind", "commit", "--fragment", "1"], ROUNDS),
        (["--kind", "commit", "--kind", "snapshot", "--fragment", "0"], ROUNDS + 1),
        (["--node", "oslo", "--kind", "delta"], 2 * ROUNDS),
        (["--node", "tromso"], 2 * ROUNDS),
        (["--node", "nobody"], 0),
    ],
)
def test_show_can_be_narrowed_down(folder: Path, words: Sequence[str], count: int) -> None:
    assert len(rows(call(folder, "journal", "show", "--all", "--json", *words))) == count


def test_a_kind_that_is_none_is_refused_with_those_there_are(folder: Path) -> None:
    result = call(folder, "journal", "show", "--kind", "comit")
    assert result.exit_code == ExitCode.USAGE and "one of begin, epoch" in result.stderr


def test_every_kind_of_record_has_a_name_of_its_own() -> None:
    assert KINDS.keys() == rec.KINDS.keys() and len(set(KINDS.values())) == len(KINDS)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "words", [("journal", "show"), ("journal", "verify"), ("journal", "replay"), ("explain", f"{ROUNDS}")]
)
def test_every_view_fits_the_screen(folder: Path, words: Sequence[str], columns: int) -> None:
    result = call(folder, *words, columns=columns)
    assert result.exit_code == 0 and max(map(len, result.stdout.splitlines())) <= columns


def test_verify_says_that_all_is_whole(folder: Path) -> None:
    result = call(folder, "journal", "verify")
    assert result.exit_code == 0 and "whole: every digest, sequence, epoch and invariant holds" in result.stdout
    (report,) = rows(call(folder, "journal", "verify", "--json"))
    assert report["good"] and report["versions"] == [ROUNDS, ROUNDS] and report["faults"] == []


def test_damage_ends_with_one_line_that_says_where_and_the_code_of_storage(folder: Path) -> None:
    *_, path = segment_paths(folder).values()
    whole = path.read_bytes()
    path.write_bytes(whole[:3000] + bytes([whole[3000] ^ 1]) + whole[3001:])
    try:
        verify, show = call(folder, "journal", "verify"), call(folder, "journal", "show")
    finally:
        path.write_bytes(whole)
    for result in (verify, show):
        assert result.exit_code == ExitCode.STORAGE
        assert "Traceback" not in result.stderr and len(result.stderr.splitlines()) == 1
    assert f"{folder} is damaged: {path.name} byte " in verify.stderr and "is damaged, and was durable" in verify.stderr


def test_replay_makes_the_commits_again_that_can_be(folder: Path) -> None:
    result = call(folder, "journal", "replay")
    assert result.exit_code == 0 and "made again: bit for bit the same" in result.stdout
    again = rows(call(folder, "journal", "replay", f"{ROUNDS}", "--fragment", "1", "--json"))
    assert [(row["fragment"], row["version"], row["same"]) for row in again] == [(1, ROUNDS, True)]
    digests = again[0]["digests"]
    assert set(digests) == {"update", "anchor", "target", "outer state"}
    assert all(digest["recorded"] == digest["found"] for digest in digests.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["abc"], "FROM:TO is wanted"),
        ([f"1:{ROUNDS + 9}"], "can be made again"),
        ([f"{ROUNDS + 1}"], "nothing of it can be made again"),
        ([":", "--fragment", "7"], "the run has fragments 0 to 1"),
    ],
)
def test_versions_that_cannot_be_made_again_are_refused_with_those_that_can(
    folder: Path, words: Sequence[str], said: str
) -> None:
    result = call(folder, "journal", "replay", *words)
    assert result.exit_code == ExitCode.USAGE and said in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_commit_that_does_not_come_out_ends_with_the_code_of_storage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from farloop.coordinator import commits

    true = commits.compute

    def other(ledger: Any, buffers: Any, draft: Any, inputs: Any, others: Any) -> Any:
        return true(ledger, buffers, draft, [(data, 0.25) for data, _ in inputs], others)

    monkeypatch.setattr(commits, "compute", other)
    result = call(folder, "journal", "replay", f"{ROUNDS}", "--fragment", "0")
    assert result.exit_code == ExitCode.STORAGE and "differs" in result.stdout
    assert "does not come out: update, anchor, target" in result.stderr


EVERY_COMMAND_OF_A_STATE_FOLDER = [
    ("journal", "show"),
    ("journal", "verify"),
    ("journal", "salvage"),
    ("journal", "salvage", "--write"),
    ("journal", "replay"),
    ("explain", "1"),
    ("release",),
    ("set", "h=3"),
]


@pytest.mark.parametrize("words", EVERY_COMMAND_OF_A_STATE_FOLDER, ids=" ".join)
def test_a_state_folder_that_is_not_there_is_bad_usage_of_every_command(words: tuple[str, ...], tmp_path: Path) -> None:
    """`release` ended with 2 and `journal verify` with 6."""
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        result = call(tmp_path / name, *words)
        assert result.exit_code == ExitCode.USAGE and len(result.stderr.splitlines()) == 1
        assert f"{name}: there is no such folder; give the coordinator's state_dir with --state" in result.stderr


def test_a_folder_without_a_journal_ends_in_one_line(tmp_path: Path) -> None:
    for words in (("journal", "show"), ("journal", "verify"), ("journal", "replay"), ("explain", "1")):
        result = call(tmp_path, *words)
        assert result.exit_code == ExitCode.STORAGE and len(result.stderr.splitlines()) == 1


def test_explain_says_who_came_when_who_did_not_and_why(folder: Path) -> None:
    result = call(folder, "explain", f"f0:{ROUNDS}")
    assert result.exit_code == 0
    for said in (
        f"f0:{ROUNDS}", "open for 12s", "12m 34s into the run", "all 2 expected came, 1 removed",
        "bergen, oslo, tromso", "+3.5s", "+4.2s", "0.500", "silent", "no message arrived within the liveness timeout",
        "+1.5s", "a flipped bit", "H 10", "record at 000001:",
    ):  # fmt: skip
        assert said in result.stdout, said


def test_explain_measures_the_deltas_that_are_still_stored(folder: Path) -> None:
    (facts,) = found("explain", f"f0:{ROUNDS}", "--state", str(folder))
    first, second = facts["arrived"]
    assert facts["deltas_stored"] and first["measured_norm"] > 0.0
    assert first["cosine"] == pytest.approx(0.5**0.5, abs=0.15), "half of the mean of two independent ones"
    assert second["cosine"] == pytest.approx(0.5**0.5, abs=0.15)


def test_explain_of_a_number_is_of_every_fragment_and_without_a_line_says_what_the_journal_has(folder: Path) -> None:
    both = found("explain", f"{ROUNDS}", "--state", str(folder))
    assert [facts["fragment"] for facts in both] == [0, 1]
    assert both[0]["open_s"] == 12.5 and both[1]["open_s"] is None
    assert [row["node"] for row in both[1]["arrived"]] == ["bergen", "oslo"]
    assert [row["code"] for row in both[1]["missing"]] == ["silent"]


def test_explain_knows_windows_that_the_journal_has_forgotten(folder: Path, tmp_path: Path) -> None:
    (facts,) = found("explain", "f1:1", "--state", str(folder))
    assert (facts["quorum"], facts["quorum_s"], facts["grace_s"]) == (2, 4.0, 2.0)
    assert (
        "for a quorum of 2, reached after 4.0s, and then 2.0s for the others" in call(folder, "explain", "f1:1").stdout
    )


@pytest.mark.parametrize(
    ("window", "said"),
    [
        ("f0:x", "f0:812 is wanted"),
        ("f7:1", "the run has fragments 0 to 1"),
        (f"f0:{ROUNDS + 1}", f"is open: the newest that closed is {ROUNDS}"),
        (f"{ROUNDS + 2}", "is not open yet"),
    ],
)
def test_a_window_that_nothing_is_known_of_ends_in_one_line(folder: Path, window: str, said: str) -> None:
    result = call(folder, "explain", window)
    assert result.exit_code == ExitCode.USAGE and said in result.stderr and len(result.stderr.splitlines()) == 1


def test_salvage_says_what_it_gives_up_and_changes_nothing_unless_told_to(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "state"))
    *_, path = segment_paths(copy).values()
    os.truncate(path, path.stat().st_size * 9 // 10)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000] + bytes([whole[-1000] ^ 1]) + whole[-999:])
    plan = farloop("journal", "salvage", str(copy))
    assert plan.exit_code == 0, plan.output
    by_option = call(copy, "journal", "salvage")
    assert by_option.exit_code == 0 and "nothing was changed" in by_option.stdout, "--state DIR, as for its siblings"
    twice = call(copy, "journal", "salvage", str(copy))
    assert twice.exit_code == ExitCode.USAGE and "given twice" in twice.stderr
    assert "nothing was changed" in plan.stdout and "goes on" in plan.stdout
    assert path.exists() and not (copy / "before-salvage-1").exists()
    (done,) = rows(farloop("journal", "salvage", str(copy), "--write", "--json"))
    assert done["written"] and (copy / "before-salvage-1" / path.name).exists()
    (report,) = rows(call(copy, "journal", "verify", "--json"))
    assert report["good"] and report["starts"] and report["versions"] == done["versions"]


def test_salvage_says_that_it_was_interrupted_and_finishes(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "state"))
    paths = segment_paths(copy).values()
    aside = copy / "before-salvage-1"
    shutil.copytree(copy, aside / "new")
    for path in paths:
        shutil.move(path, aside / path.name)
    (copy / "salvage-unfinished").write_bytes(b"farloop-salvage 1 out before-salvage-1\n")
    for command in (["journal", "verify"], ["journal", "show"]):
        refused = call(copy, *command)
        assert refused.exit_code == ExitCode.STORAGE and f"farloop journal salvage {copy} --write" in refused.stderr
    plan = farloop("journal", "salvage", str(copy))
    assert plan.exit_code == ExitCode.STORAGE and "was interrupted" in plan.stderr
    done = farloop("journal", "salvage", str(copy), "--write")
    assert done.exit_code == 0 and "finished" in done.stdout, done.output
    (report,) = rows(call(copy, "journal", "verify", "--json"))
    assert report["good"] and report["starts"] and all((aside / path.name).exists() for path in paths)


def test_salvage_of_a_folder_without_a_journal_ends_in_one_line(tmp_path: Path) -> None:
    result = farloop("journal", "salvage", str(tmp_path))
    assert result.exit_code == ExitCode.STORAGE and "holds no journal" in result.stderr
