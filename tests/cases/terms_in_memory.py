"""The record of who leads, kept in memory, in a store that fails as a test wants it."""

from farloop.coordinator.leadership import Term, Unreachable, Version


class Terms:
    """A record in memory. `away`: the store does not answer; `deaf`: it does what is asked, and the answer is lost;
    `slow`: likewise, but it does it later, in `arrive`."""

    def __init__(self) -> None:
        self.term: Term | None = None
        self.version = 0
        self.away = self.deaf = self.slow = False
        self._on_the_way = list[tuple[Term, Version]]()

    def read(self) -> tuple[Term | None, Version]:
        if self.away:
            raise Unreachable("the store is away")
        return self.term, self.version

    def replace(self, term: Term, version: Version) -> bool:
        if self.away:
            raise Unreachable("the store is away")
        if version != self.version:
            return False
        if self.slow:
            self._on_the_way.append((term, version))
            raise Unreachable("no answer")
        self.term, self.version = term, self.version + 1
        if self.deaf:
            raise Unreachable("the answer is lost")
        return True

    def arrive(self) -> None:
        """Do what is on the way."""
        for term, version in self._on_the_way:
            if version == self.version:
                self.term, self.version = term, self.version + 1
        self._on_the_way.clear()
