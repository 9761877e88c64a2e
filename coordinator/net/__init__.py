"""Sessions of the coordinator and measurements of links. `router`, `sessions` and `link_table` are sans-I/O."""
