"""What `join` says when it cannot: one line each, and no thread is left behind."""

import inspect
import multiprocessing
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest
import tiny_run
import torch
from optimizers import Inside, Masters
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from farloop.config.settings import NODE_SCHEMA
from farloop.coordinator.storage.store import Store
from farloop.monitoring.endpoint import EndpointError
from farloop.node.arguments import WANTED, check_variables, resolved
from farloop.node.errors import BadAddress, LoopError, StateUnusable, Unreachable
from farloop.node.executor import NodeExecutor
from farloop.node.library import join
from farloop.node.model.anchor_files import AnchorFiles
from farloop.wire.keys import KeyFileError
from farloop.wire.uplink import UplinkLimit

pytestmark = pytest.mark.integration

NOWHERE = "tcp://127.0.0.1:1"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    assert all(type(thread).__name__ == "GarbageCollectorThread" for thread in left), left  # zmq has one a process


def test_what_is_wrong_with_the_arguments_is_one_line(tmp_path: Path) -> None:
    model, state = nn.Linear(1, 1), tmp_path / "state"
    with pytest.raises(ValueError, match="name"):
        join(NOWHERE, model, name="not a name!", state_dir=state)
    with pytest.raises(BadAddress, match="got 'coordinator:7700'; did you mean tcp"):
        join("coordinator:7700", model, name="a", state_dir=state)
    with pytest.raises(ValueError, match="go together"):
        join(NOWHERE, model, name="a", state_dir=state, key=tmp_path / "a.key")
    with pytest.raises(KeyFileError):
        join(NOWHERE, model, name="a", state_dir=state, key=tmp_path / "a.key", server_key=tmp_path / "c.pub")
    with pytest.raises(EndpointError, match="host:port"):
        join(NOWHERE, model, name="a", state_dir=state, http="9710")
    with pytest.raises(ValueError, match="16 hex digits are a fingerprint, not '0123'"):
        join(NOWHERE, model, name="a", state_dir=state, fingerprint="0123")
    (tmp_path / "file").write_text("")
    with pytest.raises(StateUnusable):
        join(NOWHERE, model, name="a", state_dir=tmp_path / "file")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"coordinator": 7700}, "join(coordinator=…) got an int; expected its address, as 'tcp://coordinator:7700'"),
        ({"model": [nn.Linear(1, 1), 3]}, "join(model=…) got a list; expected a torch.nn.Module, a list of such"),
        ({"model": None}, "join(model=…) got None"),
        ({"model": lambda: nn.Linear(1, 1)}, "<lambda>, which cannot be called with (spec)"),
        ({"model": nn.Linear}, "join(model=…) got the class Linear, not a module of it; expected a torch.nn.Module"),
        ({"optimizer": AdamW}, "AdamW, which cannot be called with (module, spec)"),
        ({"optimizer": lambda module: None}, "<lambda>, which cannot be called with (module, spec)"),
        ({"name": None}, "join got no name"),
        ({"server_key": b"c.pub"}, "join(server_key=…) got a bytes; expected a path"),
        ({"evaluate": 0.5}, "join(evaluate=…) got a float; expected a function of the module"),
        ({"tau": 1.5}, "join(tau=…) got a float; expected a whole number"),
        ({"tau": True}, "join(tau=…) got a bool; expected a whole number"),
        ({"holds": 1}, "join(holds=…) got an int; expected the numbers of pipeline stages, as (0, 1)"),
        ({"holds": "01"}, "join(holds=…) got a str"),
        ({"own": [3]}, "join(own=…) got a list; expected names of tensors"),
        ({"give_up_s": "60"}, "join(give_up_s=…) got a str; expected seconds, as 60.0"),
        ({"hook": True}, "join(hook=True) needs optimizer="),
        ({"scaler": 3}, "join(scaler=…) got an int; expected a torch.amp.GradScaler"),
        ({"model": nn.DataParallel(nn.Linear(1, 1))}, "in DataParallel: give the module inside it, model.module"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_argument_of_a_wrong_type_is_refused_in_one_line(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    arguments = {"model": nn.Linear(1, 1), "name": "a", "state_dir": tmp_path / "s", "give_up_s": 0.1}
    with pytest.raises(LoopError, match=re.escape(words)) as caught:
        join(**{"coordinator": NOWHERE, **arguments, **given})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value) and not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("NAME", "not a name!", "FARLOOP_NODE__NAME: 'not a name!' is not a node name"),
        ("FINGERPRINT", "0123", "FARLOOP_NODE__FINGERPRINT: 16 hex digits are a fingerprint, not '0123'"),
        ("LANES", "17", "FARLOOP_NODE__LANES: 17 is not from 0 to 16; the nearest is 16"),
        ("TAU", "-1", "FARLOOP_NODE__TAU: expected a whole number of 0 or more, got '-1'"),
        ("ADAPT_TAU", "maybe", "FARLOOP_NODE__ADAPT_TAU: expected true or false, got 'maybe'"),
        ("MAX_UPLINK", "20", "FARLOOP_NODE__MAX_UPLINK: '20' is not a rate with its unit kbit, mbit or gbit; the near"),
        ("QUIET_HOURS", "8-18", "FARLOOP_NODE__QUIET_HOURS: '8-18' are not hours of the day; the nearest are 08:00-18"),
        ("QUIET_UPLINK", "2mbit", "FARLOOP_NODE__QUIET_UPLINK: quiet_hours and quiet_uplink go together"),
        ("CONGESTION", "warp9", "FARLOOP_NODE__CONGESTION: "),
        ("BULK_SOURCE", "0.0.0.0", "FARLOOP_NODE__BULK_SOURCE: 0.0.0.0 is not the address of one network card"),
        ("XYZ", "4", "FARLOOP_NODE__XYZ is not read: after FARLOOP_NODE__ join reads ADAPT_TAU, BULK_SOURCE, CONGE"),
        ("FINGERPRNT", "", "FARLOOP_NODE__FINGERPRNT is not read: did you mean FARLOOP_NODE__FINGERPRINT?"),
    ],
)
def test_what_is_wrong_with_the_environment_is_one_line(
    variable: str, value: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARLOOP_NODE__NAME", "oslo")
    monkeypatch.setenv(f"FARLOOP_NODE__{variable}", value)
    with pytest.raises(LoopError, match=re.escape(words)) as caught:
        join(NOWHERE, nn.Linear(1, 1), state_dir=tmp_path, give_up_s=0.1)
    assert "\n" not in str(caught.value)


def test_no_setting_of_the_daemon_is_taken_for_a_misspelt_argument() -> None:
    check_variables({f"FARLOOP_NODE__{key.upper()}": "" for key in NODE_SCHEMA["node"]})


def test_settings_of_the_link_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "LANES": "3", "MAX_UPLINK": "20mbit", "QUIET_HOURS": "08:00-18:00", "QUIET_UPLINK": "2mbit",
        "BULK_SOURCE": "127.0.0.2", "TAU": "2", "ADAPT_TAU": "true",
    }  # fmt: skip
    for key, value in told.items():
        monkeypatch.setenv(f"FARLOOP_NODE__{key}", value)
    config, _ = resolved(given())
    assert (config.coordinator, config.lanes, config.bulk_source) == (NOWHERE, 3, "127.0.0.2")
    assert config.uplink == UplinkLimit.parse("20mbit", "08:00-18:00", "2mbit")
    assert (config.tau, config.adapt_tau) == (2, True)
    assert resolved(given(tau=5))[0].tau == 5


