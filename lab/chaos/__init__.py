"""Storms over real processes: fault injection, and observation of the run."""
