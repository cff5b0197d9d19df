"""Bytes and layers' names as people read them, in what verbs print and on a report's page alike."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def size(count: float) -> str:
    """Bytes in three digits and a unit.

    >>> size(1_234_567), size(-20), size(0)
    ('1.23 MB', '-20 B', '0 B')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def alike(name: str) -> str:
    """A layer's name with its numbers starred: layers of one kind are one row of a table, one panel.

    >>> alike("model.layers.12.mlp.down_proj"), alike("conv1")
    ('model.layers.*.mlp.down_proj', 'conv1')
    """
    return _NUMBER.sub("*", name)


def first_number(name: str) -> int | None:
    """The first number in a layer's name: its place in the model.

    >>> first_number("model.layers.12.mlp.down_proj"), first_number("conv1")
    (12, None)
    """
    found = _NUMBER.search(name)
    return int(found.group()) if found else None
