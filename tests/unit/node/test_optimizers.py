"""The table of docs/models.md: each row is tried here, if its package is installed."""

import importlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from optimizers import Inside, Listed, Masters, Node, Process, alike
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Muon, Optimizer

from farloop.node.arguments import check_hooks
from farloop.node.errors import LoopError
from farloop.node.library import join

TABLE = Path(__file__).parents[3] / "docs" / "models.md"


class Row(NamedTuple):
    package: str
    make: Callable[[Any, list[nn.Parameter]], Optimizer]
    """Given the package."""
    merges: str = "kept"
    saved: bool = True


def galore(package: Any, parameters: list[nn.Parameter]) -> Optimizer:
    projected = {"rank": 2, "update_proj_gap": 5, "scale": 0.25, "proj_type": "std"}
    matrices, rest = ([p for p in parameters if (p.ndim == 2) is is_matrix] for is_matrix in (True, False))
    made: Optimizer = package.GaLoreAdamW([{"params": matrices, **projected}, {"params": rest}], lr=1e-2)
    return made


def training(optimizer: Any) -> Optimizer:
    optimizer.train()
    made: Optimizer = optimizer
    return made


ROWS = {
    "AdamW": Row("torch.optim", lambda _, p: AdamW(p, lr=1e-2)),
    "Muon": Row("torch.optim", lambda _, p: Muon([q for q in p if q.ndim == 2], lr=1e-2)),
    "Adafactor": Row("torch.optim", lambda _, p: Adafactor(p, lr=1e-2), saved=False),
    "AdamWScheduleFree": Row("schedulefree", lambda it, p: training(it.AdamWScheduleFree(p, lr=1e-2)), "moved"),
    "ScheduleFreeWrapper": Row(
        "pytorch_optimizer", lambda it, p: training(it.ScheduleFreeWrapper(AdamW(p, lr=1e-2))), "moved", saved=False
    ),
    "Prodigy": Row("prodigyopt", lambda it, p: it.Prodigy(p, lr=1.0), "moved", saved=False),
    "MADGRAD": Row("pytorch_optimizer", lambda it, p: it.MADGRAD(p, lr=1e-2), "moved", saved=False),
    "DAdaptSGD": Row("pytorch_optimizer", lambda it, p: it.DAdaptSGD(p, lr=1.0), "moved"),
    "Ranger": Row("pytorch_optimizer", lambda it, p: it.Ranger(p, lr=1e-2), "moved"),
    "Lookahead": Row("pytorch_optimizer", lambda it, p: it.Lookahead(AdamW(p, lr=1e-2)), "moved", saved=False),
    "Lion": Row("lion_pytorch", lambda it, p: it.Lion(p, lr=1e-2)),
    "SOAP": Row("pytorch_optimizer", lambda it, p: it.SOAP(p, lr=1e-2), saved=False),
    "GaLoreAdamW": Row("galore_torch", galore, saved=False),
    "AdamW8bit (bitsandbytes)": Row("bitsandbytes.optim", lambda it, p: it.AdamW8bit(p, lr=1e-2), saved=False),
    "AdamW8bit (torchao)": Row("torchao.optim", lambda it, p: it.AdamW8bit(p, lr=1e-2), saved=False),
    "fp32 masters in the state": Row("torch.optim", lambda _, p: Inside(p, lr=1e-2), "moved"),
    "fp32 masters in an attribute": Row("torch.optim", lambda _, p: Listed(p, lr=1e-2), "moved", saved=False),
    "fp32 masters elsewhere": Row("torch.optim", lambda _, p: Masters(p, lr=1e-2), "ended", saved=False),
}


def made(name: str) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    row = ROWS[name]
    pytest.importorskip(row.package.partition(".")[0])
    package = importlib.import_module(row.package)
    return lambda parameters: row.make(package, list(parameters))


def gradients(step: int) -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(step)
    return lambda weights: torch.randn(weights.shape, generator=generator) * 0.1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROWS)
def test_what_a_merge_brings_stays(name: str) -> None:
    """Three merges that move everything by 1 leave the weights 3 further on, with the same gradients. Steps of
    Adafactor, Muon (over rows and columns) and weight decay follow the weights a little."""
    nodes = merged, alone = Node(made(name)), Node(made(name))

    def train() -> None:
        for step in range(40):
            for node in nodes:
                node.step(gradients(step))
            if step % 12 == 5:
                merged.merge(alike(1.0))

    if ROWS[name].merges == "ended":
        with pytest.raises(LoopError, match="undoes merges"):
            train()
        return
    train()
    stepped = {id(p) for group in merged.optimizer.param_groups for p in group["params"]}
    for one, other in zip(merged.model.parameters(), alone.model.parameters(), strict=True):
        if id(one) in stepped:
            torch.testing.assert_close(one.detach() - other.detach(), torch.full_like(one, 3.0), rtol=0, atol=0.3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROWS)
def test_a_saved_state_goes_on_where_it_was(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = made(name)
    first = Process(tmp_path, lambda model: make(model.parameters()))
    first.step()
    first.step()
    (tmp_path / "0-7.anchor").write_bytes(bytes(4096))
    assert first.save() == ROWS[name].saved
    if not ROWS[name].saved:
        assert "the optimizer's state is not saved" in caplog.text or not any(first.optimizer.state.values())
        return
    second = Process(tmp_path, lambda model: make(model.parameters()))
    first.merges.show()
    second.model.load_state_dict(first.model.state_dict())
    second.files.find()
    assert second.moments.load(0)
    for process in (first, second):
        process.merges.resume()
        process.step()
    for name, weights in first.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], weights, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_sam_is_joined_by_the_optimizer_in_it() -> None:
    """Its own step needs a closure; its second_step steps the one in it, which a node with hook=True follows."""
    package: Any = pytest.importorskip("pytorch_optimizer")
    module = nn.Linear(2, 2)
    sam = package.SAM(module.parameters(), base_optimizer=AdamW, lr=0.1)
    with pytest.raises(Exception, match="SAM requires closure"):
        sam.step()
    seen = list[Tensor]()
    check_hooks(sam.base_optimizer)
    sam.base_optimizer.register_step_pre_hook(lambda *_: seen.append(module.weight.detach().clone()))
    before = module.weight.detach().clone()
    for again in (sam.first_step, sam.second_step):
        module(torch.ones(1, 2)).sum().backward()
        again(zero_grad=True)
    assert len(seen) == 1 and torch.equal(seen[0], before), "the step begins where the weights were"


@pytest.mark.filterwarnings("ignore")
def test_a_wrapper_that_is_no_optimizer_is_refused() -> None:
    module = nn.Linear(2, 2)
    wrapper = pytest.importorskip("schedulefree").ScheduleFreeWrapper(AdamW(module.parameters()))
    with pytest.raises(LoopError, match=r"^join\(optimizer=…\) got a ScheduleFreeWrapper; expected a torch.optim.Opt"):
        join("tcp://127.0.0.1:1", module, wrapper, name="a")


def test_the_page_has_these_rows() -> None:
    rows = re.findall(r"^\| (.+?) \| .* \| (kept|moved|ended)[^|]* \| (yes|no) \|$", TABLE.read_text(), re.M)
    assert {name.replace("`", ""): (merges, saved == "yes") for name, merges, saved in rows} == {
        name: (row.merges, row.saved) for name, row in ROWS.items()
    }
