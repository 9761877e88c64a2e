"""Plans of who trains what with whom, and over which links: pure functions of an inventory and a seed.

No torch, no I/O, no clock and no random numbers but those of a seed: the same inventory gives the same plan.
"""
