"""`farloop plan --layout`: the file that it writes is the layout that nodes read, and a running pipeline's is kept."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from command_line import error_line, farloop
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from farloop.algo.stages import StageLayout
from farloop.config import layout_file
from farloop.config.exit_codes import CommandError, ExitCode
from farloop.config.inventory_file import away, inventory_of, live_inventory
from farloop.coordinator.routing.mode import present_step_s
from farloop.coordinator.routing.plan import make_plan
from farloop.node.pipeline.layout import read_layout, why_not

NEAR = {"latency_ms": 0.1, "gbit_s": 10.0}


def islands(far_ms: float = 40.0, **plan: Any) -> dict[str, Any]:
    """Two islands of three nodes, which hold a model of four layers in three stages each."""
    node = {"count": 3, "layer_s": 0.002, "max_layers": 2}
    return {
        "plan": {"stages": 3, **plan},
        "model": {"layers": 4, "activation_bytes": 16e3, "microbatches": 2},
        "nodes": [
            {"name": "a", "site": "A", "address": "tcp://10.0.0.1:780{n}", **node},
            {"name": "b", "site": "B", "address": "tcp://10.0.0.2:780{n}", **node},
        ],
        "links": [
            {"between": ["A", "A"], **NEAR},
            {"between": ["B", "B"], **NEAR},
            {"between": ["A", "B"], "latency_ms": far_ms, "mbit_s": 200.0},
        ],
    }


def laid(folder: Path, tables: dict[str, Any], *words: str) -> tuple[int, str]:
    file = folder / "inventory.json"
    file.write_text(json.dumps(tables))
    ended = farloop("plan", "--inventory", str(file), "--layout", str(folder / "layout.json"), *words)
    return ended.exit_code, ended.output


def test_nodes_read_what_was_planned_and_the_run_is_told_of_it(tmp_path: Path) -> None:
    code, text = laid(tmp_path, islands())
    assert code == 0, text
    layout, addresses = read_layout(tmp_path / "layout.json")
    assert layout.epoch == 1 and addresses["b-2"] == "tcp://10.0.0.2:7802" and len(addresses) == 6
    assert [{hop.node[0] for hop in path.hops} for path in layout.paths] == [{"a"}, {"b"}]
    cut = ",".join(str(stage.first) for stage in layout.stages[1:])
    assert text.endswith(f'[run]\nstages = "{cut}"\nnodes = 2\n')
    code, text = laid(tmp_path, islands(), "--json", "--force")
    assert code == 0 and json.loads(text)["run"] == {"stages": cut, "nodes": 2} and json.loads(text)["epoch"] == 2


def one_island(far_ms: float) -> dict[str, Any]:
    """Six nodes, any of which may serve any other, so far apart as from A to B."""
    return {**islands(far_ms), "plan": {"stages": 3, "mode": "C"}}


def swapped(folder: Path) -> str:
    """The layout file, its pipelines' last stages exchanged by hand; what it has then."""
    file = folder / "layout.json"
    tables = json.loads(file.read_text())
    one, other = (path["nodes"] for path in tables["paths"])
    one[2], other[2] = other[2], one[2]
    file.write_text(json.dumps(tables))
    return file.read_text()


def test_paths_that_are_nearly_as_good_stay(tmp_path: Path) -> None:
    """Of a step of some 100 ms a millisecond is no reason to have pipelines go over; being asked is one."""
    tables = one_island(0.2)
    tables["nodes"] = [{**node, "layer_s": 0.02} for node in tables["nodes"]]
    assert laid(tmp_path, tables)[0] == 0
    before = swapped(tmp_path)
    code, text = laid(tmp_path, tables)
    assert code == 0 and "layout.json stays as it is, epoch 1: less than 10 % is gained; --force" in text, text
    told = json.loads(laid(tmp_path, tables, "--json")[1])
    assert (told["written"], told["epoch"]) == (False, 1) and 0.9 * told["present_step_s"] < told["step_s"]
    assert told["step_s"] < told["present_step_s"] and (tmp_path / "layout.json").read_text() == before
    for number, words in ((2, ("--force",)), (7, ("--epoch", "7"))):
        told = json.loads(laid(tmp_path, tables, "--json", *words)[1])
        assert (told["written"], told["epoch"], told["written_why"]) == (True, number, "it was asked for")
        assert read_layout(tmp_path / "layout.json")[0].epoch == number
    assert "the plan has the same paths" in laid(tmp_path, tables)[1]


