"""Settings files, flags and environment; the run's specification from them; inputs of the planner and the simulator."""
