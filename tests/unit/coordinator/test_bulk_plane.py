"""What a failure of the object store closes, and for whom."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from farloop.algo.spec import NodeId
from farloop.coordinator.bulk_plane import PAUSE_S, BulkPlane
from farloop.coordinator.storage.bucket import CopyFailed


class Store:
    """An object store that answers at once with `why`, and its clock."""

    def __init__(self) -> None:
        self.now_s, self.why, self.signed, self.deleted = 0.0, "", list[str](), list[str]()
        self.plane = BulkPlane(cast(Any, self), self.sign, cast(Any, self), {})

    def now(self) -> float:
        return self.now_s

    def sign(self, method: str, key: str) -> str:
        self.signed.append(key)
        if self.why:
            raise CopyFailed(self.why)
        return key

    def get(self, url: str, into: bytearray, right: Any, over: Callable[[str, tuple[int, int]], None]) -> None:
        over("404", (0, 0))

    def delete(self, urls: Sequence[str]) -> None:
        self.deleted += urls


@pytest.fixture
def store() -> Store:
    return Store()


def test_a_node_that_wrote_nothing_closes_the_store_for_itself_alone(store: Store) -> None:
    answers: list[bool] = []
    store.plane.get("f0", bytearray(8), 0, NodeId("a"), answers.append)
    assert answers == [False] and not store.plane.is_open(NodeId("a")) and store.plane.is_open(NodeId("b"))
    store.now_s = PAUSE_S
    assert store.plane.is_open(NodeId("a"))


def test_credentials_that_sign_nothing_are_tried_for_one_object_of_many(store: Store) -> None:
    store.plane.delete(["f0", "f1"])
    assert store.deleted == ["f0", "f1"]
    store.why = "expired"
    store.plane.delete(["f2", "f3", "f4"])
    assert store.signed[2:] == ["f2"] and store.deleted == ["f0", "f1"] and not store.plane.is_open()
