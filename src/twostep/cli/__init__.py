"""Speaks: the `twostep` command, one module a subcommand. Heavy imports stay inside `run`: `--help` is instant."""

from twostep.processes import forget_relative_paths

forget_relative_paths()  # before anything else is imported: a command runs in folders that hold anything
