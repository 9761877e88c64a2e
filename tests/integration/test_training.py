"""Whole runs of real processes: every method trains, and everybody ends with the same weights."""

import math
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from loopback import FARLOOP, TEXT, NewRun, Run, assert_all_agree
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from farloop.algo import schedule
from farloop.algo.terms import Terms
from farloop.coordinator.decide.records import LeaseGranted, NodeStarted, Record, RunStarted
from farloop.monitoring.status import Status
from farloop.node.data.corpus import EvaluationSet, Samples, load_corpus
from farloop.node.model.built_in import build
from farloop.node.settings import PRESETS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_two_nodes_train_by_streaming_to_the_end(new_run: NewRun) -> None:
    run = new_run(steps=240, method="streaming", name="tokyo")
    coordinator, a, b = run.start_coordinator(), run.start_node("a"), run.start_node("b")
    run.until(
        "both nodes train and the first model is scored",
        lambda status: status["run"]["state"] == "training" and bool(status["evaluations"]),
    )
    assert_pages_answer(run)
    status = run.until_done(coordinator, a, b)
    assert_all_agree(run, status, "a", "b")
    assert status["versions"] == [16, 16, 16], "one a round; a flush is the last of all slots but one"
    assert [node["inner_steps"] for node in status["nodes"]] == [240, 240]
    assert [node["lost_steps"] for node in status["nodes"]] == [0, 0]
    assert not status["alarms"]
    assert reduction(status) >= 100
    losses = [event["loss"] for event in run.events("evaluation")]
    assert losses[-1] < losses[0] - 0.3, losses
    assert_model_is_as_good(run, status, losses[0])
    assert "run tokyo is finished" in coordinator.last_line


def test_data_parallel_is_one_adamw_over_both_batches(new_run: NewRun) -> None:
    """Protocol K: M nodes with batch B equal one torch process with batch M·B, to 1e-5."""
    run = new_run(steps=25, method="data-parallel", lr=1e-3, min_lr=1e-4)
    run.on_tape = True
    run.start_coordinator(), run.start_node("a"), run.start_node("b")
    status = run.until_done()
    assert_all_agree(run, status, "a", "b")
    together = load_file(run.state_dir / "model.safetensors")
    alone = train_alone(run.records())
    assert together.keys() == alone.keys()
    for name, weights in alone.items():
        difference = (together[name] - weights).norm() / weights.norm()
        assert difference < 1e-5, f"{name} differs by {difference:.2e} of its norm"


@pytest.mark.parametrize(
    ("example", "folder", "more"),
    [
        ("own_loop.py", ("out/own.safetensors",), ([], [])),
        pytest.param("hd_pissa.py", ("out",), (["out", "0"], ["out", "1"]), marks=pytest.mark.slow),
    ],
)
def test_the_example_of_an_own_loop_trains_to_the_end(
    new_run: NewRun, example: str, folder: tuple[str, ...], more: tuple[list[str], ...]
) -> None:
    run = new_run()
    shutil.copytree(EXAMPLES, run.folder / "examples")
    assert run.until_ended(run.start("init", f"examples/{example}", "init", *folder), 300.0) == 0
    run.state_dir = run.folder / "out" / "own" / "coordinator"
    address = f"tcp://127.0.0.1:{run.port}"
    ours = [f"coordinator.bind={address}", f"coordinator.http=127.0.0.1:{run.http}", "run.steps=60"]
    ours += ["run.merge=sum"] if example == "hd_pissa.py" else []
    sets = [word for setting in ours for word in ("--set", setting)]
    run.start("coordinator", *FARLOOP, "coordinator", "examples/own-run.toml", *sets)
    for name, words in zip(("a", "b"), more, strict=True):
        run.start(f"node-{name}", f"examples/{example}", "train", address, name, *words)
    status = run.until_done(timeout_s=240.0)  # each process may compile its kernels first
    assert_all_agree(run, status, "a", "b")
    assert all(node["inner_steps"] == 60 for node in status["nodes"])
    losses = [event["loss"] for event in run.events("progress") if event["loss"] is not None]
    assert losses[-1] < losses[0], losses


