"""What `join` and `step` are given: types, the environment, and one line for what cannot be used."""

import dataclasses
import difflib
import inspect
import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from farloop.algo.spec import RunSpec
from farloop.algo.stages import Part
from farloop.node.devices import Awaited
from farloop.node.errors import LoopError
from farloop.node.link import LinkConfig
from farloop.node.model.inner_optimizer import Whose
from farloop.node.model.merges import OnMerge
from farloop.node.model.shards import ModelParts, is_dtensor
from farloop.node.settings import Buffers, NodeConfig, Where
from farloop.wire.uplink import UplinkLimit

ModelOf = Callable[[RunSpec], nn.Module]
OptimizerOf = Callable[[nn.Module, RunSpec], Optimizer]

Wrap = Literal["ddp", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """What a training loop gives a node besides a `NodeConfig`; `join` says what each of them means."""

    model: nn.Module | ModelOf
    optimizer: Optimizer | OptimizerOf | None = None
    evaluate: Callable[[nn.Module], float] | None = None
    holds: Part = None
    rate: Whose = "run"
    clip: Whose = "run"
    scaler: GradScaler | None = None
    data: DeviceMesh | None = None
    hook: bool = False
    wrap: Wrap = "ddp"
    own: Sequence[str] = ()
    on_merge: OnMerge | None = None
    signals: bool = True


_OF_THE_SPEC = "or a function of the run's spec that builds one, as lambda spec: Model()"
WANTED: dict[str, tuple[tuple[type, ...], str]] = {
    "coordinator": ((str,), "its address, as 'tcp://coordinator:7700'"),
    "model": ((nn.Module,), f"a torch.nn.Module, a list of such, {_OF_THE_SPEC}"),
    "optimizer": ((Optimizer,), "a torch.optim.Optimizer, a function (module, spec) that builds one, or None"),
    "name": ((str,), "this node's name, as 'oslo'"),
    "key": ((Path, str), "a path, or None"),
    "server_key": ((Path, str), "a path, or None"),
    "state_dir": ((Path, str), "a path, or None"),
    "fingerprint": ((str,), "16 hex digits in a str, or None"),
    "evaluate": ((), "a function of the module that returns its loss, or None"),
    "on_merge": ((), "a function of the changes, a mapping, or None"),
    "http": ((str,), "'host:port', or '' for no pages"),
    "http_names": ((str,), "host names in one str, or ''"),
    "tau": ((int,), "a whole number of inner steps, or None for the run's"),
    "adapt_tau": ((bool,), "True or False, or None where the run's tau being open decides"),
    "holds": ((), "the numbers of pipeline stages, as (0, 1), or None for all"),
    "own": ((str,), "names of tensors, or patterns of them, as ['teacher.*']"),
    "give_up_s": ((int, float), "seconds, as 60.0, or 0 for never"),
    "scaler": ((GradScaler,), "a torch.amp.GradScaler, or None"),
    "data": ((DeviceMesh,), "one dimension of a DeviceMesh, as mesh['dp'], or None for all ranks"),
    "hook": ((bool,), "True or False"),
    "save_every_rounds": ((int,), "a whole number of rounds, or 0 for never"),
    "save_optimizer": ((bool,), "True or False"),
    "signals": ((bool,), "True or False"),
    "hang_timeout_s": ((int, float), "seconds, as 600.0, or 0 for no watch"),
}
"""By argument of `join`: its types, and in words what to give, with None where that will do."""

_CHOICES = {"rate": Whose, "clip": Whose, "wrap": Wrap, "buffers": Buffers, "anchors": Where}
_SEQUENCES = {"holds": int, "own": str}
_BUILDERS = {"model": ("spec",), "optimizer": ("module", "spec"), "evaluate": ("module",), "on_merge": ("changes",)}
"""arguments that may be functions, and their parameters"""


def check_types(given: Mapping[str, object]) -> None:
    """Raises LoopError for an argument of `join` of a wrong type: it would fail far from here. ValueError for a word
    that is none of those to choose from."""
    for argument, words in _CHOICES.items():
        if given[argument] not in get_args(words):
            raise ValueError(f"{argument} is {given[argument]!r}: take {' or '.join(map(repr, get_args(words)))}")
    for argument, (types, wanted) in WANTED.items():
        value = given[argument]
        fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        if fits or (value is None and "or None" in wanted):
            continue
        one = _SEQUENCES.get(argument)
        if one and isinstance(value, Sequence) and all(type(each) is one for each in value):
            continue
        told = describe_type(value)
        if isinstance(value, type) and issubclass(value, nn.Module):
            told = f"the class {value.__name__}, not a module of it"
        elif argument in _BUILDERS and callable(value):
            if _takes(value, len(_BUILDERS[argument])):
                continue
            told = f"{getattr(value, '__name__', told)}, which cannot be called with ({', '.join(_BUILDERS[argument])})"
        raise LoopError(f"join({argument}=…) got {told}; expected {wanted}")
    if isinstance(model := given["model"], nn.Module):
        unwrap(model)


def _takes(function: Callable[..., object], count: int) -> bool:
    """Whether it accepts this many arguments, by its signature."""
    if isinstance(function, type) and issubclass(function, Optimizer):
        return False  # it takes parameters, not a module
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # of a built-in, which does not say
        pass
    return True


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that Accelerate's wrapper steps, which has no step hooks of its own. Any other wrapper is stepped
    as it is: its step is not that of the optimizer inside. Raises LoopError for one of DeepSpeed."""
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    is_accelerate_s = kind.startswith("accelerate.")
    if "deepspeed" in kind.lower() and (is_accelerate_s or not isinstance(optimizer, Optimizer)):
        raise LoopError(_DEEPSPEED)
    return getattr(optimizer, "optimizer", optimizer) if is_accelerate_s else optimizer


def check_hooks(optimizer: object) -> None:
    """Raises LoopError: with `join(hook=True)` this cannot be used."""
    if not isinstance(optimizer, Optimizer):
        raise LoopError("join(hook=True) needs optimizer=, the one that the trainer steps")
    if not (hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(type(optimizer).step, "hooked")):
        raise LoopError(
            f"join(hook=True): {type(optimizer).__name__} has no step hooks, as it does not call Optimizer.__init__: "
            "let it, or join with the optimizer inside it, and have the trainer step that"
        )


_DEEPSPEED = (
    "join got a model or an optimizer of DeepSpeed, which steps in its engine and keeps copies of the weights: take "
    "DistributedDataParallel or torch.distributed.fsdp.fully_shard in its place"
)


def describe_type(value: object) -> str:
    kind = type(value).__name__
    return "None" if value is None else f"an {kind}" if kind[0] in "aeiouAEIOU" else f"a {kind}"


def unwrap(module: object) -> nn.Module:
    """The model without a wrapper that averages gradients. Raises LoopError."""
    if not isinstance(module, nn.Module):
        raise LoopError(
            f"the function given as join(model=…) returned {describe_type(module)}: return a torch.nn.Module"
        )
    inner = getattr(module, "_orig_mod", module)
    if type(inner).__name__ == "FullyShardedDataParallel":  # its import takes as long as half of torch
        raise LoopError(
            "join(model=…) got a model in FullyShardedDataParallel (FSDP1), which hides its parameters: shard it with "
            "torch.distributed.fsdp.fully_shard"
        )
    if type(inner).__name__ == "DeepSpeedEngine" or any(hasattr(p, "ds_id") for p in inner.parameters()):  # ZeRO-3's
        raise LoopError(_DEEPSPEED)
    if isinstance(inner, torch.jit.ScriptModule):
        raise LoopError("join(model=…) got a scripted module: give the module that it was made from")
    if isinstance(inner, nn.DataParallel | DistributedDataParallel):
        raise LoopError(
            f"join(model=…) got a model in {type(inner).__name__}: give the module inside it, model.module, and call "
            "node.model in the forward pass; for several GPUs start one process for each (torchrun, or farloop node "
            "--nproc): farloop averages their gradients"
        )
    return module


_PREFIX = "FARLOOP_NODE__"
ALIKE = 0.7  # `difflib` ratio from which a word is a misspelt one


def _number(text: str) -> int:
    if not re.fullmatch("[0-9]+", text):
        raise ValueError(f"expected a whole number of 0 or more, got {text!r}")
    return int(text)


def _switch(text: str) -> bool:
    if text.lower() not in (words := {"true": True, "1": True, "false": False, "0": False}):
        raise ValueError(f"expected true or false, got {text!r}")
    return words[text.lower()]


def _path(text: str) -> Path:
    return Path(text).expanduser()


_READERS: Mapping[type, Callable[[str], Any]] = {int: _number, float: float, bool: _switch, Path: _path}
"""How a text is read, by what a setting is; others are the text itself."""
_FROM_ENVIRONMENT = (
    *("coordinator", "name", "key", "server_key", "state_dir", "fingerprint", "http", "http_names"),
    *("tau", "adapt_tau", "give_up"),
    *("lanes", "congestion", "bulk_source", "max_uplink", "quiet_hours", "quiet_uplink"),
)
"""Keys of [node] that are read from variables. All but those of the link are arguments of `join`."""
_HINTS = get_type_hints(NodeConfig, include_extras=True)
_KEYS = tuple(field.name for field in dataclasses.fields(NodeConfig) if not field.name.startswith("data"))
"""Of [node]. Those that `join` does not read are of `farloop node`."""
_IN_SECONDS = {"give_up": "give_up_s", "hang_timeout": "hang_timeout_s"}
"""Arguments of `join` that are named otherwise than their key."""


def check_variables(environ: Mapping[str, str] | None = None) -> None:
    """Raises LoopError for a variable of [node] that neither `join` nor `farloop node` reads."""
    environ = os.environ if environ is None else environ
    keys = {name: name.removeprefix(_PREFIX).lower() for name in sorted(environ) if name.startswith(_PREFIX)}
    for name, key in keys.items():
        if key in _KEYS or key == "insecure":
            continue
        if near := difflib.get_close_matches(key, _FROM_ENVIRONMENT, n=1, cutoff=ALIKE):
            raise LoopError(f"{name} is not read: did you mean {_PREFIX}{near[0].upper()}?")
        known = ", ".join(sorted(_FROM_ENVIRONMENT)).upper()
        raise LoopError(f"{name} is not read: after {_PREFIX} join reads {known}")


def setting(argument: str, given: Any) -> Any:
    """An argument of `join`, from the environment where it is None. Raises LoopError."""
    variable = f"{_PREFIX}{argument.upper()}"
    if (near := variable.replace("__", "_", 1)) in os.environ:
        raise LoopError(f"{near} is not read: did you mean {variable}, with two underscores?")
    if given is None and (text := os.environ.get(variable)):
        hint, *rules = get_args(_HINTS[argument]) if get_origin(_HINTS[argument]) is Annotated else (_HINTS[argument],)
        kind = (get_args(hint) or (hint,))[0]  # without None
        try:
            value = _READERS.get(kind, str)(text)
            for rule in rules:
                rule(value)
        except ValueError as error:
            raise LoopError(f"{variable}: {error}") from None
        return value
    if isinstance(given, str) and Path in get_args(_HINTS[argument]):
        return _path(given)
    if given is None and argument in ("coordinator", "name"):
        raise LoopError(f"join got no {argument}: give {argument}=…, {WANTED[argument][1]}, or set {variable}")
    return given


def resolved(given: Mapping[str, Any]) -> tuple[NodeConfig, LoopOptions]:
    """The arguments of `join`, by name, with the environment where they are None. Raises LoopError and ValueError."""
    check_variables()
    named = {key: _IN_SECONDS.get(key, key) for key in _KEYS if key != "model"}
    found = {
        key: setting(key, given.get(argument)) if key in _FROM_ENVIRONMENT else given[argument]
        for key, argument in named.items()
        if key in _FROM_ENVIRONMENT or argument in given
    }
    config = NodeConfig(**{key: v for key, v in found.items() if v is not None or key not in _FROM_ENVIRONMENT})
    _check_link(config)
    model = given["model"]
    if isinstance(model, Sequence) and model and all(isinstance(part, nn.Module) for part in model):
        model = ModelParts([unwrap(part) for part in model]) if len(model) > 1 else model[0]
    while (given["hook"] or given["wrap"] == "none") and isinstance(model, DistributedDataParallel):
        model = model.module
    values = {**given, **{argument: getattr(config, key) for key, argument in named.items() if argument in given}}
    values.update(model=model, optimizer=unwrapped(given["optimizer"]))
    check_types(values)
    if isinstance(own := values["own"], str):
        values["own"] = [own]
    if (holds := values["holds"]) is not None:
        values["holds"] = tuple(sorted(holds))
    options = LoopOptions(**{field.name: values[field.name] for field in dataclasses.fields(LoopOptions)})
    return config, options


def _check_link(config: NodeConfig) -> None:
    """Raises LoopError for settings of the link, which come from the environment alone."""
    try:
        UplinkLimit.parse(config.max_uplink, config.quiet_hours, config.quiet_uplink)
    except ValueError as error:
        raise LoopError(f"{_PREFIX}QUIET_UPLINK: {error}") from None
    try:
        LinkConfig.of(dataclasses.replace(config, key=None, server_key=None))
    except ValueError as error:  # of the source alone, which has to go with the coordinator's address
        raise LoopError(f"{_PREFIX}BULK_SOURCE: {str(error).removeprefix('bulk_source: ')}") from None


def check_seconds(call: str, timeout_s: float, argument: str = "timeout_s") -> None:
    """Raises ValueError for a time limit that no clock reaches or that is over before it begins; inf is for ever."""
    if not isinstance(timeout_s, int | float) or not timeout_s >= 0.0:  # also if it is nan
        raise ValueError(f"{call}({argument}={timeout_s!r}): expected 0 seconds or more, as 60.0")


def check_parameters(module: nn.Module) -> None:
    """Raises LoopError for parameters that hold no numbers, or none that can be averaged and encoded."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise LoopError(f"parameter {name!r} has no shape yet: call the model once, on any input, before join")
        if parameter.is_meta:
            raise LoopError(
                f"parameter {name!r} is on the meta device: call model.to_empty(device=…) before join, and compute "
                "anew what no state_dict has, as rotary frequencies, which that leaves unset"
            )
        if parameter.is_inference():
            raise LoopError(f"parameter {name!r} was made under torch.inference_mode(): build the model outside it")
        if parameter.requires_grad and is_traceable_wrapper_subclass(parameter) and not is_dtensor(parameter):
            raise LoopError(
                f"parameter {name!r} is trained as {describe_type(parameter)}, which cannot be averaged: train a "
                "plain tensor, or freeze it and train an adapter"
            )
        if parameter.is_complex() and parameter.requires_grad:
            raise LoopError(f"parameter {name!r} is complex: hold its real and imaginary parts as real parameters")
        sizes = {stride: size for stride, size in zip(parameter.stride(), parameter.shape, strict=True) if size > 1}
        if 0 in sizes and parameter.requires_grad:
            raise LoopError(f"parameter {name!r} is expanded, its elements share memory: make it from tensor.clone()")
    _check_overlaps(module)


def _check_overlaps(module: nn.Module) -> None:
    """Raises LoopError for two parameters that share a part of their memory: a merge would write it twice. All of it
    they may share: they are tied."""
    places = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + parameter.numel() * parameter.element_size(), name)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not is_traceable_wrapper_subclass(parameter) and parameter.is_contiguous()
    )
    for (start, end, name), (other_start, other_end, other) in itertools.pairwise(places):
        if other_start < end and (start, end) != (other_start, other_end):
            raise LoopError(
                f"parameters {name!r} and {other!r} share a part of their memory: make one by tensor.clone()"
            )


def number_of(argument: str, given: object) -> float:
    """An argument of `step` as a plain number; a tensor of one element is one."""
    try:
        if isinstance(given, str | bytes | bool):
            raise TypeError
        return float(given.detach() if isinstance(given, Tensor) else given)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        what = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise ValueError(f"step({argument}=…) got {what}; expected a number") from None


def shown(loss: object, awaited: Awaited) -> float | None:
    """The argument `loss` of `step`; of a tensor on a device that of an earlier step. None: nothing new.
    Raises ValueError."""
    if isinstance(loss, Tensor) and loss.device.type != "cpu" and loss.numel() == 1:
        return awaited.next(loss)
    return None if loss is None else number_of("loss", loss)


def loss_of(given: object) -> float:
    """What the function given as `join(evaluate=…)` returned. Raises LoopError unless that is a number."""
    try:
        return number_of("loss", given)
    except ValueError:
        raise LoopError(
            f"the function given as join(evaluate=…) returned {describe_type(given)}: return the loss, a number or a "
            "tensor of one element"
        ) from None
