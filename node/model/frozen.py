"""What a node does not exchange: frozen parameters, buffers, and the numbers of adapters.

An average over nodes that differ in it means nothing: it is compared at `join`, by one digest, and looked at again in
training: by a sample of every tensor, because torch counts no change that goes over `.data` or is made by a kernel.
"""

import hashlib
import logging
import math
from collections.abc import Container, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from farloop.algo.fragments import plain_name
from farloop.algo.spec import is_statistic
from farloop.node.cluster import Cluster
from farloop.node.errors import LoopError
from farloop.node.model.shards import elsewhere, is_dtensor, local_of, tensor_digests

_log = logging.getLogger(__name__)

_SAMPLE: Final = 256  # elements of a tensor, at equal distances


class Frozen:
    """Of one process, as it was at `join`."""

    def __init__(
        self,
        module: nn.Module,
        cluster: Cluster,
        run: Container[str] = (),
        *,
        buffers: bool,
        own: Sequence[str] = (),
    ) -> None:
        """All ranks of the `cluster` make it at once. `run`: names of what is exchanged, statistics too. `buffers`: the
        floating-point ones of the module's state dict are compared too. `own`: names, or patterns as of files, of what
        is each node's own.

        Raises LoopError, on all ranks: shards that are no boxes, or do not make the tensors; an `own` is no such name.
        """
        self._module, self._buffers, self._own, self._run = module, buffers, own, run
        self._is_own, self._used = dict[str, bool](), set[str]()
        held = self._held()
        if unused := set(own).difference(*cluster.gather([*self._used])):
            raise LoopError(
                f"join(own=…): no frozen parameter or saved floating-point buffer is called {min(unused)!r}"
            )
        compared = {name: tensor for name, tensor in held.items() if not self._is_own[name]}
        ordered = dict(sorted((compared | elsewhere(cluster, compared)).items()))
        self._digests = dict(zip(ordered, tensor_digests(cluster, ordered), strict=True))
        self._seen = {name: _snapshot(tensor) for name, tensor in held.items()}
        lines = [f"{name} {tuple(tensor.shape)} {self._digests[name]:016x}\n" for name, tensor in ordered.items()]
        settings = sorted({line for of_rank in cluster.gather(_adapter_settings(module)) for line in of_rank})
        found, of_settings = (hashlib.blake2b("".join(part).encode(), digest_size=8) for part in (lines, settings))
        if lines or settings:
            kept = f"tensors={len(lines)} digest={found.hexdigest()} adapter_settings={len(settings)}"
            _log.info("not exchanged, and the same on all nodes: %s digest=%s", kept, of_settings.hexdigest())
        rough = sorted({line for of_rank in cluster.gather(self._unsaved()) for line in of_rank})
        of_rough = hashlib.blake2b("".join(rough).encode(), digest_size=8)
        self.unsaved = int.from_bytes(of_rough.digest()) if rough else 0
        """Of floating-point buffers that no state dict has, their names, shapes and values to some 10 % of their root
        mean square; and of tables of whole numbers."""
        found.update("".join(settings).encode())
        self.digest = int.from_bytes(found.digest()) if lines or settings else 0
        """Of the names, shapes and values, as fp32, of what is compared; 0 if that is nothing. Of a tensor that is made
        of others, as a quantised one, these count, bit for bit. So do the numbers of adapters, as the scale of LoRA,
        which is in no tensor. It does not depend on how they are sharded."""

    def _held(self) -> dict[str, Tensor]:
        """What is not exchanged now, this process' part; notes whose it is."""
        saved = self._module.state_dict(keep_vars=True)  # without the buffers that are not persistent
        found = dict[str, Tensor]()
        for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
            is_buffer = not isinstance(tensor, nn.Parameter)
            if tensor.is_meta or (tensor.requires_grad and not is_buffer):
                continue
            if is_buffer and not (name in saved and tensor.is_floating_point()):
                continue
            if (plain := plain_name(name)) in self._run:
                continue
            self._used |= (own := {pattern for pattern in self._own if fnmatchcase(plain, pattern)})
            for part, held in _plain_parts(plain, tensor):
                found[part], self._is_own[part] = held, bool(own) or (is_buffer and not self._buffers)
        return found

    @torch.no_grad()
    def _unsaved(self) -> list[str]:
        saved = self._module.state_dict(keep_vars=True)
        lines = []
        for name, tensor in self._module.named_buffers():
            rough: object = None
            if tensor.is_meta or not tensor.numel():
                continue
            if tensor.is_floating_point() and name not in saved:
                some = _snapshot(tensor)[1].double()
                size = float(local_of(tensor).double().square().mean())
                is_plain = 0.0 < size < math.inf
                rough = (round(10 * math.log(size)), (some * (4 / size**0.5)).round().tolist()) if is_plain else size
            elif not tensor.is_floating_point() and tensor.ndim:  # not a counter
                rough = _table(tensor)
            lines += [] if rough is None else [f"{plain_name(name)} {tuple(tensor.shape)} {rough}\n"]
        return lines

    @torch.no_grad()
    def changed(self, *, own: bool = False) -> list[str]:
        """Names of what has changed since `join`, in order: of what is compared, or of the node's `own`."""
        held = {name: t for name, t in self._held().items() if name in self._seen and self._is_own[name] == own}
        odd, like = list[str](), dict[str, Tensor]()
        now = {name: _snapshot(tensor) for name, tensor in held.items()}
        for name, (_, sample, sharded) in now.items():
            before = self._seen[name][1]
            if sharded != self._seen[name][2]:
                continue  # it is gathered just now
            if before.shape != sample.shape or before.dtype != sample.dtype:
                odd.append(name)
            else:
                like[name] = _differs(before.to(sample.device), sample)
        device = next((flag.device for flag in like.values()), None)
        flags = torch.stack([flag.to(device) for flag in like.values()]).tolist() if like else []  # one wait
        odd += [name for name, differs in zip(like, flags, strict=True) if differs]
        for name in [] if own else [name for name in like if name not in odd and not is_dtensor(held[name])]:
            count, before, _ = self._seen[name]
            self._seen[name] = now[name][0], before, False
            if now[name][0] != count and torch.equal(now[name][1], before):  # beside the sample, or to the same
                odd += [name] if tensor_digests(Cluster(), {name: held[name]}) != [self._digests[name]] else []
        return [name for name in held if name in odd]

    def check(self) -> None:
        """Raises LoopError: what was compared has changed."""
        if odd := self.changed():
            more = f", and {len(odd) - 1} more" if len(odd) > 1 else ""
            way = "have the run average it ([run] buffers = 'average')" if is_statistic(odd[0]) else "train it"
            raise LoopError(
                f"{odd[0]!r} is not exchanged, was the same on all nodes at join, and has changed since{more}: nodes "
                f"would drift apart. Leave it as it is, {way}, or give it to each node with join(own=[{odd[0]!r}]), "
                "all buffers with join(buffers='own')"
            )

    def log_changes(self) -> None:
        """Log what the run's model does not have of this node's."""
        if odd := self.changed(own=True):
            lost = "the run's model and its exports do not have them; save them from this node's module"
            _log.warning("%d tensors of this node's own have changed in training, as %r: %s", len(odd), odd[0], lost)


