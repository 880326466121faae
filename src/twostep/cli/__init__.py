"""The `twostep` command, one module per subcommand. Heavy imports are inside `run`, so that `--help` is fast."""

from twostep.processes import forget_relative_paths

forget_relative_paths()  # before other imports: the working directory may hold any files
