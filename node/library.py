"""The library call: a training loop becomes a node in three lines.

    node = join("tcp://coordinator:7700", model, optimizer, name="oslo")
    while node.running:                      # your own batch, forward and loss.backward(), then
        node.step(loss=loss.item(), tokens=batch.numel())
    node.leave()

`step` takes the place of `optimizer.step()`: it sets the learning rate, clips and steps the inner optimizer (or, with
a method that has none, sends the gradients), then exchanges whatever is due (docs/models.md). The daemon's trainer uses
the same call.
"""

import contextlib
import dataclasses
import logging
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Self, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from farloop.algo.fragments import kept_ties, trainable_tensors
from farloop.algo.methods import method_named
from farloop.algo.spec import NodeId, RunSpec
from farloop.algo.stages import Part, is_source
from farloop.algo.validation import check_own_tau
from farloop.monitoring.endpoint import Endpoint
from farloop.node.arguments import (
    LoopOptions,
    ModelOf,
    OptimizerOf,
    Wrap,
    check_hooks,
    check_parameters,
    check_seconds,
    describe_type,
    loss_of,
    number_of,
    resolved,
    shown,
    unwrap,
)
from farloop.node.cluster import Cluster, Decision
from farloop.node.devices import Awaited, device_of
from farloop.node.driver import Driver
from farloop.node.errors import DataError, LoopError, TermsMismatch
from farloop.node.executor import NodeExecutor
from farloop.node.hang_watch import EVALUATING, EXCHANGING, WAITING, HangWatch
from farloop.node.link import LinkConfig
from farloop.node.metrics import Metrics, serve
from farloop.node.model.anchor_files import AnchorFiles
from farloop.node.model.frozen import Frozen
from farloop.node.model.inner_optimizer import InnerStep, Whose, default_optimizer
from farloop.node.model.merges import Merges, OnMerge
from farloop.node.model.moments import Moments
from farloop.node.model.replica import Replica, matched_parameters, replica_of
from farloop.node.model.shards import (
    Shards,
    Weights,
    check_codecs,
    elsewhere,
    is_on_all,
    is_sharded,
    is_split,
    reshard,
    unaveraged,
)
from farloop.node.settings import SAVE_EVERY_ROUNDS, Buffers, NodeConfig, Where, check_fingerprint
from farloop.node.signals import Handlers
from farloop.node.state_dir import NodeState, reserve
from farloop.node.zmq_dealer import LinkThread
from farloop.quant.registry import warm_for
from farloop.wire.bounds import MOST_TOKENS
from farloop.wire.keys import check_name
from farloop.wire.machine_info import NOTHING, Inventory

_log = logging.getLogger(__name__)

DRAIN_S = 20.0
"""How long `leave` waits for the outcome of what was sent: well inside the 30 s of Kubernetes after SIGTERM."""


_live: "weakref.WeakSet[Node]" = weakref.WeakSet()  # that were joined here and have not left

_LEAST_BETWEEN_LOOKS = 16  # steps between two looks at what is not exchanged, where a round is shorter
_MANY_NOTES = 100  # without a step of the optimizer: a trainer may note every forward pass, and accumulate gradients


@dataclasses.dataclass(slots=True)
class Held:
    """What a rank of a node has open, from `join` to `leave`."""

    cluster: Cluster
    watch: HangWatch | None = None
    files: AnchorFiles | None = None
    """Where anchors are saved, and the optimizer's state."""
    reserved: IO[str] | None = None
    """The state folder, on rank 0."""
    driver: Driver | None = None
    """On rank 0."""
    endpoint: Endpoint | None = None
    """Where the node shows itself, if anywhere."""

    def reporting_failure(self) -> contextlib.AbstractContextManager[None]:
        return self.driver.reporting_failure() if self.driver is not None else contextlib.nullcontext()

    def first_error(self, error: BaseException) -> BaseException:
        """What ended the node: this error, or that of another rank."""
        return (self.watch.failed(error) if self.watch is not None else None) or error

    def close(self, error: BaseException | None = None) -> None:
        """Stop all threads, without a message unless there is an error to tell. More than once is harmless."""
        if self.watch is not None:
            self.watch.stop()
        if self.endpoint is not None:
            self.endpoint.close()
        if self.driver is not None:
            self.driver.close(error)
        if self.files is not None:
            self.files.close()
        if self.reserved is not None:
            self.reserved.close()
        self.cluster.close()