def given(**arguments: object) -> dict[str, Any]:
    """All arguments of a call of `join`."""
    told = inspect.signature(join).bind(NOWHERE, nn.Linear(1, 1), name="oslo", **arguments)
    told.apply_defaults()
    return told.arguments


def test_every_argument_of_join_is_checked() -> None:
    assert {*inspect.signature(join).parameters} == {*WANTED, "rate", "clip", "wrap", "buffers", "anchors"}


def test_the_loss_is_asked_of_a_node_that_measures_it(tmp_path: Path) -> None:
    store = tiny_run.begin(tmp_path / "state", tiny_run.plan(steps=4, h=2, nodes=2))
    with tiny_run.serving(tmp_path / "state", store) as coordinator:
        nodes = [
            threading.Thread(
                target=tiny_run.train,
                args=(coordinator.link.endpoint, tmp_path / name, name),
                kwargs={"evaluate": None if name == "a" else lambda module: 1.0},
            )
            for name in "ab"
        ]
        for node in nodes:
            node.start()
        for node in nodes:
            node.join()
        evaluations = list(store.ledger.evaluations)
    assert evaluations, "b was asked, though a comes first"


@pytest.mark.parametrize("copies", [True, False])
def test_a_node_that_leaves_saves_its_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: bool) -> None:
    """Also where no copy of an anchor was written whole before the anchor changed."""
    if not copies:
        monkeypatch.setattr(NodeExecutor, "_save", lambda self: None)
    store = tiny_run.begin(tmp_path / "state", tiny_run.plan(steps=1000, h=2, nodes=1))
    with tiny_run.serving(tmp_path / "state", store) as coordinator:
        tiny_run.train(coordinator.link.endpoint, tmp_path / "a", "a", steps=9, save_optimizer=True)
    files = AnchorFiles(tmp_path / "a" / "anchors")
    steps = {index: head.more["state"]["step"][2] for index in files.find() if (head := files.optimizer(index))}
    files.close()
    assert steps == {0: 9.0, 1: 9.0}, "those beside the copies of the anchors are older"


