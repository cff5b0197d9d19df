"""Winning accuracy back after pruning, with every pruned weight kept at zero."""

from twofour.recover.masks import Masks, hold_masks
from twofour.recover.options import Recover

__all__ = ["Masks", "Recover", "hold_masks"]
