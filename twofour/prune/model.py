"""Prune a model in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from twofour.errors import InputError
from twofour.pattern import check_pattern, require_finite
from twofour.prune.magnitude import Magnitude
from twofour.select import Layer, require_layers, select

#: Every method by the name that the command line uses.
METHODS = {"magnitude": Magnitude}

Model = TypeVar("Model", bound=nn.Module)


def method_named(name: str) -> Magnitude:
    if name not in METHODS:
        raise InputError(
            f"there is no pruning method {name!r}.", hint=f"Choose one of: {', '.join(METHODS)}."
        )
    return METHODS[name]()


def prune_(
    model: Model,
    method: str | Magnitude = "magnitude",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Model:
    """Make every eligible layer 2:4, in place.

    >>> linear = prune_(nn.Sequential(nn.Linear(32, 32)))[0]
    >>> check_pattern(linear.weight).legal
    True

    All weights are looked at before the first is changed: an error leaves the model as it was.
    """
    chosen = method_named(method) if isinstance(method, str) else method
    selection = require_layers(select(model, include, exclude))
    weights = {layer: model.get_parameter(f"{layer.name}.weight") for layer in selection.layers}
    for layer, weight in weights.items():
        require_finite(weight.detach(), layer.name)
    with torch.no_grad():
        for layer, weight in weights.items():
            weight.copy_(prune_weight(layer, weight, chosen)[0])
    return model


def prune_weight(layer: Layer, weight: Tensor, method: Magnitude) -> tuple[Tensor, dict[str, float]]:
    """Prune one layer's weight in its own layout: the new weight, and what was lost."""
    matrix = layer.to_matrix(weight)
    new = method.prune(matrix, layer.name)
    report = check_pattern(new)
    if not report.legal:
        raise AssertionError(
            f"{layer.name}: {method.name} left {report.over} groups with more than two weights"
        )
    # vector_norm widens as it goes; .float() would copy the matrix.
    norm = float(torch.linalg.vector_norm(matrix, dtype=torch.float32))
    error = float(torch.linalg.vector_norm(matrix - new, dtype=torch.float32))
    return layer.from_matrix(new), {"relative_error": error / norm if norm else 0.0}