class Node:
    """A model that takes part in a run. Made by `join`; use it as a context manager, or call `leave`."""

    def __init__(self, held: Held, config: NodeConfig, options: LoopOptions, spec: RunSpec) -> None:
        """Not to be called: `join` is the way in. Raises NodeError."""
        self.spec, self.cluster = spec, held.cluster
        self._held, self._config, self._options = held, config, options
        assert held.watch is not None
        self._driver, self._watch = held.driver, held.watch
        self.module = module = _placed(options.model, spec, self.cluster)
        layout, cluster = spec.identity.layout, self.cluster
        absent = elsewhere(cluster, dict(trainable_tensors(module)))
        self._parameters = parameters = matched_parameters(module, layout, options.holds, absent)
        sharded = is_split(cluster, [*module.parameters(), *parameters.values()])
        if sharded:
            check_codecs((spec.terms.codec_of(NodeId(config.name)), spec.terms.codecs.down))
            _check_evaluate(cluster, options.evaluate is not None)
        else:
            _check_ranks(spec, cluster)
        if options.clip == "run" and not options.hook:
            _check_clip(cluster, absent)
        self._optimizer = optimizer = _inner_optimizer(options.optimizer, module, spec)
        if options.hook and optimizer is None:
            raise LoopError(
                f"with the method {spec.terms.method} the coordinator takes the step: hook=True cannot be used; "
                "call node.step() in a loop of your own"
            )
        anchors = cast(Where, config.anchors)
        self._weights = (
            Shards(cluster, module, layout, parameters, options.holds, anchors)
            if sharded
            else Weights(layout, parameters, options.holds, anchors)
        )
        self._follower: Replica | None = None  # of a rank that does not lead, where the model is sharded
        if sharded and not cluster.leads:
            self._follower = replica_of(module, spec, options.holds, self._weights)
        self._merges = Merges(optimizer, parameters, layout, options.on_merge)
        self._moments: Moments | None = None
        if held.files is not None and optimizer is not None and config.save_optimizer:
            self._moments = Moments(optimizer, self._weights, layout, held.files, self._merges)
        if self._follower is not None:
            self._follower.files, self._follower.moments = held.files, self._moments
            self._follower.merges = self._merges
        wraps = options.wrap == "ddp" and not (cluster.alone or options.hook or sharded)
        self.model = DistributedDataParallel(module, gradient_as_bucket_view=True) if wraps else module
        """The model for the forward pass. Gradients are averaged over the node's ranks: by DistributedDataParallel, or
        by the loop where it has sharded the module, steps by hook or took wrap="none"."""
        alike = wraps or cluster.alone or is_on_all(parameters.values(), cluster.size)
        self._inner = InnerStep(
            optimizer,
            module,
            {name: p for name, p in parameters.items() if p.requires_grad and not p.is_meta},
            spec.terms,
            rate=options.rate,
            clip=options.clip,
            scaler=options.scaler,
            all_agree=bool if alike else cluster.all_agree,
        )
        self._hooks = list[RemovableHandle]()
        self._noted: tuple[int | None, float | None] = None, None
        self._losses = Awaited()
        self._frozen: Frozen | None = None
        self._steps = 0
        self._steps_to_place = 2 if config.anchors == "auto" and self._weights.apart else 0
        self._notes, self._dry, self._stepped = 0, False, True  # since the optimizer's last step; whether it was none
        self._decision = Decision(running=False, lr=0.0)
        self._decided = deque[Decision]()  # of the steps after the next one
        self._left = self._told_of_end = False
        self.asked_to_leave = False
        """Whether `request_drain` was called: a step that waits for others need not wait any longer."""
        self._handlers = Handlers()  # of signals

    @property
    def executor(self) -> NodeExecutor | None:
        """What exchanges deltas with the coordinator; None on ranks other than 0."""
        return None if self._driver is None else self._driver.executor

    @property
    def running(self) -> bool:
        """Whether to run another inner step; False at the run's end, and after `request_drain` and `leave`."""
        return self._decision.running and not self._left

    @property
    def position(self) -> float:
        """Schedule position of the next inner step."""
        return self._decision.position

    @property
    def closes_round(self) -> bool:
        """Whether the next inner step is the last of its round; False on a node's other ranks."""
        machine = self.executor.machine if self.executor is not None else None
        plan = machine.schedule.plan if machine is not None else None
        return machine is not None and plan is not None and machine.schedule.step + 1 >= plan.steps_of(machine.name)

    @property
    def lr(self) -> float:
        """The run's learning rate at the next inner step."""
        return self._decision.lr

    @property
    def samples(self) -> tuple[int, ...]:
        """Stream positions of this rank's part of the next batch; empty when the loop brings its own data."""
        return self.cluster.mine(self._decision.samples)

    def samples_ahead(self, steps: int) -> tuple[tuple[int, ...], ...]:
        """This rank's parts of the batches after the next one, from the second step on that asks for as many.

        At most `steps` of them, as far as samples are granted. After a broken session other samples may come instead.

        Raises ValueError: `steps` is no whole number, or negative.
        """
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(f"samples_ahead({steps!r}): expected a whole number of steps, 0 or more")
        if self.executor is not None:
            self.executor.look_ahead = steps
        batch, ahead = self.spec.terms.inner.batch_sequences, self._decision.ahead
        return tuple(self.cluster.mine(ahead[i : i + batch]) for i in range(0, len(ahead) - batch + 1, batch))[:steps]

    def step(self, *, loss: float | Tensor | None = None, tokens: int | Tensor | None = None) -> bool:
        """One inner step after `loss.backward()`; gradients are cleared. True while the run goes on.

        Parameter groups keep their ratios to the run's learning rate, and the gradient is clipped to the run's norm. A
        gradient with NaN or Inf changes no weight; it is logged and counted. docs/models.md gives the details.

        Args:
            loss: of this step, for the displays: a number, or a tensor of one element; on CUDA shown a step later.
            tokens: of this step over the whole node; the run's batch unless given, and no more than that where the
                coordinator grants the samples. A node that holds a part of the model gives the tokens that passed
                through it: they are the weight of its deltas.

        Raises:
            ValueError: `tokens` is no whole number, below 0, or more than a step can have, or `loss` is no number;
                nothing was done.
            NonFiniteDelta: the weights are broken; nothing of them was sent.
            LoopError: a parameter was frozen or unfrozen after `join`, or has a sparse gradient; or the run is over.
            Refused: the coordinator ended this node's part for good.
        """
        if self._options.hook:
            raise LoopError("step was called on a node with hook=True, which exchanges after every optimizer.step()")
        if not self.running:
            raise LoopError(
                "step was called though node.running is False: the run has ended, or this node was asked to leave. "
                "Loop while node.running, then call node.leave()"
            )
        trained = self.batch_tokens() if tokens is None else self._checked(tokens)
        seen = shown(loss, self._losses)
        self._merges.before_step()
        stepped = self._inner.run(self._decision.lr)
        self._exchange(trained, seen, stepped=stepped)
        self.module.zero_grad(set_to_none=True)
        self._inner.zero_grad()
        return self.running

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """For gradient accumulation: backward passes inside add to the gradients and do not average them over the
        node's ranks. The last one before `step` has to be outside. Nothing changes with one rank, nor where the loop
        averages by itself."""
        return unaveraged(self.model)

    def note(self, *, loss: float | Tensor | None = None, tokens: int | Tensor | None = None) -> None:
        """With `join(hook=True)`: what the steps from here on report, as `step` takes it; kept until the next call.

        Raises ValueError as `step`. LoopError: the node was joined without it.
        """
        if not self._options.hook:
            raise LoopError("note is for a node with hook=True: call step, or join with hook=True")
        self._notes += 1
        if self._notes == _MANY_NOTES:
            _log.warning(
                "note was called %d times, and the optimizer given to join has not stepped: does the trainer step "
                "another one? Join with the one that it steps",
                self._notes,
            )
        checked = None if tokens is None else self._checked(tokens)
        self._noted = checked, shown(loss, self._losses)

    def _before_optimizer_step(self) -> None:
        self._dry = self._inner.is_dry()
        if self._dry:
            return
        if self.running:
            self._stepped = self._inner.prepare(self._decision.lr)
            self._merges.before_step()
        elif not self._told_of_end:
            self._told_of_end = True
            _log.warning("the trainer goes on though the run is over for this node: stop it when node.running is False")

    def _after_optimizer_step(self) -> None:
        if self._dry:
            return
        self._notes = 0
        if self.running:
            tokens, loss = self._noted
            self._exchange(self.batch_tokens() if tokens is None else tokens, loss, stepped=self._stepped)

    def _exchange(self, tokens: int, loss: float | None, *, stepped: bool) -> None:
        self._steps += 1
        with self._held.reporting_failure():
            self._merges.after_step()
            if self._frozen is not None and self._steps % max(self.spec.terms.schedule.h, _LEAST_BETWEEN_LOOKS) == 1:
                self._frozen.check()
        if self._decided:
            if self._driver is not None:
                self._driver.between_steps(tokens, loss, stepped=stepped)
            self._decision = self._decided.popleft()
        else:
            self._watch.enter(EXCHANGING)
            self._decide(self._driver.after_step(tokens, loss, stepped=stepped) if self._driver is not None else ())
        self._merges.resume()
        self._watch.stepped()
        self._steps_to_place -= 1
        replica = self._follower or (None if self.executor is None else self.executor.replica)
        if not self._steps_to_place and replica is not None:
            replica.place()

    def request_drain(self) -> None:
        """Stop after the current step, as SIGTERM asks: what is begun is finished. From any thread, or a handler, and
        of any rank: rank 0 hears of it within a second."""
        if self.asked_to_leave:
            return
        self.asked_to_leave = True
        if self._driver is not None:
            self._driver.executor.request_drain()
        else:
            self._watch.note.asked = True

    def drain_on(self, *signals: signal.Signals) -> None:
        """Have the first of these signals call `request_drain`. After it, and after `leave`, the handlers of before are
        back: a second one does what it would have done without farloop. Of several ranks they are back after `leave`
        alone, as torchrun sends all of them what Ctrl-C has sent them. Forked children have them too. From the main
        thread."""

        def asked(*_: object) -> None:
            if self.cluster.alone:
                self._handlers.uninstall()
            self.request_drain()

        self._handlers.install(asked, *signals)

    def leave(self, timeout_s: float = DRAIN_S) -> None:
        """Wait for the outcome of what was sent, say good-bye, save the optimizer's state if `join` was asked to, stop
        all threads. More than once is harmless.

        After an error of `step` there is nothing to wait for: the threads stop at once.

        Raises ValueError: `timeout_s` is not a number of seconds; nothing was done.
        """
        check_seconds("leave", timeout_s)
        if self._left:
            return
        self._left = True
        try:
            if self._driver is not None and self._driver.failed:
                return  # the coordinator was told, and no outcome can come any more
            if self._driver is not None:
                if self._frozen is not None:
                    self._frozen.log_changes()
                self._driver.drain(timeout_s)
                self._driver.save_moments()
            self._catch_up()
        finally:
            self.abandon()

    def abandon(self, error: BaseException | None = None) -> None:
        """Stop all threads, without a message unless there is an error to tell."""
        self._left = True
        self._merges.resume()
        _live.discard(self)
        self._handlers.uninstall()
        for handle in self._hooks:
            handle.remove()
        self._held.close(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            return self.leave()
        first = self._held.first_error(error)
        self.abandon(first)
        if first is not error:
            raise first from error

    def _begin(self) -> None:
        own, same = self._options.own, self._config.buffers == "same"
        self._frozen = frozen = Frozen(self.module, self.cluster, self._parameters, buffers=same, own=own)
        if self._driver is not None:
            executor, evaluate = self._driver.executor, self._options.evaluate
            executor.attach(self.module, self._weights, frozen.digest, frozen.unsaved)
            replica = executor.replica
            if replica is not None:
                replica.moments, replica.merges = self._moments, self._merges
            if evaluate is not None and replica is not None:
                executor.evaluate = lambda: loss_of(replica.evaluate(lambda: self._evaluated(evaluate)))
        self._decide(self._driver.wait_for_start() if self._driver is not None else ())
        if self._moments is not None and not self._weights.sharded:
            self._moments.share(self.cluster)
        self._merges.resume()
        if self._options.hook and self._optimizer is not None:
            self._hooks = [
                self._optimizer.register_step_pre_hook(lambda *_: self._before_optimizer_step()),
                self._optimizer.register_step_post_hook(lambda *_: self._after_optimizer_step()),
            ]

    def _decide(self, decisions: Sequence[Decision]) -> None:
        """Go on as rank 0 says, which alone has the `decisions`."""
        self._catch_up()
        self._decision, *following = self.cluster.share_decisions(decisions)
        self._decided.extend(following)
        for index in () if self._weights.sharded else self._decision.merged:
            # The lead's replica has merged them.
            with contextlib.nullcontext() if self.cluster.leads else self._merges.merge(index):
                self.cluster.share_weights(self.spec.identity.layout, index, self._parameters)

    def _catch_up(self) -> None:
        """Of sharded weights: the lead has done what it had to do with them, and the other ranks took part."""
        if self._follower is not None:
            evaluate = self._options.evaluate
            self._follower.follow(lambda: self._evaluated(evaluate) if evaluate is not None else None)
        elif self.executor is not None and self.executor.replica is not None:
            self.executor.replica.resume()

    def _evaluated(self, evaluate: Callable[[nn.Module], float]) -> float:
        self._watch.enter(EVALUATING)
        modes = [(part, part.training) for part in self.module.modules()]
        with self._merges.set_aside():
            loss = evaluate(self.module)
        for part, training in modes:  # a forgotten train() would turn dropout off for the rest of the run
            part.training = training
        self._watch.enter(EXCHANGING)
        return loss

    def batch_tokens(self) -> int:
        """Of a step of this run: those of its whole batch."""
        return self.spec.terms.inner.batch_sequences * self.spec.terms.inner.sequence_tokens

    def _checked(self, given: int | Tensor) -> int:
        """The step's tokens: a coordinator refuses a delta with more than a step can have."""
        terms, most = self.spec.terms, self.batch_tokens()
        number = number_of("tokens", given)
        if not number.is_integer():
            raise ValueError(f"step(tokens={number}): expected a whole number")
        tokens = int(number)
        if tokens < 0:
            raise ValueError(f"step(tokens={tokens}): expected 0 or more")
        if tokens > MOST_TOKENS:
            raise ValueError(f"step(tokens={tokens}): expected at most {MOST_TOKENS}")
        granted = self.spec.identity.num_samples and self.executor is not None and self.executor.machine.takes_samples
        if granted and tokens > most:
            batch = f"{terms.inner.batch_sequences} sequences of {terms.inner.sequence_tokens}"
            raise ValueError(f"step(tokens={tokens}): a step of this run has at most {most} tokens, {batch}")
        return tokens


def join(
    coordinator: str | None,
    model: nn.Module | Sequence[nn.Module] | ModelOf,
    optimizer: Optimizer | OptimizerOf | None = None,
    *,
    name: str | None = None,
    key: Path | str | None = None,
    server_key: Path | str | None = None,
    state_dir: Path | str | None = None,
    fingerprint: str | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    http: str | None = None,
    http_names: str | None = None,
    tau: int | None = None,
    adapt_tau: bool | None = None,
    holds: Sequence[int] | None = None,
    give_up_s: float | None = None,
    rate: Whose = "run",
    clip: Whose = "run",
    scaler: GradScaler | None = None,
    data: DeviceMesh | None = None,
    hook: bool = False,
    wrap: Wrap = "ddp",
    buffers: Buffers = "same",
    own: Sequence[str] = (),
    anchors: Where = "auto",
    save_every_rounds: int = SAVE_EVERY_ROUNDS,
    save_optimizer: bool = False,
    on_merge: OnMerge | None = None,
    signals: bool = True,
    hang_timeout_s: float = 600.0,
) -> Node:
    """Join a run and block until training begins.

    What differs between machines may come from the environment, so that a script needs no change: where `coordinator`,
    `name`, `key`, `server_key`, `state_dir`, `fingerprint`, `http`, `http_names`, `tau`, `adapt_tau` or `give_up_s` is
    None, the variable FARLOOP_NODE__COORDINATOR (…__NAME, …__GIVE_UP) is read, as by `farloop node`. So are …__LANES,
    …__CONGESTION, …__BULK_SOURCE, …__MAX_UPLINK, …__QUIET_HOURS and …__QUIET_UPLINK.

    These, `buffers`, `anchors`, `save_every_rounds`, `save_optimizer` and `hang_timeout_s` are settings of a node:
    `farloop.node.settings.NodeConfig` and docs/configuration.md explain them (section [node], without `_s`).

    Args:
        coordinator: its address, as tcp://host:port.
        model: the module, or a function of the run's spec that builds it. The run's weights replace its own. It
            may be sharded over the node's ranks (`fully_shard`, HSDP, tensor parallelism), and ranks may have different
            layers of it, under the names of the whole model, as one module or a list (stages of a pipeline that the
            loop runs). farloop wraps it only where several ranks hold it whole.
        optimizer: the inner optimizer, or a function that builds it; by the run's terms unless given.
        evaluate: the loss of the module on the fixed evaluation set, when this node is asked for it.
        holds: the pipeline stages that this node holds, as the run's layout numbers them; all unless given. The module
            has the parameters of these stages alone, under the names that they have in the whole model. A node without
            stage 0 is granted no samples: its `Node.samples` is empty.
        rate: "own" leaves the learning rate to the loop, and its scheduler; by the run's schedule unless given.
        clip: "own" leaves clipping to the loop, before it calls `step`; to the run's norm unless given.
        scaler: the loop's gradient scaler. `step` unscales, steps and updates it; the loop only scales the loss.
        data: the dimension of the loop's mesh along which ranks train on different samples, as `mesh["dp"]`; all ranks
            unless given. Ranks of one tensor-parallel group get the same `Node.samples`.
        hook: for trainers that call `optimizer.step()` themselves, as those of Hugging Face and Lightning: the exchange
            follows every step of `optimizer`, by its hooks. The trainer then clips, scales the loss, clears gradients
            and averages them over ranks; `model` may be in DistributedDataParallel. The trainer has to stop when
            `Node.running` is False.
        wrap: "none" leaves it to the loop to average gradients over several ranks that hold the model whole; `model`
            may be in DistributedDataParallel. Otherwise farloop does that: `Node.model` is in DistributedDataParallel.
        own: names of frozen parameters and buffers, or patterns as "teacher.*", that are each node's own: of others a
            node ends if they change, or differ from those of the run's other nodes.
        save_optimizer: plain tensors of a parameter's shape and type are saved, and counters (8 bytes a parameter more
            with AdamW); of one that holds another, the other's. What cannot be saved is named once.
        on_merge: called after every merge, on every rank, to move copies of the weights outside of the optimizer's
            state, also those in its attributes, which else move by themselves: with the change of each merged
            parameter, fp32, in its shape (of a sharded one that of its shard).
        signals: the first SIGTERM to any rank ends the node in order, as `Node.drain_on` does it, where `join` is
            called in the main thread.
        hang_timeout_s: has to be longer than what rank 0 does alone, as saving a checkpoint.

    Raises:
        NodeError: refused, unreachable, over (`RunOver`), an argument of a wrong type, a model or optimizer of a node
            that has not left, or the model is not the run's; the text says which, and the fix.
        KeyFileError: a key file cannot be used.
        EndpointError: `http` cannot be served.
        ValueError: `name` is not a node name or `fingerprint` no fingerprint, only one of `key` and `server_key` was
            given, `rate`, `clip`, `wrap`, `buffers` or `anchors` is none of its words, `give_up_s` or `hang_timeout_s`
            is NaN or negative, or `save_every_rounds` is negative.
    """
    return join_run(*resolved(locals()))


def join_run(config: NodeConfig, options: LoopOptions, inventory: Inventory = NOTHING) -> Node:
    """`join` with its options as wholes, none of them from the environment. `inventory`: what is told of the machine.

    Raises as `join`.
    """
    _check_options(config, options)
    name, folder = check_name(config.name), config.state_dir or Path(".farloop") / config.name
    link = LinkConfig.of(config)
    held = Held(cluster := Cluster.from_torchrun(options.data))
    try:
        held.watch = watch = HangWatch(cluster, config.hang_timeout)
        held.files = AnchorFiles(folder / "anchors") if config.save_every_rounds else None
        held.reserved = reserve(folder, name) if cluster.leads else None
        state = _counted(folder, cluster)
        if state is not None:
            link = dataclasses.replace(link, inventory=cluster.described(inventory), kept=folder / "link.json")
            make = partial(
                NodeExecutor,
                config,
                device=cluster.describe(),
                holds=options.holds,
                files=held.files,
                can_evaluate=options.evaluate is not None,
            )
            held.driver = Driver(LinkThread(link), state, make, alone=cluster.alone)
            held.driver.on_wait = partial(watch.enter, WAITING)
        metrics = held.driver.executor.metrics if held.driver else Metrics(name)
        if config.http and cluster.serves_pages:
            held.endpoint = serve(config.http, metrics, config.http_names)
        spec = cluster.share_spec(held.driver.wait_for_spec() if held.driver else None)
        with held.reporting_failure():
            _check_batch(spec, cluster, options.holds)
            _check_tau(spec, 0 if config.adapt_tau and config.tau is None else config.tau)
            if options.evaluate is None and spec.identity.evaluation_set != "none":
                _log.info("this node is not asked for the loss, which the run measures: it has no join(evaluate=…)")
            node = Node(held, config, options, spec)
        warm_for(spec.terms, cluster.device)
        watch.on_ask = node.request_drain
        node._begin()
        metrics.follows = "" if cluster.leads else "training: rank 0 of the node, on another host, reports for all"
        if options.signals and threading.current_thread() is threading.main_thread():
            node.drain_on(signal.SIGTERM)
        _live.add(node)
    except BaseException as error:
        first = held.first_error(error)
        held.close(first)
        if first is not error:
            raise first from error
        raise
    return node


def _check_options(config: NodeConfig, options: LoopOptions) -> None:
    """Raises LoopError and ValueError for what could not work with any run."""
    mine = {
        id(options.optimizer),
        *(map(id, options.model.parameters()) if isinstance(options.model, nn.Module) else ()),
    }
    for other in _live:
        if mine & {id(other._optimizer or other), *map(id, other._parameters.values())}:
            raise LoopError("join got the model or optimizer of a node that has not left: call its leave() before")
    check_seconds("join", config.give_up, "give_up_s")
    check_seconds("join", config.hang_timeout, "hang_timeout_s")
    if config.save_every_rounds < 0:
        raise ValueError(f"join(save_every_rounds={config.save_every_rounds}): expected 0 or more, 0 for never")
    if options.hook:
        check_hooks(options.optimizer)
        if options.scaler is not None:
            raise LoopError("join(hook=True) takes no scaler=: the trainer scales and steps")
    if config.fingerprint is not None:
        check_fingerprint(config.fingerprint)


def _placed(model: nn.Module | ModelOf, spec: RunSpec, cluster: Cluster) -> nn.Module:
    """The module that will be trained, on the rank's device unless the loop has sharded it. Raises LoopError."""
    module = unwrap(model if isinstance(model, nn.Module) else model(spec))
    reshard(module)  # the loop may have evaluated it
    check_parameters(module)
    if not is_sharded(module):
        cluster.device = device_of(module, cluster.device)
        with kept_ties(module):
            module.to(cluster.device)
        if cluster.device.type == "cuda":
            torch.cuda.set_device(cluster.device)
    return module


def _counted(folder: Path, cluster: Cluster) -> NodeState | None:
    """Count this start of the node on all of its hosts: any of them may have the lead at the next one. The lead's."""
    kept = NodeState.read(folder)
    incarnation, run, epoch = max(cluster.gather([kept.incarnation, kept.run, kept.epoch]))
    if not cluster.first_on_host:
        return None
    state = NodeState.claim(folder, dataclasses.replace(kept, incarnation=incarnation, epoch=epoch, run=run))
    return state if cluster.leads else None


def _check_clip(cluster: Cluster, absent: Mapping[str, nn.Parameter]) -> None:
    if not cluster.all_agree(not absent):
        raise LoopError(
            "ranks of this node have different layers of the model, and step knows the gradient's norm on one rank "
            "alone: clip the gradients over all ranks before step, and join with clip='own'"
        )


def _check_evaluate(cluster: Cluster, given: bool) -> None:
    if not cluster.all_agree(given) and not cluster.all_agree(not given):
        raise LoopError("join(evaluate=…) has to be given on all ranks or none: all take part in a forward pass")


def _check_batch(spec: RunSpec, cluster: Cluster, part: Part) -> None:
    """Ranks average their gradients with equal weight, so each must have as many of the granted samples."""
    batch = spec.terms.inner.batch_sequences
    if spec.identity.num_samples and is_source(part) and batch % cluster.data_size:
        raise DataError(
            f"the run's batch of {batch} sequences does not divide among {cluster.data_size} processes; "
            f"start as many as divide {batch}"
        )


def _check_tau(spec: RunSpec, tau: int | None) -> None:
    if tau is None:
        return
    try:
        check_own_tau(tau, spec.terms, spec.identity.layout.slots)
    except ValueError as error:
        raise TermsMismatch(str(error)) from error


def _check_ranks(spec: RunSpec, cluster: Cluster) -> None:
    """Refuse methods whose corrections are on rank 0 alone, where the model is not sharded."""
    if spec.terms.inner.control_variates and not cluster.alone:
        raise TermsMismatch(
            f"the run has control_variates, which this node's {cluster.size} processes would not share; start one, "
            "or shard the model over them"
        )


def _inner_optimizer(optimizer: Optimizer | OptimizerOf | None, module: nn.Module, spec: RunSpec) -> Optimizer | None:
    if not method_named(spec.terms.method).inner:
        if optimizer is not None:
            _log.warning("the optimizer is not used: with the method %s the coordinator steps", spec.terms.method)
        return None
    if optimizer is None:
        return default_optimizer(module, spec.terms)
    built = optimizer if isinstance(optimizer, Optimizer) else optimizer(module, spec)
    if not isinstance(built, Optimizer):
        raise LoopError(
            f"the function given as join(optimizer=…) returned {describe_type(built)}: return a torch.optim.Optimizer"
        )
    return built
