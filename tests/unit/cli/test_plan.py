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
from command_line import farloop, found
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from farloop.algo.schedule import steps_by_share
from farloop.cli.plan import plan_json, show
from farloop.config.exit_codes import CommandError
from farloop.config.inventory_file import inventory_of, live_inventory, load_inventory
from farloop.config.sources import ConfigError
from farloop.planner.plan import make_plan
from farloop.planner.sync_plan import BITS_OF, CODEC_OF, NotInPlace, Rate, settings, share_text
from farloop.plots.plan import draw
from farloop.quant.registry import CODECS

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/plans"


def planned(*words: str) -> Any:
    return found("plan", *words)


@pytest.mark.parametrize("name", ["two-islands", "four-sites", "twelve-sites"])
def test_the_examples_are_planned_in_words_and_drawn(tmp_path: Path, name: str) -> None:
    for suffix in (".svg", ".png"):
        file = tmp_path / f"plan{suffix}"
        ended = farloop("plan", "--inventory", str(EXAMPLES / f"{name}.toml"), "--plot", str(file), columns=120)
        assert ended.exit_code == 0 and file.stat().st_size > 5000
        assert all(words in ended.output for words in (" step ", "figure"))
        assert ("instead" in ended.output) == (name != "four-sites"), "which has one stage, and one way to sync"
    assert any(words in (tmp_path / "plan.svg").read_text() for words in ("stage 0", "coordinator"))


def test_json_has_what_a_comparison_needs() -> None:
    made = planned("--inventory", str(EXAMPLES / "twelve-sites.toml"))
    assert made["mode"] == "C" and made["plan_s"] > 0.0 and made["makespan_s"] > 0.0 and made["set"] == {}
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


def test_json_and_a_matrix_of_published_delays_are_read_too(tmp_path: Path) -> None:
    """Two sources and two more nodes: seconds of a message in place of links."""
    twin, delays = tmp_path / "four-sites.json", tmp_path / "delays.json"
    twin.write_text(json.dumps(tomllib.loads((EXAMPLES / "four-sites.toml").read_text())))
    assert load_inventory(twin) == load_inventory(EXAMPLES / "four-sites.toml")
    nodes = [{"name": name, "layer_s": 1.0, "stage": stage} for name, stage in zip("abcd", (0, 0, 1, 1), strict=True)]
    tables = {"plan": {"stages": 2, "skip": 0.0, "mode": "C"}, "model": {"layers": 2}, "nodes": nodes}
    delays.write_text(json.dumps({**tables, "delay_s": [[0, 9, 5, 1], [9, 0, 1, 5], [5, 1, 0, 9], [1, 5, 9, 0]]}))
    made = planned("--inventory", str(delays))
    assert sorted(path["nodes"] for path in made["paths"]) == [["a", "d"], ["b", "c"]]
    assert made["makespan_s"] == 2 * 2.5 + 0.25 + 4.0


SMALL: dict[str, Any] = {
    "model": {"layers": 4},
    "nodes": [{"name": "a", "count": 2, "layer_s": 0.1}],
    "links": [{"between": ["a", "a"], "latency_ms": 1.0}],
}


def test_links_of_sites_without_nodes_are_left_out() -> None:
    assert inventory_of({**SMALL, "links": [{"between": ["a", "tokyo"], "latency_s": 1.0}]}, "plan.toml").links == {}


# --- a running coordinator

RUN = {"method": "diloco", "codec_up": "q8", "codec_down": "q8", "h": 200, "parameters": 100_000_000}
NIC = {"kind": "ethernet", "bytes_per_s": 125e6, "active": True, "usable": True, "provenance": "sysfs"}
NODES = [
    {"name": name, "site": site, "seconds_per_step": 0.55, "nics": [NIC]}
    for name, site in (("a", "berlin"), ("b", "berlin"), ("c", ""))
]


def link(source: str, target: str, rate: float | None, rtt_s: float | None = 0.04, **more: Any) -> dict[str, Any]:
    known = {"from": source, "to": target, "bytes_per_s": rate, "rtt_s": rtt_s, "suspect": False}
    return {**known, "provenance": "transfer", "age_s": 3.0, **more}


STAR = [
    link(*ends, rate)
    for name, rate in (("a", 25e6), ("b", 25e6), ("c", 2e6))
    for ends in ((name, "coordinator"), ("coordinator", name))
]


def seen(links: list[dict[str, Any]] = STAR, nodes: list[dict[str, Any]] = NODES) -> dict[str, Any]:
    return {"run": RUN, "nodes": [], "inventory": {"nodes": nodes, "links": links}}


