"""`farloop journal` and `farloop explain` on a state folder: what they print, and how they end."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import stored_runs
from command_line import error_line, farloop, found
from plain_runs import plain_terms
from typer.testing import Result

from farloop.algo.spec import Fragment, Identity, Layout, NodeId, RunSpec, TensorSlot
from farloop.config.exit_codes import ExitCode
from farloop.coordinator import commits
from farloop.coordinator.decide import records as rec
from farloop.coordinator.storage.record_text import KINDS
from farloop.coordinator.storage.store import Store
from farloop.coordinator.storage.verify import verify

ROUNDS = stored_runs.SNAPSHOT_EVERY + 2

DECISION = {
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    slots = tuple(TensorSlot(name=f"t{i}", shape=(200,), offset=0) for i in range(2))
    fragments = tuple(Fragment(index=i, slot=i, numel=256, tensors=(slot,)) for i, slot in enumerate(slots))
    identity = Identity(
        name="small", model="own", layout=Layout(slots=2, fragments=fragments), anchor_digests=(0, 0), data="own",
        num_samples=0, evaluation_set="none", seed=7,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr("farloop.coordinator.storage.store.SNAPSHOT_EVERY", stored_runs.SNAPSHOT_EVERY)
        spec = RunSpec(identity=identity, terms=plain_terms(h=10, tau=2, mix=0.5))
        store = stored_runs.begun(tmp_path_factory.mktemp("run") / "state", spec)
        stored_runs.run_rounds(store, ROUNDS)
        store.close()
    pruned = {**DECISION, "fragment": 1, "version": 1, "why": "quorum of 2 reached, without tromso", "quorum": 2,
              "quorum_s": 4.0, "grace_s": 2.0}  # fmt: skip
    lines = [json.dumps(row) for row in (pruned, {**DECISION, "version": 10 * ROUNDS}, DECISION)]
    (store.directory / "decisions.jsonl").write_text("\n".join([*lines, lines[0][:40]]))
    return store.directory


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "state"))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farloop.coordinator.storage.state_reader.LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def call(folder: Path, words: str, columns: int = 120) -> Result:
    return farloop(*words.split(), "--state", str(folder), columns=columns)


def rows(folder: Path, words: str) -> list[dict[str, Any]]:
    result = call(folder, f"{words} --json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


# --- show, verify, replay


def test_show_lists_the_last_records_and_says_what_it_left_out(folder: Path) -> None:
    result = call(folder, "journal show --last 3")
    assert result.exit_code == 0 and result.stdout.count("000001:") == 3
    assert "commit" in result.stdout and "without tromso (silent)" in result.stdout
    total = len(rows(folder, "journal show --all"))
    foot = f"{total} records of {total}; {total - 3} earlier ones are left out, --all shows them"
    assert result.stdout.splitlines()[-1].strip() == foot


def test_show_can_go_on_with_what_comes(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    result = call(copy, "journal show --json --last 1 --follow")
    assert result.exit_code == ExitCode.INTERRUPTED, result.stderr
    followed = [json.loads(line) for line in result.stdout.splitlines()][1:]
    assert [row["words"] for row in followed if row["kind"] == "epoch"] == [
        f"epoch {epoch}: the coordinator started again" for epoch in (2, 3)
    ]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("--kind commit", 2 * ROUNDS),
        ("--kind commit --fragment 1", ROUNDS),
        ("--kind commit --kind snapshot --fragment 0", ROUNDS + 1),
        ("--node oslo --kind delta", 2 * ROUNDS),
        ("--node tromso", 2 * ROUNDS),
        ("--node nobody", 0),
    ],
)
def test_show_can_be_narrowed_down(folder: Path, words: str, count: int) -> None:
    assert len(rows(folder, f"journal show --all {words}")) == count


def test_changes_of_the_keys_are_shown_after_the_journal_has_forgotten_their_records(copy: Path) -> None:
    key = rec.AllowedKey(node=NodeId("oslo"), fingerprint="sha256:0123456789abcdef")
    changes = (((key,), ()), ((), (key,)))
    for added, removed in changes:
        store = Store.recover(copy)
        assert store is not None
        store.append(rec.KeysChanged(time_s=1.75e9, added=added, removed=removed))
        store.sync()
        store.close()
    before = rows(copy, "journal show --kind keys --node oslo")
    assert [row["words"].partition("Z: ")[2] for row in before] == [
        f"{what} oslo {key.fingerprint}" for what in ("allowed", "removed")
    ]
    assert before[0]["words"].startswith("2025-06-15 15:06:40Z")
    first, second, *_ = sorted(copy.glob("journal-*.log"))
    first.unlink()
    second.unlink()
    assert rows(copy, "journal show --kind keys --node oslo")[:1] != []


def test_every_kind_of_record_has_a_name_of_its_own() -> None:
    assert KINDS.keys() == rec.KINDS.keys() and len(set(KINDS.values())) == len(KINDS)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("words", ["journal show", "journal verify", "journal replay", f"explain {ROUNDS}"])
def test_every_view_fits_the_screen(folder: Path, words: str, columns: int) -> None:
    result = call(folder, words, columns)
    assert result.exit_code == 0 and max(map(len, result.stdout.splitlines())) <= columns


def test_verify_says_that_all_is_whole_or_where_the_damage_is(folder: Path, copy: Path) -> None:
    assert "whole: every digest, sequence, epoch and invariant holds" in call(folder, "journal verify").stdout
    (report,) = rows(folder, "journal verify")
    assert report["good"] and report["versions"] == [ROUNDS, ROUNDS] and report["faults"] == []
    *_, path = stored_runs.segment_paths(copy).values()
    whole = path.read_bytes()
    path.write_bytes(whole[:3000] + bytes([whole[3000] ^ 1]) + whole[3001:])
    for words, line in (("verify", "is damaged, and was durable"), ("show", str(copy))):
        result = call(copy, f"journal {words}")
        assert result.exit_code == ExitCode.STORAGE and line in result.stderr
        assert "Traceback" not in result.stderr and len(result.stderr.splitlines()) == 1
    assert f"{copy} is damaged: {path.name} byte " in call(copy, "journal verify").stderr


def test_a_folder_that_is_not_there_is_not_taken_for_versions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state folder of where the command runs is another one."""
    monkeypatch.chdir(folder.parent)
    for words in (["typo"], ["typo", "1:2"], ["1:2", "typo"]):
        assert error_line("journal", "replay", *words).startswith("typo: there is no such folder")


