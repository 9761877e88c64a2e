"""The mathematics of a run, pure: fragments, schedules, delta, merge rules, outer optimizers, methods."""
