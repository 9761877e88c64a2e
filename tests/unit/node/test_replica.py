"""Covers `node/replica.py` (protocol J, K, L, N)."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from farloop.algo.digest import digest
from farloop.algo.fragments import flatten_into, partition, trainable_tensors
from farloop.algo.spec import BlobId, BlobKind, Fragment, Layout, NodeId, WindowTerms
from farloop.node.errors import LayoutMismatch
from farloop.node.replica import OwnDelta, Replica, matched_parameters
from farloop.quant.blob import HEADER_BYTES, BlobHeader, as_tensor, pack_blob
from farloop.quant.registry import codec_named

EPOCH = 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def layout_of(module: nn.Module) -> Layout:
    shapes = [(name, tuple(parameter.shape)) for name, parameter in trainable_tensors(module)]
    return partition(shapes, pattern="strided", blocks_per_fragment=1)


def replica_of(module: nn.Module, *, gradients: bool = False) -> Replica:
    return Replica(module, layout_of(module), gradients=gradients)


def blob(fragment: Fragment, values: Tensor, *, version: int, base: int, codec: str, epoch: int = EPOCH) -> bytearray:
    coder = codec_named(codec)
    header = BlobHeader(codec=coder, fragment=fragment, version=version, base=base, epoch=epoch)
    return pack_blob(header, coder.encode(values, fragment, seed=header.seed))


def snapshot(replica: Replica, index: int, values: Tensor, *, version: int = 0) -> bytearray:
    return blob(replica.layout.fragments[index], values, version=version, base=version, codec="fp32")


def flat(replica: Replica, index: int) -> Tensor:
    """The local weights of a fragment."""
    fragment = replica.layout.fragments[index]
    out = torch.empty(fragment.numel)
    flatten_into(fragment, replica.parameters, out)
    return out


def anchored(replica: Replica) -> Replica:
    """With anchors that are the local weights."""
    for index in range(len(replica.layout.fragments)):
        assert replica.install(index, 0, snapshot(replica, index, flat(replica, index)), EPOCH)
    return replica


def test_tied_weights_are_one_tensor_and_are_merged_for_both_names() -> None:
    """G, N; algorithms B24."""
    module = Tied()
    replica = anchored(replica_of(module))
    assert "embed.weight" in replica.parameters and "head.weight" not in replica.parameters
    index = next(f.index for f in replica.layout.fragments if f.tensors[0].name == "embed.weight")
    with torch.no_grad():
        module.head.weight.add_(1.0)
    delta = replica.take(index)
    assert torch.allclose(delta[:35], torch.full((35,), -1.0)) and not delta[35:].any(), "padding is zero"
    replica.merge(index, 0.0)
    assert torch.equal(module.embed.weight, module.head.weight)
    assert not replica.take(index).any()


def test_a_delta_is_the_anchor_minus_the_local_weights() -> None:
    """L: positive where training went downhill."""
    module = Tied()
    replica = anchored(replica_of(module))
    before = flat(replica, 0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    assert torch.equal(replica.take(0), before - flat(replica, 0))


def test_bf16_weights_that_have_not_moved_have_a_delta_of_exactly_zero() -> None:
    """L: the rounding of the anchor never enters it."""
    module = Tied(torch.bfloat16)
    replica = replica_of(module)
    generator = torch.Generator().manual_seed(1)
    for index, fragment in enumerate(replica.layout.fragments):
        fine = torch.zeros(fragment.numel)
        for slot in fragment.tensors:
            fine[slot.offset : slot.offset + slot.numel] = torch.randn(slot.numel, generator=generator)
        assert replica.install(index, 0, snapshot(replica, index, fine), EPOCH)
        replica.merge(index, 0.0)
        assert not torch.equal(flat(replica, index), fine), "it was rounded"
        assert not replica.take(index).any()


def test_a_delta_may_be_the_raw_gradient_and_a_parameter_without_one_counts_as_zero() -> None:
    """K."""
    module = Tied()
    replica = anchored(replica_of(module, gradients=True))
    module.blocks[0](torch.ones(1, 5)).sum().backward()
    index = next(f.index for f in replica.layout.fragments if f.tensors[0].name.startswith("blocks.0"))
    fragment = replica.layout.fragments[index]
    expected = torch.zeros(fragment.numel)
    for slot in fragment.tensors:
        gradient = replica.parameters[slot.name].grad
        assert gradient is not None
        expected[slot.offset : slot.offset + slot.numel] = gradient.flatten()
    assert torch.equal(replica.take(index), expected)
    other = next(f.index for f in replica.layout.fragments if f.index != index)
    assert not replica.take(other).any()


def test_the_buffer_of_a_delta_is_used_again_once_given_back() -> None:
    replica = anchored(replica_of(Tied()))
    first, second = replica.take(0), replica.take(0)
    assert first.data_ptr() != second.data_ptr()
    replica.give_back(first)
    assert replica.take(0).data_ptr() == first.data_ptr()


def test_an_update_moves_the_anchor_by_what_it_decodes_to_and_its_digest_is_compared() -> None:
    """The decoded update is canonical (M, N)."""
    replica = anchored(replica_of(Tied()))
    fragment = replica.layout.fragments[0]
    values = torch.linspace(-1, 1, fragment.numel)
    coder = codec_named("q4")
    expected = replica.anchors[0] + coder.decode(coder.encode(values, fragment), fragment)
    data = blob(fragment, values, version=1, base=0, codec="q4")
    assert replica.apply(0, 1, data, "q4", EPOCH, digest(expected))
    assert torch.equal(replica.anchors[0], expected)
    assert (replica.versions[0], replica.digests[0]) == (1, digest(expected))
    again = blob(fragment, values, version=2, base=1, codec="q4")
    assert not replica.apply(0, 2, again, "q4", EPOCH, digest(expected)), "a digest that is not the announced one"
    assert replica.versions[0] == -1, "nobody is told that this anchor is held"


@pytest.mark.parametrize(
    "wrong",
    [
        {"index": 1},
        {"version": 2},
        {"base": 1},
        {"codec": "q8"},
        {"epoch": EPOCH + 1},
    ],
)
def test_bytes_that_are_not_the_announced_update_leave_the_anchor_alone(wrong: dict[str, int | str]) -> None:
    replica = anchored(replica_of(Tied()))
    fragment = replica.layout.fragments[0]
    before, ones = replica.anchors[0].clone(), torch.ones(fragment.numel)
    fields = {"index": 0, "version": 1, "base": 0, "codec": "q4", "epoch": EPOCH} | wrong
    said = dataclasses.replace(fragment, index=fields.pop("index"))  # type: ignore[arg-type]
    data = blob(said, ones, **fields)  # type: ignore[arg-type]
    assert not replica.apply(0, 1, data, "q4", EPOCH, 0)
    damaged = blob(fragment, ones, version=1, base=0, codec="q4")
    damaged[-1] ^= 1
    assert not replica.apply(0, 1, damaged, "q4", EPOCH, 0)
    assert torch.equal(replica.anchors[0], before) and replica.versions[0] == -1


def test_a_snapshot_must_be_of_its_version_and_fragment() -> None:
    replica = anchored(replica_of(Tied()))
    fragment = replica.layout.fragments[0]
    before, ones = replica.anchors[0].clone(), torch.ones(fragment.numel)
    assert not replica.install(0, 2, snapshot(replica, 0, ones, version=1), EPOCH)
    assert not replica.install(0, 2, blob(fragment, ones, version=2, base=1, codec="fp32"), EPOCH)
    assert torch.equal(replica.anchors[0], before) and replica.versions[0] == -1
    assert replica.install(0, 2, snapshot(replica, 0, ones, version=2), EPOCH)
    assert (replica.versions[0], replica.digests[0]) == (2, digest(ones))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_anchors_stand_in_for_the_weights_and_are_taken_out_again_bit_for_bit(dtype: torch.dtype) -> None:
    """J: also when the evaluation fails."""
    module = Tied(dtype)
    replica = anchored(replica_of(module))
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


def test_an_element_of_a_flat_fragment_is_named_after_its_parameter() -> None:
    """So that a NaN can be told by name; padding counts to the tensor before it."""
    replica = replica_of(Tied())
    index = next(f.index for f in replica.layout.fragments if f.tensors[0].name == "blocks.1.weight")
    assert replica.tensor_at(index, 0) == replica.tensor_at(index, 24) == "blocks.1.weight"
    assert replica.tensor_at(index, 255) == "blocks.1.weight"
    assert replica.tensor_at(index, 256) == "blocks.1.bias"


def test_a_model_that_is_not_the_run_s_is_refused_by_the_name_of_the_first_difference() -> None:
    layout = layout_of(Tied())
    assert set(matched_parameters(Tied(), layout)) == {t.name for f in layout.fragments for t in f.tensors}
    fewer, other, more = Tied(), Tied(), Tied()
    del fewer.blocks[1]
    other.blocks[0] = nn.Linear(6, 5)
    more.register_parameter("extra", nn.Parameter(torch.zeros(1)))
    with pytest.raises(LayoutMismatch, match=r"the run's model has a parameter 'blocks\.1\.weight' of shape \(5, 5\)"):
        matched_parameters(fewer, layout)
    with pytest.raises(LayoutMismatch, match=r"'blocks\.0\.weight' has shape \(5, 6\) here, \(5, 5\) in the run"):
        matched_parameters(other, layout)
    with pytest.raises(LayoutMismatch, match="this model has a trainable parameter 'extra'"):
        matched_parameters(more, layout)


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_model_whose_parameters_are_tied_frozen_or_wrapped_is_refused_with_the_mend() -> None:
    """The line said only that a parameter was not there."""
    layout = layout_of(Tied())
    with pytest.raises(LayoutMismatch, match=r"here it is 'module\..*Give join the module inside the wrapper"):
        matched_parameters(Wrapped(Tied()), layout)
    frozen = Tied()
    frozen.blocks[1].requires_grad_(False)
    with pytest.raises(LayoutMismatch, match=r"here it is frozen\. Set requires_grad_\(True\) before join"):
        matched_parameters(frozen, layout)
    untied = nn.ModuleDict({"embed": nn.Linear(3, 4, bias=False), "head": nn.Linear(3, 4, bias=False)})
    tied = nn.ModuleDict({"embed": nn.Linear(3, 4, bias=False), "head": nn.Linear(3, 4, bias=False)})
    tied["head"].weight = tied["embed"].weight
    with pytest.raises(LayoutMismatch, match=r"tied to 'embed\.weight'.*save_file\(.*model\.named_parameters\(\)"):
        matched_parameters(tied, layout_of(untied))
    assert set(matched_parameters(tied, layout_of(tied))) == {"embed.weight"}


def test_an_eager_merge_goes_on_from_the_anchor_with_the_own_delta_in_it_and_measures_from_there() -> None:
    replica = anchored(replica_of(Tied()))
    fragment = replica.layout.fragments[0]
    values = torch.linspace(-1, 1, fragment.numel)
    data = blob(fragment, values, version=2, base=0, codec="q4")
    decoded = codec_named("q4").decode(as_tensor(data)[HEADER_BYTES:], fragment)
    name = BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=NodeId("a"), incarnation=1, seq=2)
    terms = WindowTerms(fragment=0, window=2, round=1, tau=0, mix=0.0, codec_up="q4", codec_down="q4")
    anchor = replica.anchors[0].clone()
    replica.merge(0, 0.0, [OwnDelta(blob=name, terms=terms, data=data)], 0.5, EPOCH)
    here = [slice(slot.offset, slot.offset + slot.numel) for slot in fragment.tensors]
    start = torch.cat([(anchor - 0.5 * decoded)[part] for part in here])
    local = torch.cat([flat(replica, 0)[part] for part in here])
    assert torch.equal(local, start) and torch.equal(replica.anchors[0], anchor)
    taken = replica.take(0)
    assert not any(taken[part].any() for part in here), "nothing was done since"
    with replica.anchors_in_place():
        assert torch.equal(torch.cat([flat(replica, 0)[part] for part in here]), torch.cat([anchor[p] for p in here]))
    assert torch.equal(torch.cat([flat(replica, 0)[part] for part in here]), start)
    replica.merge(0, 0.0)
    assert not replica.take(0).any(), "measured from the anchor again"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_that_has_the_names_of_a_compiled_model_matches_all_the_same(compiled: bool) -> None:
    """Of a journal that was begun before names were told without `_orig_mod`."""
    shapes = [(f"_orig_mod.{name}", tuple(parameter.shape)) for name, parameter in trainable_tensors(Tied())]
    layout = partition(shapes, pattern="strided", blocks_per_fragment=1)
    module = Tied()
    matched = matched_parameters(torch.compile(module, backend="eager") if compiled else module, layout)
    assert set(matched) == {name for name, _ in shapes}
    assert matched["_orig_mod.embed.weight"] is module.embed.weight
