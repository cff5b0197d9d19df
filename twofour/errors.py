"""The errors a user can meet: what failed, in which layer, which rule it broke, what to do next.

The command turns them into one sentence on standard error and an exit status; a traceback is
for our mistakes, never for the user's.
"""

from __future__ import annotations


class TwoFourError(Exception):
    """Work that could not be done, or a check that found a fault. Exit status 1."""

    exit_status = 1

    def __init__(self, message: str, *, layer: str | None = None, hint: str | None = None) -> None:
        self.message = message
        self.layer = layer
        self.hint = hint
        where = f"{layer}: " if layer else ""
        then = f" {hint}" if hint else ""
        super().__init__(f"{where}{message}{then}")


class InputError(TwoFourError, ValueError):
    """What was given cannot be used: a bad file, a bad value, a rule already broken. Exit status 2."""

    exit_status = 2
