"""Beginning and continuing a run: which state directory is the file's, and what is said where it is not."""

import dataclasses
import logging
import socket
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import statuses
from command_line import error_line, farloop

from farloop.cli.daemons import _last_line, different_run, different_terms, open_run, tell_of_stores
from farloop.cli.main import adoption
from farloop.cli.pages import Viewers, pages
from farloop.config.exit_codes import CommandError, ExitCode
from farloop.config.run_config import RunConfig
from farloop.config.run_spec import Plan, plan_run
from farloop.coordinator.decide.adoption import PATIENCE_S
from farloop.coordinator.leadership import Term, mark, marked, term_store
from farloop.coordinator.settings import CoordinatorConfig
from farloop.coordinator.storage.files import DISK
from farloop.coordinator.storage.objects import signer
from farloop.lab.bench.http_store import ObjectServer
from farloop.monitoring import page
from farloop.monitoring.healthcheck import open_page
from farloop.monitoring.status import STATUS_FILE, dumps
from farloop.monitoring.status_summary import standing
from farloop.node.settings import DataConfig

DATA = DataConfig(max_bytes=300_000)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_run(RunConfig(model="nano", evaluation_sequences=4), DATA)


def test_a_run_is_begun_once_and_then_gone_on_with_and_another_is_refused(tmp_path: Path, plan: Plan) -> None:
    other = plan_run(RunConfig(model="nano", evaluation_sequences=4, seed=5), DATA)
    for epoch in (1, 2):
        store = open_run(tmp_path / "state", plan)
        store.close()
        assert (store.ledger.epoch, store.ledger.spec.terms) == (epoch, plan.spec.terms)
        with pytest.raises(CommandError, match=r"holds another run.*the first weights differ, seed was 0, is 5") as e:
            open_run(tmp_path / "state", other)
        assert e.value.code is ExitCode.REFUSED


def test_a_run_is_wound_back_or_adopted_on_request_and_where_there_is_one(
    tmp_path: Path, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    wishes: list[tuple[dict[str, Any], str]] = [
        ({"rewind": True}, "holds no run to rewind; leave out --rewind"),
        ({"adopt": True}, "not even an old copy of one; leave out --adopt-from-nodes"),
    ]
    for wish, line in wishes:
        with pytest.raises(CommandError, match=line) as error:
            open_run(tmp_path / "state", plan, **wish)
        assert error.value.code is ExitCode.USAGE
    histories = []
    for wish in ({}, {"rewind": True}, {}, {"adopt": True}):
        store = open_run(tmp_path / "state", plan, **wish)
        store.close()
        histories.append(store.ledger.history)
    assert histories == [0, 2, 2, 2]
    assert [record.getMessage()[:32] for record in caplog.records] == ["rewound history=2 versions=0,0,0"]


def test_the_last_line_of_a_run_says_how_many_steps_changed_nothing(tmp_path: Path) -> None:
    model = f"model: {tmp_path / 'model.safetensors'}"
    assert _last_line("demo", tmp_path) == f"run demo is finished; {model}"
    nodes = [statuses.node("oslo", skipped_steps=0), statuses.node("lima", skipped_steps=612)]
    for told, words in (
        (nodes[:1], ""),
        (nodes, "612 of 1,224 inner steps changed no weight: no gradient, or NaN or Inf in it; "),
    ):
        status = statuses.status(run={"state": "finished"}, nodes=told)
        (tmp_path / STATUS_FILE).write_text(dumps(status))
        assert _last_line("demo", tmp_path) == f"run demo is finished; {words}{model}"
        assert words[:-2] in standing(status) and ("changed no" in standing(status)) == bool(words)


def test_pages_are_served_after_their_files_were_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page._inline.cache_clear()
    page.template.cache_clear()
    config = CoordinatorConfig(state_dir=tmp_path, http="127.0.0.1:0")
    coordinator: Any = SimpleNamespace(observer=SimpleNamespace(status_json=b"{}", age_s=0.0))
    watch: Any = SimpleNamespace(still_s=0.0)
    with pages(config, coordinator, watch, Viewers()) as url:
        monkeypatch.setattr(page, "files", None)
        with open_page(url, 5.0) as answer:
            assert answer.status == 200 and b"The run is being read." in answer.read()


def test_the_flags_of_an_old_copy_do_not_contradict_each_other() -> None:
    assert adoption(None, wanted=False, rewind=True) is None
    assert adoption(None, wanted=True, rewind=False) == PATIENCE_S
    assert adoption(5.0, wanted=True, rewind=False) == 5.0
    for patience_s, wanted, rewind, line in (
        (None, True, True, "give one of them"),
        (5.0, False, False, "needs --adopt-from-nodes: give both"),
        *((seconds, True, False, "more than 0 seconds") for seconds in (0.0, -1.0, float("nan"), float("inf"))),
    ):
        with pytest.raises(CommandError, match=line):
            adoption(patience_s, wanted=wanted, rewind=rewind)


def test_other_terms_are_said_and_the_runs_kept(tmp_path: Path, plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    open_run(tmp_path / "state", plan).close()
    terms = plan.spec.terms
    changed = dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, terms=terms.replace(steps=700)))
    with caplog.at_level(logging.WARNING):
        store = open_run(tmp_path / "state", changed)
    store.close()
    assert store.ledger.spec.terms.schedule.steps == 600
    assert [record.getMessage().split(" cause")[0] for record in caplog.records] == ["kept steps=600 file=700"]
    assert different_terms(terms, terms) == []
    other = terms.replace(lr=dataclasses.replace(terms.schedule.lr, minimum=0.0), h=20)
    assert different_terms(terms, other) == ["h=15 file=20", "min_lr=0.0002 file=0.0"]


