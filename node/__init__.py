"""The node daemon, and the library call that makes a training loop a node: `from farloop.node import join`.

What the call needs (torch above all) is loaded when it is asked for: the pure rooms beside it need nothing of that.
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
