"""Keeps: which models can be had by name, the folder they lie in, how one is brought there whole or not at all."""
