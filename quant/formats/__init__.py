"""One file per payload format: its bytes, by definition, in torch and numpy."""
