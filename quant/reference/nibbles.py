"""Two 4-bit codes in a byte, "half split": byte j of a block of B holds code j (low) and code j + B/2 (high).

Neighbouring lanes stay neighbours, so that SIMD and GPU kernels unpack with two wide loads and no shuffle.
"""

from torch import Tensor


def pack(codes: Tensor) -> Tensor:
    """codes uint8 [m, B] below 16 → uint8 [m·B/2]."""
    low, high = codes.chunk(2, dim=1)  # [m, B/2] each
    return (low | (high << 4)).view(-1)


def unpack_into(packed: Tensor, out: Tensor) -> None:
    """packed uint8 [m·B/2] → out [m, B] of any number type, 0…15."""
    low, high = out.chunk(2, dim=1)
    packed = packed.view(low.shape)
    low.copy_(packed & 0xF)
    high.copy_(packed >> 4)
