"""The inner optimizer's state on a node's disk: what it has of each parameter, in the parameter's shape, and counters,
those of its groups too. Copies of the weights are saved as differences from them: a node goes on from an anchor.

A file has rows of these tensors, each row as long as the fragment and in its order, as fp32. So it is written and read
like an anchor: by any number of ranks, each its own elements, and checked by digests over all of them.
"""

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from farloop.algo.fragments import flatten_into
from farloop.algo.spec import Fragment, Layout
from farloop.node.cluster import Cluster
from farloop.node.model.anchor_files import AnchorFiles, Head, Runs
from farloop.node.model.inner_optimizer import held_by, parts_of
from farloop.node.model.merges import Merges
from farloop.node.model.shards import Weights, local_of

_log = logging.getLogger(__name__)

_MOST_CHARACTERS: Final = 3000  # of the description in a file's head

Described = dict[str, list[Any]]
"""By key of the state: whether each tensor of the fragment has that (1 or 0); what it is (moment, copy, tensor, number,
group, odd); the largest value of a counter. A number of a group has the group's place before its key."""


class Moments:
    """The state of one process's optimizer. What is done by all ranks has `_here` in its name."""

    def __init__(
        self,
        optimizer: Optimizer,
        weights: Weights,
        layout: Layout,
        files: AnchorFiles,
        merges: Merges | None = None,
    ) -> None:
        """`merges`: the node's, which knows what is a copy of the weights."""
        self._weights, self._layout, self._files = weights, layout, files
        self._merges = merges or Merges(optimizer, weights.parameters, layout)
        self._optimizer, self._parts = optimizer, parts_of(optimizer)
        groups = [(part, place) for part in self._parts for place in range(len(part.param_groups))]
        self._at_join = [_numbers_of(part.param_groups[place]) for part, place in groups]
        self._groups = {
            id(parameter): (number, part, place)
            for number, (part, place) in enumerate(groups)
            for parameter in part.param_groups[place]["params"]
        }
        self._loaded: list[Head] = []
        self._odd = ""  # a part of the state that cannot be saved, once it was met

    # --- Saving

    def save(self, anchor: Head) -> Head | None:
        """Begin to write a fragment's state beside the anchor with this head; None if there is nothing to write."""
        if self._odd:
            return None
        self._weights.broadcast("save moments", anchor.fragment, anchor.version)
        if (found := self.save_here(anchor.fragment, anchor.version)) is None:
            return None
        described, digests = found
        size = 4 * self._layout.fragments[anchor.fragment].numel * len(digests)
        return replace(anchor, kind="optimizer", size=size, more={"state": described, "digests": digests})

    @torch.no_grad()
    def save_here(self, index: int, version: int) -> tuple[Described, list[int]] | None:
        fragment, own = self._layout.fragments[index], self._weights.own[index]
        described = _merged(self._weights.gather(self._described(fragment)))
        rows = _rows(described)
        if len(repr(described)) > _MOST_CHARACTERS:
            self._warn(f"it has too many parts for the {len(fragment.tensors)} tensors of a fragment")
            return None
        if not rows or any(kind == "odd" for _, kind, _ in described.values()):
            return None
        flat = torch.empty(len(rows), own.fragment.numel, dtype=torch.float32, device="cpu")
        digests = list[int]()
        for keys, row in zip(rows, flat, strict=True):
            here = row.to(self._weights.device)
            tensors = self._tensors(fragment, keys, described)
            flatten_into(own.fragment, self._beside(tensors).sources(index, gradients=False), here)
            if described[keys[0]][1] == "copy":
                here -= self._flat(index)
            digests.append(self._weights.digest(index, here))
            row.copy_(here)
        numbers = flat.view(-1)
        self._files.begin(index, version, self._runs(fragment, len(rows)), lambda: numbers, kind="optimizer")
        return described, digests

    def _described(self, fragment: Fragment) -> Described:
        """What this rank has; one that is odd if a part of it cannot be saved."""
        self._merges.show()
        described: Described = {}
        parameters = [self._weights.parameters[slot.name] for slot in fragment.tensors]
        copies = {id(copy) for _, copy in self._merges.copies([p for p in parameters if not p.is_meta])}
        odd = self._beside_parts()
        for place, (slot, parameter) in enumerate(zip(fragment.tensors, parameters, strict=True)):
            found = {key: (value, *_kind(key, value, parameter)) for key, value in self._state(parameter).items()}
            if found:
                number, part, at = self._groups[id(parameter)]
                numbers, before = _numbers_of(part.param_groups[at]), self._at_join[number]
                changed = {key: value for key, value in numbers.items() if value != before.get(key)}
                found |= {f"{number} {key}": (value, "group", value) for key, value in changed.items()}
            for key, (value, kind, counted) in found.items():
                if kind == "odd":
                    odd = odd or f"'{slot.name}: {key}' is no plain tensor of the parameter's shape and type"
                elif kind:
                    kind = "copy" if id(value) in copies else kind
                    has, _, most = described.setdefault(key, [[0] * len(parameters), kind, counted])
                    has[place], described[key][2] = 1, max(most, counted)
        if odd:
            self._warn(odd)
        return {"": [[0] * len(parameters), "odd", 0]} if odd else described

    def _beside_parts(self) -> str:
        """What is not saved of an optimizer that holds others."""
        kind, states = type(self._optimizer).__name__, [id(part.state) for part in self._parts]
        for holder in held_by(self._optimizer):
            if any(holder.state.values()) and id(holder.state) not in states:
                return f"{type(holder).__name__} keeps a part of it, beside the optimizer that it holds"
        for key in (key for part in self._parts for key in part.state if not isinstance(key, Tensor)):
            return f"{kind} keeps {key!r} in it, which belongs to no parameter"
        stepped = (id(parameter) for group in self._optimizer.param_groups for parameter in group["params"])
        return "" if all(map(self._groups.__contains__, stepped)) else f"{kind} keeps it on several ranks"

    def _warn(self, odd: str) -> None:
        if not self._odd:
            self._odd = odd
            _log.warning("the optimizer's state is not saved: %s", odd)

    # --- Loading

    def load(self, index: int) -> bool:
        """Take a fragment's state from disk, if there is one and it is whole."""
        head = self._files.optimizer(index)
        if head is None:
            return False
        self._weights.broadcast("load moments", index, head.version, head.more)
        if not self.load_here(index, head.version, head.more):
            _log.warning("optimizer on disk is damaged fragment=%d: its moments begin at zero", index)
            return False
        self._loaded.append(head)
        return True

    @torch.no_grad()
    def load_here(self, index: int, version: int, more: Mapping[str, Any]) -> bool:
        self._merges.show()
        fragment, own, described = self._layout.fragments[index], self._weights.own[index], more["state"]
        rows = _rows(described)
        flat = torch.zeros(len(rows), own.fragment.numel, dtype=torch.float32, device="cpu")
        self._files.read(index, version, self._runs(fragment, len(rows)), flat.view(-1), "optimizer")
        if [self._weights.digest(index, row) for row in flat] != list(more["digests"]):
            return False
        for keys, row in zip(rows, flat, strict=True):
            tensors = self._tensors(fragment, keys, described, create=True)
            there = row.to(self._weights.device)
            is_copy = described[keys[0]][1] == "copy"
            self._merges.is_copy |= dict.fromkeys(keys if is_copy else (), True)
            self._beside(tensors).mix(index, there + self._flat(index) if is_copy else there, 0.0)
        self._count(fragment, described)
        return True

    def share(self, cluster: Cluster) -> None:
        """Where several ranks hold the model whole: the lead's state to all of them."""
        for told in cluster.gather([[head.fragment, head.more["state"]] for head in self._loaded])[0]:
            index, described = told
            for keys in _rows(described):
                tensors = self._tensors(self._layout.fragments[index], keys, described, create=True)
                cluster.share_weights(self._layout, index, tensors)
            self._count(self._layout.fragments[index], described)

    def _count(self, fragment: Fragment, described: Described) -> None:
        """Set the counters."""
        for key, (has, kind, value) in described.items():
            for slot, there in zip(fragment.tensors, has, strict=True):
                parameter = self._weights.parameters[slot.name]
                if kind in ("moment", "copy") or not there or id(parameter) not in self._groups:
                    continue
                _, part, at = self._groups[id(parameter)]
                group = part.param_groups[at]
                if kind == "group":
                    _, _, name = key.partition(" ")
                    was = group.get(name)
                    group[name] = torch.full_like(was, value) if isinstance(was, Tensor) else value
                    continue
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
        state: dict[str, Any] = found[1].state[parameter]
        return state

    def _flat(self, index: int) -> Tensor:
        """The own part of the fragment's weights, fp32."""
        own = self._weights.own[index].fragment
        flat = torch.zeros(own.numel, dtype=torch.float32, device=self._weights.device)
        flatten_into(own, self._weights.sources(index, gradients=False), flat)
        return flat

    def _tensors(
        self, fragment: Fragment, keys: list[str], described: Described, *, create: bool = False
    ) -> dict[str, Tensor]:
        """What the optimizer has under one of these keys, by parameter; zeros that are not kept where it has nothing.
        With `create` what the description has is made."""
        found: dict[str, Tensor] = {}
        for place, slot in enumerate(fragment.tensors):
            parameter = self._weights.parameters[slot.name]
            state = self._state(parameter)
            known = next((key for key in keys if described[key][0][place]), None)
            value = state.get(known or keys[0])
            if value is None:
                value = torch.zeros_like(parameter, requires_grad=False)
                if create and known is not None:
                    state[known] = value
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
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(local_of(value)):
        return "odd", 0
    if value.ndim == 0 and (parameter.ndim > 0 or key == "step"):
        return "tensor", float(value)
    same = value.shape == parameter.shape and value.dtype == parameter.dtype
    placed = getattr(value, "placements", None) == getattr(parameter, "placements", None)
    return ("moment", 0) if same and placed else ("odd", 0)


