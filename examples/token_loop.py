"""Your model on token files, or on any dataset: the coordinator grants the samples, and workers load them.

    farloop data build examples --out out/tokens.bin              # bytes, as own_loop.py's model reads them
    python examples/own_loop.py init out/own.safetensors          # the first weights, once
    farloop coordinator examples/own-run.toml --set data.path=out/tokens.bin
    python examples/token_loop.py tcp://127.0.0.1:7700 a out/tokens.bin     # and another with the name b

A node that comes back, on however many processes, goes on with samples that no other has.
"""

import logging
import sys
from pathlib import Path

import torch
from own_loop import Mixer
from torch import nn

from farloop.node import join
from farloop.node.data.corpus import Mixture, load_corpus
from farloop.node.data.loader import Batches
from farloop.node.errors import CorpusError, NodeError

WORKERS = 2


def train(coordinator: str, name: str, tokens: Path) -> None:
    """One batch for each step; any dataset with random access stands in place of the mixture."""
    with join(coordinator, Mixer(), name=name) as node:
        mixture = Mixture(node.spec, [load_corpus(tokens)])
        for loaded in Batches(node, mixture, num_workers=WORKERS):
            batch = loaded.to(node.cluster.device)
            loss = nn.functional.cross_entropy(node.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            torch.autograd.backward(loss)
            logging.info("step %.0f of %d, loss %.3f", node.position, node.spec.terms.schedule.steps, loss.item())
            node.step(loss=loss.item())


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    match sys.argv[1:]:
        case [coordinator, name, tokens]:
            try:
                train(coordinator, name, Path(tokens))
            except (NodeError, CorpusError) as error:
                logging.error(error)
                return getattr(error, "exit_code", 2)
        case _:
            logging.error(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
