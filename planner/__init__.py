"""The planner: which node trains which layers, and over which links. Functions of an inventory and a seed, sans-I/O.

No torch, no clock, and randomness from the seed alone: the same inventory gives the same plan on every machine.
"""