def test_a_coordinator_tells_nodes_and_links() -> None:
    made = live_inventory(seen(), None)
    assert [(node.name, node.site) for node in made.nodes] == [("a", "berlin"), ("b", "berlin"), ("c", "c")]
    up = made.uplink(made.nodes[2])
    assert up is not None and (up.latency_s, up.bytes_per_s, up.assumed) == (0.02, 2e6, False)
    assert made.nodes[0].layer_s * (2.5 + 0.25) == pytest.approx(0.55)
    with pytest.raises(CommandError, match="the status of this coordinator has no inventory; plan with --inventory"):
        live_inventory({"run": {}, "nodes": []}, None)


def test_before_any_node_has_joined_there_is_nothing_to_plan_with_a_file_or_without(tmp_path: Path) -> None:
    file = tmp_path / "model.toml"
    file.write_text("[model]\nlayers = 4")
    for path in (None, file):
        with pytest.raises(CommandError, match="no node has joined this coordinator yet, so there is nothing to plan"):
            live_inventory(seen(links=[], nodes=[]), path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[model]\nlayers = 4\nbackward = "x"', "model.backward: expected a number, got 'x'"),
        ("[model]\nlayers = 4\nmicrobatches = 0", "model.microbatches: expected 1 to 10000, got 0"),
        ("nodes = 3\n[model]\nlayers = 4", "nodes: expected a list, got 3"),
        ("plan = 3\n[model]\nlayers = 4", "plan: expected a table, got 3"),
    ],
)
def test_a_bad_file_beside_a_running_coordinator_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "model.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        live_inventory(seen(), file)
    assert said in str(caught.value) and "\n" not in str(caught.value), caught.value


def test_doubted_and_unmeasured_links_are_left_out() -> None:
    links = [
        {**one, "suspect": one["from"] == "a", "rtt_s": None if one["to"] == "b" else one["rtt_s"]} for one in STAR
    ]
    made = live_inventory(seen(links), None)
    assert made.uplink(made.nodes[0]) is None and made.downlink(made.nodes[1]) is None
    assert made.downlink(made.nodes[0]) is not None


def test_stages_that_only_greet_each_other_are_as_fast_as_the_slower_of_their_ends() -> None:
    """With the coordinator, where that was measured; else the least that an end has with any other node."""
    told: list[tuple[str, str, float | None, float]] = [
        ("a", "coordinator", 25e6, 0.04), ("coordinator", "b", 5e6, 0.04), ("a", "b", None, 0.1),
        ("b", "a", None, 0.1), ("a", "c", 3e6, 0.01), ("b", "c", 9e6, 0.02), ("c", "coordinator", None, 0.04),
    ]  # fmt: skip
    made = live_inventory(seen([link(*one) for one in told]), None)
    assert {ends: link.bytes_per_s for ends, link in made.links.items()} == {
        ("a", "coordinator"): 25e6, ("coordinator", "b"): 5e6, ("a", "b"): 5e6, ("a", "c"): 3e6, ("b", "c"): 9e6
    }  # fmt: skip
    assert (made.links["a", "b"].assumed, made.links["a", "b"].latency_s) == (True, 0.05)
    assert any("1 links have a measured round trip and no rate" in note for note in make_plan(made).notes)


def test_links_inside_a_site_that_are_known_but_for_their_rate_are_not_called_unknown() -> None:
    ends = [(u, v) for u in "ab" for v in ("coordinator",)] + [("coordinator", v) for v in "ab"]
    links = [link("a", "b", None, 0.002), link("b", "a", None, 0.002), *(link(*pair, 1e6, 0.002) for pair in ends)]
    notes = make_plan(live_inventory(seen(links, [{**node, "site": "here"} for node in NODES[:2]]), None)).notes
    assert any("measured round trip and no rate" in note for note in notes)
    assert not any("nothing is given for links inside" in note for note in notes), notes


def test_of_a_sync_without_any_links_nothing_is_predicted(tmp_path: Path) -> None:
    """As a coordinator sees a young run: there is no number to show, and none may be made up."""
    inventory = live_inventory(seen([]), None)
    plan = make_plan(inventory)
    assert (plan.sync_s, plan.round_s, plan.streamed_round_s, plan.compute_share) == (None, None, None, None)
    assert plan.notes[0].endswith("the sync is not predicted, bits and H are left as they are")
    made = plan_json(inventory, plan, 0.0)
    assert made["sync_s"] is None and made["step_s"] == pytest.approx(0.55)
    console = Console(file=io.StringIO(), width=120, record=True)
    show(console, inventory, plan, 0.0)
    assert " h " not in console.export_text().partition("H*")[2].partition("links")[0]
    draw(tmp_path / "plan.svg", inventory, plan)


