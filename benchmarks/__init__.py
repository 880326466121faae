"""Measures how fast a model runs, each part against what this machine can do at best, and against other engines."""
