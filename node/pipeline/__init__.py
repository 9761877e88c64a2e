"""A model split by a layout, trained across processes: stages, the way of a microbatch, and the links between nodes.

`words.py`, `frames.py`: what nodes say to each other. `machine.py`: every decision, pure; with it `hops.py` (where
next), `flights.py` (a source's microbatches), `homes.py` (whose steps a node follows), `arrivals.py`, `peers.py` and
`switching.py` (a new layout in two phases). `stage.py`: the torch of a stage. `link.py`: sockets. `executor.py`: the
thin shell around them.
"""
