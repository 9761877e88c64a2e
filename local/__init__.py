"""What runs a coordinator and nodes as processes of this machine, over links that are made slow."""
