"""A node as `farloop node` starts it, but that sends its deltas a thousand times too long.

python liar.py NODE.toml
"""

import sys
from pathlib import Path

from farloop.config.logs import LogLevel, set_up
from farloop.config.settings import load_node
from farloop.node import encoder, executor
from farloop.node.trainer import train

FACTOR = 1000.0


def lie() -> None:
    finish = encoder.finish

    def longer(packed: encoder.Packed, residual_ratio: float | None = None) -> encoder.Encoded:
        header, payload = packed.header, packed.payload
        numbers = header.codec.decode(payload, header.fragment, seed=header.seed)
        header.codec.encode_into(FACTOR * numbers, payload, header.fragment, seed=header.seed)
        return finish(packed, residual_ratio)

    for module in (encoder, executor):
        setattr(module, "finish", longer)  # noqa: B010 - replaced for good


if __name__ == "__main__":
    set_up(LogLevel.INFO)
    lie()
    train(load_node(Path(sys.argv[1]), flags=[], environ={}).node)
