"""A model of Hugging Face in its own Trainer, as a node: needs `pip install "farloop[hf]"`.

    python examples/hf_trainer.py init out/own.safetensors        # the first weights, once
    farloop coordinator examples/own-run.toml
    python examples/hf_trainer.py train tcp://127.0.0.1:7700 a    # and another with the name b

With several GPUs: torchrun --nproc-per-node 8 examples/hf_trainer.py train ... The model is a Llama of 0.3 M parameters
on bytes, built from a config: nothing is downloaded.
"""

import logging
import sys
import sysconfig
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from farloop.node.errors import NodeError
from farloop.node.hf import FarloopCallback

BATCH, CONTEXT = 16, 64


class Bytes(Dataset[dict[str, Tensor]]):
    """Windows of a text, byte by byte."""

    def __init__(self) -> None:
        text = Path(sysconfig.get_path("stdlib"), "typing.py").read_bytes()
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self._text) - CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._text[index : index + CONTEXT]
        return {"input_ids": tokens, "labels": tokens}


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    )


def train(coordinator: str, name: str) -> None:
    arguments = TrainingArguments(
        output_dir=f"out/hf-{name}",
        per_device_train_batch_size=BATCH,
        max_steps=1_000_000,  # the run says when it ends
        lr_scheduler_type="constant",  # the run sets the learning rate
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=sum(name.encode()),  # every node draws its own batches
    )
    Trainer(build(), arguments, train_dataset=Bytes(), callbacks=[FarloopCallback(coordinator, name=name)]).train()


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    match sys.argv[1:]:
        case ["init", path]:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            save_file({name: parameter.detach() for name, parameter in build().named_parameters()}, path)
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
