"""Twostep: serve, explain and foretell large language models on the machine you have."""
