"""Rehearses: the engine's own loop and scheduler, without a model. Read `replay` for recorded runs, `modelled` and
`events` for simulated ones."""
