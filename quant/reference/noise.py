"""Random bits that are a function of a seed and a place: no generator's state, and the same bits on every device.

A counter is mixed by a 32-bit finaliser of xorshifts and multiplications, with the least biased
constants of the hash-prospector project; every word serves two elements with 16 bits each.
"""

import torch
from torch import Tensor

from farloop.quant.packing import mix32

_MASK = 0xFFFFFFFF
_ODD = 0x9E3779B1  # 2³² ÷ golden ratio: neighbouring counters differ in many bits


def words(seed: int, first: int, count: int, device: torch.device | None = None) -> Tensor:
    """32 random bits for each of the counters first … first + count − 1, int64 [count]."""
    return words_at(seed, torch.arange(first, first + count, dtype=torch.int64, device=device))


def words_at(seed: int, counters: Tensor) -> Tensor:
    """32 random bits for each counter, int64 of any shape."""
    # int64 and a mask, because torch has no logical shift of 32-bit integers; products may wrap, mod 2⁶⁴.
    x = (counters * _ODD + mix32(seed & _MASK)) & _MASK
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def uniform16(seed: int, start: int, numel: int, device: torch.device | None = None) -> Tensor:
    """(r + ½)·2⁻¹⁶ for the elements [start, start + numel), r their 16 random bits: fp32 [numel], exact.

    `start` is even. Even elements take the low half of the word of their pair, odd ones the high half.
    """
    assert start % 2 == 0
    pairs = words(seed, start // 2, (numel + 1) // 2, device)
    halves = torch.stack(((pairs & 0xFFFF).to(torch.float32), (pairs >> 16).to(torch.float32)), dim=1)
    return halves.view(-1)[:numel].add_(0.5).mul_(2.0**-16)
