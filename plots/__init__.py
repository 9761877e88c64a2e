"""Plots, in one style."""
