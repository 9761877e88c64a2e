"""One line that makes Hugging Face's `Trainer`, and those of TRL, a node: needs the extra [hf].

Trainer(model, arguments, train_dataset=data, callbacks=[FarloopCallback("tcp://coordinator:7700", name="oslo")])
"""

import logging
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from farloop.node.library import Node, join

_log = logging.getLogger(__name__)


class FarloopCallback(TrainerCallback):
    """Joins a run when training begins, exchanges after every step of the optimizer, and stops the trainer when the
    run ends. `node` is the `Node`, from the begin of training on.

    The run sets the learning rate, which the trainer's log shows: give it `lr_scheduler_type="constant"`, or join with
    rate="own". Clipping, accumulation, mixed precision and several processes stay the trainer's.
    """

    def __init__(self, coordinator: str | None = None, **options: Any) -> None:
        """`coordinator` and `options` are those of `farloop.node.join`; what is left out comes from the environment."""
        self.coordinator, self.options = coordinator, options
        self.node: Node | None = None
        self._loss: float | None = None
        self._tokens_seen = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Raises as `join`."""
        if self.node is not None:  # the trainer begins again, as with auto_find_batch_size
            self.node.leave()
        self.node = node = join(self.coordinator, given["model"], given["optimizer"], hook=True, **self.options)
        self._tokens_seen = int(state.num_input_tokens_seen)
        left = node.spec.terms.schedule.steps - node.position
        if state.max_steps - state.global_step < left:
            _log.warning(
                "the trainer ends after %d more steps and the run has %.0f: give TrainingArguments a max_steps that is "
                "larger than the run's steps",
                state.max_steps - state.global_step,
                left,
            )

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        seen = int(state.num_input_tokens_seen)  # counted where the arguments ask for it, over all processes
        if self.node is not None:
            self.node.note(loss=self._loss, tokens=seen - self._tokens_seen or None)
        self._tokens_seen = seen

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        # The trainer logs the rate that its scheduler noted last, and then has the scheduler step, which notes its own
        # again: every logger sees the run's rate, and a checkpoint the scheduler as it would be.
        if isinstance(scheduler := given.get("lr_scheduler"), LRScheduler) and self.options.get("rate") != "own":
            scheduler._last_lr = [float(group["lr"]) for group in given["optimizer"].param_groups]

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if self.node is not None and not self.node.running:
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **given: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            self._loss = logs["loss"]

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if self.node is not None:
            self.node.leave()
