"""The mathematics of a run, without I/O: fragments, schedules, delta, merge rules, outer optimizers, methods."""
