"""A node as `farloop node` starts it, that falls silent: it encodes some deltas, and never another one.

It goes on to report that it waits, so neither its connection nor its heart says that anything is wrong.

python mute.py NODE.toml DELTAS
"""

import sys
import threading
from pathlib import Path

from farloop.config.logs import LogLevel, set_up
from farloop.config.settings import load_node
from farloop.node import encoder, executor
from farloop.node.trainer import train


def fall_silent(after: int) -> None:
    finish, done = encoder.finish, list[int]()

    def silent(packed: encoder.Packed, residual_ratio: float | None = None) -> encoder.Encoded:
        done.append(1)
        if len(done) > after:
            threading.Event().wait()  # for ever: the test kills this process
        return finish(packed, residual_ratio)

    for module in (encoder, executor):
        setattr(module, "finish", silent)  # noqa: B010 - replaced for good


if __name__ == "__main__":
    set_up(LogLevel.INFO)
    fall_silent(int(sys.argv[2]))
    train(load_node(Path(sys.argv[1]), flags=[], environ={}).node)
