"""Fine-tune with low-rank factors that are others on every node: HD-PiSSA (arXiv 2505.18777).

    python examples/hd_pissa.py init out                    # once: a pretrained model (a small one), in slices
    farloop coordinator examples/own-run.toml --set run.merge=sum
    python examples/hd_pissa.py train tcp://127.0.0.1:7700 a out 0     # and another: b out 1, not 0

Of every matrix, node k (0, 1, …) trains factors of the singular values k·R to (k+1)·R; all else is frozen. The slices
are disjoint, so the run adds up what the nodes did (`merge = "sum"`): together they change the model with rank
SLICES·R, and each has the gradients and the optimizer's state of rank R.
"""

import logging
import sys
import sysconfig
from pathlib import Path

import torch
from own_loop import BATCH, CONTEXT, Mixer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from farloop.node import join
from farloop.node.errors import NodeError

SLICES, RANK, PRETRAINING_STEPS = 2, 8, 100


class Slices(nn.Module):
    """A weight as a frozen rest and SLICES products of factors, of which this node trains one."""

    def __init__(self, weight: Tensor, trained: int) -> None:
        super().__init__()
        u, s, v = torch.linalg.svd(weight.detach().flatten(1), full_matrices=False)
        u, v = u * s.sqrt(), s.sqrt()[:, None] * v
        parts = [slice(k * RANK, (k + 1) * RANK) for k in range(SLICES)]
        self.left = nn.ParameterList(u[:, part].contiguous() for part in parts)
        self.right = nn.ParameterList(v[part].contiguous() for part in parts)
        self.trained = trained

    def forward(self, rest: Tensor) -> Tensor:
        """The weight, in its shape."""
        products = [left @ right for left, right in zip(self.left, self.right, strict=True)]
        own = [product if k == self.trained else product.detach() for k, product in enumerate(products)]
        return rest + torch.stack(own).sum(0).view_as(rest)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The rest of a weight."""
        return weight - self(torch.zeros_like(weight))


def sliced(model: nn.Module, trained: int) -> nn.Module:
    """The model with factors in its layers; all its own parameters are frozen."""
    model.requires_grad_(requires_grad=False)
    for layer in list(model.modules()):
        if isinstance(layer, nn.Linear | nn.Conv1d):
            register_parametrization(layer, "weight", Slices(layer.weight, trained))
    return model


def text_of(file: str) -> Tensor:
    """The bytes of a file of Python's standard library, uint8."""
    return torch.frombuffer(bytearray(Path(sysconfig.get_path("stdlib"), file).read_bytes()), dtype=torch.uint8)


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Of random samples of a text."""
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,)).tolist()
    batch = torch.stack([text[i : i + CONTEXT + 1] for i in starts]).long()
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def init(folder: Path) -> None:
    """The run's first weights are the factors (own.safetensors), and every node needs the rest (rest.safetensors)."""
    torch.manual_seed(0)
    model, text = Mixer(), text_of("typing.py")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(PRETRAINING_STEPS):
        torch.autograd.backward(loss_of(model, text))
        optimizer.step(), optimizer.zero_grad()
    parameters = dict(sliced(model, 0).named_parameters())
    folder.mkdir(parents=True, exist_ok=True)
    for file, factors in (("own.safetensors", True), ("rest.safetensors", False)):
        chosen = {name: p.detach() for name, p in parameters.items() if p.requires_grad == factors}
        save_file(chosen, folder / file)


def train(coordinator: str, name: str, folder: Path, trained: int) -> None:
    model = sliced(Mixer(), trained)
    model.load_state_dict(load_file(folder / "own.safetensors") | load_file(folder / "rest.safetensors"))
    own = [p for part in model.modules() if isinstance(part, Slices) for p in (part.left[trained], part.right[trained])]
    optimizer = torch.optim.AdamW(own, lr=2e-3, weight_decay=0.0)
    text = text_of("ast.py")
    with join(coordinator, model, optimizer, name=name) as node:
        torch.manual_seed(sum(name.encode()))
        while node.running:
            loss = loss_of(node.model, text)
            torch.autograd.backward(loss)
            logging.info("step %.0f of %d, loss %.3f", node.position, node.spec.terms.schedule.steps, loss.item())
            node.step(loss=loss.item(), tokens=BATCH * CONTEXT)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    match sys.argv[1:]:
        case ["init", folder]:
            init(Path(folder))
        case ["train", coordinator, name, folder, trained]:
            if not trained.isdecimal() or int(trained) >= SLICES:
                logging.error("the slice: expected a number from 0 to %d, got %s", SLICES - 1, trained)
                return 2
            try:
                train(coordinator, name, Path(folder), int(trained))
            except NodeError as error:
                logging.error(error)
                return error.exit_code
        case _:
            logging.error(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
