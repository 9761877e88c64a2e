"""Files, environment and flags, before anything in them is believed."""

from pathlib import Path

import pytest

from farloop.config.sources import ConfigError, nearest, read_environment, read_file, read_flags

SECTIONS = {"run": ["steps", "h"], "data": ["path"]}


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_value_knows_its_file_and_line(tmp_path: Path) -> None:
    path = written(tmp_path, "# a run\n[run]\nsteps = 5\n\nh = 2\n[data]\n  path = 'x'\n")
    found = read_file(path, SECTIONS)
    assert [(given.section, given.key, given.value) for given in found] == [
        ("run", "steps", 5),
        ("run", "h", 2),
        ("data", "path", "x"),
    ]
    assert [given.origin for given in found] == [f"{path}:3", f"{path}:5", f"{path}:7"]
    assert {given.folder for given in found} == {tmp_path}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("steps = 5\n", r":1: steps stands outside of a section; put it below \[run\] or \[data\]"),
        ("[run]\n[dta]\n", r":2: there is no section \[dta\] here; did you mean data\?"),
        ("[run]\nsteps = = 5\n", r":2: is not TOML: invalid value"),
        ("[run]\nsteps = 5\nsteps = 6\n", r":3: is not TOML: cannot overwrite a value"),
    ],
)
def test_a_file_that_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        read_file(written(tmp_path, text), SECTIONS)


def test_a_file_that_is_missing_or_no_text_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml: cannot be read: no such file"):
        read_file(tmp_path / "nothing.toml", SECTIONS)
    (tmp_path / "bad.toml").write_bytes(b"[run]\nname = '\xff'\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_file(tmp_path / "bad.toml", SECTIONS)


def test_variables_with_two_underscores_are_settings_and_all_others_are_somebody_elses() -> None:
    environ = {
        "FARLOOP_RUN__STEPS": "7",
        "FARLOOP_COORDINATOR_SERVICE_HOST": "10.0.0.1",  # Kubernetes makes such names for every service
        "FARLOOP_LOG_LEVEL": "debug",
        "PATH": "/bin",
        "OTHER__THING": "x",
    }
    (given,) = read_environment(environ, SECTIONS)
    assert (given.section, given.key, given.value, given.origin) == ("run", "steps", "7", "FARLOOP_RUN__STEPS")
    assert given.is_text


def test_a_variable_with_one_underscore_where_two_were_meant_is_an_error() -> None:
    with pytest.raises(ConfigError, match="did you mean FARLOOP_RUN__STEPS, with two underscores"):
        read_environment({"FARLOOP_RUN_STEPS": "7"}, SECTIONS)


def test_a_variable_of_no_section_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"FARLOOP_RUNN__STEPS: there is no section runn; did you mean run\?"):
        read_environment({"FARLOOP_RUNN__STEPS": "7"}, SECTIONS)


def test_flags_keep_what_stands_behind_the_first_equals_sign() -> None:
    (given,) = read_flags(["data.path=a=b.txt"], SECTIONS)
    assert (given.section, given.key, given.value, given.folder) == ("data", "path", "a=b.txt", Path.cwd())


@pytest.mark.parametrize("flag", ["steps=3", "run.steps", "run.=3", "=", ""])
def test_a_flag_of_another_shape_is_an_error(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value is wanted"):
        read_flags([flag], SECTIONS)


def test_the_nearest_word_is_offered_and_all_of_them_where_none_is_near() -> None:
    assert nearest("stepps", ["steps", "h"]) == "did you mean steps?"
    assert nearest("zzz", ["steps", "h"]) == "there are steps, h"
