"""A node's own overlap: workers need not have the same τ (arXiv 2501.18512), so a far one may take longer. Pure."""

from farloop.algo.methods import max_tau, method_named
from farloop.algo.schedule import initial_h
from farloop.algo.spec import Terms


def at_most(terms: Terms, slots: int) -> int:
    """Longest overlap that the run's shortest rounds have room for."""
    return max_tau(method_named(terms.method), min(terms.h, initial_h(terms)), slots)


def check_own_tau(tau: int, terms: Terms, slots: int) -> None:
    """Raise ValueError, one sentence, unless a node of this run can merge `tau` inner steps after it sends.

    `slots`: of the run's layout.
    """
    method = method_named(terms.method)
    own = f"this node's own tau is {tau}"
    if "tau" in method.fixed:
        raise ValueError(f"{own}, but {method.name} has the same for all nodes, {terms.tau}: leave the node's open")
    if terms.control_variates:
        raise ValueError(f"{own}, but with control_variates it is {terms.tau}: leave the node's open")
    if terms.lag:
        raise ValueError(f"{own}, but with lag = {terms.lag} the overlap is a whole round: leave the node's open")
    shortest, most = min(terms.h, initial_h(terms)), at_most(terms, slots)
    if not 0 <= tau <= most:
        raise ValueError(f"{own}; {method.name} with rounds of {shortest} steps and slots = {slots} takes 0 to {most}")
