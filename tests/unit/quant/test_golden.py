"""The bytes of every codec, as released. They change with a new codec number, and never otherwise.

`python tests/unit/quant/test_golden.py [codec …]` adds the lines that are missing, of these codecs or of all. It
changes none: where a format was changed before its release, delete its lines first.
"""

import hashlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from codec_cases import of_shapes, padded
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant.blob import BlobHeader, Expected, pack_blob, parse_blob
from farloop.quant.codec import Codec, flat
from farloop.quant.registry import CODECS, codec_named

GOLDEN = Path(__file__).with_name("golden_payloads.txt")

SPELLINGS = [
    *CODECS,
    "q4r:step=0.7,rounding=nearest",
    "q4r:step=0.01,policy=absolute",
    "topk:k=512",
    "randk:fraction=0.5",
    "ternary:clip=0",
]

NOT_REPRODUCIBLE = {("lowrank", "matrices")}
"""Encoders whose bytes depend on the machine: what was written once must still be read."""

SEEDS = (1, 2**32 - 1)
SEEDED = ("uniform-65", "uniform-5000", "tensors", "matrices")
"""The cases that are written with these seeds, and after another payload, too."""


def uniform(numel: int) -> Tensor:
    """Multiples of 2⁻²³ in [−1, 1) from a linear congruence, the same on every machine and library."""
    state, values = 1, []
    for _ in range(numel):
        state = (6364136223846793005 * state + 1442695040888963407) % 2**64
        values.append(((state >> 40) - 2**23) / 2**23)
    return torch.tensor(values, dtype=torch.float32)


def filled(fragment: Fragment) -> tuple[Fragment, Tensor]:
    return fragment, padded(fragment, uniform(fragment.numel))


VECTORS: dict[str, Tensor] = {
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
    "uniform-5000": uniform(5000) * 1e-3,
    "uniform-70000": uniform(70000) * 1e-3,
}
CASES: dict[str, tuple[Fragment, Tensor]] = {name: (flat(x.numel()), x) for name, x in VECTORS.items()} | {
    "tensors": filled(of_shapes((3, 5), (7,))),
    "matrices": filled(of_shapes((64, 64), (100,), (3, 129))),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What one line says."""

    key: str
    codec: str
    value: str

    def __str__(self) -> str:
        return f"{self.key} {self.value}"


def text_of(data: bytes, *, whole: bool = False) -> str:
    """The bytes, or, of many, their digest."""
    return data.hex() or "-" if whole or len(data) <= 1000 else f"sha256:{hashlib.sha256(data).hexdigest()}"


def payload_lines(spelling: str) -> Iterator[Line]:
    codec = codec_named(spelling)
    for case, (fragment, x) in CASES.items():
        whole = (codec.name, case) in NOT_REPRODUCIBLE
        for seed in (0,) if codec.traits.deterministic or case not in SEEDED else (0, *SEEDS):
            key = f"{spelling} {case}" + (f"@{seed}" if seed else "")
            payload = codec.encode(x, fragment, seed=seed)
            yield Line(key=key, codec=codec.name, value=text_of(bytes(payload.tolist()), whole=whole))
            if codec.traits.warm_start and case in SEEDED:
                again = codec.encode(x, fragment, seed=seed + 1, previous=payload)
                yield Line(key=f"{key}+again", codec=codec.name, value=text_of(bytes(again.tolist()), whole=whole))
            if codec.traits.exact_decode:
                numbers = codec.decode(payload, fragment, seed=seed).view(torch.uint8)
                value = text_of(bytes(numbers.tolist()))
                yield Line(key=f"numbers {key.replace(' ', '/')}", codec=codec.name, value=value)


def blob_header(codec: Codec) -> BlobHeader:
    salt = 0 if codec.traits.deterministic else 7
    fragment = replace(flat(65), index=3)
    return BlobHeader(codec=codec, fragment=fragment, version=2**40, base=2**40 - 1, epoch=5, salt=salt)


def blob_payload(codec: Codec) -> Tensor:
    return codec.encode(CASES["uniform-65"][1], blob_header(codec).fragment, seed=blob_header(codec).seed)


def blob_line(codec: Codec) -> Line:
    value = pack_blob(blob_header(codec), blob_payload(codec)).hex()
    return Line(key=f"blob {codec.name}/uniform-65", codec=codec.name, value=value)


def released_of(name: str, keys: list[str]) -> dict[str, str]:
    """The golden lines of a format; fails where some were never written."""
    released = golden()
    missing = [key for key in keys if key not in released]
    if missing:
        pytest.fail(f"{len(missing)} golden lines missing; write them with `python {__file__} {name}`: {missing[:3]} …")
    return released


def lines(codec: str) -> list[Line]:
    """All that are written of a format."""
    spelled = [spelling for spelling in SPELLINGS if codec_named(spelling).name == codec]
    return [line for spelling in spelled for line in payload_lines(spelling)] + [blob_line(CODECS[codec])]


def golden() -> dict[str, str]:
    """Key → value, in the order of the file."""
    return dict(line.rsplit(" ", 1) for line in GOLDEN.read_text().splitlines())


every_codec = pytest.mark.parametrize("name", CODECS)


@every_codec
def test_bytes_are_those_of_the_release(name: str) -> None:
    written = lines(name)
    released = released_of(name, [line.key for line in written])
    for line in written:
        case = line.key.partition(" ")[2].partition("@")[0].removesuffix("+again")
        if (name, case) in NOT_REPRODUCIBLE:
            check_readable(codec_named(line.key.partition(" ")[0]), case, line.value, released[line.key])
        elif not (line.key.startswith("blob ") and CODECS[name].traits.entropy_coded):  # zstd's versions differ
            assert line.value == released[line.key], line.key


def check_readable(codec: Codec, case: str, written: str, released: str) -> None:
    """The released payload decodes to what today's decodes to, up to a few roundings to bf16."""
    fragment, _ = CASES[case]
    new, old = (torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8) for text in (written, released))
    codec.validate(old, fragment)
    numbers, today = codec.decode(old, fragment).double(), codec.decode(new, fragment).double()
    assert float((numbers - today).norm()) <= 0.02 * float(today.norm()), (codec, case)


@every_codec
def test_a_released_blob_is_still_read(name: str) -> None:
    codec = CODECS[name]
    key = f"blob {name}/uniform-65"
    released = released_of(name, [key])
    header = blob_header(codec)
    expect = Expected(
        codecs=(codec,), fragment=header.fragment, version=header.version, base=header.base, newest_epoch=5
    )
    parsed, payload, _ = parse_blob(bytes.fromhex(released[key]), expect)
    assert parsed == header
    assert torch.equal(payload, blob_payload(codec))


def test_every_golden_line_is_still_written() -> None:
    written = {line.key for name in CODECS for line in lines(name)}
    assert [key for key in golden() if key not in written] == []


def test_no_golden_line_stands_twice() -> None:
    assert len(golden()) == len(GOLDEN.read_text().splitlines())


def add_missing(names: list[str]) -> None:
    released = golden()
    for name in names:
        for line in lines(name):
            released.setdefault(line.key, line.value)
    GOLDEN.write_text("".join(f"{key} {value}\n" for key, value in released.items()))


if __name__ == "__main__":
    add_missing(sys.argv[1:] or list(CODECS))
