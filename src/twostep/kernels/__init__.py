"""Computes: executors that run a network's operations for one step. `reference` to read and to trust, `native` to be fast."""
