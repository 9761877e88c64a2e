"""RUN.toml and NODE.toml, flags and environment; from settings to the run's specification."""
