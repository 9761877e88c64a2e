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
from farloop.monitoring.units import nearest
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


def node_file(folder: Path, text: str = "", name: str = "rome") -> NodeFile:
    return load_node(written(folder, f"[node]\nname = '{name}'\n{text}\n", "node.toml"), flags=[], environ={})


def pipeline_node(folder: Path, text: str, host: str = "127.0.0.1", name: str = "rome") -> NodeFile:
    """A node with a layout; `text` has a line [pipeline]."""
    layout = layout_of(["ab", ("rome", "d")], [("a", "rome"), "bd"])
    addresses = {node: f"tcp://{host}:7800" for node in ("a", "b", "rome", "d")}
    (folder / "layout.json").write_text(layout_json(layout, addresses))
    return node_file(folder, text.replace("[pipeline]", "[pipeline]\nlayout = 'layout.json'"), name)


def line_of(error: pytest.ExceptionInfo[ConfigError], folder: Path) -> str:
    assert "\n" not in str(error.value)
    return str(error.value).replace(f"{folder}/", "")


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
        ("[run]\nstepps = 3", "run.toml:2: [run] stepps: there is no such key; did you mean steps?"),
        ("[run]\nsteps = 'six'", 'run.toml:2: [run] steps: expected a whole number, got "six"'),
        ("[run]\nsteps = '600'", 'run.toml:2: [run] steps: expected a whole number, got "600"; did you mean 600?'),
        ("[run]\nsteps = 600.0", "run.toml:2: [run] steps: expected a whole number, got 600.0; did you mean 600?"),
        ("[run]\nsteps = true", "run.toml:2: [run] steps: expected a whole number, got true"),
        ("[run]\nname = 5", 'run.toml:2: [run] name: expected text in quotes, got 5; did you mean "5"?'),
        ("[run]\ninit = 5", "run.toml:2: [run] init: expected a path in quotes, got 5"),
        ("[run]\nlr = 'big'", 'run.toml:2: [run] lr: expected a finite number, got "big"'),
        ("[run]\ndrop_factor = nan", "run.toml:2: [run] drop_factor: expected a finite number, got nan"),
        ("FARLOOP_RUN__DECAY_SHARE=-inf", "FARLOOP_RUN__DECAY_SHARE: [run] decay_share: expected a finite number, "),
        ("--set run.lr=1_000", '--set: [run] lr: expected a finite number, got "1_000"'),
        ("FARLOOP_RUN__STEPS=6_0", 'FARLOOP_RUN__STEPS: [run] steps: expected a whole number, got "6_0"'),
        ("--set run.codec_up=q4r:step=1_0", "--set: [run] codec_up: codec 'q4r:step=1_0': step is a number from"),
        ("--set run.codec_up=topk:k=٣", "--set: [run] codec_up: codec 'topk:k=٣': k is a whole number from 1 to 4096"),
        (
            "--set coordinator.max_uplink=٥٠mbit",
            "--set: [coordinator] max_uplink: '٥٠mbit' is not a rate with its unit kbit, mbit or gbit; the nearest "
            "is 50mbit",
        ),
        ("--set data.mixture=a.bin=1_0,b.bin=1", "--set: [data] mixture: expected a list as [{path = "),
        ("[run]\nnodes = 0", "run.toml:2: [run] nodes: expected 1 or more, got 0"),
        ("[run]\nsteps = 99999999999999999999", "run.toml:2: [run] steps: expected at most 1099511627776, got 99999"),
        ("[run]\nh = 1099511627777", "run.toml:2: [run] h: expected at most 1099511627776, got 1099511627777"),
        ("[run]\nseed = 99999999999999999999", "run.toml:2: [run] seed: expected at most 9223372036854775807"),
        ("[run]\nmethod = 'streeming'", "run.toml:2: [run] method: there is no 'streeming'; did you mean streaming?"),
        ("[run]\ncodec_up = 'q5'", "run.toml:2: [run] codec_up: there is no 'q5'; there are fp32, bf16, q8, q4, "),
        ("[run]\ncodec_up = 'q4r:step=big'", "run.toml:2: [run] codec_up: codec 'q4r:step=big': step is a number from"),
        ("[data]\nphases = 'new'", 'run.toml:2: [data] phases: expected a list of paths in quotes, got "new"; did'),
        ("[data]\nphases = [1]", "run.toml:2: [data] phases: expected a list of paths in quotes, got [1]"),
        ("[data]\nphases = ['']", "run.toml:2: [data] phases: expected a path; for this folder itself write ."),
        ("[data]\nmixture = ['a.bin']", "run.toml:2: [data] mixture: expected a list as [{path = "),
        ("[data]\nmixture = [{path = 'a', wieght = 1}]", "run.toml:2: [data] mixture: expected a list as [{path = "),
        ("--set data.mixture=a.bin", "--set: [data] mixture: expected a list as [{path = "),
        ("[data]\nmixture = []", "run.toml:2: [data] mixture: expected at least one part, as [{ path = "),
        ("[run]\nname = ''", "run.toml:2: [run] name: expected 1 to 100 printable characters"),
        ('[run]\nname = "a\\u0000b"', "run.toml:2: [run] name: expected 1 to 100 printable characters"),
        (f"[run]\nname = '{101 * 'x'}'", "run.toml:2: [run] name: expected 1 to 100 printable characters"),
        ("[data]\npath = 'a'\nmixture = [{path = 'a', weight = 1}]", "run.toml:3: [data] mixture: stands in place of"),
        ("[run]\nbulk = 'store'", "run.toml:2: [run] bulk: store needs [coordinator] bulk_url, which is missing"),
        ("--set coordinator.bulk_url=s3://runs/a?x=1", "--set: [coordinator] bulk_url: expected s3://PLACE/PREFIX al"),
        ("--set coordinator.bulk_url=http://me:pw@h", "--set: [coordinator] bulk_url: expected http://PLACE/PREFIX al"),
        ("--set coordinator.bulk_url=file:///a", "--set: [coordinator] bulk_url: expected s3://, gs://"),
        ("[data]\ndigest = 'mine'", "run.toml:2: [data] digest: goes with samples, which is missing"),
        ("[data]\nsamples = 5", "run.toml:2: [data] samples: goes with digest, which is missing"),
        ("[data]\ndigest = 'mine'\nsamples = 5", "run.toml:2: [data] digest: is for a dataset of your own loops"),
        ("[run]\ninit = 'x'\n[data]\ndigest = 'a+b'\nsamples = 5", "run.toml:4: [data] digest: expected 4 to 64"),
        ("steps = 5", "run.toml:1: steps is outside of a section; put it below [run] or [data]"),
        ("[run]\n[dta]", "run.toml:2: there is no section [dta] here; did you mean data?"),
        ("[run]\nsteps = = 5", "run.toml:2: is not TOML: invalid value"),
        ("[run]\nsteps = 5\nsteps = 6", "run.toml:3: steps is given twice, first in line 2; keep one of them"),
        ("[data]\nsteps = 5\n[run]\nsteps = 5\nh = 1\nsteps = 6", "run.toml:6: steps is given twice, first in line 4;"),
        ("[run]\nsteps = 5\n[data]\n[run]\nh = 6", "run.toml:4: [run] is given twice, first in line 1; keep one"),
        ("[run]\n'steps' = 5\n'steps' = 6", "run.toml:3: is not TOML: cannot overwrite a value"),
        ("\ufeff[run]\nsteps = -5", "run.toml:2: [run] steps: expected 1 or more, got -5"),
        ("FARLOOP_RUN__STEPS=many", "FARLOOP_RUN__STEPS: [run] steps: expected a whole number"),
        ("FARLOOP_RUN_STEPS=7", "FARLOOP_RUN_STEPS: is not read; did you mean FARLOOP_RUN__STEPS, with two underscore"),
        ("FARLOOP_RUNN__STEPS=7", "FARLOOP_RUNN__STEPS: there is no section runn; did you mean run?"),
        ("--set run.stpes=3", "--set: [run] stpes: there is no such key; did you mean steps?"),
        ("--set rn.steps=3", "--set rn.steps=3: there is no section rn here; did you mean run?"),
        *((f"--set {flag}", f"--set {flag}: expected section.key=value") for flag in ("steps=3", "run.steps", "")),
        ("--set coordinator.min_participation=1.5", "--set: [coordinator] min_participation: expected 0 to 1, as 0.5,"),
        ("--set coordinator.probe_share=-1", "--set: [coordinator] probe_share: expected 0 or more, as 0.01, got -1.0"),
        (
            "--set coordinator.egress_price_per_gb=-0.01",
            "--set: [coordinator] egress_price_per_gb: expected 0 or more,",
        ),
        (
            "--set coordinator.egress_price_per_gb=inf",
            "--set: [coordinator] egress_price_per_gb: expected a finite num",
        ),
        ("--set coordinator.bind=", "--set: [coordinator] bind: expected tcp://host:port"),
        ("--set coordinator.key=k", "--set: [coordinator] key: needs allow"),
        ("--set coordinator.allow=a", "--set: [coordinator] allow: needs key"),
    ],
)
def test_a_wrong_run_is_one_line_with_its_place_and_the_nearest_value(tmp_path: Path, text: str, line: str) -> None:
    name, equals, value = text.partition("=")
    with pytest.raises(ConfigError) as error:
        if text.startswith("--set "):
            run_file(tmp_path, flags=[text.removeprefix("--set ")])
        elif name.startswith("FARLOOP") and equals:
            run_file(tmp_path, environ={name: value})
        else:
            run_file(tmp_path, f"{text}\n")
    assert line_of(error, tmp_path).startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("coordinator = '127.0.0.1:1'", "coordinator: expected tcp://host:port, as tcp://10.0.0.5:7700; got '127."),
        ("coordinator = 'tcp://oslo:7700'", "[node] coordinator: tcp://oslo:7700 goes beyond this machine, so key and"),
        ("key = 'k'", "[node] key: needs server_key"),
        ("server_key = 'k'", "[node] server_key: needs key"),
        ("http = '9700'", "[node] http: expected host:port"),
        ("nproc = 0", "[node] nproc: expected 1 or more, got 0"),
        ('hosts = "3:2"\nrendezvous = "host:29500"', "[node] hosts: expected a number of hosts, as 4 or 3:4, got"),
        ('hosts = "2"', "[node] hosts: needs [node] rendezvous, where the hosts meet, which is missing"),
        ("tau = -1", "[node] tau: expected 0 or more, got -1"),
        ("fingerprint = 'abc'", "[node] fingerprint: 16 hex digits"),
        ("address = 'here:7800'", "[node] address: expected tcp://host:port"),
        ("lanes = 17", "[node] lanes: 17 is not from 0 to 16; the nearest is 16"),
        ("bulk_source = 'eth1'", "[node] bulk_source: 'eth1' is not an IP address, as 10.0.0.5"),
        ("bulk_source = '192.0.2.1'", "[node] bulk_source: 192.0.2.1 is not an address of this machine"),
        ("bulk_source = '127.0.0.1'", "[node] bulk_source: needs key and server_key"),
        ("bulk_source = '::1'", "[node] bulk_source: ::1 is an IPv6 address, and the coordinator 127.0.0.1 an IPv4"),
        ("bulk_source = '0.0.0.0'", "bulk_source: 0.0.0.0 is not the address of one network card; the nearest is"),
        ("bulk_source = '224.0.0.1'", "[node] bulk_source: 224.0.0.1 is not the address of one network card"),
        ("bulk_source = '255.255.255.255'", "[node] bulk_source: 255.255.255.255 is not the address of one"),
        (
            "insecure = true\ncoordinator = 'tcp://192.0.2.7:7700'\nbulk_source = '127.0.0.1'",
            "[node] bulk_source: 127.0.0.1 never leaves this machine, and the coordinator 192.0.2.7 is beyond it",
        ),
        ("max_uplink = 20", '[node] max_uplink: expected text in quotes, got 20; did you mean "20mbit"?'),
        (
            "max_uplink = '1mbit'\nquiet_hours = '08:00-18:00'\nquiet_uplink = '2mbit'",
            "[node] quiet_uplink: 2mbit is above max_uplink 1mbit, which holds at any time; the nearest is 1mbit",
        ),
        ("max_uplink = '20 Mbit/s'", "[node] max_uplink: '20 Mbit/s' is not a rate with its unit kbit, mbit or gbit; "),
        ("max_uplink = '1kbit'", "[node] max_uplink: 1kbit is not from 100kbit to 1000gbit; the nearest is 100kbit"),
        ("quiet_hours = '8-18'", "[node] quiet_hours: '8-18' are not hours of the day; the nearest are 08:00-18:00"),
        ("quiet_hours = '08:00-18:00'", "[node] quiet_hours: needs quiet_uplink, as 2mbit, which is missing"),
        ("quiet_uplink = '2mbit'", "[node] quiet_uplink: needs quiet_hours, as 08:00-18:00, which is missing"),
        ("nics = 'eth0=fast'", "[node] nics: 'eth0=fast' is not a network card: expected name=kind/rate"),
        ("congestion = 'warp9'", "[node] congestion: "),
        ("[run]\nsteps = 3", "there is no section [run] here; farloop coordinator takes such a file"),
        ("[pipeline]\nlayout = 'other.json'", "cannot read the layout"),
        ("nproc = 2\n[pipeline]", "[node] nproc: a stage of a pipeline is one process"),
        ("[pipeline]\ncodec = 'q9'", "[pipeline] codec: there is no 'q9'"),
        ("[pipeline]\nnormalise = 'mean'", "[pipeline] normalise: there is no 'mean'"),
        ("[pipeline]\ncredit = 0", "[pipeline] credit: expected 1 or more, got 0"),
        ("[pipeline]\npatience_s = 0.0", "[pipeline] patience_s: expected seconds above 0, as 600, got 0"),
        ("[pipeline]\npeers = 'keys'", "[pipeline] peers: needs [node] key"),
        ("[pipeline]\nbind = 'tcp://0.0.0.0:7800'", "so peers and [node] key are required"),
        ("[pipeline]\nlayouts = 'x'", "[pipeline] layouts: there is no such key"),
    ],
)
def test_a_wrong_node_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        pipeline_node(tmp_path, text) if "[pipeline]" in text and "layout =" not in text else node_file(tmp_path, text)
    assert line in line_of(error, tmp_path)


