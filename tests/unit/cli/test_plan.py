"""`farloop plan`: files as TOML and JSON, a coordinator's status, what it prints, draws and refuses."""

import io
import json
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from command_line import error_line, farloop, found
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from farloop.algo.schedule import steps_by_share
from farloop.cli.plan import plan_json, show
from farloop.config.inventory_file import inventory_of, live_inventory, load_inventory
from farloop.config.sources import ConfigError
from farloop.coordinator.routing.plan import make_plan
from farloop.coordinator.routing.sync_plan import CODEC_OF, NotInPlace, Rate, settings, share_text
from farloop.plots.planner import draw

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/plans"


def run(*words: str) -> tuple[int, str]:
    ended = farloop("plan", *words, columns=120)
    return ended.exit_code, ended.output


def planned(*words: str) -> Any:
    return found("plan", *words)


@pytest.mark.parametrize("name", ["two-islands", "four-sites", "twelve-sites"])
def test_the_examples_are_planned_in_words(name: str) -> None:
    code, text = run("--inventory", str(EXAMPLES / f"{name}.toml"))
    assert code == 0 and " step " in text and "instead" in text


def test_json_has_what_a_comparison_needs() -> None:
    made = planned("--inventory", str(EXAMPLES / "twelve-sites.toml"))
    assert made["mode"] == "C" and made["plan_s"] > 0.0 and made["makespan_s"] > 0.0
    assert [path["source"] for path in made["paths"]] == [path["nodes"][0] for path in made["paths"]]
    assert all(len(path["nodes"]) == len(path["stages"]) == 4 for path in made["paths"])
    assert sorted(node for group in made["groups"] for node in group["nodes"]) == sorted(
        node for stage in made["stages"] for node in stage["nodes"]
    )
    assert [stage["layers"] for stage in made["stages"]] == [[4 * s, 4 * s + 4] for s in range(6)]
    assert ["nl", "london"] in made["suspects"]
    factors = {one["name"]: one["factor"] for one in made["alternatives"]}
    assert factors["full pipelines, nothing skipped"] > 1.5 and factors["paths dealt at random"] > 1.5


def test_the_mode_turns_at_h_star() -> None:
    file = str(EXAMPLES / "two-islands.toml")
    assert planned("--inventory", file)["h_star"] == pytest.approx(3.82, abs=0.005)
    assert [planned("--inventory", file, "--h", h)["mode"] for h in ("1", "3", "4", "50")] == ["B", "B", "A", "A"]


def test_the_same_file_as_json(tmp_path: Path) -> None:
    tables = tomllib.loads((EXAMPLES / "four-sites.toml").read_text())
    twin = tmp_path / "four-sites.json"
    twin.write_text(json.dumps(tables))
    assert load_inventory(twin) == load_inventory(EXAMPLES / "four-sites.toml")


def test_a_matrix_of_published_delays(tmp_path: Path) -> None:
    """Two sources and two more nodes: seconds of a message in place of links."""
    tables = {
        "plan": {"stages": 2, "skip": 0.0, "mode": "C"},
        "model": {"layers": 2},
        "nodes": [
            {"name": name, "layer_s": 1.0, "stage": stage} for name, stage in zip("abcd", (0, 0, 1, 1), strict=True)
        ],
        "delay_s": [[0, 9, 5, 1], [9, 0, 1, 5], [5, 1, 0, 9], [1, 5, 9, 0]],
    }
    file = tmp_path / "delays.json"
    file.write_text(json.dumps(tables))
    made = planned("--inventory", str(file))
    assert sorted(path["nodes"] for path in made["paths"]) == [["a", "d"], ["b", "c"]]
    assert made["makespan_s"] == 2 * 2.5 + 0.25 + 4.0


@pytest.mark.parametrize("suffix", [".svg", ".png"])
@pytest.mark.parametrize("name", ["two-islands", "four-sites", "twelve-sites"])
def test_a_plan_is_drawn(tmp_path: Path, name: str, suffix: str) -> None:
    file = tmp_path / f"plan{suffix}"
    code, text = run("--inventory", str(EXAMPLES / f"{name}.toml"), "--plot", str(file))
    assert code == 0 and "figure" in text and file.stat().st_size > 5000
    if suffix == ".svg":
        words = file.read_text()
        assert "stage 0" in words or "coordinator" in words


