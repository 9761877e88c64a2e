"""The record of who leads, kept in memory, in a store that fails as a test wants it."""

from farloop.coordinator.leadership import Term, Unreachable, Version


class Terms:
    """A record in memory. `away`: the store does not answer; `deaf`: it does what is asked, and the answer is lost."""

    def __init__(self) -> None:
        self.term: Term | None = None
        self.version = 0
        self.away = self.deaf = False

    def read(self) -> tuple[Term | None, Version]:
        if self.away:
            raise Unreachable("the store is away")
        return self.term, self.version

    def replace(self, term: Term, version: Version) -> bool:
        if self.away:
            raise Unreachable("the store is away")
        if version != self.version:
            return False
        self.term, self.version = term, self.version + 1
        if self.deaf:
            raise Unreachable("the answer is lost")
        return True
