"""One mask as a tensor: made of a 2:4 weight, checked against it, applied to it, sharded like it.

A mask is uint8 in the shape and layout of its weight: 1 is kept, 0 is pruned. Not bool, because averaging a
model's buffers (`AveragedModel(use_buffers=True)`) subtracts them, which bool does not allow.

Of every group of four, two positions are kept: the nonzero ones and, where there are fewer than two, the
zeros furthest left. These are the positions that `pack` would store, and a kept zero may move in training.
The rule needs whole groups. A DTensor that is cut across its groups is gathered for it, one weight at a
time; FSDP2 cuts rows, so there it stays where it is.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import TypeIs

from twofour.errors import InputError
from twofour.pattern import check_pattern, keep_best, require_finite
from twofour.select import Layer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: The dimension of the weight that groups of four run along.
_GROUPS_ALONG = {"linear": 1, "conv1d": 0, "conv2d": 1}

#: The integers whose product with 0 or 1 clears or keeps the bits of a float.
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Elements at a time on a CPU: torch would widen the mask into a temporary of the weight's size, while one of
#: ours stays in the cache.
_CPU_CHUNK = 1 << 16


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    if type(tensor) in (Tensor, nn.Parameter):
        return False  # and those who never shard need not wait for this import
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def mask_of(layer: Layer, weight: Tensor) -> Tensor:
    """The mask of a 2:4 weight, sharded like it. On the meta device: one without values, to load into."""
    if weight.is_meta:
        return torch.empty_like(weight, dtype=torch.uint8)
    part_layer, part = with_whole_groups(layer, weight)
    require_finite(part, layer.name)
    matrix = part_layer.to_matrix(part)
    first = check_pattern(matrix).first
    if first is not None:
        raise InputError(
            f"row {first.row}, group {first.group} keeps {first.kept} of 4 weights, {list(first.values)}, "
            "and 2:4 allows 2: there is no mask to hold.",
            layer=layer.name,
            hint="Prune it first with twofour.prune_(model), or leave this layer out with exclude.",
        )
    keep = keep_best((matrix != 0).view(torch.uint8))
    mask = torch.empty_like(part, dtype=torch.uint8).copy_(part_layer.from_matrix(keep))
    return sharded_part(mask, weight)


def require_fits(layer: Layer, mask: Tensor, weight: Tensor) -> None:
    """Refuse a mask that is not one, is not 2:4, or prunes a weight that is not zero."""
    if mask.shape != weight.shape or mask.dtype != torch.uint8:
        raise InputError(
            f"the mask is {mask.dtype} {list(mask.shape)}, and the weight needs uint8 {list(weight.shape)}.",
            layer=layer.name,
        )
    if weight.is_meta or mask.is_meta:
        return
    part_layer, mask_part = with_whole_groups(layer, shard_like(mask, weight))
    _, weight_part = with_whole_groups(layer, weight)
    if mask_part.numel() and int(mask_part.max()) > 1:
        raise InputError("the mask has values other than 0 and 1.", layer=layer.name)
    first = check_pattern(part_layer.to_matrix(mask_part)).first
    if first is not None:
        raise InputError(
            f"the mask keeps {first.kept} of 4 weights in row {first.row}, group {first.group}, "
            "and 2:4 allows 2.",
            layer=layer.name,
        )
    wrong = int(((weight_part != 0) & (mask_part == 0)).sum())
    if wrong:
        raise InputError(
            f"{wrong} weights that the mask prunes are not zero: mask and weight do not belong together.",
            layer=layer.name,
            hint="Load both from one state dict; or remove() the masks, prune_ and hold_masks again.",
        )


def shard_like(mask: Tensor, weight: Tensor) -> Tensor:
    """The mask where the weight is: on its device, and cut as it is cut. The same object if it is there."""
    if is_sharded(weight) and not is_sharded(mask):
        from torch.distributed.tensor import distribute_tensor

        # Every rank has the whole mask, so nothing need be sent.
        moved = mask.to(weight.device)
        return distribute_tensor(moved, weight.device_mesh, weight.placements, src_data_rank=None)
    return mask.to(weight.device)


@torch.no_grad()
def zero_pruned_(tensor: Tensor, mask: Tensor) -> None:
    """Set what the mask prunes to +0.0, in place: a weight, or its gradient.

    As a product of integers rather than of floats: with those a negative number would leave -0.0, and NaN
    would stay NaN. On a CPU it is also ten times faster than `masked_fill_`.
    """
    if is_sharded(tensor):
        mask = _placed_like(mask, tensor).to_local()
        tensor = tensor.to_local()
    if torch.compiler.is_compiling():
        tensor.copy_(torch.where(mask.bool(), tensor, 0))  # which the compiler fuses with what is around it
        return
    bits = tensor.detach().view(_INTEGER[tensor.element_size()])
    if bits.device.type == "cpu" and bits.is_contiguous() and mask.is_contiguous():
        wide = bits.new_empty(min(_CPU_CHUNK, bits.numel()))
        chunks = zip(bits.view(-1).split(_CPU_CHUNK), mask.view(-1).split(_CPU_CHUNK), strict=True)
        for some_bits, some_mask in chunks:
            some_bits.mul_(wide[: len(some_mask)].copy_(some_mask))
    else:
        bits.mul_(mask)


def with_whole_groups(layer: Layer, tensor: Tensor) -> tuple[Layer, Tensor]:
    """A plain tensor in which no group is cut, and the layer with its shape: the local part, if it can be."""
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return layer, tensor
    if cuts_groups(layer, tensor):
        return layer, tensor.full_tensor()
    part = tensor.to_local()
    shape = tuple(part.shape)
    return dataclasses.replace(layer, shape=shape[::-1] if layer.kind == "conv1d" else shape), part


def cuts_groups(layer: Layer, tensor: DTensor) -> bool:
    """Whether groups are spread over processes: `with_whole_groups` has to gather it."""
    along = _GROUPS_ALONG[layer.kind]
    return any(p.is_partial() or getattr(p, "dim", None) == along for p in tensor.placements)


def sharded_part(mask: Tensor, weight: Tensor) -> Tensor:
    """What was made of `with_whole_groups(weight)`, in the place of the weight."""
    if not is_sharded(weight) or mask.shape == weight.shape:
        return shard_like(mask, weight)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        *(mask, weight.device_mesh, weight.placements),
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def _placed_like(mask: Tensor, tensor: DTensor) -> DTensor:
    """A gradient may be cut otherwise than its weight, or be a sum whose terms are on several ranks."""
    from torch.distributed.tensor import Replicate

    assert is_sharded(mask)
    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    if list(mask.placements) == placements:
        return mask
    return mask.redistribute(placements=placements)
