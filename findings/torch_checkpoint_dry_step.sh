#!/usr/bin/env bash
# torch 2.13.0: to look at the state of a fresh AdamW by the checkpoint library counts as a step, and changes the training after it.
#
# get_optimizer_state_dict of torch.distributed.checkpoint.state_dict reads an optimizer's state, as for saving. Where it is empty the
# library makes it by a step of its own, at a rate of 0 and with gradients of zeros, so that no weight moves. AdamW counts
# this step all the same and takes the bias out of its moments by that count: every step after it, a look before training
# gives other weights than none. SGD with momentum keeps no such count, and trains as before.
#
# Exits with 0 while that is so, with 1 once it changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def trained(make, looks):
    """The weights after three steps, and how many steps the optimizer counts, 0 where it counts none."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 3), torch.arange(8.0).reshape(2, 4)
    optimizer = make(model.parameters())
    if looks:
        get_optimizer_state_dict(model, optimizer)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach(), float(optimizer.state[model.weight].get("step", 0.0))


def compared(name, make):
    (plain, steps), (looked, steps_looked) = trained(make, False), trained(make, True)
    gap = (plain - looked).abs().max().item()
    print(f"{name}: steps counted after three {steps:.0f}, after a look and three {steps_looked:.0f}; weights differ by {gap:.4f}")
    return gap, steps, steps_looked


print("torch", torch.__version__)
adamw = compared("AdamW", lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
sgd = compared("SGD with momentum", lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9))
sys.exit(0 if adamw[0] > 1e-3 and adamw[1:] == (3.0, 4.0) and sgd[0] == 0.0 else 1)
PYTHON
