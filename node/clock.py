"""Where a node's wall time goes: training, farloop's own code, standing still, evaluation (protocol, Figures). Pure."""

from typing import Literal

Activity = Literal["training", "farloop", "blocked", "evaluation"]


class Clock:
    """Adds up the seconds of each activity. It runs from the first `turn` on; `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._seconds: dict[Activity, float] = dict.fromkeys(("training", "farloop", "blocked", "evaluation"), 0.0)
        self._activity: Activity | None = None
        self._since = 0.0

    @property
    def activity(self) -> Activity | None:
        """What the time goes into now; None before the first step and after the last."""
        return self._activity

    def turn(self, activity: Activity | None, now: float) -> None:
        """From now on the time goes into something else, or, with None, is not counted."""
        if self._activity is not None:
            self._seconds[self._activity] += now - self._since
        self._activity, self._since = activity, now

    def seconds(self, activity: Activity, now: float) -> float:
        """Seconds of it so far, the present stretch included."""
        running = now - self._since if activity == self._activity else 0.0
        return self._seconds[activity] + running

    def all_seconds(self, now: float) -> dict[Activity, float]:
        """Those of every activity."""
        return {activity: self.seconds(activity, now) for activity in self._seconds}

    def compute_share(self, now: float) -> float:
        """Share of the time that the training loop had for itself, data loading included; farloop's code, waiting and
        evaluation are the rest."""
        wall = sum(self.all_seconds(now).values())
        return self.seconds("training", now) / wall if wall > 0 else 1.0
