"""What a power cut may leave of a `VirtualFiles` disk."""

from pathlib import Path

import xxhash
from virtual_files import AllOrNothing, Fate, VirtualFiles


def extremes() -> list[Fate]:
    """Nothing, writes alone, names alone, everything; and everything but the first, out of order."""
    both = (False, True)
    return [*(AllOrNothing(writes=writes, names=names) for writes in both for names in both), AllButFirst()]


class AllButFirst(AllOrNothing):
    """Later changes arrive, the first does not."""

    def __init__(self) -> None:
        super().__init__(writes=True, names=True)
        self._writes = self._names = 0

    def keeps_write(self) -> bool:
        self._writes += 1
        return self._writes > 1

    def keeps_name(self) -> bool:
        self._names += 1
        return self._names > 1


def image_of(files: VirtualFiles) -> int:
    """One number for all names and bytes."""
    hasher = xxhash.xxh3_64()
    places = [Path("/")]
    while places:
        place = places.pop()
        for name in sorted(files.names(place)):
            hasher.update(f"{place / name}\0".encode())
            if files.is_directory(place / name):
                places.append(place / name)
            else:
                hasher.update(files.read_bytes(place / name).rstrip(b"\0"))
    return hasher.intdigest()
