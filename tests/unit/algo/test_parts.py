"""Covers `algo/stages.py`: what a part of the model is, and what is wrong with one that is none (protocol G)."""

import pytest

from farloop.algo.fragments import partition
from farloop.algo.stages import Part, described, fault_of, fragments_of, is_source, is_whole

BLOCKS = [(f"blocks.{number}.weight", (16,)) for number in range(6)]
CUT = partition([("embed", (16,)), *BLOCKS], pattern="strided", blocks_per_fragment=1, stages=(2, 4))
UNCUT = partition(BLOCKS, pattern="strided", blocks_per_fragment=1)


@pytest.mark.parametrize(
    ("part", "held"),
    [(None, range(7)), ((0,), (0, 1, 2)), ((1,), (3, 4)), ((0, 2), (0, 1, 2, 5, 6)), ((0, 1, 2), range(7))],
)
def test_a_part_has_the_fragments_of_its_stages(part: Part, held: range | tuple[int, ...]) -> None:
    assert [fragment.index for fragment in fragments_of(part, CUT)] == list(held)
    assert fault_of(part, CUT) is None
    assert is_whole(part, CUT) == (len(held) == 7)
    assert is_source(part) == (0 in held)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ((), "holds no stage of the model"),
        ((3,), "holds stage 3, and the run's model has stages 0 to 2"),
        ((-1, 0), "holds stage -1, and the run's model has stages 0 to 2"),
        ((1, 1), "names its stages more than once, or out of order"),
        ((2, 1), "names its stages more than once, or out of order"),
        ((0,) * 100_000, "names its stages more than once, or out of order"),
    ],
)
def test_what_is_no_part_of_the_model_is_said_in_one_sentence(part: Part, words: str) -> None:
    assert (fault_of(part, CUT) or "").startswith(words)


def test_a_model_that_is_not_cut_is_held_as_a_whole() -> None:
    assert fault_of((0,), UNCUT) is None
    assert fault_of((1,), UNCUT) == "holds stage 1, and the run's model has one stage, 0: it is not cut into more"


def test_a_part_in_words() -> None:
    assert (described(None), described((0, 2))) == ("all", "0, 2")