def test_show_and_replay_go_on_beside_damage_that_no_start_needs(copy: Path) -> None:
    whole, again = rows(copy, "journal show --all"), rows(copy, "journal replay")
    lost = next(row for row in whole if row["kind"] == "delta")  # merged since, and in a snapshot
    path = stored_runs.segment_paths(copy)[0]
    data = bytearray(path.read_bytes())
    data[lost["offset"] + 60] ^= 1
    path.write_bytes(data)
    assert verify(copy).refused == ""
    result = call(copy, "journal show --all --json")
    shown = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == ExitCode.STORAGE and "farloop journal verify says" in result.stderr
    damaged = shown.pop(whole.index(lost))
    assert (damaged["kind"], damaged["path"], damaged["offset"]) == ("damaged", path.name, lost["offset"])
    assert shown == [row for row in whole if row != lost]
    assert f"{path.name} byte {lost['offset']}" in call(copy, "journal show").stdout
    behind = rows(copy, "journal replay")
    assert behind and behind == [row for row in again if row["where"] > "000001"]


def test_replay_makes_the_commits_again_that_can_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "made again: bit for bit the same" in call(folder, "journal replay").stdout
    for words in ("show DIR", "verify DIR", "replay DIR", f"replay DIR {ROUNDS}", f"replay {ROUNDS} DIR"):
        assert farloop("journal", *words.replace("DIR", str(folder)).split()).exit_code == 0
    assert "given twice" in error_line("journal", "verify", str(folder), "--state", str(folder))
    (again,) = rows(folder, f"journal replay {ROUNDS} --fragment 1")
    assert (again["fragment"], again["version"], again["same"]) == (1, ROUNDS, True)
    assert set(again["digests"]) == {"update", "anchor", "target", "outer state"}
    assert all(digest["recorded"] == digest["found"] for digest in again["digests"].values())
    true = commits.compute

    def other(ledger: Any, buffers: Any, draft: Any, inputs: Any, others: Any) -> Any:
        return true(ledger, buffers, draft, [(data, 0.25) for data, _ in inputs], others)

    monkeypatch.setattr(commits, "compute", other)
    result = call(folder, f"journal replay {ROUNDS} --fragment 0")
    assert result.exit_code == ExitCode.STORAGE and "differs" in result.stdout
    assert "does not come out: update, anchor, target" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("journal show --kind comit", "one of begin, epoch"),
        ("journal replay abc", "the folder is given twice: abc and --state"),
        ("journal replay abc def", "def: expected FROM:TO"),
        (f"journal replay 1:{ROUNDS + 9}", "can be made again"),
        (f"journal replay {ROUNDS + 1}", "nothing of it can be made again"),
        ("journal replay : --fragment 7", "the run has fragments 0 to 1"),
        ("explain f0:x", "expected f0:812"),
        ("explain f7:1", "the run has fragments 0 to 1"),
        (f"explain f0:{ROUNDS + 1}", f"is open: the newest that closed is {ROUNDS}"),
        (f"explain {ROUNDS + 2}", "is not open yet"),
    ],
)
def test_what_is_not_in_the_journal_is_refused_with_what_there_is(folder: Path, words: str, said: str) -> None:
    assert said in error_line(*words.split(), "--state", str(folder))


