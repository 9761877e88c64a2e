"""Covers `node/model/frozen.py`."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farloop.node.arguments import check_parameters
from farloop.node.cluster import Cluster
from farloop.node.errors import LoopError
from farloop.node.model.frozen import Frozen


def digest_of(module: nn.Module, **settings: Any) -> int:
    return Frozen(module, Cluster(), **{"buffers": True, **settings}).digest


class Tied(nn.Module):
    """Two blocks and a head that is the embedding."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 5, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(5, 5, dtype=dtype) for _ in range(2))
        self.head = nn.Linear(5, 7, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight


def test_the_digest_of_frozen_weights_is_that_of_their_values_and_names() -> None:
    def model(freeze: str = "blocks.0", change: float = 0.0, dtype: torch.dtype = torch.float32) -> Tied:
        module = Tied()
        module.get_submodule(freeze).requires_grad_(False).to(dtype)
        module.register_buffer("scale", torch.ones(3))
        module.register_buffer("count", torch.ones(3, dtype=torch.int64))
        module.register_buffer("scratch", torch.rand(3), persistent=False)
        with torch.no_grad():
            module.get_submodule(freeze).weight[-1, -1] += change
        return module

    of = functools.partial(digest_of, buffers=False)
    assert of(Tied()) == 0
    assert of(model()) == of(model()) != 0
    assert of(model(dtype=torch.float64)) == of(model()), "the values count, not how they are stored"
    assert len({of(model()), of(model(change=1e-3)), of(model("blocks.1"))}) == 3

    scaled = model()
    scaled.scale[1] = 2.0
    scaled.count[1] = 2
    assert of(scaled) == of(model())
    assert digest_of(scaled) != digest_of(model())
    scaled.scale[1] = 1.0
    assert digest_of(scaled) == digest_of(model())


class OwnLora(nn.Module):
    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.lora_a, self.alpha, self._seen = nn.Parameter(torch.ones(2, 2)), alpha, alpha


class LoRALinear(nn.Module):
    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.a, self.scale = nn.Parameter(torch.ones(2, 2)), alpha / 8


def test_the_scale_of_an_adapter_counts_which_is_in_no_tensor() -> None:
    peft = pytest.importorskip("peft")

    def adapted(**settings: Any) -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["0"], **{"lora_alpha": 8, **settings})
        module: nn.Module = peft.get_peft_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), config)
        return module

    def other(kind: str, **settings: Any) -> nn.Module:
        config = getattr(peft, kind)(target_modules=["0"], **settings)
        module: nn.Module = peft.get_peft_model(nn.Sequential(nn.Linear(8, 8)), config)
        nn.init.ones_(module.base_model.model[0].base_layer.weight)
        nn.init.ones_(module.base_model.model[0].base_layer.bias)
        return module

    of = digest_of
    assert of(adapted()) == of(adapted(lora_dropout=0.5))
    blocks = {"kind": "OFTConfig", "r": 0, "oft_block_size": 4}  # its numbers are in a module of the layer
    assert of(other(**blocks)) == of(other(**blocks, module_dropout=0.5))
    assert (
        len({of(other(**blocks)), of(other(**blocks, coft=True)), of(other(**blocks, use_cayley_neumann=False))}) == 3
    )
    sparse = {"kind": "ShiraConfig", "r": 2}  # it trains the elements that a table names
    assert (
        of(other(**sparse, random_seed=1)) == of(other(**sparse, random_seed=1)) != of(other(**sparse, random_seed=2))
    )
    assert len({of(adapted()), of(adapted(lora_alpha=64)), of(adapted(use_rslora=True))}) == 3
    assert of(OwnLora(8)) == of(OwnLora(8.0)) != of(OwnLora(64))
    assert of(LoRALinear(8)) == of(LoRALinear(8.0)) != of(LoRALinear(64))


def test_buffers_that_no_state_dict_has_are_compared_roughly() -> None:
    """`to_empty` leaves them unset; a table that is drawn on each node is another one, too."""

    def model(*frequencies: float, table: tuple[int, ...] = (0, 1), count: int = 0) -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("inv_freq", torch.tensor(frequencies), persistent=False)
        module.register_buffer("table", torch.tensor(table))
        module.register_buffer("count", torch.tensor(count))
        return module

    def unsaved(module: nn.Module) -> int:
        return Frozen(module, Cluster(), buffers=True).unsaved

    right = unsaved(model(1.0, 0.1, 0.01))
    assert right == unsaved(model(1.0 + 1e-6, 0.1, 0.01)) != 0
    assert right == unsaved(model(1.0, 0.1, 0.01, count=5))
    assert len({right, unsaved(model(0.0, 0.0, 0.0)), unsaved(model(1.0, 1.0, 0.01)), unsaved(model(1.0, 0.1))}) == 4
    assert right != unsaved(model(0.1, 1.0, 0.01)), "of the same length"
    assert right != unsaved(model(1.0, 0.1, 0.01, table=(1, 0)))
    assert unsaved(nn.BatchNorm1d(2)) == 0


