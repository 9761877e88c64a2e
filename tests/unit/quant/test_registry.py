"""Names and numbers."""

import sys

import pytest

from farloop.quant.errors import CodecError, UnknownCodec, UnsupportedHost
from farloop.quant.registry import CODECS, codec_named, codec_numbered


def test_the_numbers_on_the_wire_are_those_of_the_first_release() -> None:
    """They are never reused and never changed: extend this list, do not edit it."""
    assert {codec.name: codec.code for codec in CODECS.values()} == {"fp32": 1, "bf16": 2, "q8": 3, "q4": 4, "e3m0": 5}


def test_blocks_are_part_of_the_formats() -> None:
    assert {name: codec.block for name, codec in CODECS.items()} == {
        "fp32": 1,
        "bf16": 1,
        "q8": 256,
        "q4": 64,
        "e3m0": 64,
    }


def test_bits_per_element_count_the_scales() -> None:
    bits = {name: codec.bits_per_element for name, codec in CODECS.items()}
    assert bits == {"fp32": 32, "bf16": 16, "q8": 8.0625, "q4": 4.25, "e3m0": 4.25}


def test_a_codec_is_found_by_its_name_and_by_its_number() -> None:
    for name, codec in CODECS.items():
        assert codec_named(name) is codec
        assert codec_numbered(codec.code) is codec


@pytest.mark.parametrize(("wanted", "nearest"), [("fp23", "'fp32'"), ("bfloat16", "'bf16'"), ("Q4", "'q4'")])
def test_an_unknown_name_gets_the_nearest(wanted: str, nearest: str) -> None:
    with pytest.raises(
        UnknownCodec, match=f"no codec '{wanted}', did you mean .*{nearest}.*there are: fp32, bf16"
    ) as error:
        codec_named(wanted)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, CodecError)


@pytest.mark.parametrize("number", [0, 6, 255])
def test_an_unknown_number_is_refused(number: int) -> None:
    with pytest.raises(UnknownCodec, match=f"no codec {number} "):
        codec_numbered(number)


def test_a_big_endian_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(UnsupportedHost):
        codec_named("q4")
    with pytest.raises(UnsupportedHost):
        codec_numbered(4)
