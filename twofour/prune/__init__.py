"""Choosing which two of every four weights stay: one module per method, an options dataclass each."""

from twofour.prune.model import (
    METHODS,
    Method,
    chosen_method,
    method_named,
    options_of,
    prune_,
    prune_block,
    prune_weight,
    reorder_block,
    run_calibrated,
)

__all__ = [
    "METHODS",
    "Method",
    "chosen_method",
    "method_named",
    "options_of",
    "prune_",
    "prune_block",
    "prune_weight",
    "reorder_block",
    "run_calibrated",
]
