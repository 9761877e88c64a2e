"""Your model, your data, your loop: a node in three lines.

    python examples/own_loop.py init out/own.safetensors          # the first weights, once
    farloop coordinator examples/own-run.toml
    python examples/own_loop.py train tcp://127.0.0.1:7700 a      # and another with the name b

farloop learns the names and shapes of the parameters from the weights file, and nothing else of the model.
"""

import logging
import sys
import sysconfig
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from farloop.node import join
from farloop.node.errors import NodeError

BATCH, CONTEXT, WIDTH, LAYERS = 32, 64, 128, 4


class Mixer(nn.Module):
    """A byte model without attention: each layer looks back with a causal convolution, twice as far as the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 3, dilation=2**i) for i in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, time] int64 → logits [batch, time, 256]."""
        x = self.embed(tokens).transpose(1, 2)
        for i, layer in enumerate(self.layers):
            x = x + nn.functional.glu(layer(nn.functional.pad(x, (2 * 2**i, 0))), dim=1)
        out: Tensor = self.head(x.transpose(1, 2))
        return out


def train(coordinator: str, name: str) -> None:
    """An ordinary loop; the three lines of farloop are marked."""
    text = torch.frombuffer(bytearray(Path(sysconfig.get_path("stdlib"), "typing.py").read_bytes()), dtype=torch.uint8)
    with join(coordinator, Mixer(), name=name) as node:  # 1
        torch.manual_seed(sum(name.encode()) + node.cluster.rank)  # every process draws its own batches
        while node.running:  # 2
            starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,)).tolist()
            batch = torch.stack([text[i : i + CONTEXT + 1] for i in starts]).long().to(node.cluster.device)
            loss = nn.functional.cross_entropy(node.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            torch.autograd.backward(loss)
            logging.info("step %.0f of %d, loss %.3f", node.position, node.spec.terms.schedule.steps, loss.item())
            node.step(loss=loss.item(), tokens=BATCH * CONTEXT * node.cluster.size)  # 3, in place of optimizer.step()


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    match sys.argv[1:]:
        case ["init", path]:
            torch.manual_seed(0)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.detach() for name, tensor in Mixer().named_parameters()}, path)
        case ["train", coordinator, name]:
            try:
                train(coordinator, name)
            except NodeError as error:
                logging.error(error)
                return error.exit_code
        case _:
            logging.error(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
