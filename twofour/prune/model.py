"""Prune a model in memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from twofour.calibrate.blocks import Block, Weights, run_blocks
from twofour.calibrate.experts import with_open_experts
from twofour.calibrate.layerwise import reestimate_norms_, run_layers
from twofour.calibrate.statistics import Gram
from twofour.calibrate.windows import require_windows
from twofour.errors import InputError
from twofour.pattern import check_pattern, require_finite
from twofour.progress import OnProgress, silent
from twofour.prune.admm import ADMM
from twofour.prune.best import Best
from twofour.prune.hessian import relative_output_error
from twofour.prune.magnitude import Magnitude
from twofour.prune.permute_block import Reordered, permute_block_
from twofour.prune.reconstruct import Reconstruct, Reconstructed, reconstruct_
from twofour.prune.ria import RIA
from twofour.prune.sparsegpt import SparseGPT
from twofour.prune.wanda import Wanda
from twofour.select import Layer, require_layers, select

Model = TypeVar("Model", bound=nn.Module)


class Method(Protocol):
    """What every method is: options, a name, and how one weight is pruned.

    One that also tunes whole blocks has its options for that as `reconstruct`, a `Reconstruct`.
    """

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
    "best": Best,
}


def method_named(name: str) -> Method:
    if name not in METHODS:
        raise InputError(
            f"there is no pruning method {name!r}.", hint=f"Choose one of: {', '.join(METHODS)}."
        )
    return METHODS[name]()


def chosen_method(method: str | Method | None, has_text: bool) -> Method:
    """The method asked for, or else the best that there is without asking for more."""
    if method is None:
        return method_named("best" if has_text else "magnitude")
    return method_named(method) if isinstance(method, str) else method


def reconstruction_of(method: Method) -> Reconstruct | None:
    """How a method tunes a block after its layers are pruned, if it does."""
    return getattr(method, "reconstruct", None)


@with_open_experts
def prune_(
    model: Model,
    method: str | Method | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    windows: Tensor | None = None,
    data: Sequence[Any] | None = None,
    on_progress: OnProgress = silent,
    permute: bool = False,
) -> Model:
    """Make every eligible layer 2:4, in place.

    >>> linear = prune_(nn.Sequential(nn.Linear(32, 32)))[0]
    >>> check_pattern(linear.weight).legal
    True

    Experts that are stored as one tensor are pruned one by one, as the `nn.Linear`s that they are in files.
    Methods that look at the inputs of the layers need `windows`, token ids [samples, length] of calibration
    text (`twofour.calibrate.windows.sample_windows`). With windows the default is `best`, which also tunes
    norms and biases; without, it is `magnitude`. Any other module takes `data` instead, examples to call it
    with: its layers are pruned one after another in the order in which they run, and its BatchNorms, if it
    has any, are measured anew at the end.

    With `permute`, for windows only, channels inside each block are reordered first, so that weights that
    matter share fewer groups of four; the dense block computes the same (`twofour.prune.permute_block`).

    All weights are looked at before the first is changed: NaN or infinite ones leave the model as it was.
    """
    chosen = chosen_method(method, has_text=windows is not None or data is not None)
    layers = require_layers(select(model, include, exclude)).layers
    weights = {layer: model.get_parameter(f"{layer.name}.weight") for layer in layers}
    for layer, weight in weights.items():
        require_finite(weight.detach(), layer.name)

    if permute and (data is not None or not chosen.needs_inputs):
        raise InputError(
            f"permute reorders the channels of blocks by their inputs, and {chosen.name} "
            + ("is run layer by layer over data." if data is not None else "does not look at any."),
            hint="Give windows and another method, or call twofour.prune.permute.permute_ before pruning.",
        )
    if data is not None:
        _prune_layerwise(model, layers, chosen, data, on_progress)
        return model
    if chosen.needs_inputs:
        if windows is None:
            raise InputError(
                f"{chosen.name} looks at the inputs of the layers.",
                hint="Give windows of tokens of calibration text, or data to call the model with.",
            )

        def change(block: Block) -> None:
            if permute:
                reorder_block(block, chosen, getattr(model, "config", None))
            prune_block(block, chosen)

        run_calibrated(
            *(model, layers, windows, chosen, change),
            device=next(iter(weights.values())).device,
            on_progress=on_progress,
        )
        return model
    with torch.no_grad():
        for layer, weight in weights.items():
            weight.copy_(prune_weight(layer, weight.detach(), chosen)[0])
    return model


def _prune_layerwise(
    model: nn.Module, layers: Sequence[Layer], method: Method, data: Sequence[Any], on_progress: OnProgress
) -> None:
    if not data:
        raise InputError("data holds no examples.")

    @torch.no_grad()
    def change(layer: Layer, gram: Gram) -> None:
        weight = model.get_parameter(f"{layer.name}.weight")
        weight.copy_(prune_weight(layer, weight.detach(), method, gram)[0])

    run_layers(model, layers, data, change, on_progress)
    reestimate_norms_(model, data)


def run_calibrated(
    model: nn.Module,
    layers: Sequence[Layer],
    windows: Tensor,
    method: Method,
    change: Callable[[Block], object],
    *,
    device: torch.device | str,
    finished: int = 0,
    restore: Callable[[int], None] | None = None,
    weights: Weights | None = None,
    on_progress: OnProgress = silent,
) -> None:
    """`run_blocks` with what the method wants of it."""
    require_windows(windows, model)
    tuning = reconstruction_of(method)
    run_blocks(
        *(model, layers, windows.to(next(model.parameters()).device), change),
        device=device,
        batch=tuning.batch(windows) if tuning else None,
        follow=tuning.follow if tuning else None,
        finished=finished,
        restore=restore,
        weights=weights,
        on_progress=on_progress,
    )


@torch.no_grad()
def reorder_block(
    block: Block, method: Method, config: Any, may_change: Callable[[str], bool] = lambda name: True
) -> Reordered:
    """Reorder the channels inside a block that is still dense, for what the method will do to it."""
    # These two leave the weights that they keep as they are; the others repair what was lost with them.
    saliencies = not isinstance(method, Wanda | RIA)
    return permute_block_(block, config, saliencies=saliencies, may_change=may_change)


@torch.no_grad()
def prune_block(
    block: Block,
    method: Method,
    may_change: Callable[[str], bool] = lambda name: True,
    compensate: Callable[[Layer, Tensor, Tensor, Gram], dict[str, float]] = lambda *_: {},
) -> tuple[dict[Layer, dict[str, float]], Reconstructed | None]:
    """Prune the layers of a block in place and tune what is left, if the method does that.

    What was lost in each layer, and what the tuning made of the block. `may_change` is asked for the norms
    and biases that would be tuned.
    """
    notes: dict[Layer, dict[str, float]] = {}
    for layer in block.layers:
        gram = block.grams.pop(layer)  # and with its last layer it is freed
        start = time.perf_counter()
        weight = block.module.get_parameter(f"{layer.name.removeprefix(f'{block.name}.')}.weight")
        new, notes[layer] = prune_weight(layer, weight.detach(), method, gram)
        notes[layer] |= compensate(layer, weight.detach(), new, gram)
        weight.copy_(new)
        notes[layer]["tokens"] = gram.tokens
        notes[layer]["seconds"] = round(time.perf_counter() - start, 4)
    tuning = reconstruction_of(method)
    return notes, reconstruct_(block, tuning, may_change) if tuning else None


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
