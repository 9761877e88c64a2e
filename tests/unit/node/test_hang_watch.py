"""Who hangs is judged from notes alone."""

from typing import Any

from farloop.config.exit_codes import ExitCode
from farloop.node.hang_watch import EVALUATING, EXIT_CODE, LEFT, SLOW, TRAINING, WAITING, Judge
from farloop.wire.messages import pack

LIMIT_S = 60.0


class Notes:
    """Two ranks that have stepped once a second, until now."""

    def __init__(self, steps: int = 20, step_s: float = 1.0) -> None:
        self.judge, self.now, self._beats = Judge(2, LIMIT_S, 0.0), 0.0, 0
        for step in range(steps):
            self.now += step_s
            self.tell(0, step=step), self.tell(1, step=step)

    def tell(
        self, rank: int, *, step: int = 19, phase: str = TRAINING, turns: int = 0, begun: int = 40, asked: bool = False
    ) -> None:
        self._beats += 1
        self.judge.on_note(rank, pack([step, phase, turns, {"0": begun}, asked, self._beats]), self.now)

    def hung_after(self, seconds: float, *ranks: dict[str, Any]) -> list[int]:
        """Ranks that hang when each, if given, has told this again and again."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            for rank, told in enumerate(ranks):
                if told:
                    self.tell(rank, **told)
        return sorted(self.judge.hung(self.now))


def test_a_rank_behind_the_others_hangs_once_the_limit_is_over() -> None:
    for behind, ahead in (({"step": 19}, {"step": 20}), ({"begun": 41}, {"begun": 42})):
        notes = Notes()
        assert notes.hung_after(LIMIT_S - 5, ahead, behind) == []
        assert notes.hung_after(10, ahead, behind) == [1]


def test_a_rank_that_tells_nothing_hangs_even_if_it_is_not_behind() -> None:
    assert Notes().hung_after(LIMIT_S + 5, {"begun": 40}) == [1]
    assert Notes().hung_after(LIMIT_S + 5, {}, {"begun": 40}) == [0], "the lead is judged as any other"


def test_the_limit_is_ten_steps_where_those_are_longer() -> None:
    notes = Notes(step_s=20.0)
    assert notes.hung_after(SLOW * 20 - 5, {"step": 20}, {"step": 19}) == []
    assert notes.hung_after(10, {"step": 20}, {"step": 19}) == [1]
    first = Notes(steps=0)
    assert first.hung_after(SLOW * LIMIT_S - 5, {"step": 0, "begun": 2}, {"step": 0, "begun": 1}) == [], "it compiles"
    assert first.hung_after(10, {"step": 0, "begun": 2}, {"step": 0, "begun": 1}) == [1]


def test_no_rank_hangs_that_waits_evaluates_or_has_left() -> None:
    hour = 3600.0
    assert Notes().hung_after(hour, {"begun": 41}, {"begun": 41}) == [], (
        "all of them evaluate, or wait in one collective"
    )
    waits = Notes()
    for turn in range(720):
        assert waits.hung_after(5.0, {"phase": WAITING, "turns": turn}, {"begun": 41}) == [], "for the coordinator"
    assert Notes().hung_after(LIMIT_S * SLOW - 5, {"phase": EVALUATING}, {"begun": 41}) == []
    assert Notes().hung_after(LIMIT_S * SLOW + 5, {"phase": EVALUATING}, {"begun": 41}) == [0]
    left = Notes()
    left.tell(1, phase=LEFT)
    assert left.hung_after(hour, {"step": 20}) == []


def test_its_exit_code_is_documented() -> None:
    assert EXIT_CODE == ExitCode.HUNG
