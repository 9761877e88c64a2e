"""Covers `node/executor.py` where no thread is needed (protocol L); its threads: `integration/test_leader.py`."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain_runs import plain_terms
from torch import nn

from farloop.algo.fragments import partition, trainable_tensors
from farloop.algo.spec import Identity, NodeId, RunSpec
from farloop.node import executor as leader_module
from farloop.node.cluster import Cluster
from farloop.node.executor import NodeExecutor, _stop_error
from farloop.node.state_dir import NodeState
from farloop.node.zmq_dealer import LinkConfig
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

TERMS = plain_terms(method="diloco", steps=8, h=2, weight_decay=0.1, batch_sequences=4, sequence_tokens=8)


class NoLink:
    """A link that never comes."""

    def __init__(self, config: LinkConfig, hello: Callable[[], msg.Hello], deliver: object) -> None:
        pass

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("dtype", "warned"), [(torch.float32, False), (torch.bfloat16, True)], ids=["fp32", "bf16"])
def test_weights_below_fp32_without_masters_are_warned_of(
    dtype: torch.dtype, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """L: a step smaller than half an ulp of the weight is lost on the node, before any delta can see it."""
    monkeypatch.setattr(leader_module, "NodeLink", NoLink)
    module = nn.Linear(3, 2).to(dtype)
    layout = partition([(name, tuple(p.shape)) for name, p in trainable_tensors(module)], pattern="whole")
    identity = Identity(
        name="play", model="own", layout=layout, anchor_digests=(0,), data="own", num_samples=0,
        evaluation_set="none", seed=0,
    )  # fmt: skip
    link = LinkConfig(coordinator="tcp://127.0.0.1:1")
    leader = NodeExecutor(NodeId("a"), link, Cluster(), NodeState.claim(tmp_path), None)
    leader.machine.spec = RunSpec(identity=identity, terms=TERMS)
    with caplog.at_level(logging.WARNING):
        leader.attach(module)
    leader.close()
    assert any("without fp32 masters" in record.message for record in caplog.records) == warned


@pytest.mark.parametrize(
    ("reason", "step"),
    [
        (Reason.PROTOCOL_VERSION, "install the same version of farloop on both"),
        (Reason.WRONG_RUN, "check the coordinator's address, and the fingerprint"),
        (Reason.WRONG_LAYOUT, "build the model that the run began with"),
        (Reason.WRONG_PART, "give the stages that the run's layout has"),
        (Reason.WRONG_KEY, "farloop keys authorize NAME.pub"),
        (Reason.NAME_TAKEN, "stop the other process of this name"),
        (Reason.OLD_INCARNATION, "stop the newer process of this name"),
        (Reason.FENCED, "the coordinator runs on an old copy of its state"),
    ],
)
def test_a_refusal_for_good_names_the_next_step(reason: Reason, step: str) -> None:
    error = _stop_error(reason, "detail")
    assert f"{reason.sentence}: detail; " in str(error) and step in str(error) and "\n" not in str(error)
