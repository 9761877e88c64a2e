"""The node daemon, and the library call that makes a training loop a node: `from farloop.node import join`.

Modules without I/O and without torch: machine, send_schedule, fragment_set, events. `join` loads the
rest when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farloop.node.library import Node, join

__all__ = ["Node", "join"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from farloop.node import library

    return getattr(library, name)
