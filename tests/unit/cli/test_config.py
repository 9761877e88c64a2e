"""RUN.toml and NODE.toml with the environment and flags on top: values, and one line for everything that is wrong."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from pipeline_layouts import layout_of

from farloop.cli.check import check
from farloop.config.run_config import RunConfig
from farloop.config.run_spec import planned
from farloop.config.settings import NodeFile, RunFile, json_text, load, load_node, load_run, toml_text
from farloop.config.sources import ConfigError, read_environment, read_file
from farloop.node.settings import PRESETS, Share
from farloop.pipeline.layout import layout_json

NANO = "[run]\nmodel = 'nano'\nevaluation_sequences = 4\n"
SECTIONS = {"run": ["steps", "h"], "data": ["path"]}


def written(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def run_file(
    folder: Path, text: str = "", *, flags: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> RunFile:
    path = written(folder, f"{text}[coordinator]\nstate_dir = 'state'\n")
    return load_run(path, flags=flags, environ=environ or {})


def node_file(folder: Path, text: str = "") -> NodeFile:
    return load_node(written(folder, f"[node]\nname = 'rome'\n{text}\n", "node.toml"), flags=[], environ={})


def pipeline_node(folder: Path, text: str, host: str = "127.0.0.1") -> NodeFile:
    """A node with a layout; `text` has a line [pipeline]."""
    layout = layout_of(["ab", ("rome", "d")], [("a", "rome"), "bd"])
    addresses = {node: f"tcp://{host}:7800" for node in ("a", "b", "rome", "d")}
    (folder / "layout.json").write_text(layout_json(layout, addresses))
    return node_file(folder, text.replace("[pipeline]", "[pipeline]\nlayout = 'layout.json'"))


def test_flags_override_the_environment_the_environment_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    assert run_file(tmp_path, environ={"FARLOOP_NODE__NAME": "oslo"}).run == RunConfig(), "the node's variable"
    text, environ = "[run]\nsteps = 1\nh = 1\nseed = 1\n", {"FARLOOP_RUN__H": "2", "FARLOOP_RUN__SEED": "2"}
    file = run_file(tmp_path, text, flags=["run.seed=3"], environ=environ)
    assert (file.run.steps, file.run.h, file.run.seed) == (1, 2, 3)
    origins = [file.settings.by_name["run", key].origin for key in ("steps", "h", "seed", "lr")]
    assert origins == [f"{tmp_path}/run.toml:2", "FARLOOP_RUN__H", "--set", "default"]
    assert str(run_file(tmp_path, "[run]\nouter_lr = -0.0\n").run.outer_lr) == "0.0"
    open_again = run_file(tmp_path, "[run]\ntau = 3\nclip = 2\n", flags=["run.tau=", "coordinator.http="])
    assert (open_again.run.tau, open_again.coordinator.http, open_again.run.clip) == (None, "", 2.0)


def test_paths_of_a_file_are_relative_to_it_and_others_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    file = run_file(tmp_path, "[data]\npath = '../text'\n", flags=["coordinator.state_dir=mine"])
    assert (file.data.path, file.coordinator.state_dir) == (tmp_path.parent / "text", here / "mine")
    table = "[data]\nphases = ['new', '../newer']\n"
    expected = (tmp_path / "new", tmp_path.parent / "newer")
    assert run_file(tmp_path, table).data.phases == expected
    node = node_file(tmp_path, table)
    assert node.node.data.phases == expected and node_file(tmp_path).node.data.phases is None
    assert run_file(tmp_path, flags=["data.phases=new, /newer.txt"]).data.phases == (here / "new", Path("/newer.txt"))
    assert run_file(tmp_path, flags=["data.path=a=b.txt"]).data.path == here / "a=b.txt"
    parts = "[data]\nmixture = [{path = 'wiki.bin', weight = 3}, {path = '/code', weight = 0.5}]\n"
    shares = (Share(path=tmp_path / "wiki.bin", weight=3.0), Share(path=Path("/code"), weight=0.5))
    assert run_file(tmp_path, parts).data.mixture == node_file(tmp_path, parts).node.data.mixture == shares
    assert run_file(tmp_path, flags=["data.mixture=a=b=2, c=1"]).data.mixture == (
        Share(path=here / "a=b", weight=2.0),
        Share(path=here / "c", weight=1.0),
    )
    again = tmp_path / "again.toml"
    again.write_text(toml_text(run_file(tmp_path, parts).settings))
    assert load_run(again, flags=[], environ={}).data.mixture == shares
    shown = toml_text(run_file(tmp_path, table).settings)
    assert f'phases = ["{tmp_path}/new", "{tmp_path.parent}/newer"]' in shown
    assert json.loads(json_text(node.settings))["data"]["phases"]["value"] == [str(p) for p in expected]


def test_a_file_with_a_section_node_is_a_node_s(tmp_path: Path) -> None:
    path = written(tmp_path, "[node]\nname = 'oslo'\ntau = 9\n[data]\nmax_bytes = 1000\n")
    file = load(path, flags=[], environ={})
    assert isinstance(file, NodeFile)
    assert (file.node.name, file.node.data.max_bytes, file.node.tau) == ("oslo", 1000, 9)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("bulk_source = '192.0.2.1'", "192.0.2.1 is not an address of this machine"),
        (
            "insecure = true\ncoordinator = 'tcp://192.0.2.7:7700'\nbulk_source = '127.0.0.1'",
            "bulk_source: 127.0.0.1 never leaves this machine, and the coordinator 192.0.2.7 is beyond it",
        ),
        ("congestion = 'warp9'", "congestion: "),
    ],
)
def test_what_a_machine_does_not_have_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        node_file(tmp_path, text)


def test_a_pipeline_has_its_layout_and_keys_or_permission_beyond_this_machine(tmp_path: Path) -> None:
    assert node_file(tmp_path).pipeline.layout is None
    pipeline = pipeline_node(tmp_path, "[pipeline]\ncodec = 'q8'\nmicrobatches = 2").pipeline
    assert (pipeline.layout, pipeline.codec, pipeline.microbatches) == (tmp_path / "layout.json", "q8", 2)
    bind = "insecure = true\n[pipeline]\nbind = 'tcp://0.0.0.0:7800'"
    assert pipeline_node(tmp_path, bind).pipeline.bind == "tcp://0.0.0.0:7800"
    assert pipeline_node(tmp_path, "insecure = true\n[pipeline]", host="10.0.0.1").pipeline.bind == ""
    with pytest.raises(ConfigError, match="goes beyond this machine, so peers"):
        pipeline_node(tmp_path, "[pipeline]", host="10.0.0.1")


def test_beyond_loopback_keys_or_insecure_are_required(tmp_path: Path) -> None:
    for here in ("tcp://127.9.9.9:1", "tcp://localhost:1", "tcp://[::1]:1"):
        assert run_file(tmp_path, flags=[f"coordinator.bind={here}"]).coordinator.key is None
    bind = "tcp://*:1"
    flags = [f"coordinator.bind={bind}"]
    assert run_file(tmp_path, flags=[*flags, "coordinator.insecure=true"]).coordinator.bind == bind
    keys = ["coordinator.key=k", "coordinator.allow=a"]
    assert run_file(tmp_path, flags=[*flags, *keys]).coordinator.key == Path.cwd() / "k"
    assert node_file(tmp_path, "coordinator = 'tcp://oslo:7700'\ninsecure = true\n").node.key is None


def test_every_value_knows_its_file_and_line(tmp_path: Path) -> None:
    path = written(tmp_path, "# a run\n[run]\nsteps = 5\n\nh = 2\n[data]\n  path = 'x'\n")
    found = [(given.section, given.key, given.value, given.origin) for given in read_file(path, SECTIONS)]
    assert found == [("run", "steps", 5, f"{path}:3"), ("run", "h", 2, f"{path}:5"), ("data", "path", "x", f"{path}:7")]
    (tmp_path / "bad.toml").write_bytes(b"[run]\nname = '\xff'\n")
    for name, line in (("nothing.toml", r"nothing\.toml: cannot be read: no such file"), ("bad.toml", "UTF-8")):
        with pytest.raises(ConfigError, match=line):
            read_file(tmp_path / name, SECTIONS)
    with pytest.raises(ConfigError, match=r"\[coordinator\] state_dir: is missing; its meaning: Journal, snapshots"):
        load_run(written(tmp_path, "[run]\n"), flags=[], environ={})


def test_other_environment_variables_are_ignored() -> None:
    """Kubernetes creates a name such as the second for every service."""
    others = {"FARLOOP_COORDINATOR_SERVICE_HOST": "10.0.0.1", "FARLOOP_LOG_LEVEL": "debug", "OTHER__THING": "x"}
    (given,) = read_environment({"FARLOOP_RUN__STEPS": "7", **others}, SECTIONS)
    assert (given.section, given.key, given.value, given.origin) == ("run", "steps", "7", "FARLOOP_RUN__STEPS")


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("run.batch_sequences=999999999999", "of 128 tokens are too many for one step; the most is 33554432"),
        ("run.batch_sequences=200000", r"the training text has \d+ sequences, and a step would repeat some; the most"),
        ("run.evaluation_sequences=9999999", r"room for \d+ sequences, not 9999999; the most is \d+"),
    ],
)
def test_a_run_asks_for_no_more_sequences_than_the_data_have(tmp_path: Path, setting: str, line: str) -> None:
    """A check that passed was followed by a node without memory, or a smaller evaluation set than asked for."""
    (tmp_path / "text").write_text("to be or not to be, that is the question\n" * 20_000)
    with pytest.raises(ConfigError, match=line):
        planned(run_file(tmp_path, NANO, flags=["data.path=" + str(tmp_path / "text"), setting]))


def test_the_default_evaluation_set_fits_itself_to_a_small_text_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to be or not to be, that is the question\n" * 1000)
    plan = planned(run_file(tmp_path, "[run]\nmodel = 'nano'\n", flags=["data.path=" + str(tmp_path / "text")]))
    assert plan.evaluation is not None and len(plan.evaluation) < 64
    assert any("evaluations use these" in note for note in plan.notes)


def test_the_example_names_every_model_that_is_built_in() -> None:
    *others, last = PRESETS
    example = Path(__file__).parents[3] / "examples/run.toml"
    assert f"# {', '.join(others)} or {last}\n" in example.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("setting", "inner", "told"),
    [("method = 'data-parallel'", None, "every step"), ("h = 15\nlr = 0.004", "muon, lr 0.004", "every 15 steps")],
)
def test_the_inner_step_and_the_traffic_of_a_round_are_told(
    tmp_path: Path, setting: str, inner: str | None, told: str
) -> None:
    lines = dict(check(run_file(tmp_path, f"{NANO}{setting}\n"))[0])
    assert lines.get("inner step") == inner
    assert lines["traffic"].endswith(f" down per node, {told}")
