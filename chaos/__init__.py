"""Storms over real processes: what injects faults, and what is observed of a run in them."""