SMALL: dict[str, Any] = {
    "model": {"layers": 4},
    "nodes": [{"name": "a", "count": 2, "layer_s": 0.1}],
    "links": [{"between": ["a", "a"], "latency_ms": 1.0}],
}


def changed(**more: Any) -> dict[str, Any]:
    return {**SMALL, **more}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"nodes": []}, "model is missing"),
        (changed(nodes=[]), "nodes is empty; the least is 1"),
        (changed(model={"layer": 4}), "model"),
        (changed(nodes=[{"name": "a", "layers": 1}]), r"nodes\[0\]: there is no key 'layers'; did you mean layer_s"),
        (changed(modl={}), "there is no key 'modl'; did you mean model?"),
        (changed(model={"layers": "four"}), "model.layers: a whole number is wanted, not 'four'"),
        (changed(model={"layers": 0}), "layers is 0; the least is 1"),
        (changed(plan={"skip": 1.0}), "skip is 1.0; from 0 to below 1, as 0.25"),
        (changed(plan={"stages": 9}), "stages is 9; the model has 4 layers, so at most that many"),
        (changed(plan={"stages": 3}), "stages is 3; there are 2 nodes, so at most that many"),
        (changed(plan={"mode": "D"}), "plan.mode: there is no 'D'; there are A, B, C"),
        (changed(nodes=[{"name": "a", "nics": [{"kind": "infinband"}]}]), "did you mean infiniband?"),
        (changed(nodes=[{"name": "a"}, {"name": "a"}]), "the name 'a' stands twice"),
        (changed(nodes=[{"name": "a", "stage": 1}, {"name": "b", "stage": 1}]), "stage 0 has no node"),
        (changed(nodes=[{"name": "a", "stage": 0}, {"name": "b"}]), "for all nodes or for none"),
        (changed(nodes=[{"name": "a", "slots": 0}]), r"nodes\[0\]: slots of a is 0; the least is 1"),
        (changed(nodes=[{"name": "a", "layer_s": float("nan")}]), "seconds of at least 0 are wanted"),
        (changed(nodes=[{"name": "a", "memory_bytes": 1e9}]), r"\[model\] layer_bytes has to say"),
        (changed(nodes=[{"name": "coordinator"}]), "any other text"),
        (changed(links=[{"between": ["a", "a"]}]), "one of latency_ms and latency_s is wanted"),
        (changed(links=[{"between": ["a"], "latency_s": 1.0}]), "two are wanted"),
        (changed(links=[{"from": "a", "latency_s": 1.0}]), "or from and to for one"),
        (changed(links=[{"between": ["a", "a"], "latency_s": -1.0}]), r"links\[0\]: latency is -1.0 s"),
        (changed(links=[{"between": ["a", "a"], "latency_s": 1.0, "mbit_s": 0.0}]), "mbit_s is 0.0; a number above 0"),
        (
            changed(links=[{"between": ["a", "a"], "latency_s": 1.0, "mbit_s": 1.0, "gbit_s": 1.0}]),
            "mbit_s and gbit_s are both given",
        ),
        (
            changed(nodes=[{"name": "berlin"}], links=[{"between": ["berlin", "berlim"], "latency_s": 1.0}]),
            "no site 'berlim'; did you mean berlin?",
        ),
        (changed(links=[], delay_s=[[0.0]]), "delay_s has 1 rows; there are 2 nodes"),
    ],
)
def test_bad_files_are_one_clear_line(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        inventory_of(tables, "plan.toml")
    assert str(refused.value).startswith("plan.toml: ") and "\n" not in str(refused.value)


def test_links_of_sites_without_nodes_are_left_out() -> None:
    made = inventory_of(changed(links=[{"between": ["a", "tokyo"], "latency_s": 1.0}]), "plan.toml")
    assert made.links == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--inventory FILE or --live URL is wanted"),
        (("--inventory", "no-such.toml"), "cannot be read"),
        (("--inventory", str(EXAMPLES / "two-islands.toml"), "--plot", "plan.gif"), "--plot is a file named"),
        (("--inventory", str(EXAMPLES / "twelve-sites.toml"), "--skip", "0.9"), "the most that can be planned is 0.67"),
        (("--inventory", str(EXAMPLES / "two-islands.toml"), "--mode", "X"), "there is no 'X'"),
    ],
)
def test_bad_words_end_in_one_line(words: tuple[str, ...], said: str) -> None:
    assert said in error_line("plan", *words)


