"""`farloop plan --layout`: the file that it writes is the layout that nodes read, and a running pipeline's is kept."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import farloop
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slow_cases import examples

from farloop.config import layout_file
from farloop.config.exit_codes import CommandError, ExitCode
from farloop.config.inventory_file import away, inventory_of, live_inventory
from farloop.pipeline.layout import read_layout, why_not
from farloop.planner.mode import present_step_s
from farloop.planner.plan import make_plan

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


def one_island(far_ms: float) -> dict[str, Any]:
    """Six nodes, any of which may serve any other, so far apart as from A to B."""
    return islands(far_ms, mode="C")


def changed(tables: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**tables, "nodes": [{**node, **fields} for node in tables["nodes"]]}


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return tmp_path / "layout.json"


def laid(layout: Path, tables: dict[str, Any], *words: str) -> str:
    """What the command prints; it must succeed."""
    code, text = tried(layout, tables, *words)
    assert code == 0, text
    return text


def tried(layout: Path, tables: dict[str, Any], *words: str) -> tuple[int, str]:
    file = layout.with_name("inventory.json")
    file.write_text(json.dumps(tables))
    ended = farloop("plan", "--inventory", str(file), "--layout", str(layout), *words)
    return ended.exit_code, ended.output


def told(layout: Path, tables: dict[str, Any], *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(laid(layout, tables, *words, "--json"))
    return found


def swapped(layout: Path) -> str:
    """The layout file, its pipelines' last stages exchanged by hand; what it has then."""
    tables = json.loads(layout.read_text())
    one, other = (path["nodes"] for path in tables["paths"])
    one[2], other[2] = other[2], one[2]
    layout.write_text(json.dumps(tables))
    return layout.read_text()


def test_nodes_read_what_was_planned_and_the_run_is_told_of_it(layout: Path) -> None:
    text = laid(layout, islands())
    planned, addresses = read_layout(layout)
    assert planned.epoch == 1 and addresses["b-2"] == "tcp://10.0.0.2:7802" and len(addresses) == 6
    assert [{hop.node[0] for hop in path.hops} for path in planned.paths] == [{"a"}, {"b"}]
    cut = ",".join(str(stage.first) for stage in planned.stages[1:])
    assert text.endswith(f'[run]\nstages = "{cut}"\nnodes = 2\n')
    again = told(layout, islands(), "--force")
    assert (again["run"], again["epoch"]) == ({"stages": cut, "nodes": 2}, 2)


def test_paths_that_are_nearly_as_good_stay(layout: Path) -> None:
    """Of a step of some 100 ms a millisecond is no reason to have pipelines go over; being asked is one."""
    tables = changed(one_island(0.2), layer_s=0.02)
    laid(layout, tables)
    before = swapped(layout)
    assert "layout.json stays as it is, epoch 1: less than 10 % is gained; --force" in laid(layout, tables)
    kept = told(layout, tables)
    assert (kept["written"], kept["epoch"]) == (False, 1)
    assert 0.9 * kept["present_step_s"] < kept["step_s"] < kept["present_step_s"] and layout.read_text() == before
    for number, words in ((2, ["--force"]), (7, ["--epoch", "7"])):
        new = told(layout, tables, *words)
        assert (new["written"], new["epoch"], new["written_why"]) == (True, number, "it was asked for")
        assert read_layout(layout)[0].epoch == number
    assert "the plan has the same paths" in laid(layout, tables)


def test_paths_that_are_worth_it_are_told_beside_those_that_are_there(layout: Path) -> None:
    laid(layout, one_island(40.0))
    swapped(layout)
    text = laid(layout, one_island(40.0))
    for words in ("epoch 2: the stages as they were", "ms along the paths that it had,", "ms along those planned"):
        assert words in text
    assert {path.source[0] + path.hops[2].node[0] for path in read_layout(layout)[0].paths} == {"aa", "bb"}


def test_paths_of_which_nothing_is_predicted_are_replaced(layout: Path) -> None:
    """No node stays on a link that is not believed for want of a number."""
    tables = one_island(0.2)
    laid(layout, tables)
    one, other = (hop.node for hop in read_layout(layout)[0].paths[0].hops[:2])
    tables["links"].append({"between": [one, other], "latency_ms": 900.0})
    new = told(layout, tables)
    assert new["written"] and new["present_step_s"] is None and "is not believed" in new["written_why"]


def test_another_address_is_written_whatever_is_gained(layout: Path) -> None:
    tables = islands()
    laid(layout, tables)
    tables["nodes"][0]["address"] = "tcp://10.9.9.9:780{n}"
    new = told(layout, tables)
    assert new["written"] and new["written_why"].endswith("has another address")
    assert "tcp://10.9.9.9:7800" in read_layout(layout)[1].values()