def _snapshot(tensor: Tensor) -> tuple[int, Tensor, bool]:
    """torch's count of changes, a copy of at most some 256 elements, and whether the tensor is sharded."""
    flat = local_of(tensor.detach()).reshape(-1)
    sample = flat[:: max(1, flat.numel() // _SAMPLE)].clone()
    return 0 if tensor.is_inference() else tensor._version, sample, is_dtensor(tensor)


def _differs(before: Tensor, now: Tensor) -> Tensor:
    """Whether by more than what an adapter that is merged for an evaluation and taken out again leaves by rounding."""
    if not before.is_floating_point():
        return before.ne(now).any()
    limit = max(1e-4, 2 * torch.finfo(before.dtype).eps) * before.double().square().mean().sqrt()
    return ((now.double() - before.double()).abs().gt(limit) | now.isnan().ne(before.isnan())).any()


def _plain_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not is_traceable_wrapper_subclass(tensor) or is_dtensor(tensor):
        yield name, tensor
        return
    for inner in tensor.__tensor_flatten__()[0]:
        for part, held in _plain_parts(f"{name}.{type(tensor).__name__}.{inner}", getattr(tensor, inner)):
            yield part, held if held.is_floating_point() else held.contiguous().view(torch.uint8)


def _table(tensor: Tensor) -> int:
    """Its digest, bit for bit."""
    return tensor_digests(Cluster(), {"": local_of(tensor).contiguous().reshape(-1).view(torch.uint8)})[0]


def _adapter_settings(module: nn.Module) -> list[str]:
    """Names and values of the numbers in adapters, and of their tables of whole numbers: of peft's layers and of what
    is in them, and of classes or parts that are called lora."""
    lines, adapter = [], "?"
    for where, part in module.named_modules():
        held = vars(part) | dict(part.named_buffers(recurse=False))
        called = (type(part).__name__, *part._parameters, *part._modules)
        if own := getattr(type(part), "other_param_names", ()):  # of peft
            adapter, names = where, list[str](own)
        elif where.startswith(f"{adapter}.") and not where.startswith(f"{adapter}.base_layer"):
            names = [] if "dropout" in type(part).__name__.lower() else [*held]
        else:
            is_called = any("lora" in name.lower() or "adapter" in name.lower() for name in called)
            names = [*held] if is_called else []
        for name in names:
            value = held.get(name)
            numbers = value.items() if isinstance(value, dict) else [("", value)]
            told = sorted((str(key), known) for key, each in numbers if (known := _number_of(each)) is not None)
            is_setting = told and not name.startswith("_") and name != "training"
            lines += [f"{plain_name(where)}.{name} {told}\n"] if is_setting else []
    return lines


def _number_of(value: object) -> float | None:
    if isinstance(value, Tensor):
        return None if value.is_floating_point() or value.is_meta else _table(value)
    return float(value) if isinstance(value, int | float) else None
