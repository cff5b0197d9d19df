"""Choosing which two of every four weights stay: one module per method, an options dataclass each."""

from twofour.prune.model import METHODS, Method, method_named, options_of, prune_, prune_weight

__all__ = ["METHODS", "Method", "method_named", "options_of", "prune_", "prune_weight"]
