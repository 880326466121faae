"""Keeps what an engine's loop was told and what it decided, so that the run can be repeated without the model.

A recording has lengths, block hashes, times and plans: never text, never token ids. Read `codec` for the format.
"""
