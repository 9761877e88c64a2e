"""Who holds which samples: no sample twice, none lost (protocol, Data leases)."""

from pathlib import Path

import pytest
from coordinator_run import A, B
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from slow_cases import examples
from stories import Scripted, StoryText, all_stories, check_story

from farloop.algo.spec import Lease, NodeId
from farloop.coordinator.decide.leases import ENDED_KEPT, Account, Leases


class Book(Leases, Scripted):
    """`give(A, 10)`: to the first start of a."""

    def give(self, node: NodeId, count: int, incarnation: int = 1) -> list[Lease]:
        leases = self.propose(count)
        assert leases == self.propose(count), "proposing changes nothing"
        for lease in leases:
            self.grant(node, incarnation, lease)
        return leases


@all_stories(__file__, "leases")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Book().told, rewrite=rewrite)


def test_the_book_does_not_grow_with_the_rounds() -> None:
    """Of weeks of grants, starts and ends, what is kept is bounded."""
    book = Book()
    incarnations, used = {A: 1, B: 1}, {A: 0, B: 0}
    for number in range(4_000):
        node = (A, B)[number % 2]
        start = (node, incarnations[node])
        book.retire(*start, used[node])
        book.give(node, 4, incarnations[node])
        book.watermark(*start, used[node] + 4)
        used[node] = used[node] + 4 if number % 3 else used[node]
        book.stores(*start, used[node])
        if number % 17 == 0:
            book.give_back(*start, used[node])
            incarnations[node] += 1
            used[node] = 0
        assert sum(len(account.leases) for account in book.held.values()) + len(book.returned) < 110
        assert len(book.ended) <= ENDED_KEPT
    book.check()


@pytest.mark.parametrize(
    "odd",
    [
        Leases(frontier=10, returned=[Lease(start=3, count=2)], held={(A, 1): Account([Lease(start=4, count=2)])}),
        Leases(frontier=3, returned=[Lease(start=3, count=1)]),
    ],
    ids=["the same sample in two places", "a grant beyond the frontier"],
)
def test_what_must_not_be_is_noticed(odd: Leases) -> None:
    with pytest.raises(AssertionError):
        odd.check()


nodes = st.sampled_from([A, B])


@settings(max_examples=examples(20), stateful_step_count=40)
class Grants(RuleBasedStateMachine):
    """Any sequence of grants, reports and ends, beside a model that knows the owner of every single sample."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Book()
        self.incarnation = {A: 1, B: 1}
        self.granted: dict[NodeId, list[int]] = {A: [], B: []}
        """Samples of the present incarnation in the order of their grants."""
        self.used: dict[NodeId, int] = {A: 0, B: 0}
        self.done: list[int] = []
        """Samples that were used."""

    @rule(node=nodes, count=st.integers(1, 20))
    def grant(self, node: NodeId, count: int) -> None:
        leases = self.book.give(node, count, self.incarnation[node])
        assert sum(lease.count for lease in leases) == count
        self.granted[node] += [s for lease in leases for s in range(lease.start, lease.start + lease.count)]

    @precondition(lambda self: any(self.granted.values()))
    @rule(node=nodes, data=st.data())
    def report(self, node: NodeId, data: st.DataObject) -> None:
        consumed = data.draw(st.integers(self.used[node], len(self.granted[node])))
        self.done += self.granted[node][self.used[node] : consumed]
        self.used[node] = consumed
        self.book.watermark(node, self.incarnation[node], consumed)

    @rule(node=nodes)
    def end(self, node: NodeId) -> None:
        free = self.book.give_back(node, self.incarnation[node], self.used[node])
        assert free == len(self.granted[node]) - self.used[node]
        self.incarnation[node] += 1
        self.granted[node], self.used[node] = [], 0

    @invariant()
    def every_sample_is_used_held_or_free_and_only_once(self) -> None:
        self.book.check()
        held = [s for node in (A, B) for s in self.granted[node][self.used[node] :]]
        free = [s for lease in self.book.returned for s in range(lease.start, lease.start + lease.count)]
        assert sorted([*self.done, *held, *free]) == list(range(self.book.frontier))

    @invariant()
    def what_is_outstanding_is_what_was_granted_and_not_used(self) -> None:
        for node, incarnation in self.incarnation.items():
            outstanding = len(self.granted[node]) - self.used[node]
            assert self.book.outstanding(node, incarnation) == outstanding
            unused = self.book.unused(node, incarnation)
            samples = [s for lease in unused for s in range(lease.start, lease.start + lease.count)]
            assert samples[len(samples) - outstanding :] == self.granted[node][self.used[node] :]


TestGrants = Grants.TestCase


# --- an old copy of the book


def test_an_old_book_takes_what_nodes_say_is_left_and_counts_the_rest_as_trained() -> None:
    """a was granted more since, and says what is left; b says nothing: what the copy says of it may come twice."""
    book = Book()
    book.give(A, 10)
    book.give(B, 10)
    book.stores(B, 1, 4)
    told = book.free_after_reports({(A, 1): [Lease(start=7, count=3), Lease(start=30, count=10)]}, 40)
    assert told == (40, (Lease(start=7, count=3), Lease(start=14, count=6), Lease(start=30, count=10)), 6)
    book.begin_from(*told)
    book.check()
    assert (book.frontier, book.free, book.uncertain_total, book.held) == (40, 19, 6, {})
    assert (book.granted_total, book.trained_total) == (40, 21)
    assert book.give(A, 4, 2) == [Lease(start=7, count=3), Lease(start=14, count=1)]


def test_what_two_say_they_have_is_free_once() -> None:
    book = Leases(frontier=10, returned=[Lease(start=0, count=4)])
    frontier, free, uncertain = book.free_after_reports(
        {(A, 1): [Lease(start=2, count=6)], (B, 1): [Lease(start=5, count=5)]}, 0
    )
    assert (frontier, free, uncertain) == (10, (Lease(start=0, count=10),), 2)
