"""What a fuzz target is: a door through which bytes come from outside, as a function of these bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from fuzz_mutator import edited

Mutate = Callable[[Random, bytes], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One door. It keeps no state between inputs."""

    name: str
    run: Callable[[bytes], object]
    """Returns what it saw, or raises one of `allowed`; anything else is a finding, and so is much memory or time."""
    allowed: tuple[type[Exception], ...]
    seeds: Callable[[], Sequence[bytes]]
    """Good inputs, which the mutations begin with."""
    mutate: Mutate = edited
    seal: Callable[[bytes], bytes] = bytes
    """The input with lengths and checksums that fit it: else nothing behind them would ever be reached."""

    def outcome(self, data: bytes) -> str:
        """In one word, what became of an input. Raises what is not allowed."""
        try:
            saw = self.run(data)
        except self.allowed as error:
            return f"{type(error).__name__}: {error}"
        return f"{ACCEPTED}: {saw}"


ACCEPTED = "accepted"
