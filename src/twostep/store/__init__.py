"""Keeps: which models can be had by name, the folder they are cached in, and how one is brought there whole or not at all."""
