"""An object store in virtual time: slow, failing, with wrong bytes, or with none."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from farloop.runtime.ports import Buffer, Moved
from farloop.sim.virtual_time import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualStore:
    """The store of one world."""

    seconds: tuple[float, float] = (0.02, 0.2)  # shortest and longest request
    fails: float = 0.0  # share of requests that fail
    spoils: float = 0.0  # share of reads that bring other bytes
    loses: float = 0.0  # share of deltas of which nothing is there, though the answer said so
    objects: dict[str, bytes] = field(default_factory=dict)

    def __call__(self, process: Process, rng: random.Random) -> "VirtualObjects":
        return VirtualObjects(self, process, rng)


class VirtualObjects:
    """One process's way to the store. A URL is a method and a key."""

    def __init__(self, store: VirtualStore, process: Process, rng: random.Random) -> None:
        self._process, self._conditions, self._rng = process, store, random.Random(rng.random())
        self._objects = store.objects

    def put(self, url: str, data: Buffer, over: Callable[[str, Moved], None]) -> None:
        held = bytes(data)  # as it is now: nobody may change what is being written

        def done(why: str) -> None:
            assert held == bytes(data)
            key = _key(url, "PUT")
            if not why and not (self._happens(self._conditions.loses) and "update-" not in key):
                self._objects.setdefault(key, held)
            over(why, (len(held), 0))

        self._after(done)

    def get(
        self, url: str, into: bytearray, right: Callable[[bytearray], bool], over: Callable[[str, Moved], None]
    ) -> None:
        def done(why: str) -> None:
            found = self._objects.get(_key(url, "GET"))
            if found is None or len(found) != len(into):
                why = why or "404 Not Found"
            if not why:
                into[:] = found or b""
                if self._happens(self._conditions.spoils):
                    into[self._rng.randrange(len(into))] ^= 1
                why = "" if right(into) else "other bytes"
            over(why, (0, 0 if found is None else len(found)))

        self._after(done)

    def delete(self, urls: Sequence[str]) -> None:
        for url in urls:
            self._objects.pop(_key(url, "DELETE"), None)

    def close(self) -> None:
        pass

    def _after(self, done: Callable[[str], None]) -> None:
        why = "500 Internal Server Error" if self._happens(self._conditions.fails) else ""
        self._process.after(self._rng.uniform(*self._conditions.seconds), lambda: done(why))

    def _happens(self, share: float) -> bool:
        return share > 0.0 and self._rng.random() < share


def _key(url: str, method: str) -> str:
    allowed, _, key = url.partition(" ")
    assert allowed == method, f"{method} by the URL of a {allowed}"
    return key
