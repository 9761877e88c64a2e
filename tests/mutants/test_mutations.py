"""The list of mutations fits the tree: each can be applied, and each changes something."""

import ast

import pytest
from mutate import is_stale
from mutations import MUTATIONS, Mutation
from sample_mutations import changes


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.file}: {mutation.name}")
def test_a_mutation_is_of_the_tree_as_it_is(mutation: Mutation) -> None:
    assert is_stale(mutation) == ""
    assert mutation.before != mutation.after
    assert mutation.tests


def test_no_two_mutations_have_one_name() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 40


def test_every_floor_of_the_product_has_mutations() -> None:
    assert {mutation.file.partition("/")[0] for mutation in MUTATIONS} >= {
        "algo",
        "quant",
        "coordinator",
        "node",
        "wire",
    }


def test_changes_are_drawn_within_functions_alone() -> None:
    tree = ast.parse(
        "A = 1\ndef f(a=2) -> int:\n    if a < 3 and B:\n        g()\n    assert a == 4\n    return a + True"
    )
    made = " ".join(f"{node.lineno}:{field}" for node, field, _ in changes(tree))
    assert made == "3:test 3:op 3:ops 3:value 4:value 6:value 6:op 6:value"
