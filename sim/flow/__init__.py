"""Thousands of nodes in virtual time without tensors: rates, windows and where machine time goes."""
