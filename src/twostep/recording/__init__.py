"""Recordings of the input and decisions of an engine loop, to replay a run without the model.

A recording has lengths, block hashes, times and plans, but no text and no token ids. See `codec` for the format.
"""