# --- a running coordinator

SEEN: dict[str, Any] = {
    "run": {"method": "diloco", "codec_up": "q8", "codec_down": "q8", "h": 200, "parameters": 100_000_000},
    "nodes": [],
    "inventory": {
        "nodes": [
            {
                "name": name, "site": site, "reachable": name == "a", "seconds_per_step": 0.55,
                "nics": [{"kind": "ethernet", "bytes_per_s": 125e6, "active": True, "usable": True,
                          "provenance": "sysfs"}],
            }
            for name, site in (("a", "berlin"), ("b", "berlin"), ("c", ""))
        ],
        "links": [
            {"from": source, "to": target, "rtt_s": 0.04, "bytes_per_s": rate, "provenance": "transfer",
             "age_s": 3.0, "suspect": False}
            for name, rate in (("a", 25e6), ("b", 25e6), ("c", 2e6))
            for source, target in ((name, "coordinator"), ("coordinator", name))
        ],
    },
}  # fmt: skip


def test_a_coordinator_tells_nodes_and_links() -> None:
    made = live_inventory(SEEN, None)
    assert [(node.name, node.site, node.reachable) for node in made.nodes] == [
        ("a", "berlin", True), ("b", "berlin", False), ("c", "c", False)
    ]  # fmt: skip
    link = made.uplink(made.nodes[2])
    assert link is not None and (link.latency_s, link.bytes_per_s, link.provenance) == (0.02, 2e6, "transfer")
    assert made.nodes[0].layer_s * (2.5 + 0.25) == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[model]\nlayers = "4"', "model.layers: a whole number is wanted, not '4'"),
        ('[model]\nlayers = 4\nbackward = "x"', "model.backward: a number is wanted, not 'x'"),
        ("[model]\nlayers = 4\nmicrobatches = 0", "microbatches is 0"),
        ("nodes = 3\n[model]\nlayers = 4", "nodes: a list is wanted, not 3"),
        ("links = 3\n[model]\nlayers = 4", "links: a list is wanted, not 3"),
        ("plan = 3\n[model]\nlayers = 4", "plan: a table is wanted, not 3"),
        ("model = 3", "model: a table is wanted, not 3"),
        ('[model]\nlayers = 4\n[[nodes]]\nname = "a"\ncount = "2"', "nodes[0].count: a whole number is wanted"),
        ('[model]\nlayers = 4\n[[nodes]]\nname = "a"\ncount = 0', "nodes[0]: count is 0; the least is 1"),
    ],
)
def test_a_bad_file_beside_a_running_coordinator_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "model.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        live_inventory(SEEN, file)
    assert said in str(caught.value) and "\n" not in str(caught.value), caught.value


def test_doubted_and_unmeasured_links_are_left_out() -> None:
    links = [{**link, "suspect": link["from"] == "a", "rtt_s": None if link["to"] == "b" else link["rtt_s"]}
             for link in SEEN["inventory"]["links"]]  # fmt: skip
    made = live_inventory({"inventory": {**SEEN["inventory"], "links": links}}, None)
    assert made.uplink(made.nodes[0]) is None and made.downlink(made.nodes[1]) is None
    assert made.downlink(made.nodes[0]) is not None


