"""torchtitan's trainer as a node. NOT RUN: it needs GPUs; for torchtitan 0.2.2.

    export FARLOOP_NODE__COORDINATOR=tcp://coordinator.example:7700 FARLOOP_NODE__NAME=oslo
    torchrun --nproc-per-node 8 examples/torchtitan_trainer.py --job.config_file llama3_8b.toml

The run's first weights have torchtitan's names: save those of a seed checkpoint once (docs/models.md). Parameters are
as torchtitan shards them, by FSDP2 or HSDP, tensor parallelism, or stages of a pipeline.
"""

from torchtitan.train import Trainer, main

from farloop.node import Node, join


class FarloopTrainer(Trainer):
    """Joins when torchtitan first asks whether to go on: by then it has built, sharded and loaded everything."""

    node: Node | None = None

    def should_continue_training(self) -> bool:
        if self.node is None:
            # `optimizers` is one optimizer that steps those of all parts: one exchange follows each of its steps.
            self.node = join(None, self.model_parts, self.optimizers, hook=True)
        return self.node.running

    def close(self) -> None:
        if self.node is not None:
            self.node.leave()
        super().close()


if __name__ == "__main__":
    main(FarloopTrainer)