def _rows(described: Described) -> list[list[str]]:
    """The keys of tensors; those that no tensor of the fragment has together share a row of the file, as Muon's
    momentum of matrices and AdamW's first moment of the rest."""
    rows: list[list[str]] = []
    for key, (has, kind, _) in sorted(described.items()):
        if kind not in ("moment", "copy"):
            continue
        free = (
            row
            for row in rows
            if described[row[0]][1] == kind
            and not any(a and b for other in row for a, b in zip(has, described[other][0], strict=True))
        )
        if (row := next(free, None)) is None:
            rows.append(row := [])
        row.append(key)
    return rows


def _numbers_of(group: Mapping[str, Any]) -> dict[str, int | float]:
    """Without the rate, which is the run's or the loop's. What changes after join is a counter."""
    numbers = {k: float(v) if isinstance(v, Tensor) and v.ndim == 0 else v for k, v in group.items()}
    return {key: v for key, v in numbers.items() if type(v) in (int, float) and key not in ("lr", "initial_lr")}


def _merged(of_ranks: list[Described]) -> Described:
    """What all ranks have together: one that has none of a fragment's parameters knows nothing of them."""
    merged: Described = {}
    for described in of_ranks:
        for key, (has, kind, value) in described.items():
            before, same, most = merged.get(key, [[0] * len(has), kind, value])
            merged[key] = [[a | b for a, b in zip(before, has, strict=True)], min(kind, same), max(most, value)]
    return merged