def test_stages_that_only_greet_each_other_are_as_fast_as_the_slower_of_their_ends() -> None:
    """With the coordinator, where that was measured; else the least that an end has with any other node."""
    told = [
        ("a", "coordinator", 25e6, 0.04), ("coordinator", "b", 5e6, 0.04), ("a", "b", None, 0.1),
        ("b", "a", None, 0.1), ("a", "c", 3e6, 0.01), ("b", "c", 9e6, 0.02), ("c", "coordinator", None, 0.04),
    ]  # fmt: skip
    links = [{"from": u, "to": v, "bytes_per_s": rate, "rtt_s": rtt, "suspect": False} for u, v, rate, rtt in told]
    made = live_inventory({"inventory": {**SEEN["inventory"], "links": links}}, None)
    assert {ends: link.bytes_per_s for ends, link in made.links.items()} == {
        ("a", "coordinator"): 25e6, ("coordinator", "b"): 5e6, ("a", "b"): 5e6, ("a", "c"): 3e6, ("b", "c"): 9e6
    }  # fmt: skip
    assert (made.links["a", "b"].provenance, made.links["a", "b"].latency_s) == ("assumed", 0.05)
    assert made.links["a", "c"].provenance == "probe"
    notes = make_plan(made).notes
    assert any("1 links have a measured round trip and no rate" in note for note in notes)


def test_links_inside_a_site_that_are_known_but_for_their_rate_are_not_called_unknown() -> None:
    nodes = [{**node, "site": "here"} for node in SEEN["inventory"]["nodes"][:2]]
    links = [
        {"from": u, "to": v, "bytes_per_s": rate, "rtt_s": 0.002, "suspect": False}
        for u, v, rate in (
            ("a", "b", None), ("b", "a", None), ("a", "coordinator", 1e6), ("coordinator", "a", 1e6),
            ("b", "coordinator", 1e6), ("coordinator", "b", 1e6),
        )
    ]  # fmt: skip
    made = live_inventory({"inventory": {"nodes": nodes, "links": links}}, None)
    notes = make_plan(made).notes
    assert any("measured round trip and no rate" in note for note in notes)
    assert not any("nothing is given for links inside" in note for note in notes), notes


def test_of_a_sync_without_any_links_nothing_is_predicted(tmp_path: Path) -> None:
    """As a coordinator sees a young run: there is no number to show, and none may be made up."""
    seen = live_inventory({"inventory": {**SEEN["inventory"], "links": []}, "run": SEEN["run"]}, None)
    plan = make_plan(seen)
    assert (plan.sync_s, plan.round_s, plan.streamed_round_s, plan.compute_share) == (None, None, None, None)
    assert plan.notes[0].endswith("the sync is not predicted, bits and H are left as they are")
    made = plan_json(seen, plan, 0.0)
    assert made["sync_s"] is None and made["step_s"] == pytest.approx(0.55)
    console = Console(file=io.StringIO(), width=120, record=True)
    show(console, seen, plan, 0.0)
    assert " h " not in console.export_text().partition("H*")[2].partition("links")[0]
    draw(tmp_path / "plan.svg", seen, plan)


def test_whose_link_to_the_coordinator_is_not_known_is_told(tmp_path: Path) -> None:
    """One that is not measured keeps bits and H of all as they are: a person wants to know which."""
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"model": {"layers": 1, "parameters": 1e6}}))

    def note(links: list[dict[str, Any]], parameters: float = 1e6) -> str:
        file.write_text(json.dumps({"model": {"layers": 1, "parameters": parameters}}))
        plan = make_plan(live_inventory({"inventory": {**SEEN["inventory"], "links": links}}, file))
        return next((note for note in plan.notes if "bits and H are left as they are" in note), "")

    ends = [(name, "coordinator") for name in "abc"] + [("coordinator", name) for name in "abc"]
    links = [{"from": u, "to": v, "bytes_per_s": 1e6, "rtt_s": 0.01, "suspect": False} for u, v in ends]
    assert note(links) == ""
    assert note(links[:-1]).startswith("not known in both directions is the coordinator's link to c: the sync")
    assert note([]).startswith("links to the coordinator are not given:")
    assert note(links, 0.0).startswith("the size of the parameters is not given:")


