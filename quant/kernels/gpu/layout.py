"""How each format lies in memory, and how its kernels divide it. Importing this loads Triton."""

from dataclasses import dataclass
from types import ModuleType
from typing import Final

from farloop.quant.kernels.gpu import bf16, e3m0, fp32, q4, q4r, q8
from farloop.quant.packing import CODES_ALIGN


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of one format's payloads, and the shape of its programs."""

    device_functions: ModuleType
    """Where its `write` and `read` are."""
    block: int
    """Elements that share a scale; 1 where there are no scales."""
    code_bits: int
    row: int
    """Elements of a row of a program: 2·H of `kernels.py`."""
    rows: int
    """Rows of a program."""
    num_warps: int = 4

    def num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def scale_bytes(self, numel: int) -> int:
        return 2 * self.num_blocks(numel) if self.block > 1 else 0

    def codes_start(self, numel: int) -> int:
        return -(-self.scale_bytes(numel) // CODES_ALIGN) * CODES_ALIGN

    def padded(self, numel: int) -> int:
        """Elements up to the end of the last block."""
        return self.num_blocks(numel) * self.block

    def payload_bytes(self, numel: int) -> int:
        return self.codes_start(numel) + self.padded(numel) * self.code_bits // 8

    def programs(self, numel: int) -> int:
        return -(-numel // (self.row * self.rows))


# 2048 elements for 128 threads: 16 registers a thread hold one fp32 operand, and there are up to four.
LAYOUTS: Final = {
    "fp32": Layout(device_functions=fp32, block=1, code_bits=32, row=256, rows=8),
    "bf16": Layout(device_functions=bf16, block=1, code_bits=16, row=256, rows=8),
    "q8": Layout(device_functions=q8, block=256, code_bits=8, row=256, rows=8),
    "q4": Layout(device_functions=q4, block=64, code_bits=4, row=64, rows=32),
    "e3m0": Layout(device_functions=e3m0, block=64, code_bits=4, row=64, rows=32),
    "q4r": Layout(device_functions=q4r, block=256, code_bits=4, row=64, rows=32),
}
"""By the name of the format."""
