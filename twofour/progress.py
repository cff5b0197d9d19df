"""How long work tells how far it is: a callable that gets what is done, what there is to do, and a label."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int, str], None]


def silent(done: int, total: int, label: str) -> None:
    """The default in Python: nothing is printed unless it is asked for."""
