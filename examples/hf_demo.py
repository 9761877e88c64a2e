"""A run of a Hugging Face model from its data to `from_pretrained`, on this machine and offline: `make demo-hf`.

It trains a tokenizer on Python's standard library, then a small Llama on two nodes: one is two processes that shard the
model (FSDP2), the other a single process. It kills a process of the first node, which farloop starts again, exports the
model, loads it with transformers and lets it write some text. Everything is done by the commands that it prints.

    python examples/hf_demo.py [--steps N] [--out DIR]
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farloop.monitoring.healthcheck import open_page

FARLOOP = (sys.executable, "-m", "farloop.cli.main")
LIBRARY = Path(os.__file__).parent
VOCABULARY = 1024
PATIENCE_S = 600.0  # for each part, on a slow machine
END_S = 60.0  # for a daemon to end after SIGTERM

LLAMA = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 344,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

RUN = """
[run]
name = "hf-demo"
model = "hf:llama"
nodes = 2
steps = {steps}
method = "streaming"
floor = 2            # without both nodes the run waits, so that it cannot end before the killed one is back
sequence_tokens = 128

[data]
path = "tokens.bin"

[coordinator]
state_dir = "state"
bind = "tcp://127.0.0.1:{port}"
http = "127.0.0.1:{http}"
"""

NODE = """
[node]
name = "{name}"
coordinator = "tcp://127.0.0.1:{port}"
state_dir = "node-{name}"
threads = 1
{more}
[data]
path = "tokens.bin"
"""


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def farloop(folder: Path, *words: str) -> None:
    """Run a command to its end."""
    say("$ farloop", *words)
    try:
        code = subprocess.run([*FARLOOP, *words], cwd=folder, check=False, timeout=PATIENCE_S).returncode
    except subprocess.TimeoutExpired:
        sys.exit(f"farloop {words[0]} did not end within {PATIENCE_S:g} s")
    if code:
        sys.exit(f"farloop {words[0]} ended with exit code {code}")


def start(folder: Path, name: str, *words: str) -> "subprocess.Popen[bytes]":
    """Start a daemon; its log is NAME.log."""
    say("$ farloop", *words, f"&    # log: {name}.log")
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen([*FARLOOP, *words], cwd=folder, stdout=log, stderr=log)


def rank_1_of(node: int) -> int:
    """The process of a node's second rank: a child of the node's own that torchrun's variables call so."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == node and b"\0RANK=1\0" in b"\0" + (folder / "environ").read_bytes():
                return int(folder.name)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    sys.exit(f"process {node} has no rank 1")


def until_ended(daemons: "dict[str, subprocess.Popen[bytes]]", within_s: float) -> None:
    """Wait for all of them to end well."""
    deadline = time.monotonic() + within_s
    for name, daemon in daemons.items():
        try:
            code = daemon.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            sys.exit(f"{name} did not end within {within_s:g} s: see {name}.log")
        if code:
            sys.exit(f"{name} ended with exit code {code}: see {name}.log")


def end(daemons: "dict[str, subprocess.Popen[bytes]]") -> None:
    """End those that still run."""
    for daemon in reversed(daemons.values()):
        daemon.terminate()
        try:
            daemon.wait(END_S)
        except subprocess.TimeoutExpired:
            daemon.kill()


class Run:
    """The daemons and the coordinator's status page."""

    def __init__(self, http: int, daemons: "dict[str, subprocess.Popen[bytes]]") -> None:
        self._url, self.daemons = f"http://127.0.0.1:{http}/status", daemons

    def until(self, what: str, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait; the status then."""
        say(f"… until {what}")
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for name, daemon in self.daemons.items():
                if daemon.poll() is not None:
                    sys.exit(f"{name} ended with exit code {daemon.returncode} before {what}: see {name}.log")
            try:
                with open_page(self._url, 5) as page:
                    status: dict[str, Any] = json.load(page)
                if reached(status):
                    return status
            except OSError:
                pass  # it has not begun to listen
            time.sleep(0.5)
        sys.exit(f"this did not happen within {PATIENCE_S:g} s: {what}")


def node_of(status: dict[str, Any], name: str) -> dict[str, Any]:
    """A node that the coordinator knows; one that has done nothing for another."""
    nothing = {"connected": False, "state": "", "inner_steps": 0, "incarnation": 0}
    return next((node for node in status["nodes"] if node["name"] == name), nothing)


def trains(node: dict[str, Any], after: int = 0) -> bool:
    """Whether it trains, as a later start than number `after`."""
    return node["connected"] and node["incarnation"] > after and node["state"] == "training" and node["inner_steps"] > 0


def train(folder: Path, steps: int) -> None:
    port, http = free_port(), free_port()
    (folder / "run.toml").write_text(RUN.format(steps=steps, port=port, http=http))
    more = {"sharded": "nproc = 2\nshard = true\n", "plain": ""}
    for name, lines in more.items():
        (folder / f"{name}.toml").write_text(NODE.format(name=name, port=port, more=lines))
    daemons = {"coordinator": start(folder, "coordinator", "coordinator", "run.toml")}
    try:
        for name in more:
            daemons[name] = start(folder, name, "node", f"{name}.toml")
        run = Run(http, daemons)
        status = run.until("both nodes train", lambda status: all(trains(node_of(status, name)) for name in more))
        before = node_of(status, "sharded")["incarnation"]
        rank = rank_1_of(daemons["sharded"].pid)
        say(f"$ kill -9 {rank}    # one of the two processes of the sharded node")
        os.kill(rank, signal.SIGKILL)
        status = run.until("farloop has started it again", lambda status: trains(node_of(status, "sharded"), before))
        say(f"the sharded node trains again, as its start number {node_of(status, 'sharded')['incarnation']}")
        say("… until the run's end")
        until_ended(daemons, PATIENCE_S)
    finally:
        end(daemons)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="inner steps of each node (400)")
    parser.add_argument("--out", type=Path, default=Path("out/demo-hf"), help="folder, made anew (out/demo-hf)")
    given = parser.parse_args()
    folder: Path = given.out
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "llama").mkdir(parents=True)
    (folder / "llama" / "config.json").write_text(json.dumps(LLAMA, indent=1))
    begun = time.monotonic()
    for name in ("asyncio", "email", "json", "logging", "unittest", "urllib"):
        shutil.copytree(LIBRARY / name, folder / "text" / name, ignore=shutil.ignore_patterns("__pycache__", "test"))
    farloop(folder, "data", "build", "text", "--train-tokenizer", str(VOCABULARY), "--out", "tokens.bin")
    train(folder, given.steps)
    farloop(folder, "export", "model", "--tokenizer", "tokens.tokenizer.json")
    losses = [taken["loss"] for taken in json.loads((folder / "state" / "status.json").read_text())["evaluations"]]
    say(f"loss on text that no node trains on: {losses[0]:.3f} after the first round, {losses[-1]:.3f} at the end")
    show(folder / "model")
    say(f"{time.monotonic() - begun:.0f} s in all; everything is in {folder}")


def show(model: Path) -> None:
    """Load the exported folder with transformers, and let it write."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    module = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
    prompt = tokenizer("    def __init__(self", return_tensors="pt")
    written = module.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)
    say(f"from_pretrained({str(model)!r}) has {module.num_parameters():,} parameters, and writes:")
    say(tokenizer.decode(written[0]))


if __name__ == "__main__":
    main()
