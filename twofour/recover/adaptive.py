"""Masks that may still move while the model is trained, and then freeze (SR-STE, arXiv 2102.04010).

A mask from one-shot pruning is a guess. Here training may correct it:

    forward    multiplies with the two largest of every four weights, the other two count as zero
    backward   hands the gradient straight through, so that a pruned weight goes on learning
    decay      pulls pruned weights towards zero: one comes back only if gradients keep asking for it
    freeze     sets what is pruned then to zero: a plain 2:4 model, to be trained on with `hold_masks`

The mask is a function of the weight and is made anew wherever it is needed, not stored. So the state dict is
that of the dense model, every process of DDP has the same mask, and a run that is resumed has the masks it
had. It costs a few passes over the weights, whatever the number of tokens.

The decay grows in a straight line from nothing at the start to all of it at the freeze. At the start masks
should follow the gradients, and a pruned weight begins at zero anyway; towards the end they should settle,
for what moves just before the freeze has not been trained for long. AST (AAAI 2025) reports the same: with a
constant decay moving masks were no better than fixed ones, with a growing one they were (OPT-125M, perplexity
31.08, 31.06 and 30.22).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from twofour.errors import InputError, TwoFourError
from twofour.recover.derived import Derived, derive, derived_class, largest_two, plain_again
from twofour.recover.mask_tensor import (
    is_sharded,
    shard_like,
    sharded_part,
    with_whole_groups,
    zero_pruned_,
)
from twofour.recover.masks import reshard, unwrapped
from twofour.select import Layer, as_layer


class AdaptiveMasks:
    """Lets the masks of these layers move, in somebody's own loop.

    >>> from twofour.select import select
    >>> model = nn.Sequential(nn.Linear(64, 32))
    >>> masks = AdaptiveMasks(model, select(model).layers, decay=2e-4, until=0.5)
    >>> for step in range(10):
    ...     model(torch.randn(8, 64)).square().mean().backward()
    ...     masks.regularize_(step / 10)
    ...     # clip, optimizer.step(), optimizer.zero_grad()
    ...     masks.after_step((step + 1) / 10)
    >>> masks.frozen, model
    (True, Sequential(
      (0): Linear(in_features=64, out_features=32, bias=True)
    ))

    `progress` is the share of the training that is done. The model may be dense or 2:4 already; its
    parameters stay the same objects throughout, so an optimizer may be built before or after;
    `torch.compile`, DDP and FSDP2 (of blocks, not of single layers) may come before or after too. To resume,
    make it, then load the state dict, so that `flips` counts from the model that training began with.
    """

    def __init__(self, model: nn.Module, layers: Iterable[Layer], decay: float, until: float) -> None:
        if not (decay >= 0 and math.isfinite(decay)):
            raise InputError(f"decay must be a number of at least 0, not {decay}.")
        if not 0 < until <= 1:
            raise InputError(f"until must be a share of the training, above 0 and at most 1, not {until}.")
        self._model = unwrapped(model)
        self._decay = decay
        self._until = until
        self._moving = [_Moving(layer, _module_of(self._model, layer)) for layer in layers]
        if not self._moving:
            raise InputError("there are no layers whose masks could move.")
        self._flips_when_frozen = 0
        for moving in self._moving:
            moving.start()

    @property
    def frozen(self) -> bool:
        return not self._moving

    @property
    def flips(self) -> int:
        """How many weights are pruned now and were not at the start, or the other way round.

        It waits for the device, so ask now and then, for a log. Of sharded weights it counts those of this
        process. Once frozen it stays what it was.
        """
        return self._flips_when_frozen + sum(moving.flips() for moving in self._moving)

    def regularize_(self, progress: float) -> None:
        """Add the decay to the gradients of pruned weights: after backward (and unscaling), before clipping.

        Once in a step, after the last of several backward passes. Nothing once frozen.
        """
        strength = self._decay * min(max(progress / self._until, 0.0), 1.0)
        for moving in self._moving:
            moving.require_still_ours()
            if strength:
                moving.regularize_(strength)

    def after_step(self, progress: float) -> None:
        """Freeze if it is time. After a resume as well: with the progress of the last step that was made."""
        if progress >= self._until and not self.frozen:
            self.freeze_()

    @torch.no_grad()
    def freeze_(self) -> None:
        """Leave a plain 2:4 model: what is pruned now becomes zero. Then `hold_masks` keeps it so.

        The output does not change. The optimizer may have moments for what is now zero; `hold_masks` copes.
        """
        reshard(self._model)
        for moving in self._moving:  # all of them before the first is changed
            moving.require_still_ours()
            moving.require_finite()
        self._flips_when_frozen = self.flips
        for moving in self._moving:
            moving.stop()
        self._moving = []

    def __repr__(self) -> str:
        if self.frozen:
            return "AdaptiveMasks(frozen)"
        return f"AdaptiveMasks({len(self._moving)} layers, decay={self._decay}, until={self._until})"


class _Moving:
    """One layer whose mask moves. The module changes its class, and keeps its parameters and their names."""

    def __init__(self, layer: Layer, module: nn.Module) -> None:
        self.layer = layer
        self.module: Any = module
        self.plain: Any = type(module)
        self.at_start = self.mask()

    @property
    def weight(self) -> Tensor:
        """Looked up, for FSDP2 replaces it."""
        return self.module.get_parameter("weight").detach()

    def mask(self) -> Tensor:
        """The mask of the weight as it is now, sharded like it: uint8, 1 is kept."""
        part_layer, part = with_whole_groups(self.layer, self.weight)
        return sharded_part(largest_two(part_layer, part).view(torch.uint8), self.weight)

    def start(self) -> None:
        derive(self.module, self.layer)
        self.module.mask_moves = True

    def stop(self) -> None:
        zero_pruned_(self.weight, self.mask())
        self.module.mask_moves = False
        plain_again(self.module)

    @torch.no_grad()
    def regularize_(self, strength: float) -> None:
        gradient = self.module.get_parameter("weight").grad
        if gradient is not None:
            gradient.addcmul_(self.weight, self.mask() == 0, value=strength)

    def flips(self) -> int:
        self.at_start = shard_like(self.at_start, self.weight)
        return int((_local(self.mask()) != _local(self.at_start)).sum())

    def require_finite(self) -> None:
        if not bool(_local(self.weight).isfinite().all()):
            raise TwoFourError(
                "some weights are NaN or infinite: the training has diverged, and there is no mask of them.",
                layer=self.layer.name,
                hint="Go back to an earlier checkpoint and lower the learning rate.",
            )

    def require_still_ours(self) -> None:
        if type(self.module) is not derived_class(self.plain):
            raise InputError(
                f"its class has become {type(self.module).__name__} while its mask was moving.",
                layer=self.layer.name,
                hint="With FSDP2 call fully_shard on the blocks of the model, not on single layers.",
            )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor


def _module_of(model: nn.Module, layer: Layer) -> nn.Module:
    try:
        module = model.get_submodule(layer.name)
    except AttributeError:
        raise InputError(
            "the model has no such layer.",
            layer=layer.name,
            hint="Names are those inside of DDP and torch.compile: select(model) before wrapping it.",
        ) from None
    found = as_layer(layer.name, module)
    if isinstance(module, Derived) and module.mask_moves:
        raise InputError("its mask is moving already.", layer=layer.name, hint="freeze_() first.")
    if found != layer:
        raise InputError(
            f"it cannot have a moving mask: {found if isinstance(found, str) else 'its shape is another'}.",
            layer=layer.name,
            hint="Give the layers that twofour.select.select(model) finds.",
        )
    return module