def test_every_part_of_an_identity_can_be_told(plan: Plan) -> None:
    kept = plan.spec.identity
    blank: dict[type, Any] = {int: -1, str: "x" * 99}
    for field in dataclasses.fields(kept):
        changes: dict[str, Any] = {field.name: blank.get(type(getattr(kept, field.name)), ())}
        told = different_run(plan.spec, dataclasses.replace(plan.spec, identity=dataclasses.replace(kept, **changes)))
        assert field.name in told or "differ" in told


def test_a_method_that_divides_the_model_otherwise_is_named_the_weights_are_not(tmp_path: Path, plan: Plan) -> None:
    open_run(tmp_path / "state", plan).close()
    other = plan_run(dataclasses.replace(plan.config, method="diloco"), DATA)
    with pytest.raises(CommandError, match=r"method was streaming, is diloco, the division of the model") as refused:
        open_run(tmp_path / "state", other)
    assert "first weights" not in str(refused.value)


def test_a_bucket_that_cannot_be_opened_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\nmodel = 'nano'\n[coordinator]\nstate_dir = 'state'\nhttp = ''\n")
    (tmp_path / "file").write_text("not a folder")
    store = "/file/x: open" if find_spec("obstore") else "needs the extra 'cloud'"
    bucket = (tmp_path / "file" / "x").as_uri()
    assert store in error_line("coordinator", str(tmp_path / "run.toml"), "--copy-to", bucket)
    assert not (tmp_path / "state").exists()


def test_a_flag_of_one_start_neither_takes_the_lead_in_vain_nor_waits_for_it(tmp_path: Path, plan: Plan) -> None:
    """A standby with `--restore` took over, found that it had a run, and ended: nobody led."""
    (tmp_path / "run.toml").write_text(
        "[run]\nmodel = 'nano'\nevaluation_sequences = 4\n[data]\nmax_bytes = 300000\n[coordinator]\nstate_dir = 's'\n"
        f"http = ''\nname = 'b'\nleads_by = '{tmp_path.as_uri()}'\nbind = 'tcp://127.0.0.1:0'\n"
        "mirror = 'tcp://127.0.0.1:0'\npeers = 'tcp://127.0.0.1:9'\n"
    )
    terms, command = term_store(tmp_path.as_uri()), ("coordinator", str(tmp_path / "run.toml"))
    run = plan.spec.identity.fingerprint()
    term = Term(run=run, leader="a", process="1", mark="1", term=1, address="", in_sync=("b",))
    assert terms.replace(term, 0)
    for flag in (["--rewind"], ["--adopt-from-nodes"], ["--restore", "file:///nowhere"]):
        line = error_line(*command, *flag)
        assert line.startswith(f"{flag[0]} is for the coordinator that leads, and the record names a: ")
    assert terms.replace(dataclasses.replace(term, leader="b", in_sync=("a",)), 1)
    (tmp_path / "s" / "journal-000000.log").touch()
    line = error_line(*command, "--restore", "file:///nowhere", code=ExitCode.REFUSED)
    assert "holds a run already; a copy is restored into an empty folder" in line
    assert terms.read()[1] == 2


