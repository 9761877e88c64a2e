"""Compressed payloads that say they are small, or large, or nothing: refused, for little memory and little time.

In a process of its own, whose address space is bounded from the moment on when everything is loaded: `python
tests/fuzz/test_bombs.py`.
"""

import subprocess
import sys
import time
from functools import cache
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit" / "quant")]

import pytest  # noqa: E402
import torch  # noqa: E402
import zstandard  # noqa: E402
from fuzz_codecs import check_blob, header, sealed  # noqa: E402
from fuzz_run import bound_memory  # noqa: E402

from farloop.quant.blob import HEADER_BYTES, pack_blob  # noqa: E402
from farloop.quant.codec import Codec, flat  # noqa: E402
from farloop.quant.errors import BadBlob  # noqa: E402
from farloop.quant.registry import CODECS  # noqa: E402

LARGE = flat(1 << 20)


def around(codec: Codec, frame: bytes) -> bytearray:
    """A blob with any bytes as its compressed payload."""
    blob = pack_blob(header(codec, LARGE), torch.zeros(codec.payload_bytes(LARGE), dtype=torch.uint8))
    blob = blob[:HEADER_BYTES] + frame
    blob[7] = 1
    return sealed(blob)


@cache
def gigabytes() -> tuple[bytes, bytes]:
    """A gigabyte of zeros, in 33 kilobytes: with its size, and without."""
    zeros = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 30)
    honest = b"".join(zeros.compress(bytes(1 << 20)) for _ in range(1024)) + zeros.flush()
    streamed = zstandard.ZstdCompressor(level=1).compressobj()
    nameless = b"".join(streamed.compress(bytes(1 << 20)) for _ in range(1024)) + streamed.flush()
    return honest, nameless


def bombs(size: int) -> list[bytes]:
    """Frames that say they hold `size` bytes, or do not, and would cost much memory or time."""
    run, last = ((128 << 10) << 3 | 1 << 1).to_bytes(3, "little") + b"\x00", b"\x01\x00\x00"
    magic, empty = bytes.fromhex("28b52ffd"), b"\x00\x00\x00"
    window = magic + bytes([0x80, (31 - 10) << 3]) + size.to_bytes(4, "little")
    claims = magic + bytes([0xE0]) + (1 << 62).to_bytes(8, "little")
    right = magic + bytes([0xA0]) + size.to_bytes(4, "little")
    frames = [*gigabytes(), *(begin + run * 8000 + last for begin in (window, claims, right))]
    return [*frames, right + empty * 150_000 + last, right + run * 4 + empty * 150_000]


def main() -> None:
    torch.set_num_threads(1)
    gigabytes()
    compressed = [codec for codec in CODECS.values() if codec.traits.entropy_coded]
    for codec in compressed:  # load, compile
        check_blob(codec, LARGE, pack_blob(header(codec, LARGE), codec.encode(torch.ones(LARGE.numel), LARGE)))
    bound_memory()
    for codec in compressed:
        for bomb in bombs(codec.payload_bytes(LARGE)):
            assert len(bomb) < 600_000
            for scratch in (None, bytearray(codec.payload_bytes(LARGE))):
                began = time.process_time()
                with pytest.raises(BadBlob):
                    check_blob(codec, LARGE, around(codec, bomb), scratch)
                assert time.process_time() - began < 5.0


@pytest.mark.timeout(400)  # processor time is bounded, and waiting for a processor is not
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address spaces are bounded on Linux alone")
def test_what_would_be_a_gigabyte_is_refused_before_it_is_one() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    main()
