"""The node daemon, and the library call that makes a training loop a node: `from farloop.node import join`."""