@pytest.fixture
def coordinator() -> Iterator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(SEEN).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_running_coordinator_is_planned_for(coordinator: str, tmp_path: Path) -> None:
    file = tmp_path / "model.toml"
    file.write_text("[model]\nlayers = 8\nparameters = 25e6\n[plan]\nh = 200\n")
    made = planned("--live", coordinator, "--inventory", str(file))
    assert made["mode"] == "A" and set(made["rates"]) == {"a", "b", "c"}
    assert made["rates"]["a"]["bits"] >= made["rates"]["c"]["bits"]
    assert made["topologies"][0]["name"] == "star"


def test_the_line_that_puts_the_rates_in_place_stands_at_the_end(coordinator: str) -> None:
    """What the file does not say of model, H and bits is the run's."""
    code, text = run("--live", coordinator)
    made = planned("--live", coordinator)
    assert code == 0 and made["h"] == 200 and made["rates"]["a"] == {"bits": 8, "h": 200}
    rate = made["rates"]["c"]
    assert rate["bits"] < 8 and rate["h"] < 200
    assert made["set"] == {"codec_up_of.c": CODEC_OF[rate["bits"]], "h_share_of.c": share_text(rate["h"], 200)}
    assert text.rstrip().endswith(f"farloop set {' '.join(f'{key}={value}' for key, value in made['set'].items())}")


def test_without_a_running_coordinator_nothing_is_set() -> None:
    assert planned("--inventory", str(EXAMPLES / "four-sites.toml"))["set"] == {}


RUN = {"method": "streaming", "codec_up": "q4", "h": 50}
BOTH = {"codec_up_of.b": "q4r", "h_share_of.b": "0.86"}


@pytest.mark.parametrize(
    ("own", "rates", "h", "told"),
    [
        ({}, {"a": (4, 50), "b": (4, 50)}, 50, {}),
        ({}, {"a": (4, 50), "b": (2, 43)}, 50, BOTH),
        ({}, {"a": (8, 60), "b": (8, 20)}, 60, {"codec_up": "q8", "h": "60", "h_share_of.b": "0.34"}),
        ({"codec_up": "nf4"}, {"a": (4, 50)}, 50, {}),
        ({"codec_up_of": {"b": "q4r:step=0.7"}, "h_share_of": {"b": 0.86}}, {"a": (4, 50), "b": (2, 43)}, 50, {}),
        (
            {"codec_up_of": {"a": "q4r"}, "h_share_of": {"a": 0.86}},
            {"a": (4, 50), "b": (4, 57)},
            50,
            {"codec_up_of.a": "none", "h_share_of.a": "none"},
        ),
    ],
)
def test_only_what_would_change_is_set(
    own: dict[str, Any], rates: dict[str, tuple[int, int]], h: int, told: dict[str, str]
) -> None:
    """A node that could do more than all steps does all of them."""
    chosen = {node: Rate(bits=bits, h=steps, round_s=1.0) for node, (bits, steps) in rates.items()}
    assert settings({**RUN, **own}, chosen, h) == told


@pytest.mark.parametrize(
    ("own", "bits", "words"),
    [
        ({"codec_up": "topk"}, 8, "the run sends by topk, whose bits no plan chooses: take fp32, bf16, q8, q4 or q4r"),
        ({"method": "data-parallel"}, 8, "data-parallel runs with fp32"),
        ({}, 3, "there is no codec of 3 bits"),
    ],
)
def test_rates_that_no_run_can_have_are_said(own: dict[str, Any], bits: int, words: str) -> None:
    with pytest.raises(NotInPlace, match=words):
        settings({**RUN, **own}, {"a": Rate(bits=bits, h=50, round_s=1.0)}, 50)


@given(h=st.integers(2, 1000), data=st.data())
def test_a_share_gives_the_steps_that_were_planned(h: int, data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, h - 1))
    text = share_text(steps, h)
    assert steps_by_share(h, float(text)) == steps and len(text) <= 2 + len(str(h))


def test_a_coordinator_without_an_inventory_is_said() -> None:
    with pytest.raises(Exception, match="tells no inventory in its status; give one with --inventory"):
        live_inventory({"run": {}, "nodes": []}, None)
