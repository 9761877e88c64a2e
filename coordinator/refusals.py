"""What was not heard, for people: counted by its reason, and told in the log without letting strangers fill it."""

import logging
import time
from collections import OrderedDict

from farloop.coordinator.metrics import Metrics
from farloop.wire.reasons import Reason

_log = logging.getLogger(__name__)

TOLD_EVERY_S = 60.0
"""The same reason of the same origin is told once in so long, with how often it came."""

_ORIGINS = 16
"""Of one reason, so many origins are told of in that time: a stranger can have a new key for every knock."""


class Refusals:
    """To be called with a reason, and who or where it was."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._told: OrderedDict[tuple[Reason, str], tuple[float, int]] = OrderedDict()
        """When it was told, and how often it has come since."""

    def __call__(self, reason: Reason, who: str) -> None:
        self._metrics.turned_away.labels(reason.code).inc()
        now, key = time.monotonic(), (reason, who)
        told_at, since = self._told.get(key, (float("-inf"), 0))
        while self._told and next(iter(self._told.values()))[0] < now - TOLD_EVERY_S:
            self._told.popitem(last=False)
        if now - told_at < TOLD_EVERY_S:
            self._told[key] = (told_at, since + 1)
        elif sum(known is reason for known, _ in self._told) < _ORIGINS:
            self._told.pop(key, None)
            self._told[key] = (now, 0)
            again = f" again={since}" if since else ""
            _log.warning("turned away who=%r reason=%s why=%r%s", who, reason.name, reason.sentence, again)
