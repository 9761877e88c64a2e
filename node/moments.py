"""The inner optimizer's state on a node's disk: what it has of each parameter, in the parameter's shape, and counters.

A file has these tensors of a fragment one after the other, in the order of the fragment, as fp32. So it is written and
read like an anchor: by any number of ranks, each its own elements, and checked by digests over all of them.
"""

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from farloop.algo.fragments import flatten_into
from farloop.algo.spec import Fragment, Layout
from farloop.node.anchor_files import AnchorFiles, Head, Runs
from farloop.node.cluster import Cluster
from farloop.node.inner_optimizer import parts_of
from farloop.node.shards import Weights

_log = logging.getLogger(__name__)

_MOST_CHARACTERS: Final = 3000  # of the description in a file's head

Described = dict[str, list[Any]]
"""By key of the state: whether each tensor of the fragment has that (1 or 0); what it is (moment, tensor, number); the
largest value of a counter."""


class Moments:
    """The state of one process's optimizer. What is done by all ranks has `_here` in its name."""

    def __init__(self, optimizer: Optimizer, weights: Weights, layout: Layout, files: AnchorFiles) -> None:
        self._weights, self._layout, self._files = weights, layout, files
        self._groups = {
            id(parameter): (part, group)
            for part in parts_of(optimizer)
            for group in part.param_groups
            for parameter in group["params"]
        }
        self._loaded: list[Head] = []
        self._odd = ""  # a part of the state that cannot be saved, once it was met

    # --- Saving

    def save(self, anchor: Head) -> Head | None:
        """Begin to write a fragment's state beside the anchor with this head; None if there is nothing to write."""
        if self._odd:
            return None
        self._weights.tell("save moments", anchor.fragment, anchor.version)
        if (found := self.save_here(anchor.fragment, anchor.version)) is None:
            return None
        described, digests = found
        size = 4 * self._layout.fragments[anchor.fragment].numel * len(digests)
        return replace(anchor, kind="optimizer", size=size, more={"state": described, "digests": digests})

    @torch.no_grad()
    def save_here(self, index: int, version: int) -> tuple[Described, list[int]] | None:
        fragment, own = self._layout.fragments[index], self._weights.own[index]
        described = _merged(self._weights.gather(self._described(fragment)))
        keys = _moments(described)
        if not keys or len(repr(described)) > _MOST_CHARACTERS:
            return None
        flat = torch.empty(len(keys), own.fragment.numel, dtype=torch.float32, device="cpu")
        digests = list[int]()
        for key, row in zip(keys, flat, strict=True):
            here = row.to(self._weights.device)
            tensors = self._tensors(fragment, key, {})
            flatten_into(own.fragment, self._beside(tensors).sources(index, gradients=False), here)
            digests.append(self._weights.digest(index, here))
            row.copy_(here)
        numbers = flat.view(-1)
        self._files.begin(index, version, self._runs(fragment, len(keys)), lambda: numbers, kind="optimizer")
        return described, digests

    def _described(self, fragment: Fragment) -> Described:
        """What this rank has; nothing at all if a part of it cannot be saved."""
        described: Described = {}
        for place, slot in enumerate(fragment.tensors):
            parameter = self._weights.parameters[slot.name]
            for key, value in self._state(parameter).items():
                kind, counted = _kind(key, value, parameter)
                if kind == "odd":
                    self._tell(f"{slot.name}: {key}")
                    return {}
                if kind:
                    has, _, most = described.setdefault(key, [[0] * len(fragment.tensors), kind, counted])
                    has[place], described[key][2] = 1, max(most, counted)
        return described

    def _tell(self, odd: str) -> None:
        if not self._odd:
            self._odd = odd
            _log.warning("the optimizer's state is not saved: %r is no tensor of the parameter's shape and type", odd)

    # --- Loading

    def load(self, index: int) -> bool:
        """Take a fragment's state from disk, if there is one and it is whole."""
        head = self._files.optimizer(index)
        if head is None:
            return False
        self._weights.tell("load moments", index, head.version, head.more)
        if not self.load_here(index, head.version, head.more):
            _log.warning("optimizer on disk is damaged fragment=%d: its moments begin at zero", index)
            return False
        self._loaded.append(head)
        return True

    @torch.no_grad()
    def load_here(self, index: int, version: int, more: Mapping[str, Any]) -> bool:
        fragment, own, described = self._layout.fragments[index], self._weights.own[index], more["state"]
        keys = _moments(described)
        flat = torch.zeros(len(keys), own.fragment.numel, dtype=torch.float32, device="cpu")
        self._files.read(index, version, self._runs(fragment, len(keys)), flat.view(-1), "optimizer")
        if [self._weights.digest(index, row) for row in flat] != list(more["digests"]):
            return False
        for key, row in zip(keys, flat, strict=True):
            tensors = self._tensors(fragment, key, described)
            self._beside(tensors).mix(index, row.to(self._weights.device), 0.0)
        self._count(fragment, described)
        return True

    def share(self, cluster: Cluster) -> None:
        """Where several ranks hold the model whole: the lead's state to all of them."""
        for told in cluster.gather([[head.fragment, head.more["state"]] for head in self._loaded])[0]:
            index, described = told
            for key in _moments(described):
                tensors = self._tensors(self._layout.fragments[index], key, described)
                cluster.share_weights(self._layout, (index,), tensors)
            self._count(self._layout.fragments[index], described)

    def _count(self, fragment: Fragment, described: Described) -> None:
        """Set the counters."""
        for key, (has, kind, value) in described.items():
            for slot, there in zip(fragment.tensors, has, strict=True):
                parameter = self._weights.parameters[slot.name]
                if kind == "moment" or not there or id(parameter) not in self._groups:
                    continue
                _, group = self._groups[id(parameter)]
                on_device = group.get("capturable") or group.get("fused")
                device = parameter.device if on_device else torch.device("cpu")
                number = torch.tensor(float(value), device=device, dtype=torch.float32) if kind == "tensor" else value
                self._state(parameter)[key] = number

    # --- Tensors

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        """Of the optimizer; empty, and of no use, for a parameter that it does not step."""
        found = self._groups.get(id(parameter))
        if found is None:
            return {}
        state: dict[str, Any] = found[0].state[parameter]
        return state

    def _tensors(self, fragment: Fragment, key: str, create: Described) -> dict[str, Tensor]:
        """What the optimizer has under this key, by parameter; zeros that nobody keeps where it has nothing. Where
        `create` says that there is one, it is made."""
        found: dict[str, Tensor] = {}
        for place, slot in enumerate(fragment.tensors):
            parameter = self._weights.parameters[slot.name]
            state = self._state(parameter)
            value = state.get(key)
            if value is None:
                value = torch.zeros_like(parameter, requires_grad=False)
                if create and create[key][0][place]:
                    state[key] = value
            found[slot.name] = value
        return found

    def _beside(self, tensors: Mapping[str, Tensor]) -> Weights:
        """The weights with these in the place of parameters of the same names."""
        beside = copy.copy(self._weights)
        beside.parameters = {**self._weights.parameters, **tensors}  # type: ignore[dict-item]
        return beside

    def _runs(self, fragment: Fragment, count: int) -> Runs:
        """Where the own elements of `count` tensors lie in the file, and in memory."""
        own = self._weights.own[fragment.index]
        return [
            (first + row * fragment.numel, at + row * own.fragment.numel, number)
            for row in range(count)
            for first, at, number in own.runs
        ]


def _kind(key: str, value: object, parameter: Tensor) -> tuple[str, float]:
    """What a part of the state is, and a counter's value; "" for nothing, "odd" for what cannot be saved."""
    if value is None:
        return "", 0
    if isinstance(value, int | float):
        return "number", value
    if not isinstance(value, Tensor):
        return "odd", 0
    if value.ndim == 0 and (parameter.ndim > 0 or key == "step"):
        return "tensor", float(value)
    same = value.shape == parameter.shape and value.dtype == parameter.dtype
    placed = getattr(value, "placements", None) == getattr(parameter, "placements", None)
    return ("moment", 0) if same and placed else ("odd", 0)


def _moments(described: Described) -> list[str]:
    return sorted(key for key, (_, kind, _) in described.items() if kind == "moment")


def _merged(of_ranks: list[Described]) -> Described:
    """What all ranks have together: one that has none of a fragment's parameters knows nothing of them."""
    merged: Described = {}
    for described in of_ranks:
        for key, (has, kind, value) in described.items():
            before, _, most = merged.get(key, [[0] * len(has), kind, value])
            merged[key] = [[a | b for a, b in zip(before, has, strict=True)], kind, max(most, value)]
    return merged