READERS = ("journal show", "journal verify", "journal replay", "journal salvage", "explain 1")


@pytest.mark.parametrize("words", [*READERS, "journal salvage --write", "run release", "run set h=3"])
def test_without_a_state_folder_or_a_journal_every_command_ends_in_one_line(words: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, what in (("nowhere", "there is no such folder"), ("file", "is a file, expected a folder")):
        line = error_line(*words.split(), "--state", str(tmp_path / name))
        assert f"{name}: {what}; give the coordinator's state_dir with --state" in line
    if words in READERS:
        error_line(*words.split(), "--state", str(tmp_path), code=ExitCode.STORAGE)


# --- explain


def test_explain_says_who_came_when_who_did_not_and_why(folder: Path) -> None:
    result = call(folder, f"explain f0:{ROUNDS}")
    for said in (
        f"f0:{ROUNDS}", "open for 12s", "12m 34s into the run", "all 2 expected came, 1 removed",
        "bergen, oslo, tromso", "+3.5s", "+4.2s", "0.500", "silent", "no message arrived within the liveness timeout",
        "+1.5s", "a flipped bit", "H 10", "record at 000001:",
    ):  # fmt: skip
        assert said in result.stdout, said
    (facts,) = found("explain", f"f0:{ROUNDS}", "--state", str(folder))
    assert facts["deltas_stored"] and facts["arrived"][0]["measured_norm"] > 0.0
    for one in facts["arrived"]:
        assert one["cosine"] == pytest.approx(0.5**0.5, abs=0.15), "half of the mean of two independent ones"


def test_explain_knows_windows_without_a_decision_and_those_that_the_journal_has_forgotten(folder: Path) -> None:
    both = found("explain", f"{ROUNDS}", "--state", str(folder))
    assert [(facts["fragment"], facts["open_s"]) for facts in both] == [(0, 12.5), (1, None)]
    assert [row["node"] for row in both[1]["arrived"]] == ["bergen", "oslo"]
    assert [row["code"] for row in both[1]["missing"]] == ["silent"]
    (facts,) = found("explain", "f1:1", "--state", str(folder))
    assert (facts["quorum"], facts["quorum_s"], facts["grace_s"]) == (2, 4.0, 2.0)
    said = "for a quorum of 2, reached after 4.0s, and then 2.0s for the others"
    assert said in call(folder, "explain f1:1").stdout


# --- salvage


def assert_starts(folder: Path, versions: Any = None) -> None:
    (report,) = rows(folder, "journal verify")
    assert report["good"] and report["starts"] and versions in (None, report["versions"])


def test_salvage_says_what_it_gives_up_and_changes_nothing_unless_told_to(copy: Path) -> None:
    *_, path = stored_runs.segment_paths(copy).values()
    os.truncate(path, path.stat().st_size * 9 // 10)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000] + bytes([whole[-1000] ^ 1]) + whole[-999:])
    for plan in (farloop("journal", "salvage", str(copy)), call(copy, "journal salvage")):
        assert plan.exit_code == 0 and "nothing was changed" in plan.stdout and "goes on" in plan.stdout
    assert "given twice" in error_line("journal", "salvage", str(copy), "--state", str(copy))
    assert path.exists() and not (copy / "before-salvage-1").exists()
    done = found("journal", "salvage", str(copy), "--write")
    assert done["written"] and (copy / "before-salvage-1" / path.name).exists()
    assert_starts(copy, done["versions"])


def test_salvage_says_that_it_was_interrupted_and_finishes(copy: Path) -> None:
    paths, aside = stored_runs.segment_paths(copy).values(), copy / "before-salvage-1"
    shutil.copytree(copy, aside / "new")
    for path in paths:
        shutil.move(path, aside / path.name)
    (copy / "salvage-unfinished").write_bytes(b"farloop-salvage 1 out before-salvage-1\n")
    for words, said in (
        ("journal verify", f"farloop journal salvage {copy} --write"),
        ("journal show", f"farloop journal salvage {copy} --write"),
        ("journal salvage", "was interrupted"),
    ):
        assert said in error_line(*words.split(), "--state", str(copy), code=ExitCode.STORAGE)
    done = farloop("journal", "salvage", str(copy), "--write")
    assert done.exit_code == 0 and "finished" in done.stdout, done.output
    assert_starts(copy)
    assert all((aside / path.name).exists() for path in paths)
