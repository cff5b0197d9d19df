"""Examples to call a model with: a tensor, a tuple of arguments, or a dictionary of named ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def call(model: nn.Module, example: Any) -> Any:
    """Call the model with an example, moved to where the model is."""
    device = next(model.parameters()).device

    def here(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    if isinstance(example, Mapping):
        return model(**{name: here(value) for name, value in example.items()})
    return model(*map(here, example if isinstance(example, tuple | list) else (example,)))


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """No dropout, no BatchNorm statistics updated; every module back in the mode that it was in."""
    training = [module for model in models for module in model.modules() if module.training]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