@pytest.mark.parametrize("name", ["o s l o", ""])
def test_a_node_needs_a_valid_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[node\] name: '{name}' is not a node name"):
        node_file(tmp_path, name=name)


def test_a_pipeline_has_its_layout_and_keys_or_permission_beyond_this_machine(tmp_path: Path) -> None:
    assert node_file(tmp_path).pipeline.layout is None
    pipeline = pipeline_node(tmp_path, "[pipeline]\ncodec = 'q8'\nmicrobatches = 2").pipeline
    assert (pipeline.layout, pipeline.codec, pipeline.microbatches) == (tmp_path / "layout.json", "q8", 2)
    bind = "insecure = true\n[pipeline]\nbind = 'tcp://0.0.0.0:7800'"
    assert pipeline_node(tmp_path, bind).pipeline.bind == "tcp://0.0.0.0:7800"
    assert pipeline_node(tmp_path, "insecure = true\n[pipeline]", host="10.0.0.1").pipeline.bind == ""
    with pytest.raises(ConfigError, match="goes beyond this machine, so peers"):
        pipeline_node(tmp_path, "[pipeline]", host="10.0.0.1")
    with pytest.raises(ConfigError, match="no stage of it has a node kyiv"):
        pipeline_node(tmp_path, "[pipeline]", name="kyiv")


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://10.0.0.1:1", "tcp://[::]:1"])
def test_beyond_loopback_keys_or_insecure_are_required(tmp_path: Path, bind: str) -> None:
    for here in ("tcp://127.9.9.9:1", "tcp://localhost:1", "tcp://[::1]:1"):
        assert run_file(tmp_path, flags=[f"coordinator.bind={here}"]).coordinator.key is None
    flags = [f"coordinator.bind={bind}"]
    with pytest.raises(ConfigError, match="goes beyond this machine, so key and allow are required"):
        run_file(tmp_path, flags=flags)
    assert run_file(tmp_path, flags=[*flags, "coordinator.insecure=true"]).coordinator.bind == bind
    keys = ["coordinator.key=k", "coordinator.allow=a"]
    assert run_file(tmp_path, flags=[*flags, *keys]).coordinator.key == Path.cwd() / "k"
    with pytest.raises(ConfigError, match=r"\[coordinator\] allow: needs key"):
        run_file(tmp_path, flags=[*flags, "coordinator.allow=a", "coordinator.insecure=true"])
    assert node_file(tmp_path, "coordinator = 'tcp://oslo:7700'\ninsecure = true\n").node.key is None


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("tau=40", "--set: [run] tau: expected 0 to 14 by streaming with h = 15, got 40"),
        ("quorum=3", "--set: [run] quorum: 3; the run starts with nodes = 2"),
        ("warmup_steps=9999", "--set: [run] warmup_steps: 9999; the run has 600 steps"),
        ("sequence_tokens=4096", "--set: [run] sequence_tokens: nano reads at most 1024, not 4096"),
        ("init=none.safetensors", "--set: [run] init: there is no file"),
        (f"init={__file__}", f"--set: [run] init: {__file__} is not a safetensors file"),
        ("h_init=3", "--set: [run] h_init: 3, but with h_rule = constant every round has h = 15"),
        ("h_rule=qsr", "run.toml: [run] h_alpha: missing; h_rule = qsr needs one above 0"),
        ("drops=5", "--set: [run] drops: (5,), but schedule is cosine: only step has it"),
        ("drops=٣", "--set: [run] drops: expected schedule positions, as 300,450, got '٣'"),
        ("rewarms=600:1_0", "--set: [run] rewarms: expected position and peak of each re-warm, as 600:1e-3,900"),
        ("drops=a", "--set: [run] drops: expected schedule positions, as 300,450, got 'a'"),
        ("min_lr=1", "--set: [run] min_lr: min_lr = 1.0 is above lr; at most 0.002"),
        ("rewarms=400:1e-3:0.05", "--set: [run] rewarms: 1 with a replay"),
        ("data.path=nowhere", "--set: [data] path: no file or folder"),
        ("rewarms=400:1e-3:0.05 data.phases=nowhere", "--set: [data] phases: no file or folder"),
    ],
)
def test_a_run_that_cannot_be_is_told_in_the_words_of_the_file(tmp_path: Path, flag: str, line: str) -> None:
    flags = [one if one.startswith("data.") else f"run.{one}" for one in flag.split()]
    file = run_file(tmp_path, NANO, flags=["data.max_bytes=200000", *flags])
    with pytest.raises(ConfigError) as error:
        planned(file)
    assert line_of(error, tmp_path).startswith(line)


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


