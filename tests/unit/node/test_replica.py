"""Covers `node/model/replica.py` (protocol J, K, L, N)."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stories import StoryText, all_stories, check_story, python
from torch import Tensor, nn

from farloop.algo.fragments import flatten_into, partition, statistics_of, trainable_tensors
from farloop.algo.spec import BlobId, BlobKind, Layout, NodeId, WindowTerms
from farloop.node.errors import LayoutMismatch
from farloop.node.model import replica as replica_module
from farloop.node.model.replica import OwnDelta, Replica, matched_parameters
from farloop.quant.blob import HEADER_BYTES, BlobHeader, as_tensor, pack_blob
from farloop.quant.digest import digest
from farloop.quant.registry import codec_named

EPOCH = 3


class Tied(nn.Module):
    """Two blocks and a head that is the embedding."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(7, 5, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(5, 5, dtype=dtype) for _ in range(2))
        self.head = nn.Linear(5, 7, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def layout_of(module: nn.Module, prefix: str = "") -> Layout:
    shapes = [(prefix + name, tuple(parameter.shape)) for name, parameter in trainable_tensors(module)]
    return partition(shapes, pattern="strided", blocks_per_fragment=1)


def blob(replica: Replica, values: Tensor, *, index: int = 0, said: int | None = None, **header: Any) -> bytearray:
    """Version 1 from base 0, in q4, unless told otherwise."""
    fields = {"version": 1, "base": 0, "codec": "q4", "epoch": EPOCH, **header}
    fragment, coder = replica.layout.fragments[index], codec_named(fields.pop("codec"))
    if said is not None:
        fragment = dataclasses.replace(fragment, index=said)
    return pack_blob(BlobHeader(codec=coder, fragment=fragment, **fields), coder.encode(values, fragment, seed=0))


def snapshot(replica: Replica, index: int, values: Tensor, version: int = 0) -> bytearray:
    return blob(replica, values, index=index, version=version, base=version, codec="fp32")


def flat(replica: Replica, index: int) -> Tensor:
    """The local weights of a fragment."""
    fragment = replica.layout.fragments[index]
    out = torch.empty(fragment.numel)
    flatten_into(fragment, replica.parameters, out)
    return out


def anchored(module: nn.Module, *, gradients: bool = False) -> Replica:
    """With anchors that are the local weights."""
    replica = Replica(module, layout_of(module), gradients=gradients)
    for index in range(len(replica.layout.fragments)):
        assert replica.install(index, 0, snapshot(replica, index, flat(replica, index)), EPOCH)
    return replica


def with_tensor(replica: Replica, name: str) -> int:
    return next(f.index for f in replica.layout.fragments if f.tensors[0].name.startswith(name))


# --- deltas


def test_tied_weights_are_one_tensor_and_are_merged_for_both_names() -> None:
    """G, L, N; algorithms B24: a delta is the anchor minus the local weights, its padding zero."""
    module = Tied()
    replica = anchored(module)
    assert "embed.weight" in replica.parameters and "head.weight" not in replica.parameters
    index = with_tensor(replica, "embed.weight")
    with torch.no_grad():
        module.head.weight.add_(1.0)
    delta = replica.compute_delta(index)
    assert torch.allclose(delta[:35], torch.full((35,), -1.0)) and not delta[35:].any()
    replica.merge(index, 0.0)
    assert torch.equal(module.embed.weight, module.head.weight) and not replica.compute_delta(index).any()


def test_a_delta_may_be_the_raw_gradient_and_a_parameter_without_one_counts_as_zero() -> None:
    """K."""
    module = Tied()
    replica = anchored(module, gradients=True)
    module.blocks[0](torch.ones(1, 5)).sum().backward()
    index = with_tensor(replica, "blocks.0")
    expected = torch.zeros(replica.layout.fragments[index].numel)
    for slot in replica.layout.fragments[index].tensors:
        gradient = replica.parameters[slot.name].grad
        assert gradient is not None
        expected[slot.offset : slot.offset + slot.numel] = gradient.flatten()
    assert torch.equal(replica.compute_delta(index), expected)
    assert not replica.compute_delta(with_tensor(replica, "blocks.1")).any()


# --- anchors


def test_an_update_moves_the_anchor_by_what_it_decodes_to_and_its_digest_is_compared() -> None:
    """The decoded update is canonical (M, N)."""
    replica, coder = anchored(Tied()), codec_named("q4")
    fragment = replica.layout.fragments[0]
    values = torch.linspace(-1, 1, fragment.numel)
    expected = replica.anchors[0].read() + coder.decode(coder.encode(values, fragment), fragment)
    assert replica.apply(0, 1, blob(replica, values), "q4", EPOCH, digest(expected))
    assert torch.equal(replica.anchors[0].read(), expected)
    assert (replica.versions[0], replica.digests[0]) == (1, digest(expected))
    again = blob(replica, values, version=2, base=1)
    assert not replica.apply(0, 2, again, "q4", EPOCH, digest(expected)), "a digest that is not the announced one"
    assert replica.versions[0] == -1, "this anchor is not announced as held"


def test_an_update_applied_ahead_makes_the_same_anchor_and_changes_none_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_module, "_WORTH_AHEAD", 1)
    replica, plain = anchored(Tied()), anchored(Tied())
    index = with_tensor(replica, "embed")
    assert replica.can_apply_ahead(index) and not replica.can_apply_ahead(with_tensor(replica, "blocks")), "a quarter"
    for version in (1, 2, 3):  # the memory of one is that of the next
        values = torch.linspace(-version, 1, replica.layout.fragments[index].numel)
        data = blob(replica, values, index=index, version=version, base=version - 1)
        assert not plain.apply(index, version, data, "q4", EPOCH, 0)
        plain.versions[index] = version
        before = replica.anchors[index].read().clone()
        replica.apply_ahead(index, version, data, "q4", EPOCH)
        assert torch.equal(replica.anchors[index].read(), before) and not replica.can_apply_ahead(index)
        data[:] = bytes(len(data))  # it is not read again
        assert replica.apply(index, version, data, "q4", EPOCH, plain.digests[index])
        assert (
            torch.equal(replica.anchors[index].read(), plain.anchors[index].read())
            and replica.versions[index] == version
        )


