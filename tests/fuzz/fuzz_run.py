"""Feeds targets with mutations of good inputs: python tests/fuzz/fuzz_run.py TARGET… --inputs 100000 --seed 1

Targets run in processes of their own, whose address space is bounded from the moment on when everything is loaded,
and every input has so many seconds of processor time. What is found is written to tests/fuzz/cases/TARGET/, where the
tests take it from; the exit status is 1. An input whose outcome is new becomes one that further mutations begin with.
"""

import argparse
import hashlib
import mmap
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from types import FrameType

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cases"), str(HERE.parent / "unit" / "quant")]

import fuzz_codecs  # noqa: E402
import fuzz_machine  # noqa: E402
import fuzz_storage  # noqa: E402
import fuzz_wire  # noqa: E402
import torch  # noqa: E402
from fuzz_target import ACCEPTED, Target  # noqa: E402

TARGETS = {
    target.name: target
    for target in (*fuzz_wire.TARGETS, *fuzz_codecs.TARGETS, *fuzz_storage.TARGETS, *fuzz_machine.TARGETS)
}
CASES = HERE / "cases"
FOUND = "FOUND"

ROOM = 256 << 20
"""Bytes of address space beyond what is taken when all is loaded."""

INPUT_S = 5.0
"""Processor time of one input."""

_MOST_KEPT = 400
"""Inputs that mutations begin with."""

_LARGEST_KEPT = 16 << 10
"""Bytes of them: what grows would only be slow."""

_HEAD = struct.Struct("<64sI")
_LARGEST = 4 << 20


class TooSlow(BaseException):
    """An input took longer than `INPUT_S`. Not an Exception: no target may catch it."""


def cases_of(target: Target) -> list[bytes]:
    """What was found before."""
    return [path.read_bytes() for path in sorted((CASES / target.name).glob("*")) if path.is_file()]


def bound_memory() -> None:
    """From now on `ROOM` more bytes of address space may be taken."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        bytearray(2 * ROOM)
    except MemoryError:
        return
    raise AssertionError("the memory is not bounded")


def too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow(f"more than {INPUT_S:g} s")


class Child:
    """Targets in a bounded process. What it works on is in a file, in case that it dies of it."""

    def __init__(self, targets: list[Target], seed: int, scratch: Path) -> None:
        self.targets, self.seed = targets, seed
        self.kept = {target.name: [*target.seeds(), *cases_of(target)] for target in targets}
        self.outcomes: Counter[str] = Counter()
        self.found: set[str] = set()
        self._file = scratch.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), _LARGEST + _HEAD.size)

    def run(self, inputs: int) -> int:
        """Feed every target with as many. Returns how many findings there were."""
        for target in self.targets:  # loads, compiles, starts threads
            for data in self.kept[target.name][:]:
                self.try_one(target, data)
        bound_memory()
        signal.signal(signal.SIGPROF, too_slow)
        findings = 0
        for target in self.targets:
            began, chance = time.monotonic(), Random(f"{target.name} {self.seed}")
            self.outcomes.clear()
            for _ in range(inputs):
                self.try_one(target, self.next_input(target, chance))
            findings += self.report(target, inputs, time.monotonic() - began)
        return findings

    def report(self, target: Target, inputs: int, seconds: float) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        found = sum(count for kind, count in self.outcomes.items() if kind.startswith(FOUND))
        accepted = sum(count for kind, count in self.outcomes.items() if kind.startswith(ACCEPTED))
        sys.stdout.write(
            f"{target.name:<30} inputs {inputs:>8} accepted {accepted:>8} outcomes {len(self.outcomes):>4} "
            f"found {found} seconds {seconds:.0f} peak {peak:.0f} MiB\n"
        )
        sys.stdout.flush()
        return found

    def next_input(self, target: Target, chance: Random) -> bytes:
        data = target.mutate(chance, chance.choice(self.kept[target.name]))
        return (target.seal(data) if chance.random() < 0.75 else data)[:_LARGEST]

    def try_one(self, target: Target, data: bytes) -> None:
        self._map[: _HEAD.size + len(data)] = _HEAD.pack(target.name.encode(), len(data)) + data
        signal.setitimer(signal.ITIMER_PROF, INPUT_S)
        try:
            outcome = target.outcome(data)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 — whatever it is, it is what is looked for
            signal.setitimer(signal.ITIMER_PROF, 0)
            return self.tell(target, error, data)
        signal.setitimer(signal.ITIMER_PROF, 0)
        kind, kept = re.sub(r"[0-9a-f]{6,}|\d+|'.*'|\".*\"", "#", outcome)[:300], self.kept[target.name]
        if not self.outcomes[kind] and len(kept) < _MOST_KEPT and len(data) <= _LARGEST_KEPT:
            kept.append(data)
        self.outcomes[kind] += 1

    def tell(self, target: Target, error: BaseException, data: bytes) -> None:
        """Keep the first input of every place that raises."""
        frames = traceback.extract_tb(error.__traceback__)
        where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[-4:]]
        kind = f"{FOUND} {target.name} {type(error).__name__} {' < '.join(reversed(where))}"
        self.outcomes[kind] += 1
        if kind not in self.found:
            self.found.add(kind)
            sys.stdout.write(f"{kind}: {str(error)[:200]}\n  {keep(target.name, data)}\n")
            sys.stdout.flush()


def keep(name: str, data: bytes) -> Path:
    """Write a finding where the tests take it from."""
    path = CASES / name / hashlib.sha256(data).hexdigest()[:12]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def run_child(names: list[str], inputs: int, seed: int, scratch: Path) -> int:
    torch.set_num_threads(1)
    return int(Child([TARGETS[name] for name in names], seed, scratch).run(inputs) > 0)


def run_parent(names: list[str], inputs: int, seed: int) -> bool:
    """Whether nothing was found, not even an input that the process died of."""
    with tempfile.NamedTemporaryFile() as scratch:
        scratch.truncate(_LARGEST + _HEAD.size)
        path = Path(scratch.name)
        words = [sys.executable, __file__, *names, "--inputs", str(inputs), "--seed", str(seed), "--child", str(path)]
        status = subprocess.run(words, check=False).returncode
        if status < 0:
            data = path.read_bytes()
            name, size = _HEAD.unpack_from(data)
            where = keep(name.rstrip(b"\0").decode(), data[_HEAD.size : _HEAD.size + size])
            sys.stdout.write(f"{FOUND} the process died of signal {-status}\n  {where}\n")
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Feed targets with mutations of good inputs.")
    parser.add_argument(
        "targets", nargs="+", choices=[*TARGETS, "all"], metavar="TARGET", help=f"all, {', '.join(TARGETS)}"
    )
    parser.add_argument("--inputs", type=int, default=10_000, help="of every target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--together", action="store_true", help="all targets in one process")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    names = list(TARGETS) if "all" in asked.targets else asked.targets
    if asked.child:
        return run_child(names, asked.inputs, asked.seed, asked.child)
    batches = [names] if asked.together else [[name] for name in names]
    return int(not all([run_parent(batch, asked.inputs, asked.seed) for batch in batches]))


if __name__ == "__main__":
    sys.exit(main())
