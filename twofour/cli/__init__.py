"""The `twofour` command: one thin file per verb."""
