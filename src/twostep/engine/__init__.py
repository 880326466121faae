"""Runs: executors, KV memory and sampling behind the loop that serves requests."""
