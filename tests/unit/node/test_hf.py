"""Covers node/hf.py but for the run, in which test_hook.py takes part."""

from typing import Any
from unittest import mock

import pytest
import torch
from plain_runs import plain_spec

transformers = pytest.importorskip("transformers")

from farloop.node import hf  # noqa: E402 - it needs transformers


def test_the_callback_tells_tokens_and_rate_and_stops_no_other_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = mock.Mock(position=10.0, running=True)
    node.spec = plain_spec(steps=100)
    join = mock.Mock(return_value=node)
    monkeypatch.setattr(hf, "join", join)
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    callback, control = hf.FarloopCallback(name="oslo"), transformers.TrainerControl()
    state = transformers.TrainerState(max_steps=89, num_input_tokens_seen=7)
    given: dict[str, Any] = {"model": None, "optimizer": optimizer, "lr_scheduler": scheduler}
    callback.on_train_begin(None, state, control, **given)
    assert join.call_args == mock.call(None, None, optimizer, hook=True, name="oslo")
    assert "the trainer ends after 89 more steps and the run has 90" in caplog.text
    optimizer.param_groups[0]["lr"] = 0.25
    callback.on_optimizer_step(None, state, control, **given)
    assert scheduler.get_last_lr() == [0.25]

    callback.on_log(None, state, control, logs={"loss": 3.0})
    for seen, tokens in ((27, 20), (27, None)):
        state.num_input_tokens_seen = seen
        callback.on_pre_optimizer_step(None, state, control)
        assert node.note.call_args == mock.call(loss=3.0, tokens=tokens)

    control.should_training_stop = True
    callback.on_step_end(None, state, control)
    assert control.should_training_stop, "as another callback asked"
    control.should_training_stop, node.running = False, False
    callback.on_step_end(None, state, control)
    assert control.should_training_stop
    callback.on_train_end(None, state, control)
    node.leave.assert_called_once_with()
    callback.on_train_begin(None, state, control, **given)
    assert node.leave.call_count == 2, "a trainer that begins again ends the node before"