def test_paths_that_are_worth_it_are_told_beside_those_that_are_there(tmp_path: Path) -> None:
    tables = one_island(40.0)
    assert laid(tmp_path, tables)[0] == 0
    swapped(tmp_path)
    code, text = laid(tmp_path, tables)
    assert code == 0 and "epoch 2: the stages as they were" in text, text
    assert "ms along the paths that it had," in text and "ms along those planned" in text
    assert {path.source[0] + path.hops[2].node[0] for path in read_layout(tmp_path / "layout.json")[0].paths} == {
        "aa",
        "bb",
    }


def test_paths_of_which_nothing_is_predicted_are_replaced(tmp_path: Path) -> None:
    """Nobody stays on a link that is not believed for want of a number."""
    tables = one_island(0.2)
    assert laid(tmp_path, tables)[0] == 0
    old, _ = read_layout(tmp_path / "layout.json")
    one, other = (hop.node for hop in old.paths[0].hops[:2])
    tables["links"].append({"between": [one, other], "latency_ms": 900.0})
    told = json.loads(laid(tmp_path, tables, "--json")[1])
    assert told["written"] and told["present_step_s"] is None and "is not believed" in told["written_why"]


def test_a_node_that_is_away_is_planned_without_and_keeps_its_stage(tmp_path: Path) -> None:
    """Nobody is sent over it, and it can come back: a layout without it would leave it outside for good."""
    tables, path, file = one_island(0.2), tmp_path / "layout.json", tmp_path / "inventory.json"
    tables["nodes"] = [{**node, "slots": 2} for node in tables["nodes"]]
    assert laid(tmp_path, tables)[0] == 0
    old, addresses = read_layout(path)
    gone = old.paths[0].hops[1].node
    names = [node for stage in old.stages for node in stage.replicas]

    def planned(*absent: str) -> layout_file.Outcome:
        nodes = [{"name": name, "connected": name not in absent, "nics": []} for name in names]
        status = {"inventory": {"nodes": nodes, "links": []}}
        now = layout_file.present(path)
        assert now is not None and away(status) == frozenset(absent)
        given = layout_file.kept(live_inventory(status, file), path, now)
        return layout_file.write(
            path, given, make_plan(given), now=now, epoch=None, where="status", away=away(status)
        )  # fmt: skip

    without = planned(gone)
    new, told = read_layout(path)
    assert without.written and without.why == f"{gone} is not there" and told == addresses
    assert [set(stage.replicas) for stage in new.stages] == [set(stage.replicas) for stage in old.stages]
    assert not any(hop.node == gone for way in new.paths for hop in way.hops)
    assert not any("stop it" in line and gone in line for line in without.lines())
    assert not any(why_not(new, old, node) for node in names)
    again = planned()
    assert again.written and any(hop.node == gone for way in read_layout(path)[0].paths for hop in way.hops)
    with pytest.raises(CommandError, match="no node is connected"):
        planned(*names)


def test_another_address_is_written_whatever_is_gained(tmp_path: Path) -> None:
    tables = islands()
    assert laid(tmp_path, tables)[0] == 0
    tables["nodes"][0]["address"] = "tcp://10.9.9.9:780{n}"
    told = json.loads(laid(tmp_path, tables, "--json")[1])
    assert told["written"] and told["written_why"].endswith("has another address")
    assert "tcp://10.9.9.9:7800" in read_layout(tmp_path / "layout.json")[1].values()


