"""A state folder whose file system fills up, for real: the run is held, and goes on when there is room (protocol O)."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from loopback import PACED, NewRun, assert_all_agree
from virtual_host import VirtualHost

from farloop.config.exit_codes import ExitCode
from farloop.coordinator.decide import records as rec
from farloop.coordinator.storage.journal import Journal
from farloop.coordinator.storage.storage_queue import StorageQueue
from farloop.lab.chaos.faults import Ballast
from farloop.monitoring.status import Status

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system of its own size"),
]


@contextmanager
def mounted(folder: Path, megabytes: int) -> Iterator[Path]:
    """A file system of this size, in memory."""
    folder.mkdir(parents=True)
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"nothing can be mounted here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def filled(folder: Path) -> Ballast:
    """Not a byte is free until it is removed."""
    ballast = Ballast(folder)
    ballast.fill()
    return ballast


def test_a_storm_fills_a_small_disk_of_its_own_and_empties_it(tmp_path: Path) -> None:
    with mounted(tmp_path / "state", 8) as folder:
        ballast = Ballast(folder)
        assert ballast.refusal() == ""
        ballast.fill()
        assert ballast.lies
        with pytest.raises(OSError, match="No space left"):
            (folder / "more").write_bytes(b"x")
        ballast.remove()
        (folder / "more").write_bytes(bytes(1 << 20))
        assert not ballast.lies


def test_records_of_any_size_wait_for_room_and_none_is_lost_or_cut(tmp_path: Path) -> None:
    with mounted(tmp_path / "state", 8) as folder:
        journal, _ = Journal.open(folder)
        ballast = filled(folder)

        host, alarms, durable = VirtualHost(), dict[str, str](), list[int]()
        queue = StorageQueue(journal, host.storage, host.clock, alarms, host.fatal)  # type: ignore[arg-type]
        appended = 0
        while not queue.hold:
            appended += 1
            queue.append(rec.EpochClaimed(epoch=appended), partial(durable.append, appended))
            host.run_for(0.02)
        assert "free space on its file system" in alarms["storage"]
        assert journal.num_records == journal.durable == len(durable) == appended - 1
        ballast.remove()
        host.run()
        assert not queue.hold and alarms == {} and len(durable) == appended
        queue.close()
        again, found = Journal.open(folder)
        again.close()
        assert [entry.record for entry in found.entries] == [rec.EpochClaimed(epoch=e + 1) for e in range(appended)]
        assert found.last.torn_bytes == 0


def test_a_run_is_held_by_a_full_disk_and_goes_on(new_run: NewRun) -> None:
    run = new_run(steps=120, **PACED)
    with mounted(run.state_dir, 64) as folder:
        coordinator, a, b = run.start_coordinator(), run.start_metronome("a", pace_s=0.1), run.start_node("b")
        run.until("every fragment has two versions", lambda status: min(status["versions"]) >= 2)

        ballast = filled(folder)
        held = run.until("it is held", lambda status: status["run"]["state"] == "held")
        (alarm,) = (alarm for alarm in held["alarms"] if alarm.startswith("storage: "))
        assert "free space on its file system, and it goes on by itself" in alarm
        held = run.until("what was being written has ended", partial(is_older, held["run"]["uptime_s"] + 3))
        later = run.until("eleven seconds have passed", partial(is_older, held["run"]["uptime_s"] + 11))
        assert later["run"]["state"] == "held" and later["versions"] == held["versions"]
        assert all(node["connected"] and node["incarnation"] == 1 for node in later["nodes"])
        metrics = run.page("/metrics")[1]
        assert "\nfarloop_storage_held 1.0\n" in metrics
        assert '\nfarloop_log_dropped_lines_total{file="metrics.jsonl"} 0.0\n' not in metrics

        coordinator.signal(signal.SIGTERM)
        assert run.until_ended(coordinator) == ExitCode.DONE
        ballast.remove()
        coordinator = run.start_coordinator()
        run.until("it goes on", partial(is_beyond, held["versions"]))

        ballast = filled(folder)
        held = run.until("it is held again", lambda status: status["run"]["state"] == "held")
        ballast.remove()
        after = run.until("it goes on by itself", partial(is_beyond, held["versions"]))
        assert after["run"]["epoch"] == held["run"]["epoch"]
        run.hurry()
        status = run.until_done(coordinator, a, b)
        assert_all_agree(run, status, "a", "b")
        assert [node["inner_steps"] for node in status["nodes"]] == [120, 120]
        assert not status["alarms"]


def is_older(uptime_s: float, status: Status) -> bool:
    return status["run"]["uptime_s"] >= uptime_s


def is_beyond(versions: list[int], status: Status) -> bool:
    return status["run"]["state"] == "training" and min(status["versions"]) > max(versions)