class Quantised(Tensor):
    """int8 numbers and a scale, as torchao has them."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> "Quantised":
        made: Quantised = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=numbers.device)
        return made

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: object) -> "Quantised":
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        raise NotImplementedError(func)


def test_a_quantised_base_counts_by_what_it_is_made_of_and_is_not_trained() -> None:
    def model(number: int = 3, scale: float = 0.5, dtype: torch.dtype = torch.int8) -> nn.Module:
        module = nn.Linear(2, 2, bias=False)
        numbers = torch.tensor([[1, 2], [number, 1 << 25 if dtype.itemsize > 1 else 4]], dtype=dtype)
        module.weight = nn.Parameter(Quantised(numbers, torch.tensor([scale])), requires_grad=False)
        return module

    of = digest_of
    assert of(model()) == of(model()) != 0
    assert len({of(model()), of(model(number=4)), of(model(scale=0.25)), of(model(dtype=torch.int32))}) == 4
    packed = model(dtype=torch.int32)
    packed.weight.numbers[1, 1] += 1
    assert of(packed) != of(model(dtype=torch.int32)), "fp32 would round it away"
    assert of(model(), own=["weight"]) == 0

    check_parameters(module := model())
    module.weight.requires_grad_()
    with pytest.raises(LoopError, match=r"'weight' is trained as a Quantised, which cannot be averaged: train a plain"):
        check_parameters(module)


class Trained(nn.Module):
    """What a loop may change beside the parameters that it trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.norm, self.head = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 2)
        self.teacher = nn.Linear(64, 2)
        self.base.requires_grad_(False)
        self.teacher.requires_grad_(False)
        self.register_buffer("codes", torch.zeros(64, 64))
        self.eval()

    @property
    def changes(self) -> dict[str, Any]:
        """Of some tensor, in the ways that torch knows: the name, and what changes it."""
        return {
            "base.weight": lambda: self.base.weight.data.add_(1e-3),  # peft's merge
            "teacher.weight": lambda: setattr(self.teacher.weight, "data", self.teacher.weight.data * 0.99),
            "norm.running_mean": lambda: self.norm.train()(torch.randn(8, 64)),
            "codes": lambda: self.codes[1, 1].fill_(1.0),  # outside of the sample
            "norm.running_var": lambda: setattr(self.norm, "running_var", self.norm.running_var * 2.0),
        }


@pytest.mark.parametrize("name", Trained().changes)
def test_what_was_the_same_at_join_and_changes_is_named(name: str) -> None:
    """torch's count of changes does not move for the first three."""
    module = Trained()
    frozen = Frozen(module, Cluster(), buffers=True)
    with torch.no_grad():
        module.head.weight.add_(1.0)  # trained
        module.codes.mul_(1.0)
    frozen.check()
    module.changes[name]()
    with pytest.raises(LoopError, match=rf"^'{name}' is not exchanged, .* has changed since.*own=\['{name}'\]") as told:
        frozen.check()
    assert ("[run] buffers = 'average'" in str(told.value)) == name.startswith("norm.")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_merging_an_adapter_for_an_evaluation_leaves_by_rounding_is_no_change(dtype: torch.dtype) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["0"])
    module = peft.get_peft_model(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)).to(dtype), config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(std=0.1) if "lora" in name else None
    frozen, base = Frozen(module, Cluster(), buffers=True), module.base_model.model[0].base_layer.weight
    before = base.clone()
    module.merge_adapter()
    with pytest.raises(LoopError, match=r"0\.base_layer\.weight' is not exchanged, .* has changed since"):
        frozen.check()
    module.unmerge_adapter()
    assert not torch.equal(base, before)
    frozen.check()


def test_what_is_a_node_s_own_is_neither_compared_nor_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    """But the run's model does not have it, which is said at the end."""
    first, second = Trained(), Trained()
    for change in second.changes.values():
        change()
    own = {"buffers": False, "own": ["teacher.*", "base.weight"]}
    assert digest_of(first, **own) == digest_of(second, **own) != digest_of(first, buffers=False)
    frozen = Frozen(first, Cluster(), **own)
    frozen.log_changes()
    assert "own have changed" not in caplog.text
    first.changes["norm.running_mean"]()
    first.changes["teacher.weight"]()
    frozen.check()
    frozen.log_changes()
    assert "3 tensors of this node's own have changed in training, as 'teacher.weight'" in caplog.text
    with pytest.raises(LoopError, match=r"no frozen parameter or saved .* is called 'student\.\*'$"):
        Frozen(first, Cluster(), buffers=True, own=["teacher.*", "student.*"])


def test_statistics_that_the_run_averages_may_change_and_differ() -> None:
    first, second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    second.register_buffer("scale", torch.ones(3))
    run = {"weight", "bias", "running_mean", "running_var"}
    assert digest_of(first, run=run) == 0
    frozen = Frozen(second, Cluster(), buffers=True, run=run)
    second(torch.randn(8, 3))
    frozen.check()
    second.scale[0] = 2.0
    with pytest.raises(LoopError, match=r"^'scale' is not exchanged"):
        frozen.check()
