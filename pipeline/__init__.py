"""Pipeline parallelism across nodes: stages of a layout, routing of microbatches, and links between nodes.

`machine.py` decides, without I/O; `routing.py` says where a microbatch goes next, `layout.py` switches to another
layout in two phases. `messages.py`: what nodes send each other. `stage.py`: a stage's module and its jobs. `link.py`:
sockets. `executor.py` carries the decisions out.
"""