def test_a_node_that_is_away_is_planned_without_and_keeps_its_stage(layout: Path) -> None:
    """No microbatch is sent over it, and it can come back: a layout without it would leave it outside for good."""
    laid(layout, changed(one_island(0.2), slots=2))
    old, addresses = read_layout(layout)
    gone = old.paths[0].hops[1].node
    names = [node for stage in old.stages for node in stage.replicas]

    def planned(*absent: str) -> layout_file.Outcome:
        nodes = [{"name": name, "connected": name not in absent, "nics": []} for name in names]
        status = {"inventory": {"nodes": nodes, "links": []}}
        now = layout_file.present(layout)
        assert now is not None and away(status) == frozenset(absent)
        given = layout_file.kept(live_inventory(status, layout.with_name("inventory.json")), layout, now)
        made = make_plan(given)
        return layout_file.write(layout, given, made, now=now, epoch=None, where="status", away=away(status))

    without = planned(gone)
    new, kept = read_layout(layout)
    assert without.written and without.why == f"{gone} is not there" and kept == addresses
    assert [set(stage.replicas) for stage in new.stages] == [set(stage.replicas) for stage in old.stages]
    assert not any(hop.node == gone for way in new.paths for hop in way.hops)
    assert not any("stop it" in line and gone in line for line in without.lines())
    assert not any(why_not(new, old, node) for node in names)
    assert planned().written and any(hop.node == gone for way in read_layout(layout)[0].paths for hop in way.hops)
    with pytest.raises(CommandError, match="no node is connected"):
        planned(*names)


def test_a_layout_that_is_there_keeps_its_stages_and_gets_other_paths(layout: Path) -> None:
    """The nearest are joined anew; every node that follows the old layout can go over to the new one."""
    tables = changed(islands(), site="A")
    laid(layout, tables)
    old, _ = read_layout(layout)
    path = next(path for path in old.paths if path.source == old.stages[0].replicas[0])
    far = (path.hops[0].node, path.hops[1].node)
    tables["links"].append({"between": [*far], "latency_ms": 50.0})
    tables["nodes"][0]["layer_s"] = 0.008  # the layers would be dealt otherwise
    text = laid(layout, tables, "--mode", "C")
    assert "the stages as they were" in text and "[run]" not in text, text
    new, _ = read_layout(layout)
    assert (new.epoch, new.stages) == (2, old.stages)
    assert all((one.hops[0].node, one.hops[1].node) != far for one in new.paths)
    assert not any(why_not(new, old, node) for stage in old.stages for node in stage.replicas)


def test_new_nodes_stand_outside_and_those_that_are_gone_leave(layout: Path) -> None:
    tables = islands()
    laid(layout, tables)
    old, _ = read_layout(layout)
    gone = old.stages[1].replicas[0]
    named = [
        {**group, "name": f"{group['name']}-{n}", "count": 1, "address": "", "slots": 2}
        for group in tables["nodes"]
        for n in range(3)
    ]
    new_node = {"name": "c", "site": "B", "layer_s": 0.001, "max_layers": 4}
    tables["nodes"] = [new_node, *(node for node in named if node["name"] != gone)]
    laid(layout, tables, "--mode", "C")
    new, addresses = read_layout(layout)
    assert new.stages[1].replicas == old.stages[1].replicas[1:] and "c" not in addresses
    assert addresses.keys() == {node for stage in new.stages for node in stage.replicas}


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        ({"max_layers": 4}, "--stages 1", "there is no pipeline and no layout; run it as it is"),
        ({"address": ""}, "", "a-0 has stage 0 and no address"),
        (
            {"address": "tcp://10.0.0.1:7800"},
            "",
            "address is one for 3 nodes; {n} in it stands for the number of each node",
        ),
        ({"address": "10.0.0.1:780{n}"}, "", "did you mean tcp://10.0.0.1:7800?"),
        ({"address": "tcp://10.0.0.2:780{n}"}, "", "a-0 and b-0 have the same address, tcp://10.0.0.2:7800"),
        ({}, "--epoch 0", "--epoch is 0; epochs count from 1, so it is at least 1"),
        ({}, "--layout no/such/folder.json", "cannot write no/such/folder.json: no such file or directory"),
    ],
)
def test_what_cannot_be_laid_out_is_one_line(layout: Path, change: dict[str, Any], words: str, said: str) -> None:
    tables = changed(islands(), **change)
    if "10.0.0.2" not in change.get("address", ""):
        tables["nodes"][1] |= {"address": "tcp://10.0.0.2:780{n}"}
    code, text = tried(layout, tables, *words.split())
    assert code == ExitCode.USAGE and said in text and len(text.strip().splitlines()) == 1, text
    assert not layout.exists()