def test_a_layout_that_is_there_keeps_its_stages_and_gets_other_paths(tmp_path: Path) -> None:
    """The nearest are joined anew; every node that follows the old layout can go over to the new one."""
    tables = islands()
    for name in "ab":  # one island: anybody may serve anybody
        tables["nodes"]["ab".index(name)]["site"] = "A"
    assert laid(tmp_path, tables)[0] == 0
    old, _ = read_layout(tmp_path / "layout.json")
    path = next(path for path in old.paths if path.source == old.stages[0].replicas[0])
    far = [(path.hops[0].node, path.hops[1].node)]
    tables["links"] += [{"between": [*ends], "latency_ms": 50.0} for ends in far]
    tables["nodes"][0]["layer_s"] = 0.008  # the layers would be dealt otherwise
    code, text = laid(tmp_path, tables, "--mode", "C")
    assert code == 0 and "the stages as they were" in text and "[run]" not in text, text
    new, _ = read_layout(tmp_path / "layout.json")
    assert (new.epoch, new.stages) == (2, old.stages)
    assert all((one.hops[0].node, one.hops[1].node) not in far for one in new.paths)
    assert not any(why_not(new, old, node) for stage in old.stages for node in stage.replicas)


def test_new_nodes_stand_outside_and_those_that_are_gone_leave(tmp_path: Path) -> None:
    tables = islands()
    assert laid(tmp_path, tables)[0] == 0
    old, _ = read_layout(tmp_path / "layout.json")
    tables["nodes"].append({"name": "c", "site": "B", "layer_s": 0.001, "max_layers": 4})
    gone = old.stages[1].replicas[0]
    for group in tables["nodes"][:2]:  # by name, without the one that is gone
        tables["nodes"] += [
            {**group, "name": f"{group['name']}-{n}", "count": 1, "address": "", "slots": 2}
            for n in range(3)
            if f"{group['name']}-{n}" != gone
        ]
    del tables["nodes"][:2]
    code, text = laid(tmp_path, tables, "--mode", "C")
    assert code == 0, text
    new, addresses = read_layout(tmp_path / "layout.json")
    assert new.stages[1].replicas == old.stages[1].replicas[1:] and "c" not in addresses
    assert addresses.keys() == {node for stage in new.stages for node in stage.replicas}


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        ({}, ("--stages", "1"), "there is no pipeline and no layout; run it as it is"),
        ({"address": ""}, (), "a-0 has stage 0 and no address"),
        ({"address": "tcp://10.0.0.1:7800"}, (), "address is one for 3 nodes; {n} in it stands for each one's number"),
        ({"address": "10.0.0.1:780{n}"}, (), "did you mean tcp://10.0.0.1:7800?"),
        ({"address": "tcp://10.0.0.2:780{n}"}, (), "a-0 and b-0 have the same address, tcp://10.0.0.2:7800"),
        ({}, ("--epoch", "0"), "--epoch is 0; epochs count from 1, so it is at least 1"),
        ({}, ("--layout", "no/such/folder.json"), "cannot write no/such/folder.json: no such file or directory"),
    ],
)
def test_what_cannot_be_laid_out_is_one_line(
    tmp_path: Path, change: dict[str, Any], words: tuple[str, ...], said: str
) -> None:
    tables = islands()
    tables["nodes"][0] |= change
    if words[:1] == ("--stages",):
        tables["nodes"] = [{**node, "max_layers": 4} for node in tables["nodes"]]
    code, text = laid(tmp_path, tables, *words)
    assert code == ExitCode.USAGE and said in text and len(text.strip().splitlines()) == 1, text
    assert not (tmp_path / "layout.json").exists()


def test_what_a_file_does_not_allow_is_one_line_and_leaves_it_as_it_is(tmp_path: Path) -> None:
    assert laid(tmp_path, islands(), "--epoch", "5")[0] == 0
    file = tmp_path / "layout.json"
    before = file.read_bytes()
    other = {**islands(), "model": {"layers": 5}}
    strangers = islands()
    strangers["nodes"][0]["name"] = strangers["nodes"][1]["name"] = "c"
    strangers["nodes"][1]["count"], strangers["nodes"][1]["name"] = 1, "d"
    for tables, words, said in (
        (islands(), ("--epoch", "5"), "so it is at least 6"),
        (islands(), ("--stages", "2"), "has 3 stages, 2 are asked for; remove"),
        (other, (), "has 4 layers, [model] 5; remove"),
        (strangers, (), "no node of stage 0 is there, of "),
    ):
        code, text = laid(tmp_path, tables, *words)
        assert code == ExitCode.USAGE and said in text and len(text.strip().splitlines()) == 1, text
        assert file.read_bytes() == before
    file.write_text("{}")
    code, text = laid(tmp_path, islands())
    assert code == ExitCode.USAGE and "nothing is written over it" in text and file.read_text() == "{}"


