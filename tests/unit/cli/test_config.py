"""RUN.toml and NODE.toml with the environment and flags on top: values, and the line for everything that is wrong."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from farloop.config.run_spec import RunConfig
from farloop.config.settings import (
    NODE_SCHEMA,
    RUN_SCHEMA,
    NodeFile,
    RunFile,
    json_text,
    load,
    load_node,
    load_run,
    planned,
    toml_text,
)
from farloop.config.sources import ConfigError

COORDINATOR = "[coordinator]\nstate_dir = 'state'\n"
NODE = "[node]\nname = 'oslo'\n"


def run_file(
    folder: Path, text: str = "", *, flags: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> RunFile:
    path = folder / "run.toml"
    path.write_text(text + COORDINATOR)
    return load_run(path, flags=flags, environ=environ or {})


def node_file(folder: Path, text: str = "") -> NodeFile:
    path = folder / "node.toml"
    path.write_text(NODE + text)
    return load_node(path, flags=[], environ={})


def line_of(error: pytest.ExceptionInfo[ConfigError], folder: Path) -> str:
    assert "\n" not in str(error.value)
    return str(error.value).replace(f"{folder}/", "")


def test_what_is_not_given_is_the_default(tmp_path: Path) -> None:
    assert run_file(tmp_path).run == RunConfig()


def test_flags_go_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    text, environ = "[run]\nsteps = 1\nh = 1\nseed = 1\n", {"FARLOOP_RUN__H": "2", "FARLOOP_RUN__SEED": "2"}
    file = run_file(tmp_path, text, flags=["run.seed=3"], environ=environ)
    assert (file.run.steps, file.run.h, file.run.seed) == (1, 2, 3)
    origins = [file.settings.by_name["run", key].origin for key in ("steps", "h", "seed", "lr")]
    assert origins == [f"{tmp_path}/run.toml:2", "FARLOOP_RUN__H", "--set", "default"]


def test_paths_of_a_file_begin_at_its_folder_and_paths_of_flags_where_the_person_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    file = run_file(tmp_path, "[data]\npath = '../text'\n", flags=["coordinator.state_dir=mine"])
    assert file.data.path == tmp_path.parent / "text"
    assert file.coordinator.state_dir == here / "mine"


def test_an_empty_text_leaves_an_open_setting_open(tmp_path: Path) -> None:
    file = run_file(tmp_path, "[run]\ntau = 3\n", flags=["run.tau=", "coordinator.http="])
    assert file.run.tau is None
    assert file.coordinator.http == ""


def test_the_other_daemons_variables_are_left_to_it(tmp_path: Path) -> None:
    assert run_file(tmp_path, environ={"FARLOOP_NODE__NAME": "oslo"}).run == RunConfig()


def test_a_section_node_makes_a_file_a_nodes(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(NODE + "[data]\nmax_bytes = 1000\n")
    file = load(tmp_path / "x.toml", flags=[], environ={})
    assert isinstance(file, NodeFile)
    assert (file.node.name, file.node.data_bytes) == ("oslo", 1000)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("stepps = 3", "run.toml:2: [run] stepps: there is no such key; did you mean steps?"),
        ("steps = 'six'", 'run.toml:2: [run] steps: a whole number is wanted, not "six"'),
        ("steps = '600'", 'run.toml:2: [run] steps: a whole number is wanted, not "600"; did you mean 600?'),
        ("steps = 600.0", "run.toml:2: [run] steps: a whole number is wanted, not 600.0; did you mean 600?"),
        ("steps = true", "run.toml:2: [run] steps: a whole number is wanted, not true"),
        ("steps = {a = 1}", 'run.toml:2: [run] steps: a whole number is wanted, not {"a": 1}'),
        ("name = 5", 'run.toml:2: [run] name: text in quotes is wanted, not 5; did you mean "5"?'),
        ("init = 5", "run.toml:2: [run] init: a path in quotes is wanted, not 5"),
        ("lr = 'big'", 'run.toml:2: [run] lr: a number is wanted, not "big"'),
        ("nodes = 0", "run.toml:2: [run] nodes: the least is 1, not 0"),
        ("steps = 99999999999999999999", "run.toml:2: [run] steps: the most is 9223372036854775807"),
        ("method = 'streeming'", "run.toml:2: [run] method: there is no 'streeming'; did you mean streaming?"),
        ("model = 'tinny'", "run.toml:2: [run] model: there is no 'tinny'; did you mean tiny?"),
        ("codec_up = 'q5'", "run.toml:2: [run] codec_up: there is no 'q5'; there are fp32, bf16, q8, q4, "),
        (
            "codec_up = 'q4r:step=big'",
            "run.toml:2: [run] codec_up: codec 'q4r:step=big': step is a number from 1e-30 to",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_with_file_key_and_the_nearest_right_one(
    tmp_path: Path, text: str, line: str
) -> None:
    with pytest.raises(ConfigError) as error:
        run_file(tmp_path, f"[run]\n{text}\n")
    assert line_of(error, tmp_path).startswith(line)


def test_a_number_where_a_float_belongs_may_be_whole(tmp_path: Path) -> None:
    assert run_file(tmp_path, "[run]\nclip = 2\n").run.clip == 2.0


def test_a_wrong_variable_or_flag_is_told_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^FARLOOP_RUN__STEPS: \[run\] steps: a whole number is wanted"):
        run_file(tmp_path, environ={"FARLOOP_RUN__STEPS": "many"})
    with pytest.raises(ConfigError, match=r"^--set: \[run\] stpes: there is no such key; did you mean steps\?"):
        run_file(tmp_path, flags=["run.stpes=3"])


def test_what_must_be_given_and_is_not_is_told_with_its_meaning(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\n")
    with pytest.raises(ConfigError, match=r"\[coordinator\] state_dir: is missing; its meaning: Journal, snapshots"):
        load_run(tmp_path / "run.toml", flags=[], environ={})


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:1", "tcp://127.9.9.9:1", "tcp://localhost:1", "tcp://[::1]:1"])
def test_on_this_machine_nobody_asks_for_keys(tmp_path: Path, bind: str) -> None:
    assert run_file(tmp_path, flags=[f"coordinator.bind={bind}"]).coordinator.key is None


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://10.0.0.1:1", "tcp://[::]:1"])
def test_beyond_it_keys_are_required_unless_somebody_says_insecure(tmp_path: Path, bind: str) -> None:
    flags = [f"coordinator.bind={bind}"]
    with pytest.raises(ConfigError, match="goes beyond this machine, so key and allow are required"):
        run_file(tmp_path, flags=flags)
    assert run_file(tmp_path, flags=[*flags, "coordinator.insecure=true"]).coordinator.bind == bind
    keys = ["coordinator.key=k", "coordinator.allow=a"]
    assert run_file(tmp_path, flags=[*flags, *keys]).coordinator.key == Path.cwd() / "k"


def test_half_of_the_encryption_is_an_error_even_on_loopback(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[coordinator\] key: goes with allow"):
        run_file(tmp_path, flags=["coordinator.key=k"])
    with pytest.raises(ConfigError, match=r"\[coordinator\] allow: goes with key"):
        run_file(tmp_path, flags=["coordinator.allow=k", "coordinator.insecure=true"])
    with pytest.raises(ConfigError, match=r"\[node\] key: goes with server_key"):
        node_file(tmp_path, "key = 'k'\n")
    with pytest.raises(ConfigError, match=r"\[node\] server_key: goes with key"):
        node_file(tmp_path, "server_key = 'k'\n")


def test_a_node_dials_another_machine_with_keys_or_says_insecure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key and server_key are required"):
        node_file(tmp_path, "coordinator = 'tcp://oslo:7700'\n")
    assert node_file(tmp_path, "coordinator = 'tcp://oslo:7700'\ninsecure = true\n").node.key is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("coordinator = '127.0.0.1:1'", r"\[node\] coordinator: .*did you mean tcp://127\.0\.0\.1:1\?"),
        ("http = '9700'", r"\[node\] http: host:port is wanted"),
        ("nproc = 0", r"\[node\] nproc: the least is 1"),
        ("fingerprint = 'abc'", r"\[node\] fingerprint: 16 hex digits"),
        ("address = 'here:7800'", r"\[node\] address: tcp://host:port is wanted"),
        ("nics = 'eth0=fast'", r"\[node\] nics: 'eth0=fast' is no card: name=kind/rate is wanted"),
        ("congestion = 'warp9'", r"\[node\] congestion: .*(choose one of|leave it out)"),
        ("[run]\nsteps = 3", r"there is no section \[run\] here; there are node, data"),
    ],
)
def test_a_wrong_node_is_told_in_a_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        node_file(tmp_path, text + "\n")


def test_a_node_needs_a_name_that_can_be_one(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("[node]\nname = 'o s l o'\n")
    with pytest.raises(ConfigError, match=r"\[node\] name: 'o s l o' is no node name"):
        load_node(tmp_path / "node.toml", flags=[], environ={})


NANO = "[run]\nmodel = 'nano'\nevaluation_sequences = 4\n"


def test_a_good_run_is_planned(tmp_path: Path) -> None:
    plan = planned(run_file(tmp_path, NANO, flags=["data.max_bytes=200000"]))
    assert plan.spec.terms.min_nodes == 2
    assert plan.evaluation is not None


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("tau=40", "--set: [run] tau: 40; streaming with h = 30 takes 0 to 29"),
        ("quorum=3", "--set: [run] quorum: 3; the run starts with nodes = 2"),
        ("warmup_steps=9999", "--set: [run] warmup_steps: 9999; the run has 600 steps"),
        ("sequence_tokens=4096", "--set: [run] sequence_tokens: nano reads at most 1024, not 4096"),
        ("init=none.safetensors", "--set: [run] init: there is no file"),
        ("h_init=3", "--set: [run] h_init: 3, but with h_rule = constant every round has h = 30"),
        ("h_rule=qsr", "run.toml: [run] h_alpha: missing; h_rule = qsr needs one above 0"),
        ("drops=5", "--set: [run] drops: (5,), but schedule is cosine: only step has it"),
        ("drops=a", "--set: [run] drops: schedule positions are wanted, as 300,450, not 'a'"),
        ("min_lr=1", "--set: [run] min_lr: min_lr = 1.0 is above lr; at most 0.002"),
    ],
)
def test_what_the_mathematics_refuses_is_told_with_the_files_own_words(tmp_path: Path, flag: str, line: str) -> None:
    file = run_file(tmp_path, NANO, flags=["data.max_bytes=200000", f"run.{flag}"])
    with pytest.raises(ConfigError) as error:
        planned(file)
    assert line_of(error, tmp_path).startswith(line)


def test_texts_of_later_data_begin_at_the_file_s_folder_and_a_flag_has_commas(tmp_path: Path) -> None:
    table = "[data]\nphases = ['new', '../newer']\n"
    assert run_file(tmp_path, table).data.phases == (tmp_path / "new", tmp_path.parent / "newer")
    node = node_file(tmp_path, table)
    assert node.node.data_phases == node.data.phases == (tmp_path / "new", tmp_path.parent / "newer")
    assert node_file(tmp_path).node.data_phases == ()
    flagged = run_file(tmp_path, flags=["data.phases=new, /newer.txt"]).data.phases
    assert flagged == (Path.cwd() / "new", Path("/newer.txt"))
    shown = toml_text(run_file(tmp_path, table).settings)
    assert f'phases = ["{tmp_path}/new", "{tmp_path.parent}/newer"]' in shown
    assert json.loads(json_text(node.settings))["data"]["phases"]["value"] == [str(p) for p in node.node.data_phases]


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("'new'", 'a list of paths in quotes is wanted, not "new"; did you mean ["new"]?'),
        ("[1]", "a list of paths in quotes is wanted, not [1]"),
        ("['']", "a path is wanted; for this folder itself write ."),
    ],
)
def test_later_data_that_is_no_list_of_paths_is_told(tmp_path: Path, value: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_file(tmp_path, f"[data]\nphases = {value}\n")
    assert line_of(error, tmp_path) == f"run.toml:2: [data] phases: {line}"


def test_later_data_that_does_not_fit_the_run_is_told_with_its_key(tmp_path: Path) -> None:
    data = f"{NANO}rewarms = '400:1e-3:0.05'\n[data]\nmax_bytes = 200000\n"
    with pytest.raises(ConfigError, match=r"run\.toml:7: \[data\] phases: no file or folder"):
        planned(run_file(tmp_path, f"{data}phases = ['nowhere']\n"))
    with pytest.raises(ConfigError, match=r"run\.toml:4: \[run\] rewarms: 1 with a replay .* \[data\] phases names 0"):
        planned(run_file(tmp_path, data))


def test_a_node_may_have_a_tau_of_its_own(tmp_path: Path) -> None:
    assert node_file(tmp_path).node.tau is None
    assert node_file(tmp_path, "tau = 9\n").node.tau == 9
    with pytest.raises(ConfigError, match=r"\[node\] tau: the least is 0, not -1"):
        node_file(tmp_path, "tau = -1\n")


def test_data_and_weights_that_cannot_be_read_are_told_with_their_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml:5: \[data\] path: no file or folder"):
        planned(run_file(tmp_path, f"{NANO}[data]\npath = 'nowhere'\n"))
    (tmp_path / "weights").write_bytes(b"not tensors")
    with pytest.raises(ConfigError, match=r"\[run\] init: .*weights is not a safetensors file"):
        planned(run_file(tmp_path, "[run]\ninit = 'weights'\n"))


def test_every_key_has_a_meaning_to_show() -> None:
    keys = [key for schema in (RUN_SCHEMA, NODE_SCHEMA) for section in schema.values() for key in section.values()]
    assert [f"{key.section}.{key.name}" for key in keys if not key.meaning] == []


@pytest.mark.parametrize("price", ["-0.01", "inf", "nan"])
def test_a_price_that_is_none_is_refused(tmp_path: Path, price: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[coordinator]\nstate_dir = "state"\negress_price_per_gb = {price}\n')
    with pytest.raises(ConfigError, match=r"egress_price_per_gb.*no price"):
        load_run(file, flags=[], environ={})
