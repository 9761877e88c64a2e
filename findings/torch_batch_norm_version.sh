#!/usr/bin/env bash
# torch 2.13.0: a training step of BatchNorm changes its statistics without counting a change, so autograd misses it.
#
# Autograd counts changes made in place to a tensor (`_version`), and backward ends with an error where what forward saved
# has another count. BatchNorm in eval mode saves running_var. Multiplying that by 2 before backward gives the error.
# A batch in training mode between forward and backward changes running_mean and running_var as well, but neither count
# moves (that of num_batches_tracked does): backward goes on with the new statistics, and the gradient is another one.
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


def gradient(change):
    """Of a sum behind BatchNorm in eval mode, with a change of the layer between forward and backward."""
    layer, x = torch.nn.BatchNorm1d(3).eval(), torch.ones(2, 3, requires_grad=True)
    total, before = layer(x).sum(), layer.running_var.clone()
    counts = [each._version for each in (layer.running_mean, layer.running_var, layer.num_batches_tracked)]
    change(layer)
    now = [each._version for each in (layer.running_mean, layer.running_var, layer.num_batches_tracked)]
    moved = [after - count for after, count in zip(now, counts)]
    try:
        total.backward()
    except RuntimeError as error:
        return moved, "error: " + str(error).partition(":")[0]
    return moved, f"{x.grad[0, 0].item():.4f} (running_var {before[0].item():.1f} -> {layer.running_var[0].item():.1f})"


def trained(layer):
    layer.train()
    layer(torch.arange(12.0).reshape(4, 3) * 5)
    layer.eval()


print("torch", torch.__version__)
found = [gradient(change) for change in (lambda layer: None, lambda layer: layer.running_var.mul_(2.0), trained)]
for what, (moved, outcome) in zip(("unchanged", "running_var.mul_(2)", "a batch in training mode"), found):
    print(f"{what}: changes counted of running_mean, running_var, num_batches_tracked: {moved}; gradient: {outcome}")
(_, right), (_, caught), (moved, silent) = found
missed = not silent.startswith("error") and silent.split()[0] != right.split()[0]
sys.exit(0 if caught.startswith("error") and moved == [0, 0, 1] and missed else 1)
PYTHON