def test_a_folder_that_a_record_was_about_is_not_led_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`leads_by` was removed from the file of one: both led, in one epoch."""
    (tmp_path / "run.toml").write_text("[run]\nmodel = 'nano'\nevaluation_sequences = 4\n[data]\nmax_bytes = 300000\n")
    command = ("coordinator", str(tmp_path / "run.toml"), "--state", str(tmp_path), "--set", "coordinator.http=")
    assert "--force-lead needs [coordinator] leads_by" in error_line(*command, "--force-lead")
    mark(tmp_path, "1")
    assert f"{tmp_path}: a record says who leads its run, and another coordinator may" in error_line(*command)
    with closing(DISK.lock(tmp_path / "lock")):
        assert "another coordinator holds" in error_line(*command, "--force-lead", code=ExitCode.STORAGE)
    assert marked(tmp_path) == ["1"], "a start that fails leaves it"
    monkeypatch.setattr("farloop.cli.daemons._serve", AsyncMock(side_effect=CommandError("it leads")))
    for flags in (("--force-lead",), ()):
        assert "it leads" in error_line(*command, *flags)


def test_an_empty_copy_to_empties_the_one_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ignored in silence, and the state was copied into the file's bucket."""
    bucket = (tmp_path / "bucket").as_uri()
    (tmp_path / "run.toml").write_text(
        f"[run]\nmodel = 'nano'\n[coordinator]\nstate_dir = 's'\nhttp = ''\ncopy_to = '{bucket}'\n"
    )
    began: list[str] = []
    monkeypatch.setattr("farloop.cli.main.set_up", lambda *_, **__: None)
    monkeypatch.setattr("farloop.cli.daemons.run_coordinator", lambda run, **_: began.append(run.coordinator.copy_to))
    for words in ([], ["--copy-to", ""]):
        result = farloop("coordinator", str(tmp_path / "run.toml"), *words)
        assert not isinstance(result.exception, Exception) and not result.stderr
    assert began == [bucket, ""]


def test_a_store_that_does_not_work_is_told_of_at_the_start_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was silent until the first delta, or copy."""
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").touch()
    with ObjectServer().serving() as server:
        for url, status, copy_to, said in (
            (server.url, "", f"file://{tmp_path}/copies", ()),
            (server.url, "403", "", ("setting=bulk_url", "403")),
            ("", "", f"file://{tmp_path}/file/below", ("setting=copy_to", "file/below")),
            ("", "", "az://container/run", ("AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",)),
        ):
            caplog.clear()
            server.fault = lambda method, path, status=status: status
            config = CoordinatorConfig(state_dir=tmp_path, copy_to=copy_to)
            tell_of_stores(config, signer(url) if url else None).join()
            assert all(words in caplog.text for words in said) and len(caplog.messages) == bool(said), caplog.text
        assert not server.objects


def test_a_used_port_is_named_before_the_state_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run's journal was left behind."""
    monkeypatch.setattr("farloop.cli.main.set_up", lambda *_, **__: None)
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        for bind, http, said in (
            (f"tcp://127.0.0.1:{port}", "", f"tcp://127.0.0.1:{port} is in use; stop the other process"),
            ("tcp://127.0.0.1:0", f"127.0.0.1:{port}", f"port {port} on 127.0.0.1 is in use"),
        ):
            (tmp_path / "run.toml").write_text(
                f"[run]\nmodel = 'nano'\n[coordinator]\nstate_dir = 'state'\nhttp = '{http}'\nbind = '{bind}'\n"
            )
            assert said in error_line("coordinator", str(tmp_path / "run.toml"))
    assert not (tmp_path / "state").exists()