@pytest.mark.parametrize("meanwhile", ["snapshot", "other fragment", "other version", "wrong digest"])
def test_what_was_applied_ahead_of_an_anchor_that_is_another_by_now_is_not_taken(meanwhile: str) -> None:
    replica = anchored(Tied())
    values = torch.ones(replica.anchors[0].read().numel())
    first, second = blob(replica, values), blob(replica, values, version=2, base=1)
    replica.apply_ahead(0, 2 if meanwhile == "other version" else 1, first, "q4", EPOCH)
    replica.apply_ahead(0, 1, first, "q4", EPOCH)
    start = replica.anchors[0].read().clone()
    match meanwhile:
        case "snapshot":
            start = torch.full_like(start, 3.0)
            assert replica.install(0, 0, snapshot(replica, 0, start), EPOCH)
        case "other fragment":
            other = blob(replica, torch.ones(replica.anchors[1].read().numel()), index=1)
            replica.apply(1, 1, other, "q4", EPOCH, 0)
    expected = start + codec_named("q4").decode(as_tensor(first)[HEADER_BYTES:], replica.layout.fragments[0])
    right = digest(expected) + (meanwhile == "wrong digest")
    assert replica.apply(0, 1, first, "q4", EPOCH, right) == (meanwhile != "wrong digest")
    assert torch.equal(replica.anchors[0].read(), expected)
    if meanwhile != "wrong digest":
        assert not replica.apply(0, 2, second, "q4", EPOCH, 0) and not torch.equal(replica.anchors[0].read(), expected)


