"""A node of a model with many parameters whose step costs nearly nothing: it moves some rows by noise.

python -m farloop.lab.chaos.wide_node COORDINATOR NAME STATE_DIR PARAMETERS
"""

import logging
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from farloop.config.logs import LogLevel, set_up
from farloop.node import join
from farloop.node.errors import NodeError

TENSORS = 16  # each a fragment: one is sent at a step
_COLUMNS = 64
_STEP_S = 0.1
_ROWS = 64  # that a step moves


def weights(parameters: int) -> dict[str, Tensor]:
    """All zeros; as many parameters as this, about."""
    shape = (max(1, parameters // TENSORS // _COLUMNS), _COLUMNS)
    return {f"w{index:02}": torch.zeros(shape, dtype=torch.float32, device="cpu") for index in range(TENSORS)}


def main() -> int:
    set_up(LogLevel.INFO)
    torch.set_num_threads(1)
    coordinator, name, state_dir, parameters = sys.argv[1:]
    model = nn.ParameterDict(weights(int(parameters)))
    still = torch.zeros_like(model["w00"])  # without a gradient it would be no step
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    try:
        with join(coordinator, model, optimizer, name=name, state_dir=Path(state_dir), rate="own", clip="own") as node:
            while node.running:
                ends = time.monotonic() + _STEP_S
                with torch.no_grad():
                    for tensor in model.values():
                        rows = torch.randint(len(tensor), (_ROWS,), dtype=torch.int64, device="cpu")
                        tensor[rows] += 1e-3 * torch.randn(_ROWS, _COLUMNS, dtype=torch.float32, device="cpu")
                model["w00"].grad = still
                node.step(loss=1.0, tokens=1)
                time.sleep(max(0.0, ends - time.monotonic()))
    except NodeError as error:
        logging.error(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
