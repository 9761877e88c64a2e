"""Half-split packing."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farloop.quant import packing


def test_byte_j_holds_code_j_and_the_one_half_a_block_later() -> None:
    codes = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 15]], dtype=torch.uint8)
    assert packing.pack(codes).tolist() == [0x31, 0x42, 0x75, 0xF6]


@given(blocks=st.integers(0, 5), seed=st.integers(0, 99), dtype=st.sampled_from([torch.uint8, torch.float32]))
@settings(deadline=None)
def test_unpacking_undoes_packing(blocks: int, seed: int, dtype: torch.dtype) -> None:
    codes = torch.randint(0, 16, (blocks, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    out = torch.full((blocks, 64), 99).to(dtype)
    packing.unpack_into(packing.pack(codes), out)
    assert torch.equal(out, codes.to(dtype))