@pytest.mark.parametrize("words", [("--epoch", "2"), ("--force",)])
def test_what_is_said_of_a_file_without_one_is_refused(words: tuple[str, ...]) -> None:
    assert f"{words[0]} goes with --layout FILE" in error_line("plan", "--inventory", "x.toml", *words)


def test_addresses_are_the_nodes_own_words_where_a_coordinator_is_asked() -> None:
    nodes = [{"name": name, "address": f"tcp://10.0.0.{n}:7800", "nics": []} for n, name in enumerate("ab")]
    found = live_inventory({"inventory": {"nodes": nodes, "links": []}}, None)
    assert [node.address for node in found.nodes] == ["tcp://10.0.0.0:7800", "tcp://10.0.0.1:7800"]


def test_what_a_file_says_of_several_nodes_is_true_of_each_that_a_coordinator_has(tmp_path: Path) -> None:
    file = tmp_path / "sites.json"
    file.write_text(json.dumps(islands(stages=2)))
    seen = {"address": "tcp://10.9.9.9:1", "seconds_per_step": 9.0, "nics": []}
    nodes = [{"name": name, **seen} for name in ("a-1", "b-2")]
    found = live_inventory({"inventory": {"nodes": nodes, "links": []}}, file)
    told = [(node.address, node.layer_s, node.max_layers, node.site) for node in found.nodes]
    assert told == [("tcp://10.0.0.1:7801", 0.002, 2, "A"), ("tcp://10.0.0.2:7802", 0.002, 2, "B")]


@st.composite
def inventories(draw: st.DrawFn) -> dict[str, Any]:
    sites = draw(st.integers(1, 3))
    stages = draw(st.integers(2, 4))
    groups = [
        {
            "name": f"n{site}",
            "count": draw(st.integers(1, 4)),
            "site": f"s{site}",
            "layer_s": draw(st.sampled_from([0.01, 0.02, 0.05])),
            "slots": draw(st.integers(1, 3)),
            "address": f"tcp://10.0.{site}.{{n}}:7800",
        }
        for site in range(sites)
    ]
    links = [
        {"between": [f"s{one}", f"s{other}"], "latency_ms": draw(st.floats(0.1, 80.0)), "mbit_s": 300.0}
        for one in range(sites)
        for other in range(one, sites)
    ]
    skip = draw(st.sampled_from([0.0, 0.25, 0.34]))
    plan = {"stages": stages, "skip": skip, "seed": draw(st.integers(0, 9)), "effort": 0.05}
    model = {"layers": draw(st.integers(stages, 9)), "activation_bytes": 1e5, "microbatches": draw(st.integers(1, 3))}
    return {"plan": plan, "model": model, "nodes": groups, "links": links}


@settings(max_examples=40, deadline=None)
@given(inventories())
def test_whatever_is_planned_is_read_back_and_can_be_followed_by_another(tables: dict[str, Any]) -> None:
    """Plan → file → the same layout; planned again over it, every node of it can go over."""
    path = Path(tempfile.mkdtemp()) / "layout.json"
    try:
        inventory = inventory_of(tables, "inventory")
        plan = make_plan(inventory)
    except ValueError:
        assume(False)
    except CommandError:
        assume(False)
    written = layout_file.write(path, inventory, plan, now=None, epoch=None, where="inventory")
    layout, addresses = read_layout(path)
    assert layout == written.layout and not list(layout.faults())
    assert present_step_s(layout, inventory) == pytest.approx(plan.step_s)
    assert {node: addresses[node] for node in addresses} == {
        node.name: node.address for node in inventory.nodes if layout.stage_of(node.name) is not None
    }
    assert len(set(written.run["stages"].split(","))) == len(layout.stages) - 1  # type: ignore[union-attr]
    again = _planned_again(path, inventory)
    assert again.epoch == 2
    assert all(why_not(again, layout, node) == "" for node in addresses)


def _planned_again(path: Path, inventory: Any) -> StageLayout:
    now = layout_file.present(path)
    assert now is not None
    kept = layout_file.kept(inventory, path, now)
    return layout_file.write(path, kept, make_plan(kept), now=now, epoch=None, where="inventory", force=True).layout
