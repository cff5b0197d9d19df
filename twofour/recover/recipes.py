"""The recipes: what of a model is trained, and how its layers stay (or become) 2:4.

    masked, distill   everything is trained, the masks are fixed                        `Fixed`
    adaptive          everything is trained, masks move and then freeze                  `Moving`
    lora              only adapters are, each multiplied by the mask of its layer         `Adapters`
    scales            of a quantized model its scales, norms and biases                  `Scales`

They differ in a few moments of the training, and these are the methods here. The losses are the trainer's.
With a scheme to train for, the first two have rounded layers besides (rounded.py): always the last to be put
on and the first to be taken off, since masks are found on plain layers.
"""

# ruff: noqa: B027 (moments at which most recipes have nothing to do are empty on purpose)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twofour.recover.masks import Masks, hold_masks
from twofour.recover.options import SCALES, Recover
from twofour.select import Layer

if TYPE_CHECKING:
    from twofour.recover.rounded import RoundedLayers

#: The dtypes that weights will be stored in, by the names of their parameters.
Stored = Mapping[str, torch.dtype]


class Recipe(ABC):
    """What all have in common: masks that are settled, and moments at which there is nothing to do."""

    layers: tuple[Layer, ...]

    @property
    def settled(self) -> bool:
        """Whether the model is 2:4 as it stands, with masks that will not move any more."""
        return True

    def attach(self, optimizer: Optimizer) -> None:
        """The model is where it will be trained, and so are the optimizer's parameters."""

    def before_clip(self, progress: float) -> None:
        """After the backward pass of a step; `progress` is the share of the steps before this one."""

    def after_step(self, progress: float) -> None:
        """After a step of the optimizer; `progress` counts it."""

    def settle(self) -> None:
        """Fix the masks now: a resumed run had done so."""

    def notes(self) -> dict[str, float]:
        """What is worth a place in the log."""
        return {}

    @abstractmethod
    def finish(self) -> None:
        """Leave a plain 2:4 model."""


def recipe_for(
    model: nn.Module, options: Recover, stored: Stored, include: Sequence[str], exclude: Sequence[str]
) -> Recipe:
    if options.recipe == "adaptive":
        return Moving(model, options, stored, include, exclude)
    if options.recipe == "lora":
        return Adapters(model, options, include, exclude)
    if options.recipe == SCALES:
        return Scales(model, stored)
    return Fixed(model, options, stored, include, exclude)


class Fixed(Recipe):
    def __init__(
        self,
        model: nn.Module,
        options: Recover,
        stored: Stored,
        include: Sequence[str],
        exclude: Sequence[str],
    ) -> None:
        self._masks = hold_masks(model, include, exclude)
        self.layers = self._masks.layers
        self._rounded = rounded_layers(model, self.layers, options, stored)

    def attach(self, optimizer: Optimizer) -> None:
        self._masks.attach(optimizer)
        if self._rounded is not None:
            self._rounded.refresh()

    def after_step(self, progress: float) -> None:
        if self._rounded is not None:
            self._rounded.refresh()

    def finish(self) -> None:
        if self._rounded is not None:
            self._rounded.stop()
        self._masks.apply()
        self._masks.remove()


class Moving(Recipe):
    def __init__(
        self,
        model: nn.Module,
        options: Recover,
        stored: Stored,
        include: Sequence[str],
        exclude: Sequence[str],
    ) -> None:
        from twofour.recover.adaptive import AdaptiveMasks

        self._model = model
        self._patterns = (include, exclude)
        fixed = hold_masks(model, include, exclude)  # refuses a model that is not 2:4
        self.layers = fixed.layers
        fixed.remove()
        self._moving = AdaptiveMasks(model, self.layers, options.decay, options.until)
        self._rounded = rounded_layers(model, self.layers, options, stored)
        self._fixed: Masks | None = None
        self._optimizer: Optimizer | None = None

    @property
    def settled(self) -> bool:
        return self._fixed is not None

    def attach(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        if self._fixed is not None:
            self._fixed.attach(optimizer)
        if self._rounded is not None:
            self._rounded.refresh()

    def before_clip(self, progress: float) -> None:
        if not self.settled:
            self._moving.regularize_(progress)

    def after_step(self, progress: float) -> None:
        if not self.settled:
            self._moving.after_step(progress)
            if self._moving.frozen:
                self.settle()
        if self._rounded is not None:
            self._rounded.refresh()

    def settle(self) -> None:
        if self._rounded is not None:
            self._rounded.stop()
        if not self._moving.frozen:
            self._moving.freeze_()
        self._fixed = hold_masks(self._model, *self._patterns)
        if self._rounded is not None:
            self._rounded.start()
        if self._optimizer is not None:
            self._fixed.attach(self._optimizer)

    def notes(self) -> dict[str, float]:
        return {} if self.settled else {"flips": self._moving.flips}

    def finish(self) -> None:
        if self._fixed is None:
            self.settle()
        assert self._fixed is not None
        if self._rounded is not None:
            self._rounded.stop()
        self._fixed.apply()
        self._fixed.remove()


class Adapters(Recipe):
    def __init__(
        self, model: nn.Module, options: Recover, include: Sequence[str], exclude: Sequence[str]
    ) -> None:
        from twofour.recover.lora import add_masked_lora_

        fixed = hold_masks(model, include, exclude)
        self.layers = fixed.layers
        fixed.remove()
        self._model = model
        self._trained = {id(p): p.requires_grad for p in model.parameters()}
        self.parameters: list[Tensor] = list(
            add_masked_lora_(model, options.rank, options.alpha, include, exclude)
        )

    def finish(self) -> None:
        from twofour.recover.lora import merge_masked_lora_

        merge_masked_lora_(self._model)
        for parameter in self._model.parameters():
            parameter.requires_grad_(self._trained.get(id(parameter), True))


class Scales(Recipe):
    def __init__(self, model: nn.Module, stored: Stored) -> None:
        from twofour.recover.scales import learn_scales_

        self._model = model
        self._trained = {id(p): p.requires_grad for p in model.parameters()}
        self.layers = ()  # there are no masks to hold: codes do not change
        self._learning = learn_scales_(model, stored)
        scales = {id(stand_in.scale_change) for stand_in in self._learning.values()}
        for parameter in model.parameters():
            is_vector = parameter.dim() == 1 and self._trained.get(id(parameter), False)
            parameter.requires_grad_(id(parameter) in scales or is_vector)

    def finish(self) -> None:
        from twofour.recover.scales import put_back_

        put_back_(self._model, self._learning)
        for parameter in self._model.parameters():
            if id(parameter) in self._trained:
                parameter.requires_grad_(self._trained[id(parameter)])


def rounded_layers(
    model: nn.Module, layers: Sequence[Layer], options: Recover, stored: Stored
) -> RoundedLayers | None:
    scheme = options.rounds_to
    if scheme is None:
        return None
    from twofour.recover.rounded import RoundedLayers

    return RoundedLayers(model, layers, scheme, stored)
