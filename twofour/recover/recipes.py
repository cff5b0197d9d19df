"""The recipes: what of a model is trained, and how its layers stay (or become) 2:4.

    masked, distill   everything is trained, the masks are fixed                        `Fixed`
    adaptive          everything is trained, masks move and then freeze                  `Moving`
    lora              only adapters are, each multiplied by the mask of its layer         `Adapters`

They differ in a few moments of the training, and these are the methods here. The losses are the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from twofour.recover.masks import Masks, hold_masks
from twofour.recover.options import Recover
from twofour.select import Layer


class Recipe:
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

    def finish(self) -> None:
        """Leave a plain 2:4 model."""
        raise NotImplementedError


def recipe_for(model: nn.Module, options: Recover, include: Sequence[str], exclude: Sequence[str]) -> Recipe:
    if options.recipe == "adaptive":
        return Moving(model, options, include, exclude)
    if options.recipe == "lora":
        return Adapters(model, options, include, exclude)
    return Fixed(model, include, exclude)


class Fixed(Recipe):
    def __init__(self, model: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> None:
        self._masks = hold_masks(model, include, exclude)
        self.layers = self._masks.layers

    def attach(self, optimizer: Optimizer) -> None:
        self._masks.attach(optimizer)

    def finish(self) -> None:
        self._masks.apply()
        self._masks.remove()


class Moving(Recipe):
    def __init__(
        self, model: nn.Module, options: Recover, include: Sequence[str], exclude: Sequence[str]
    ) -> None:
        from twofour.recover.adaptive import AdaptiveMasks

        self._model = model
        self._patterns = (include, exclude)
        fixed = hold_masks(model, include, exclude)  # refuses a model that is not 2:4
        self.layers = fixed.layers
        fixed.remove()
        self._moving = AdaptiveMasks(model, self.layers, options.decay, options.until)
        self._fixed: Masks | None = None
        self._optimizer: Optimizer | None = None

    @property
    def settled(self) -> bool:
        return self._fixed is not None

    def attach(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        if self._fixed is not None:
            self._fixed.attach(optimizer)

    def before_clip(self, progress: float) -> None:
        if not self.settled:
            self._moving.regularize_(progress)

    def after_step(self, progress: float) -> None:
        if not self.settled:
            self._moving.after_step(progress)
            if self._moving.frozen:
                self.settle()

    def settle(self) -> None:
        if not self._moving.frozen:
            self._moving.freeze_()
        self._fixed = hold_masks(self._model, *self._patterns)
        if self._optimizer is not None:
            self._fixed.attach(self._optimizer)

    def notes(self) -> dict[str, float]:
        return {} if self.settled else {"flips": self._moving.flips}

    def finish(self) -> None:
        if self._fixed is None:
            self.settle()
        assert self._fixed is not None
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
