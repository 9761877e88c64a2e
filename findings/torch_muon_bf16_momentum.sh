#!/usr/bin/env bash
# torch 2.13.0: Muon with nesterov=False loses its momentum where gradients are bfloat16.
#
# torch.optim.Muon keeps an average of the gradients in "momentum_buffer" and orthogonalises it in bfloat16. With
# nesterov=False the average itself goes to the orthogonalisation, and where it is bfloat16 already, as the gradients of
# bfloat16 parameters make it, the cast there is no copy: the buffer is divided by its own norm in place. After three
# steps with one gradient of norm 16 (momentum 0.95) the norm of the buffer should be 0.8, 1.56, 2.28, and so it is with
# nesterov=True and with float32. Here it is 1.0 after every step: each step begins from an average of length 1, however
# long the gradients were. There is no error and no warning.
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


def norms(dtype, nesterov):
    """Of the momentum after each of three steps with the same gradient."""
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(64, 64).to(dtype))
    optimizer = torch.optim.Muon([weights], lr=1e-3, momentum=0.95, nesterov=nesterov, weight_decay=0.0)
    gradient = torch.nn.functional.normalize(torch.randn(64, 64), dim=None) * 16
    found = []
    for _ in range(3):
        weights.grad = gradient.to(dtype)
        optimizer.step()
        found.append(round(optimizer.state[weights]["momentum_buffer"].float().norm().item(), 2))
    return found


print("torch", torch.__version__)
found = {}
for dtype in (torch.float32, torch.bfloat16):
    for nesterov in (True, False):
        found[dtype, nesterov] = norms(dtype, nesterov)
        print(f"{dtype}, nesterov={nesterov}: {found[dtype, nesterov]}")
lost = found.pop((torch.bfloat16, False))
right = all(abs(a - b) < 0.02 for each in found.values() for a, b in zip(each, (0.8, 1.56, 2.28)))
sys.exit(0 if right and all(abs(norm - 1.0) < 0.02 for norm in lost) else 1)
PYTHON
