"""Beginning and continuing a run: which state directory is the file's, and what is said where it is not."""

import dataclasses
import logging
from pathlib import Path

import pytest

from farloop.cli.daemons import adoption, different_identity, different_terms, open_run
from farloop.config.exit_codes import CommandError, ExitCode
from farloop.config.run_spec import DataConfig, Plan, RunConfig, plan_run
from farloop.coordinator.decide.adoption import PATIENCE_S

DATA = DataConfig(max_bytes=300_000)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_run(RunConfig(model="nano", evaluation_sequences=4), DATA)


def test_a_run_is_begun_once_and_then_gone_on_with(tmp_path: Path, plan: Plan) -> None:
    first = open_run(tmp_path / "state", plan)
    first.close()
    second = open_run(tmp_path / "state", plan)
    second.close()
    assert (first.ledger.epoch, second.ledger.epoch) == (1, 2)
    assert second.ledger.spec == plan.spec


def test_another_run_is_refused_and_the_line_says_what_differs(tmp_path: Path, plan: Plan) -> None:
    open_run(tmp_path / "state", plan).close()
    other = plan_run(RunConfig(model="nano", evaluation_sequences=4, seed=5), DATA)
    with pytest.raises(CommandError, match=r"holds another run.*the first weights differ, seed was 0, is 5") as error:
        open_run(tmp_path / "state", other)
    assert error.value.code is ExitCode.REFUSED
    open_run(tmp_path / "state", plan).close()  # and the state is not locked, nor changed


def test_a_run_is_wound_back_on_request_alone(tmp_path: Path, plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CommandError, match="holds no run to go back to; leave out --rewind") as error:
        open_run(tmp_path / "state", plan, rewind=True)
    assert error.value.code is ExitCode.USAGE
    for rewind, history in ((False, 0), (True, 2), (False, 2)):
        store = open_run(tmp_path / "state", plan, rewind=rewind)
        store.close()
        assert store.ledger.history == history
    assert [record.getMessage()[:32] for record in caplog.records] == ["rewound history=2 versions=0,0,0"]


def test_a_run_goes_on_from_the_nodes_where_there_is_one(tmp_path: Path, plan: Plan) -> None:
    with pytest.raises(CommandError, match="not even an old copy of one; leave out --adopt-from-nodes") as error:
        open_run(tmp_path / "state", plan, adopt=True)
    assert error.value.code is ExitCode.USAGE
    open_run(tmp_path / "state", plan).close()
    open_run(tmp_path / "state", plan, adopt=True).close()


def test_the_flags_of_an_old_copy_do_not_contradict_each_other() -> None:
    assert adoption(None, wanted=False, rewind=True) is None
    assert adoption(None, wanted=True, rewind=False) == PATIENCE_S
    assert adoption(5.0, wanted=True, rewind=False) == 5.0
    with pytest.raises(CommandError, match="give one of them"):
        adoption(None, wanted=True, rewind=True)
    with pytest.raises(CommandError, match="give that, too"):
        adoption(5.0, wanted=False, rewind=False)
    for patience_s in (0.0, -1.0, float("nan")):
        with pytest.raises(CommandError, match="more than 0 seconds"):
            adoption(patience_s, wanted=True, rewind=False)


def test_other_terms_are_said_and_the_runs_own_are_kept(
    tmp_path: Path, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    open_run(tmp_path / "state", plan).close()
    terms = plan.spec.terms.replace(steps=700)
    changed = dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, terms=terms))
    with caplog.at_level(logging.WARNING):
        store = open_run(tmp_path / "state", changed)
    store.close()
    assert store.ledger.spec.terms.schedule.steps == 600
    assert [record.getMessage().split(" cause")[0] for record in caplog.records] == ["kept steps=600 file=700"]


def test_terms_are_told_by_the_files_own_keys(plan: Plan) -> None:
    terms = plan.spec.terms
    assert different_terms(terms, terms) == []
    other = terms.replace(lr=dataclasses.replace(terms.schedule.lr, minimum=0.0), h=20)
    assert different_terms(terms, other) == ["h=30 file=20", "min_lr=0.0002 file=0.0"]


def test_every_part_of_an_identity_can_be_told(plan: Plan) -> None:
    kept = plan.spec.identity
    blank: dict[str, object] = {int: -1, str: "x" * 99}  # type: ignore[dict-item]
    for field in dataclasses.fields(kept):
        value = getattr(kept, field.name)
        other = dataclasses.replace(kept, **{field.name: blank.get(type(value), ())})  # type: ignore[call-overload]
        assert field.name in different_identity(kept, other) or "differ" in different_identity(kept, other)
