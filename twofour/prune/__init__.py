"""Choosing which two of every four weights stay: one module per method, an options dataclass each."""

from twofour.prune.magnitude import Magnitude
from twofour.prune.model import METHODS, method_named, prune_, prune_weight

__all__ = ["METHODS", "Magnitude", "method_named", "prune_", "prune_weight"]
