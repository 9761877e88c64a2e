"""The model of a node: its tensors, anchors and optimizer, and what is made of them for the wire and the disk."""
