"""The hold of a run while something waits for room on the disk: nothing new is committed (protocol, Commit order)."""

import logging
from collections.abc import MutableMapping

from farloop.coordinator.errors import NoRoom

_log = logging.getLogger(__name__)

ALARM = "storage"  # the alarm that says what is wrong and how to fix it, for as long as it is


class StorageHold:
    """True while something waits."""

    def __init__(self, alarms: MutableMapping[str, str]) -> None:
        self._alarms = alarms
        self._waiting: dict[str, NoRoom] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin(self, what: str, why: NoRoom) -> None:
        """`what` did not fit, and will be tried again."""
        if not self._waiting:
            _log.warning("storage hold begin what=%r why=%r fix=%r", what, str(why), why.fix)
        self._waiting[what] = why
        self._tell()

    def end(self, what: str) -> None:
        """`what` fits now, if it ever did not."""
        if self._waiting.pop(what, None) and not self._waiting:
            _log.info("storage hold end what=%r", what)
        self._tell()

    def _tell(self) -> None:
        if not self._waiting:
            self._alarms.pop(ALARM, None)
            return
        why = next(iter(self._waiting.values()))
        names = ", ".join(self._waiting)
        self._alarms[ALARM] = f"the run is held: {names} must wait: {why}; {why.fix}, and it goes on by itself"
