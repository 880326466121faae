"""Computes: executors that run a network's operations for one step; `reference` to read, `native` to be fast."""
