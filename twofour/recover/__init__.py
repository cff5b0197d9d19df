"""Winning accuracy back after pruning, with every pruned weight kept at zero."""

from twofour.recover.masks import Masks, hold_masks

__all__ = ["Masks", "hold_masks"]
