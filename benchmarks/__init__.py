"""Benchmarks: speed of a model compared with the limits of this machine and with other engines."""
