"""Predicts: how long a step takes on this machine."""