@pytest.mark.parametrize(
    "wrong", [{"said": 1}, {"version": 2}, {"base": 1}, {"codec": "q8"}, {"epoch": EPOCH + 1}, {"damaged": True}]
)
def test_bytes_that_are_not_the_announced_update_leave_the_anchor_alone(wrong: dict[str, Any]) -> None:
    replica = anchored(Tied())
    before, damaged = replica.anchors[0].read().clone(), wrong.pop("damaged", False)
    data = blob(replica, torch.ones(before.numel()), **wrong)
    data[-1] ^= damaged
    assert not replica.apply(0, 1, data, "q4", EPOCH, 0)
    assert torch.equal(replica.anchors[0].read(), before) and replica.versions[0] == -1


def test_a_snapshot_must_be_of_its_version_and_fragment() -> None:
    replica = anchored(Tied())
    before, ones = replica.anchors[0].read().clone(), torch.ones(replica.layout.fragments[0].numel)
    for wrong in (snapshot(replica, 0, ones, 1), blob(replica, ones, version=2, base=1, codec="fp32")):
        assert not replica.install(0, 2, wrong, EPOCH)
    assert torch.equal(replica.anchors[0].read(), before) and replica.versions[0] == -1
    assert replica.install(0, 2, snapshot(replica, 0, ones, 2), EPOCH)
    assert (replica.versions[0], replica.digests[0]) == (2, digest(ones))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_anchors_stand_in_for_the_weights_and_are_taken_out_again_bit_for_bit(dtype: torch.dtype) -> None:
    """J: also when the evaluation fails."""
    module = Tied(dtype)
    replica = anchored(module)
    anchors = {name: parameter.clone() for name, parameter in replica.parameters.items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.7)
    local = {name: parameter.clone() for name, parameter in replica.parameters.items()}
    with replica.anchors_in_place():
        assert all(torch.equal(parameter, anchors[name]) for name, parameter in replica.parameters.items())
    with pytest.raises(RuntimeError, match="out of memory"), replica.anchors_in_place():
        raise RuntimeError("out of memory")
    assert all(torch.equal(parameter, local[name]) for name, parameter in replica.parameters.items())
    for fragment in replica.layout.fragments:
        replica.merge(fragment.index, 0.0)
    assert all(torch.equal(parameter, anchors[name]) for name, parameter in replica.parameters.items()), "all are back"


def test_an_eager_merge_goes_on_from_the_anchor_with_the_own_delta_in_it_and_measures_from_there() -> None:
    replica = anchored(Tied())
    fragment, anchor = replica.layout.fragments[0], replica.anchors[0].read().clone()
    data = blob(replica, torch.linspace(-1, 1, fragment.numel), version=2)
    decoded = codec_named("q4").decode(as_tensor(data)[HEADER_BYTES:], fragment)
    name = BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=NodeId("a"), incarnation=1, seq=2)
    terms = WindowTerms(fragment=0, window=2, round=1, tau=0, mix=0.0, codec_up="q4", codec_down="q4")
    held = torch.cat([torch.arange(slot.offset, slot.offset + slot.numel) for slot in fragment.tensors])
    start = (anchor - 0.5 * decoded)[held]
    replica.merge(0, 0.0, [OwnDelta(blob=name, terms=terms, data=data)], 0.5, EPOCH)
    assert torch.equal(flat(replica, 0)[held], start) and torch.equal(replica.anchors[0].read(), anchor)
    assert not replica.compute_delta(0)[held].any(), "nothing was done since"
    with replica.anchors_in_place():
        assert torch.equal(flat(replica, 0)[held], anchor[held])
    assert torch.equal(flat(replica, 0)[held], start)
    replica.merge(0, 0.0)
    assert not replica.compute_delta(0).any(), "measured from the anchor again"


# --- models that are not the run's


def changed(change: Callable[[Tied], object]) -> Tied:
    module = Tied()
    change(module)
    return module


