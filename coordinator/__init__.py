"""The coordinator daemon: it holds the global parameters, decides what a window merges, and remembers it."""
