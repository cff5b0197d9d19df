"""What quantized weights are stored as, and whether the activations are rounded as well.

    int8         codes -127…127, one scale a row; every token is rounded to int8 as it comes
    fp8          e4m3 codes up to ±448, one scale a row; every token is rounded to e4m3 as it comes
    int4         codes -8…7, one scale for each row and 128 (64, 32) columns; activations stay as they are
    int8-weight, fp8-weight   as the first two, with activations as they are

A weight is code · scale. All schemes are symmetric, so the code of zero is zero and a pruned weight stays
exactly zero; 2:4 holds for the codes as it does for the weights.

A scale is a number of 8 significant bits (a bfloat16). In int4 it may be negative, so that the sixteenth
code, -8, serves the largest weight of either sign; else it is positive. Codes are found for the scale as
stored, and such a scale is the same number in bfloat16, float16 and float32, so that a layer may change its
dtype (`.to`, `from_pretrained(dtype=…)`) without changing its weights. Only float16 has a lower end: there no
scale is below 2⁻¹⁷ from the start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from twofour.errors import InputError
from twofour.packed import FOUR_BIT

Codes = Literal["int8", "fp8", "int4"]

#: Columns that may share a scale in 4 bits.
GROUPS = (32, 64, 128)

#: The smallest number of 8 significant bits that float16 holds in full, and the smallest bfloat16.
_LEAST = {torch.float16: 2.0**-17}
_LEAST_BFLOAT16 = 2.0**-126

_STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": FOUR_BIT}
_RANGE = {"int8": (-127.0, 127.0), "fp8": (-448.0, 448.0), "int4": (-8.0, 7.0)}
#: Of e4m3 half, so that the search for a scale, which goes down to half, cuts no weight (rounding.py).
_LARGEST = {"int8": 127.0, "fp8": 224.0, "int4": 7.0}


@dataclass(frozen=True)
class Scheme:
    """How weights are stored. `group` columns share a scale, None: all of a row."""

    name: str
    codes: Codes
    rounds_activations: bool
    group: int | None = None

    @property
    def stored(self) -> torch.dtype:
        """What `weight_values` is in a file and in a module."""
        return _STORED[self.codes]

    @property
    def largest(self) -> float:
        """The code that the largest weight under a scale gets, before scales are searched."""
        return _LARGEST[self.codes]

    @property
    def range(self) -> tuple[float, float]:
        """The least code and the largest."""
        return _RANGE[self.codes]

    @property
    def signs(self) -> tuple[float, ...]:
        """Of scales that are worth trying."""
        least, largest = self.range
        return (1.0,) if least == -largest else (1.0, -1.0)

    def scale_width(self, columns: int) -> int:
        """Scales a row."""
        return 1 if self.group is None else max(1, -(-columns // self.group))

    def to_codes(self, scaled: Tensor) -> Tensor:
        """Weights over their scales, rounded to the nearest codes, as float32. What is too large is cut."""
        inside = scaled.clamp(*self.range)
        return inside.to(torch.float8_e4m3fn).float() if self.codes == "fp8" else inside.round()

    def rounded_scale(self, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Scales as stored beside a layer of `dtype`, in float32; 1 where all weights are zero."""
        size = scale.float().abs().clamp(min=_LEAST.get(dtype, _LEAST_BFLOAT16)).bfloat16().float()
        usable = scale != 0 if len(self.signs) > 1 else scale > 0
        return torch.where(usable, size.copysign(scale), 1.0)

    def as_config(self) -> dict[str, Any]:
        """As it stands in config.json."""
        return {"name": self.name, **({"group": self.group} if self.group else {})}


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", "int8", True),
        Scheme("fp8", "fp8", True),
        Scheme("int4", "int4", False, 128),
        Scheme("int8-weight", "int8", False),
        Scheme("fp8-weight", "fp8", False),
    )
}


def scheme_named(name: str | Scheme, group: int | None = None) -> Scheme:
    """A scheme by its name, with another group than its own if one is given.

    >>> scheme_named("int4", 64)
    Scheme(name='int4', codes='int4', rounds_activations=False, group=64)
    """
    if isinstance(name, Scheme):
        return name
    if name not in SCHEMES:
        raise InputError(f"there is no scheme {name!r}.", hint=f"Choose one of: {', '.join(SCHEMES)}.")
    scheme = SCHEMES[name]
    if group is None or group == scheme.group:
        return scheme
    if scheme.group is None:
        raise InputError(f"{name} has one scale a row, and no groups.", hint="Groups are for int4.")
    if group not in GROUPS:
        raise InputError(
            f"{group} columns cannot share a scale.", hint=f"Choose one of: {', '.join(map(str, GROUPS))}."
        )
    return replace(scheme, group=group)


def scheme_from_config(config: Any) -> Scheme | None:
    """The scheme that config.json names, after refusing one that this version does not know."""
    if config is None:
        return None
    if not isinstance(config, dict) or not isinstance(config.get("name"), str):
        raise InputError(f"the scheme {config!r} is not known.", hint="Upgrade twofour.")
    if unknown := sorted(config.keys() - {"name", "group"}):
        raise InputError(f"the scheme has settings that are not known: {unknown}.", hint="Upgrade twofour.")
    return scheme_named(config["name"], config.get("group"))
