"""Prune a model in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from twofour.calibrate.blocks import run_blocks
from twofour.calibrate.statistics import Gram
from twofour.errors import InputError
from twofour.pattern import check_pattern, require_finite
from twofour.progress import OnProgress, silent
from twofour.prune.admm import ADMM
from twofour.prune.hessian import relative_output_error
from twofour.prune.magnitude import Magnitude
from twofour.prune.ria import RIA
from twofour.prune.sparsegpt import SparseGPT
from twofour.prune.wanda import Wanda
from twofour.select import Layer, require_layers, select

Model = TypeVar("Model", bound=nn.Module)


class Method(Protocol):
    """What every method is: options, a name, and how one weight is pruned."""

    name: ClassVar[str]
    needs_inputs: ClassVar[bool]

    def prune(self, matrix: Tensor, layer: str | None = None, inputs: Gram | None = None) -> Tensor: ...


#: Every method by the name that the command line uses.
METHODS: dict[str, type[Any]] = {
    "magnitude": Magnitude,
    "wanda": Wanda,
    "ria": RIA,
    "sparsegpt": SparseGPT,
    "admm": ADMM,
}


def method_named(name: str) -> Method:
    if name not in METHODS:
        raise InputError(
            f"there is no pruning method {name!r}.", hint=f"Choose one of: {', '.join(METHODS)}."
        )
    return METHODS[name]()


def prune_(
    model: Model,
    method: str | Method = "magnitude",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    windows: Tensor | None = None,
    on_progress: OnProgress = silent,
) -> Model:
    """Make every eligible layer 2:4, in place.

    >>> linear = prune_(nn.Sequential(nn.Linear(32, 32)))[0]
    >>> check_pattern(linear.weight).legal
    True

    Methods that look at the inputs of the layers need `windows`, token ids [samples, length] of calibration
    text (`twofour.calibrate.windows.sample_windows`). All weights are looked at before the first is changed:
    NaN or infinite ones leave the model as it was.
    """
    chosen = method_named(method) if isinstance(method, str) else method
    layers = require_layers(select(model, include, exclude)).layers
    weights = {layer: model.get_parameter(f"{layer.name}.weight") for layer in layers}
    for layer, weight in weights.items():
        require_finite(weight.detach(), layer.name)

    @torch.no_grad()
    def change(_: int, grams: dict[Layer, Gram]) -> None:
        for layer, gram in grams.items():
            weights[layer].copy_(prune_weight(layer, weights[layer].detach(), chosen, gram)[0])

    if chosen.needs_inputs:
        if windows is None:
            raise InputError(f"{chosen.name} needs calibration text: give windows of tokens.")
        device = next(iter(weights.values())).device
        run_blocks(model, layers, windows.to(device), change, device=device, on_progress=on_progress)
        return model
    with torch.no_grad():
        for layer, weight in weights.items():
            weight.copy_(prune_weight(layer, weight.detach(), chosen)[0])
    return model


def prune_weight(
    layer: Layer, weight: Tensor, method: Method, inputs: Gram | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Prune one layer's weight in its own layout: the new weight, and what was lost."""
    matrix = layer.to_matrix(weight)
    new = method.prune(matrix, layer.name, inputs)
    report = check_pattern(new)
    if not report.legal:
        raise AssertionError(
            f"{layer.name}: {method.name} left {report.over} groups with more than two weights"
        )
    # vector_norm widens as it goes; .float() would copy the matrix.
    norm = float(torch.linalg.vector_norm(matrix, dtype=torch.float32))
    error = float(torch.linalg.vector_norm(matrix - new, dtype=torch.float32))
    lost = {"relative_error": error / norm if norm else 0.0}
    if inputs is not None:
        lost["output_error"] = relative_output_error(matrix, new, inputs)
    return layer.from_matrix(new), lost


def options_of(method: Method) -> dict[str, Any]:
    """A method's name and options, for the record."""
    return {"method": method.name, **dataclasses.asdict(method)}  # type: ignore[call-overload]
