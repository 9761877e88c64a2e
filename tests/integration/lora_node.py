"""An adapter of peft over a frozen base, in a loop of its own: it ends with code 1 if its base has changed by a bit.

python lora_node.py init FILE R
python lora_node.py train tcp://HOST:PORT NAME R
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

from farloop.node import join
from farloop.node.errors import NodeError

WIDTH = 512


def adapted(rank: int) -> nn.Module:
    torch.manual_seed(1)
    base = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model: nn.Module = get_peft_model(base, LoraConfig(r=rank, target_modules=["0", "2"]))
    return model


def train(coordinator: str, name: str, rank: int) -> bool:
    model = adapted(rank)
    base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    with join(coordinator, model, name=name, state_dir=Path(name)) as node:
        while node.running:
            x = torch.randn(8, WIDTH)
            loss = nn.functional.mse_loss(node.model(x), x)
            torch.autograd.backward(loss)
            node.step(loss=loss.item(), tokens=8)
    parameters = dict(model.named_parameters())
    return bool(base) and all(torch.equal(parameters[name], was) for name, was in base.items())


def main() -> int:
    match sys.argv[1:]:
        case ["init", file, rank]:
            trained = {name: p for name, p in adapted(int(rank)).named_parameters() if p.requires_grad}
            save_file({name: p.detach() for name, p in trained.items()}, file)
            return 0
        case ["train", coordinator, name, rank]:
            try:
                return 0 if train(coordinator, name, int(rank)) else 1
            except NodeError as error:
                sys.stderr.write(f"{error}\n")
                return error.exit_code
    return 2


if __name__ == "__main__":
    sys.exit(main())
