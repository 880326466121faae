"""Runs the engine loop and scheduler without a model: `recorded` replays recordings, `modelled` and `events`
simulate."""