def test_a_node_of_two_ranks_takes_part_like_any_other(new_run: NewRun) -> None:
    run = new_run(steps=60, method="streaming", h=10, tau=2)
    run.start_coordinator(), run.start_node("one")
    two = run.start_node("two", nproc=2)
    heard_on: set[str] = set()
    while two.running:
        heard_on |= listening(two.process.pid)
        time.sleep(0.1)
    status = run.until_done()
    assert heard_on == {"127.0.0.1"}, "whoever reaches torch's ports can run code"
    assert_all_agree(run, status, "one", "two")
    assert [node["device"].split(" ")[0] for node in status["nodes"]] == ["1", "2"]
    assert [node["inner_steps"] for node in status["nodes"]] == [60, 60]
    assert [node["lost_steps"] for node in status["nodes"]] == [0, 0]
    losses = [event["loss"] for event in run.events("evaluation")]
    assert losses[-1] < losses[0], losses


# --- what a run came to


def assert_pages_answer(run: Run) -> None:
    assert run.page("/healthz") == (200, "ok\n")
    assert run.page("/readyz") == (200, "ready\n")
    code, text = run.page("/metrics")
    assert code == 200
    told = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE farloop_")}
    promised = """position_steps round run_steps h_steps epoch fragment_version validation_loss_nats nodes commits_total
        merged_deltas_total dropped_deltas_total refusals_total update_bytes_total delta_norm merge_seconds
        journal_seconds node_loss_nats node_tokens node_inner_steps node_compute_share_ratio node_blocked_seconds
        node_bytes"""
    assert told >= {f"farloop_{name}" for name in promised.split()}, sorted(told)
    assert 'farloop_nodes{state="connected"} 2.0' in text.splitlines()


def reduction(status: Status) -> float:
    """As protocol, Figures, says."""
    sent = sum(node["bytes_up"] + node["bytes_down"] for node in status["nodes"])
    inner_steps = sum(node["inner_steps"] for node in status["nodes"])
    return 8 * status["run"]["parameters"] * inner_steps / sent


def assert_model_is_as_good(run: Run, status: Status, first_loss: float) -> None:
    """The exported model is of this run, loads into the module it came from, and has learnt."""
    path = run.state_dir / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["run"] == status["run"]["fingerprint"]
    model = build(PRESETS["nano"], 1)
    model.load_state_dict(load_file(path))
    evaluation = EvaluationSet(load_corpus(TEXT), sequences=8, sequence_tokens=32)
    assert evaluation.loss(model, 8) < first_loss - 0.3


def listening(session: int) -> set[str]:
    """Addresses that the processes of a session listen on for TCP, by Linux's own book."""
    inodes: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may be gone by now
            if os.getsid(int(process.name)) == session:
                targets = [os.readlink(file) for file in (process / "fd").iterdir()]
                inodes |= {target[8:-1] for target in targets if target.startswith("socket:[")}
    found: set[str] = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw = bytes.fromhex(fields[1].partition(":")[0])
                words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                found.add(socket.inet_ntop(family, words))
    return found


# --- the same run in one process


def train_alone(records: list[Record]) -> dict[str, Tensor]:
    """AdamW on the samples that the run's nodes had at the same step."""
    (spec,) = (record.spec for record in records if isinstance(record, RunStarted))
    terms, texts = spec.terms, load_corpus(TEXT)
    samples = Samples(texts, terms.inner.sequence_tokens, spec.identity.seed)
    shares = [granted(records, record.node) for record in records if isinstance(record, NodeStarted)]
    assert len(shares) == 2
    model = build(PRESETS["nano"], spec.identity.seed)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": terms.inner.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=terms.schedule.lr.peak, betas=(0.9, 0.95), eps=1e-8)
    for step in range(terms.schedule.steps):
        batch = samples.batch([i for share in shares for i in mine(share, step, terms)])
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), terms.inner.clip)
        for group in adamw.param_groups:
            group["lr"] = schedule.learning_rate(terms, step)
        adamw.step()
        adamw.zero_grad()
    assert math.isfinite(loss.item())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def granted(records: list[Record], node: str) -> list[int]:
    """Stream positions in the order that a node uses them up."""
    leases = [record.lease for record in records if isinstance(record, LeaseGranted) and record.node == node]
    return [position for lease in leases for position in range(lease.start, lease.start + lease.count)]


def mine(share: list[int], step: int, terms: Terms) -> list[int]:
    return share[step * terms.inner.batch_sequences : (step + 1) * terms.inner.batch_sequences]
