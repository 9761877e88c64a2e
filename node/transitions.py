"""One log line for every step of a node's way through a run, and why it took it. Decides nothing."""

import logging
from typing import Final

from farloop.node.machine import NodeMachine, Stage

_log = logging.getLogger(__name__)

_WHY: Final[dict[Stage, str]] = {
    "joining": "this node begins anew: it has no anchors of the run",
    "ready": "all fragments are here",
    "training": "a round begins that it takes part in",
    "finishing": "its last round is over: what it has sent is waited for",
    "draining": "it was asked to leave, and finishes what it has begun",
    "finished": "the run is over",
    "left": "nothing that it has sent is open any more",
    "stopped": "it was refused, or cannot go on",
}


class Transitions:
    """Of one node. To be shown its machine whenever something may have changed."""

    def __init__(self) -> None:
        self._stage: Stage = "joining"
        self._connected = False

    def saw(self, machine: NodeMachine) -> None:
        """Write what has changed since the last look."""
        if machine.connected != self._connected:
            self._connected = machine.connected
            if machine.connected:  # its end is told where the reason is known
                told = machine.epoch, machine.stage, machine.schedule.round
                _log.info("session open epoch=%d stage=%s round=%d", *told)
        if machine.stage != self._stage:
            before, self._stage = self._stage, machine.stage
            _log.info(
                "stage is=%s was=%s round=%d step=%d why=%r",
                machine.stage,
                before,
                machine.schedule.round,
                machine.schedule.step,
                _WHY[machine.stage],
            )