def test_the_nearest_word_is_offered_or_all_of_them() -> None:
    assert nearest("stepps", ["steps", "h"]) == "did you mean steps?"
    assert nearest("zzz", ["steps", "h"]) == "there are steps, h"


PAIR = """name = 'a'
mirror = 'tcp://127.0.0.1:7701'
leads_by = 'file:///record'
peers = 'tcp://127.0.0.1:7701, tcp://127.0.0.1:7702'"""
"""One of two coordinators."""


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("copy_every_s = 0.0", "expected seconds above 0"),
        ("probe_idle_s = -1.0", "expected 0 seconds or more"),
        ("copy_every_s = nan", "copy_every_s: expected a finite number, got nan"),
        ("bind = 'tcp://127.0.0.1:7700'\nhttp = '127.0.0.1:7700'", "is on the port of tcp.*another one, as 7701"),
        ("bind = 'tcp://127.0.0.1:7700'\nhttp = '0.0.0.0:7700'", "is on the port of"),
        ("bind = 'tcp://*:7700'\ninsecure = true\nhttp = '127.0.0.1:7700'", "is on the port of"),
        ("bind = 'tcp://127.0.0.1:65535'\nhttp = 'localhost:65535'", "another one, as 65534"),
        ("copy_to = 'ftp://x'", "copy_to: the URL of an object store begins with s3://, gs://, az://, file://"),
        ("copy_to = 'backup'", "begins with s3://"),
        ("copy_to = 'file://backup'", "written with three slashes, as file:///backup"),
        ("copy_to = 's3:///backup'", "the name of the bucket is missing, as s3://BUCKET/PREFIX"),
        (PAIR.replace("leads_by", "#"), r"needs \[coordinator\] leads_by"),
        (f"{PAIR}\nrecover = 'auto'", r"needs \[coordinator\] copy_to"),
        (PAIR.replace("127.0.0.1:7701'\n", "0.0.0.0:7701'\n"), "goes beyond this machine, so key is required"),
        (PAIR.replace("'tcp://127.0.0.1:7701, tcp", "'http://x:1, tcp"), "farloop speaks tcp:// only"),
        (PAIR.replace("file:///record", "ftp://x"), "expected a URL that begins with one of s3://"),
    ],
)
def test_a_coordinator_that_cannot_be_is_one_line(tmp_path: Path, setting: str, line: str) -> None:
    path = written(tmp_path, f"{NANO}[coordinator]\nstate_dir = 'state'\n{setting}\n")
    with pytest.raises(ConfigError, match=line):
        load_run(path, flags=[], environ={})


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
