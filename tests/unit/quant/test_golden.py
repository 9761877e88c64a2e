"""The bytes of every codec, as released. They change with a new codec number, and never otherwise.

`python tests/unit/quant/test_golden.py` writes the file anew; its diff may only add lines.
"""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from farloop.quant.blob import BlobHeader, pack_blob
from farloop.quant.registry import CODECS

GOLDEN = Path(__file__).with_name("golden_payloads.txt")


def uniform(numel: int) -> Tensor:
    """Multiples of 2⁻²³ in [−1, 1) from a linear congruence, the same on every machine and library."""
    state, values = 1, []
    for _ in range(numel):
        state = (6364136223846793005 * state + 1442695040888963407) % 2**64
        values.append(((state >> 40) - 2**23) / 2**23)
    return torch.tensor(values, dtype=torch.float32)


CASES: dict[str, Tensor] = {
    "empty": torch.empty(0),
    "one": torch.tensor([-0.3]),
    "zeros": torch.tensor([0.0, -0.0] * 3),
    "uniform-63": uniform(63),
    "uniform-64": uniform(64) * 2.0**-10,
    "uniform-65": uniform(65) * 1e-3,
    "sizes": torch.tensor([sign * 1.5 * 2.0**power for power in range(-150, 128, 9) for sign in (1, -1)]),
    "ties": torch.tensor([-8.0, 0.5, 1.5, 2.5, -0.5, -1.5, 8.0, 6.0, 3.0]),
    "smallest": torch.full((3,), 2.0**-149),
    "largest": torch.tensor([1.0, -1.0, 0.5]) * math.ldexp(2 - 2**-23, 127),
}


def lines() -> list[str]:
    payloads = [
        f"{name} {case} {bytes(codec.encode(x).tolist()).hex() or '-'}"
        for name, codec in CODECS.items()
        for case, x in CASES.items()
    ]
    header = BlobHeader(codec=CODECS["q4"], fragment=3, numel=65, version=2**40, base=2**40 - 1, epoch=5)
    blob = pack_blob(header, CODECS["q4"].encode(CASES["uniform-65"]))
    return [*payloads, f"blob q4/uniform-65 {blob.hex()}"]


@pytest.mark.parametrize("line", lines(), ids=lambda line: "-".join(line.split()[:2]))
def test_bytes_are_those_of_the_release(line: str) -> None:
    assert line in GOLDEN.read_text().splitlines()


def test_every_golden_line_is_still_written() -> None:
    assert GOLDEN.read_text().splitlines() == lines()


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(lines()) + "\n")