def test_a_coordinator_that_does_not_answer_in_time_is_one_line_and_may_be_tried_again(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"no session with the coordinator \S+ for 0\.1 s, after which") as caught:
        join(NOWHERE, nn.Linear(1, 1), name="a", state_dir=tmp_path, give_up_s=0.1)
    assert caught.value.retriable and caught.value.exit_code == 5


def begun(folder: Path) -> tuple[Path, Store, nn.Module]:
    return folder, tiny_run.begin(folder, tiny_run.plan(steps=8, h=2, nodes=1)), tiny_run.model()


def trained(folder: Path, store: Store, model: nn.Module, optimizer: Optimizer, **options: Any) -> list[Tensor]:
    """The weights of the one node of a run."""
    with tiny_run.serving(folder, store) as coordinator:
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float32, device="cpu")
        where = coordinator.link.endpoint
        with join(where, model, optimizer, name="a", state_dir=folder / "a", **options) as node:
            while node.running:
                loss = nn.functional.mse_loss(node.model(x), 2 * x)
                torch.autograd.backward(loss)
                node.step(loss=loss)
    store.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_loop_may_have_defaults_of_its_own_for_new_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    """And the run is the one without them, bit for bit."""
    plain, own = begun(tmp_path / "plain"), begun(tmp_path / "own")
    expected = trained(*plain, SGD(plain[2].parameters(), lr=1e-2))
    torch.set_default_dtype(dtype), torch.set_default_device("meta")
    try:
        found = trained(*own, SGD(own[2].parameters(), lr=1e-2))
    finally:
        torch.set_default_dtype(torch.float32), torch.set_default_device(None)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", [Inside, Masters])
def test_a_run_s_merges_reach_copies_of_the_weights(tmp_path: Path, kind: type[Masters]) -> None:
    """In the optimizer's state, or moved by on_merge: the run is the one without copies."""
    plain, copied = begun(tmp_path / "plain"), begun(tmp_path / "copied")
    expected = trained(*plain, SGD(plain[2].parameters(), lr=1e-2))
    optimizer = kind(copied[2].parameters(), lr=1e-2)

    def move(changes: Mapping[nn.Parameter, Tensor]) -> None:
        for parameter, change in changes.items():
            if parameter in optimizer.masters:  # not before the first step
                optimizer.masters[parameter].add_(change)

    options = {} if kind is Inside else {"on_merge": move}
    for found, weights in zip(trained(*copied, optimizer, **options), expected, strict=True):
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12 on
def test_forked_children_end_by_sigterm_as_without_a_node_and_a_model_has_one_node(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    store, before = tiny_run.begin(tmp_path / "state", tiny_run.plan(steps=4, h=2, nodes=1)), signal.getsignal(SIGTERM)
    with tiny_run.serving(tmp_path / "state", store) as coordinator:
        where = coordinator.link.endpoint
        optimizer = AdamW((model := tiny_run.model()).parameters())
        with join(where, model, optimizer, name="a", state_dir=tmp_path / "a") as node:
            assert signal.getsignal(SIGTERM) is not before
            child = fork.Process(target=time.sleep, args=(60.0,))
            child.start()
            child.terminate()
            child.join(30.0)
            assert child.exitcode == -SIGTERM
            with fork.Pool(2) as pool:  # ends its processes by SIGTERM, and waits for them
                assert pool.map(abs, [-1, 2]) == [1, 2]
            assert node.running and signal.getsignal(SIGTERM) is not before
            for given in ((nn.Sequential(model), None), (tiny_run.model(), optimizer)):
                with pytest.raises(LoopError, match=r"of a node that has not left: call its leave\(\) before$"):
                    join(where, *given, name="b", state_dir=tmp_path / "b")
            node.abandon()
        join(where, model, optimizer, name="a", state_dir=tmp_path / "a").abandon()
    store.close()
    assert signal.getsignal(SIGTERM) is before