def test_what_a_file_does_not_allow_is_one_line_and_leaves_it_as_it_is(layout: Path) -> None:
    laid(layout, islands(), "--epoch", "5")
    before = layout.read_bytes()
    other, strangers = {**islands(), "model": {"layers": 5}}, islands()
    strangers["nodes"][0]["name"], strangers["nodes"][1]["name"] = "c", "d"
    strangers["nodes"][1]["count"] = 1
    for tables, words, said in (
        (islands(), "--epoch 5", "so it is at least 6"),
        (islands(), "--stages 2", "has 3 stages, 2 are asked for; remove"),
        (other, "", "has 4 layers, [model] 5; remove"),
        (strangers, "", "no node of stage 0 is there, of "),
    ):
        code, text = tried(layout, tables, *words.split())
        assert code == ExitCode.USAGE and said in text and len(text.strip().splitlines()) == 1, text
        assert layout.read_bytes() == before
    layout.write_text("{}")
    code, text = tried(layout, islands())
    assert code == ExitCode.USAGE and "nothing is written over it" in text and layout.read_text() == "{}"


def test_a_file_names_each_node_of_a_coordinator_and_addresses_are_the_nodes_own_otherwise(
    tmp_path: Path,
) -> None:
    file = tmp_path / "sites.json"
    file.write_text(json.dumps(islands(stages=2)))
    nodes = [
        {"name": name, "address": "tcp://10.9.9.9:1", "seconds_per_step": 9.0, "nics": []} for name in ("a-1", "b-2")
    ]
    seen = {"inventory": {"nodes": nodes, "links": []}}
    assert {node.address for node in live_inventory(seen, None).nodes} == {"tcp://10.9.9.9:1"}
    found = [(node.address, node.layer_s, node.max_layers, node.site) for node in live_inventory(seen, file).nodes]
    assert found == [("tcp://10.0.0.1:7801", 0.002, 2, "A"), ("tcp://10.0.0.2:7802", 0.002, 2, "B")]


@st.composite
def inventories(draw: st.DrawFn) -> dict[str, Any]:
    sites, stages = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    nodes = [
        {
            "name": f"n{site}", "count": draw(st.integers(1, 4)), "site": f"s{site}", "slots": draw(st.integers(1, 3)),
            "layer_s": draw(st.sampled_from([0.01, 0.02, 0.05])), "address": f"tcp://10.0.{site}.{{n}}:7800",
        }
        for site in range(sites)
    ]  # fmt: skip
    links = [
        {"between": [f"s{one}", f"s{other}"], "latency_ms": draw(st.floats(0.1, 80.0)), "mbit_s": 300.0}
        for one in range(sites)
        for other in range(one, sites)
    ]
    skip, seed = draw(st.sampled_from([0.0, 0.25, 0.34])), draw(st.integers(0, 9))
    model = {"layers": draw(st.integers(stages, 9)), "activation_bytes": 1e5, "microbatches": draw(st.integers(1, 3))}
    plan = {"stages": stages, "skip": skip, "seed": seed, "effort": 0.05}
    return {"plan": plan, "model": model, "nodes": nodes, "links": links}


@settings(max_examples=examples(15))
@given(inventories())
def test_whatever_is_planned_is_read_back_and_can_be_followed_by_another(
    tmp_path_factory: pytest.TempPathFactory, tables: dict[str, Any]
) -> None:
    """Plan → file → the same layout; planned again over it, every node of it can go over."""
    path = tmp_path_factory.mktemp("planned") / "layout.json"
    try:
        inventory = inventory_of(tables, "inventory")
        plan = make_plan(inventory)
    except (ValueError, CommandError):
        assume(False)
    written = layout_file.write(path, inventory, plan, now=None, epoch=None, where="inventory")
    layout, addresses = read_layout(path)
    assert layout == written.layout and not list(layout.faults())
    assert present_step_s(layout, inventory) == pytest.approx(plan.step_s)
    assert addresses == {node.name: node.address for node in inventory.nodes if layout.stage_of(node.name) is not None}
    assert len(set(written.run["stages"].split(","))) == len(layout.stages) - 1  # type: ignore[union-attr]
    now = layout_file.present(path)
    assert now is not None
    kept = layout_file.kept(inventory, path, now)
    try:
        plan = make_plan(kept)
    except ValueError:  # the search for paths over stages that are given is a heuristic, and can find none
        return
    again = layout_file.write(path, kept, plan, now=now, epoch=None, where="inventory", force=True).layout
    assert again.epoch == 2 and all(why_not(again, layout, node) == "" for node in addresses)
