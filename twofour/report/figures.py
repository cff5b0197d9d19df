"""Figures as people read them: three digits, a unit, and a sign where there is no figure; and as JSON."""

from __future__ import annotations

import json
import math
from typing import Any, TypeGuard

from twofour import words

#: Stands where nothing was measured; the section says which command measures it.
NONE = "–"


def is_number(value: Any) -> TypeGuard[float]:
    """A finite number. JSON from Python may hold NaN, and True is an int."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def to_json(document: Any) -> str:
    """What verbs print and keep. JSON has no NaN and no infinity: a figure that is none is null.

    >>> to_json({"perplexity": float("nan")})
    '{\\n  "perplexity": null\\n}\\n'
    """
    return json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value: Any, digits: int = 3) -> str:
    """
    >>> number(0.0123456), number(1234.5), number(20.331), number(0.00001234), number(None)
    ('0.0123', '1,234', '20.3', '1.23e-05', '–')
    """
    if value is None:
        return NONE
    if not is_number(value):
        return "not finite" if isinstance(value, float) else str(value)
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}"
    size = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))  # of the rounded value: 0.9999 is 1
    if size >= digits - 1:
        return f"{value:,.0f}"
    return f"{value:.{digits - 1}e}" if size < -4 else f"{value:.{digits - 1 - size}f}"


def times(value: Any) -> str:
    """
    >>> times(1.4999), times(None)
    ('1.50×', '–')
    """
    return f"{value:.2f}×" if is_number(value) else NONE


def percent(value: Any) -> str:
    return f"{100 * value:.1f} %" if is_number(value) else NONE


def size(count: Any) -> str:
    """
    >>> size(1_234_567), size(None)
    ('1.23 MB', '–')
    """
    return words.size(count) if is_number(count) else NONE


def duration(milliseconds: Any) -> str:
    """
    >>> duration(0.01629), duration(58.7), duration(2345.6)
    ('16.3 µs', '58.7 ms', '2.35 s')
    """
    if not is_number(milliseconds):
        return NONE
    if milliseconds < 1:
        return f"{number(1e3 * milliseconds)} µs"
    return f"{number(float(milliseconds))} ms" if milliseconds < 1000 else f"{number(milliseconds / 1e3)} s"


def shape(sides: Any) -> str:
    return "×".join(str(side) for side in sides)


def count(many: int, noun: str) -> str:
    """
    >>> count(1, "layer"), count(1200, "layer")
    ('1 layer', '1,200 layers')
    """
    return f"{many:,} {noun}{'' if many == 1 else 's'}"
