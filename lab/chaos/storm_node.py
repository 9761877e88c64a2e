"""A node as `farloop node` starts it, with two differences: its steps take a given time, and it records its anchors.

PACE is a file with the minimum seconds of an inner step; it may be replaced at any time. ANCHORS receives a line for
every version that the node holds.

    python -m farloop.lab.chaos.storm_node NODE.toml PACE ANCHORS
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import typer

from farloop.config.exit_codes import ended_in_one_line
from farloop.config.logs import LogLevel, set_up
from farloop.config.settings import load_node
from farloop.monitoring.status import dumps
from farloop.node.library import Node
from farloop.node.trainer import train

LOOK_S = 0.05  # between two looks at the pace, so that a change of it reaches a step that has begun


def main(file: Path, pace: Path, anchors: Path) -> None:
    with ended_in_one_line(), anchors.open("a") as book:
        book.write("\n")  # ends a line that the last start left unfinished

        def watch(node: Node) -> None:
            step, told = node.step, list[tuple[int, int]]()

            def slow_step(*, loss: float | None = None, tokens: int | None = None) -> bool:
                _wait(pace)
                more = step(loss=loss, tokens=tokens)
                _write_down(node, told, book)
                return more

            setattr(node, "step", slow_step)  # noqa: B010 - a method that is replaced on one object, for good
            leave = node.leave

            def leave_and_record(*args: float) -> None:
                try:
                    leave(*args)
                finally:
                    _write_down(node, told, book)

            setattr(node, "leave", leave_and_record)  # noqa: B010

        set_up(LogLevel.INFO)
        train(load_node(file, flags=[], environ={}).node, on_join=watch)


def _wait(pace: Path) -> None:
    begun = time.monotonic()
    while (left := begun + _pace_s(pace) - time.monotonic()) > 0:
        time.sleep(min(left, LOOK_S))


def _pace_s(pace: Path) -> float:
    with suppress(OSError, ValueError):
        return float(pace.read_text())
    return 0.0


def _write_down(node: Node, told: list[tuple[int, int]], book: TextIO) -> None:
    """Versions whose digest the node has compared with that of the commit, and not told yet."""
    assert node.executor is not None and node.executor.replica is not None
    replica = node.executor.replica
    now = list(zip(replica.versions.values(), replica.digests.values(), strict=True))
    for fragment, (version, digest) in enumerate(now):
        if version >= 0 and (not told or told[fragment] != (version, digest)):
            book.write(dumps([fragment, version, f"{digest:016x}"]) + "\n")
    book.flush()
    told[:] = now


if __name__ == "__main__":
    typer.run(main)
