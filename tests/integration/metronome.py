"""A node as `farloop node` starts it, but whose inner steps take their time until the file `go` is there.

A run whose windows wait for all can be no faster than this node. So whatever a test has to do to a run, it does to a
run that is still going on, on any machine; and once it is done, the rest takes no time.

    python metronome.py NODE.toml GO PACE_S
"""

import sys
import time
from pathlib import Path

from farloop.config.logs import LogLevel, set_up
from farloop.config.settings import load_node
from farloop.node.library import Node
from farloop.node.trainer import train

LOOK_S = 0.01


def main(file: Path, go: Path, pace_s: float) -> None:
    def slow_down(node: Node) -> None:
        step, pause = node.step, go.with_name("pause")

        def slow_step(*, loss: float | None = None, tokens: int | None = None) -> bool:
            due = time.monotonic() + pace_s
            while (time.monotonic() < due or pause.exists()) and not go.exists():
                time.sleep(LOOK_S)
            return step(loss=loss, tokens=tokens)

        setattr(node, "step", slow_step)  # noqa: B010 - a method that is replaced on one object, for good

    set_up(LogLevel.INFO)
    train(load_node(file, flags=[], environ={}).node, on_join=slow_down)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
