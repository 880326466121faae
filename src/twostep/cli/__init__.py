"""Speaks: the `twostep` command, one module a subcommand. Heavy imports stay inside `run`: `--help` is instant."""