def with_extra(module: Tied) -> None:
    module.register_parameter("extra", nn.Parameter(torch.zeros(1)))


def freeze(module: Tied) -> None:
    module.blocks[1].requires_grad_(False)


def linears(tied: bool) -> nn.Module:
    module = nn.ModuleDict({name: nn.Linear(3, 4, bias=False) for name in ("embed", "head")})
    if tied:
        module["head"].weight = module["embed"].weight
    return module


def test_a_file_that_peft_wrote_is_named_as_the_cause(tmp_path: Path) -> None:
    """Its names lack the adapter's, as `default`."""
    peft = pytest.importorskip("peft")
    module = peft.get_peft_model(nn.Sequential(nn.Linear(8, 8)), peft.LoraConfig(r=2, target_modules=["0"]))
    module.save_pretrained(tmp_path)
    held = [(name, tuple(t.shape)) for name, t in load_file(tmp_path / "adapter_model.safetensors").items()]
    with pytest.raises(
        LayoutMismatch, match=r"lora_A\.weight' .* peft's own files .* Make the run's weights file with"
    ):
        matched_parameters(module, partition(held, pattern="strided", blocks_per_fragment=1))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_that_has_the_names_of_a_compiled_model_matches_all_the_same(compiled: bool) -> None:
    """Of a journal that was begun before names were told without `_orig_mod`."""
    module = Tied()
    layout = layout_of(module, prefix="_orig_mod.")
    matched = matched_parameters(torch.compile(module, backend="eager") if compiled else module, layout)
    assert set(matched) == {slot.name for fragment in layout.fragments for slot in fragment.tensors}
    assert matched["_orig_mod.embed.weight"] is module.embed.weight


def test_a_node_that_holds_a_stage_has_the_statistics_of_that_stage() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)))
    exchanged = [*trainable_tensors(module), *statistics_of(module).items()]
    layout = partition([(name, tuple(tensor.shape)) for name, tensor in exchanged], pattern="whole", stages=(1,))
    part = nn.Module()
    part.add_module("1", module[1])
    replica = Replica(part, layout, gradients=False, holds=(1,))
    module.get_buffer("1.1.running_var").fill_(4.0)
    averaged = [fragment for fragment in replica.fragments if fragment.averaged]
    assert [slot.name for fragment in averaged for slot in fragment.tensors] == ["1.1.running_mean", "1.1.running_var"]
    assert replica.compute_delta(averaged[0].index).tolist().count(-4.0) == 3, "anchors begin as zeros"


def test_an_evaluation_that_changes_statistics_changes_no_anchor() -> None:
    """A forgotten eval() does."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    exchanged = [*trainable_tensors(module), *statistics_of(module).items()]
    layout = partition([(name, tuple(tensor.shape)) for name, tensor in exchanged], pattern="whole")
    replica = Replica(module, layout, gradients=False)
    assert [fragment.averaged for fragment in layout.fragments] == [True, False]
    for index, fragment in enumerate(layout.fragments):
        assert replica.install(index, 0, snapshot(replica, index, torch.full((fragment.numel,), 5.0)), EPOCH)
        replica.merge(index, 0.5)
    mean = module.get_buffer("1.running_mean")
    assert mean.tolist() == [2.5] * 3, "merged as weights are"
    assert replica.compute_delta(0)[:3].tolist() == [2.5] * 3, "anchor − local"
    with replica.anchors_in_place():
        assert mean.tolist() == [5.0] * 3
        module(torch.randn(8, 3))
    assert mean.tolist() == [2.5] * 3
    assert replica.anchors[0].read()[:3].tolist() == [5.0] * 3


def match(module: nn.Module, run: nn.Module | None = None) -> None:
    """A model with the run's, by default `Tied`."""
    matched_parameters(module, layout_of(run or Tied()))


@all_stories(__file__, "replicas")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(globals()), rewrite=rewrite)
