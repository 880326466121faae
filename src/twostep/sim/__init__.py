"""Rehearses: the engine's own loop and scheduler, without a model. Read `replay` for runs of the past, `modelled` for
runs that have not been."""
