"""Covers `cli/run.py` where no file can say it: a codec that rounds as it decodes (protocol M)."""

import dataclasses

import pytest

from farloop.cli import run as run_module
from farloop.cli.run import DataConfig, RunConfig, plan_run
from farloop.quant.codec import Codec
from farloop.quant.registry import codec_named


def test_only_a_codec_that_decodes_exactly_may_be_the_downlink(monkeypatch: pytest.MonkeyPatch) -> None:
    """M: else anchors could differ in the last bit between two machines."""

    def with_a_rounding_q8(name: str) -> Codec:
        return dataclasses.replace(codec_named(name), exact_decode=name != "q8")

    monkeypatch.setattr(run_module, "codec_named", with_a_rounding_q8)
    with pytest.raises(ValueError, match="codec_down 'q8' does not decode exactly"):
        plan_run(RunConfig(model="nano", codec_down="q8"), DataConfig())