def test_whose_link_to_the_coordinator_is_not_known_is_told(tmp_path: Path) -> None:
    """One that is not measured keeps bits and H of all as they are: a person wants to know which."""
    file = tmp_path / "model.json"
    for links, parameters, said in (
        (STAR, 1e6, ""),
        (STAR[:-1], 1e6, "the coordinator's link is not known in both directions for c: the sync"),
        ([], 1e6, "links to the coordinator are neither given nor measured yet:"),
        (STAR, 0.0, "the size of the parameters is not given:"),
    ):
        file.write_text(json.dumps({"model": {"layers": 1, "parameters": parameters}}))
        notes = make_plan(live_inventory({"inventory": seen(links)["inventory"]}, file)).notes
        told = [note for note in notes if "bits and H are left as they are" in note]
        assert told[0].startswith(said) if said else not told


@pytest.fixture
def coordinator() -> Iterator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(seen()).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_running_coordinator_is_planned_and_its_set_command_given(coordinator: str, tmp_path: Path) -> None:
    """What the file does not say of model, H and bits is the run's."""
    file = tmp_path / "model.toml"
    file.write_text("[model]\nlayers = 8\nparameters = 25e6\n[plan]\nh = 200\n")
    made = planned("--live", coordinator, "--inventory", str(file))
    assert made["mode"] == "A" and set(made["rates"]) == {"a", "b", "c"}
    assert made["rates"]["a"]["bits"] >= made["rates"]["c"]["bits"] and made["syncs"][0]["name"] == "star"
    made = planned("--live", coordinator)
    assert made["h"] == 200 and made["rates"]["a"] == {"bits": 8, "h": 200}
    rate = made["rates"]["c"]
    assert rate["bits"] < 8 and rate["h"] < 200
    assert made["set"] == {"codec_up_of.c": CODEC_OF[rate["bits"]], "h_share_of.c": share_text(rate["h"], 200)}
    text = farloop("plan", "--live", coordinator, columns=120).stdout
    assert text.rstrip().endswith(f"farloop run set {' '.join(f'{key}={value}' for key, value in made['set'].items())}")


def test_a_plan_knows_the_bits_of_the_codecs_it_deals_in() -> None:
    of_codecs = {name: round(CODECS[name].traits.bits_per_element) for name in BITS_OF}
    assert of_codecs | {"q4r": 2} == BITS_OF, "q4r has as many as its numbers need, about 2"


Q4 = {"method": "streaming", "codec_up": "q4", "h": 50}
BOTH = {"codec_up_of.b": "q4r", "h_share_of.b": "0.86"}
NONE = {"codec_up_of.a": "none", "h_share_of.a": "none"}


@pytest.mark.parametrize(
    ("own", "rates", "h", "told"),
    [
        ({}, {"a": (4, 50), "b": (4, 50)}, 50, {}),
        ({}, {"a": (4, 50), "b": (2, 43)}, 50, BOTH),
        ({}, {"a": (8, 60), "b": (8, 20)}, 60, {"codec_up": "q8", "h": "60", "h_share_of.b": "0.34"}),
        ({"codec_up": "nf4"}, {"a": (4, 50)}, 50, {}),
        ({"codec_up_of": {"b": "q4r:step=0.7"}, "h_share_of": {"b": 0.86}}, {"a": (4, 50), "b": (2, 43)}, 50, {}),
        ({"codec_up_of": {"a": "q4r"}, "h_share_of": {"a": 0.86}}, {"a": (4, 50), "b": (4, 57)}, 50, NONE),
    ],
)
def test_only_what_would_change_is_set(
    own: dict[str, Any], rates: dict[str, tuple[int, int]], h: int, told: dict[str, str]
) -> None:
    """A node that could do more than all steps does all of them."""
    chosen = {node: Rate(bits=bits, h=steps, round_s=1.0) for node, (bits, steps) in rates.items()}
    assert settings({**Q4, **own}, chosen, h) == told


def test_rates_that_no_run_can_have_are_said() -> None:
    for own, bits, words in (
        ({"codec_up": "topk"}, 8, "sends by topk, whose bits no plan chooses: take fp32, bf16, q8, q4 or q4r"),
        ({"method": "data-parallel"}, 8, "data-parallel runs with fp32"),
        ({}, 3, "there is no codec of 3 bits"),
    ):
        with pytest.raises(NotInPlace, match=words):
            settings({**Q4, **own}, {"a": Rate(bits=bits, h=50, round_s=1.0)}, 50)


@given(st.integers(2, 1000))
@example(96)  # 60 of its steps are 0.63, not 0.625
def test_a_share_is_short_and_gives_the_steps_that_were_planned(h: int) -> None:
    for steps in range(1, h):
        text = share_text(steps, h)
        assert steps_by_share(h, float(text)) == steps and len(text) <= 2 + len(str(h))
