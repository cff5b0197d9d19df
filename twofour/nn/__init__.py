"""Modules that hold packed weights as plain tensors, and the calls that put them into a model."""

from twofour.nn.conv import SparseConv2d
from twofour.nn.convert import convert_, packed_layers, set_memory, swap_
from twofour.nn.fuse import fuse_, unfuse_
from twofour.nn.linear import SparseLinear
from twofour.nn.modules import Memory, PackedModule

__all__ = [
    "Memory",
    "PackedModule",
    "SparseConv2d",
    "SparseLinear",
    "convert_",
    "fuse_",
    "packed_layers",
    "set_memory",
    "swap_",
    "unfuse_",
]
