"""What ends a node of a pipeline, in one line each.

NodeError
├── LayoutError       the layout is none, or has no place for this node (do not retry)
├── PeerBindError     the address cannot be listened at (do not retry)
└── PipelineBroken    the sources that this stage follows are gone (retry: a new layout, or they come back)
"""

from farloop.node.errors import NodeError


class LayoutError(NodeError):
    """Names the file and the fault."""

    exit_code = 2


class PeerBindError(NodeError):
    """Names the address."""

    exit_code = 2


class PipelineBroken(NodeError):
    """Says who is gone."""

    exit_code = 5
    retriable = True
