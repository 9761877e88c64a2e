"""The same targets under atheris, which looks at what inputs reach.

`python tests/fuzz/atheris_driver.py TARGET -max_total_time=600`, and whatever else libFuzzer takes. Needs the extra
`fuzz`: atheris has no wheels for every platform, so nothing else here asks for it. Bytes behind the checksums are
reached because what libFuzzer makes of an input is sealed. A finding is raised, with its input in the current folder;
move it to tests/fuzz/cases/TARGET/.
"""

import sys
import tempfile
from pathlib import Path
from random import Random

import atheris

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "cases")]

with atheris.instrument_imports(include=["farloop"]):
    import farloop.coordinator.decide.machine
    import farloop.coordinator.storage.segment
    import farloop.coordinator.storage.snapshots
    import farloop.quant.blob
    import farloop.wire.session  # noqa: F401

from fuzz_run import TARGETS, cases_of  # noqa: E402


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"name one of {', '.join(TARGETS)}")
    target = TARGETS[sys.argv.pop(1)]

    def one_input(data: bytes) -> None:
        target.outcome(target.seal(data))

    def mutated(data: bytes, max_size: int, seed: int) -> bytes:
        """By ourselves as often as by libFuzzer: it knows neither msgpack nor sequences."""
        if seed % 2:
            return bytes(atheris.Mutate(data, max_size))
        return target.mutate(Random(seed), bytes(data))[:max_size]

    with tempfile.TemporaryDirectory() as corpus:
        for number, data in enumerate([*target.seeds(), *cases_of(target)]):
            (Path(corpus) / str(number)).write_bytes(data)
        atheris.Setup([*sys.argv, corpus], one_input, custom_mutator=mutated)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
