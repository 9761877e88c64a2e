"""What ends a node, in one line each.

NodeError             carries the exit code of the daemon
├── Refused           the coordinator does not want this node (do not retry)
├── LayoutMismatch    the model is not the run's (do not retry)
├── NonFiniteDelta    the weights hold NaN or Inf (a restart begins again from the anchors)
├── DataError         the samples are not the run's, or there are none (do not retry)
├── TermsMismatch     what the node chose for itself does not go with the run's terms (do not retry)
├── LoopError         what the training loop gave to `join` or `step` cannot be used (do not retry)
├── StateUnusable     the state folder cannot be written (do not retry)
├── BadAddress        an address of the link cannot be used (do not retry)
├── RankFailed        another rank of the node has ended by an error (as that one's)
├── Unreachable       there was no session with the coordinator for as long as `give_up` allows (retry)
├── RunOver           the run whose end the state folder remembers has no coordinator any more (nothing is left to do)
└── LinkFailed        the link's thread broke down: a bug, or this machine is out of something

CorpusError           the text or the tokens cannot be used, also where no node is (bad configuration)
ModelError            a named model cannot be built or read, also where no node is (bad configuration)
"""

import re

_LOST = re.compile(r"connection (was )?(closed|reset)|remote (process|worker)|broken pipe", re.IGNORECASE)
"""Messages of gloo and NCCL about a lost peer."""


def lost_another(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone."""
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


class CorpusError(ValueError):
    """The data cannot be used; one line for the person who named it."""


class ModelError(ValueError):
    """The named model cannot be built here; one line for the person who named it."""


class NodeError(Exception):
    """Base of all."""

    exit_code = 1
    retriable = False


class Refused(NodeError):
    """The reason and its detail are in the text."""

    exit_code = 3


class LayoutMismatch(NodeError):
    """Names the first parameter that differs."""

    exit_code = 3


class NonFiniteDelta(NodeError):
    """Names the parameter; nothing of it was sent."""

    exit_code = 4

    def __init__(self, parameter: str, step: int) -> None:
        self.parameter = parameter
        super().__init__(
            f"parameter {parameter!r} holds NaN or Inf after inner step {step}; nothing was sent. "
            "Lower the learning rate or look at the data; a restart continues from the anchors"
        )


class DataError(NodeError):
    """Says what is there and what the run wants."""

    exit_code = 3


class TermsMismatch(NodeError):
    """Names the setting, and what the run allows."""

    exit_code = 2


class LoopError(NodeError):
    """Says what cannot be used, and what to take instead."""

    exit_code = 2


class BadAddress(NodeError):
    """Says how an address looks, or what it needs."""

    exit_code = 2


class Unreachable(NodeError):
    """Names the address."""

    exit_code = 5
    retriable = True


class RunOver(NodeError):
    """Names the run."""

    exit_code = 0


class RankFailed(NodeError):
    """Names the rank and its error, and has its exit code."""

    def __init__(self, rank: int, error: str, exit_code: int) -> None:
        self.rank, self.exit_code = rank, exit_code
        super().__init__(f"rank {rank} of this node has {'failed' if exit_code else 'ended'}: {error}")


class StateUnusable(NodeError):
    """Names the file and the fix."""

    exit_code = 3


class LinkFailed(NodeError):
    """Holds what was raised; of a group, its first."""

    def __init__(self, error: Exception) -> None:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        self.error = error
        super().__init__(f"the link to the coordinator failed: {type(error).__name__}: {error}; start the node again")
        self.__cause__ = error


class LayoutError(NodeError):
    """A layout file is wrong; names the file and the fault."""

    exit_code = 2
