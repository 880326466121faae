"""Measures what steps cost on this machine: the grid of steps, how they are run, and what is learned from them."""
