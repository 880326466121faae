"""Settings: one table, typed values from the first parse on. See docs/decisions/0024-settings.md."""
