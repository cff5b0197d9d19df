"""Rounding block by block: a layer's inputs as they are when its turn comes, beside what they were before.

Errors add up: behind a few rounded blocks a layer no longer gets the inputs x that it had in the model as it
was, but others, x′. Rounding so that Q·x′ stays near W·x′ leaves the error that x′ brings with it. Q·x′ near
W·x also repairs it, as far as a matrix can: the best one is W + W·D·G⁻¹ with G the mean of x′·x′ᵀ and D that
of (x - x′)·x′ᵀ, so that is what is rounded in place of W. For x the model runs along as it was, and a layer's
inputs are measured when those before it in the same block are rounded already. Where the scheme rounds
activations, x′ is what is left of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calibrate.blocks import Block, Call, run_blocks
from twofour.calibrate.statistics import Gram
from twofour.packed import Packed24
from twofour.prune.hessian import damped_cholesky
from twofour.quantize.activations import as_rounded, round_inputs
from twofour.quantize.rounding import DAMPING, Rounding, quantize_matrix
from twofour.quantize.schemes import Scheme
from twofour.select import Layer


def quantize_blocks(
    model: nn.Module,
    layers: Sequence[Layer],
    windows: Tensor,
    scheme: Scheme,
    rounding: Rounding,
    keep: Any,
    *,
    device: torch.device | str,
    dtypes: dict[Layer, torch.dtype] | None = None,
    restore: Callable[[int], list[Layer]] | None = None,
    **options: Any,
) -> None:
    """Round the layers block by block. `keep` is given each result and says what is stored of it: that is
    what the blocks behind it get to see, with activations rounded as they will be. `restore` puts a finished
    block back and says which layers it had."""

    @torch.no_grad()
    def change(block: Block) -> None:
        follows = rounding != "nearest"
        plain = ((layer, block.grams.pop(layer), None) for layer in block.layers)
        inputs = inputs_in_order(block, scheme) if follows else plain
        for layer, gram, drift in inputs:
            weight = block.module.get_parameter(f"{layer.name.removeprefix(f'{block.name}.')}.weight")
            dtype = dtypes[layer] if dtypes else weight.dtype
            matrix = layer.to_matrix(weight.detach())
            target = None if drift is None else shifted_target(matrix, gram, drift, layer.name)
            rounded = quantize_matrix(matrix, scheme, rounding, gram, layer.name, dtype, target)
            stored: Packed24 = keep(block, layer, rounded, gram)
            weight.copy_(layer.from_matrix(stored.unpack(weight.dtype)))
            rounding_inputs(layer)

    def restore_and_round(number: int) -> None:
        if restore is not None:
            for layer in restore(number):
                rounding_inputs(layer)

    def rounding_inputs(layer: Layer) -> None:
        if scheme.rounds_activations:
            hooks.append(round_inputs(model.get_submodule(layer.name), scheme))

    hooks: list[Any] = []
    here = windows.to(next(model.parameters()).device)
    follow = None if rounding == "nearest" else 1.0
    options |= {"device": device, "follow": follow, "restore": restore_and_round}
    try:
        run_blocks(model, layers, here, change, **options)
    finally:
        for hook in hooks:
            hook.remove()


class _Reached(Exception):
    """Raised to leave the block once a layer has had its input."""


def inputs_in_order(block: Block, scheme: Scheme) -> Iterator[tuple[Layer, Gram, Tensor | None]]:
    """The layers as they run, each with G and D of its inputs as they are when its turn comes.

    The caller changes a layer before it asks for the next. Layers that not every token passes (experts) have
    the statistics that the block came with, and no D: who knows which tokens would have come.
    """
    original = copy.deepcopy(block.module)
    for stage in _stages(block):
        measured = _measure(block, original, stage[0], scheme)
        for layer in stage:
            gram = block.grams.pop(layer)  # and with its last layer it is freed
            yield (layer, *measured) if measured is not None else (layer, gram, None)


def shifted_target(weight: Tensor, gram: Gram, drift: Tensor, layer: str | None = None) -> Tensor:
    """W + W·D·G⁻¹: makes of the inputs as they are now most nearly what W made of those before.

    >>> gram = Gram(2)
    >>> gram.add(torch.eye(2))
    >>> shifted_target(torch.ones(1, 2), gram, torch.zeros(2, 2))
    tensor([[1., 1.]])
    """
    root, _ = gram.derived(
        ("shifted", DAMPING, weight.device),
        lambda: damped_cholesky(_alive(gram.mean.to(weight.device)), DAMPING, layer),
    )
    moved = weight.float() @ drift.to(weight.device)
    return weight.float() + torch.cholesky_solve(moved.t(), root).t()


def _alive(gram: Tensor) -> Tensor:
    """A Gram matrix whose channels that never fire count as the mean of the others."""
    gram = gram.clone()
    diagonal = gram.diagonal()
    dead = diagonal <= 0
    diagonal[dead] = diagonal[~dead].mean() if bool((~dead).any()) else 1.0
    return gram


def _stages(block: Block) -> list[list[Layer]]:
    """The layers in the order in which they run, those with the same input together."""
    order: list[Layer] = []
    hooks = [
        _module(block.module, block, layer).register_forward_pre_hook(lambda *_, own=layer: order.append(own))
        for layer in block.layers
    ]
    try:
        block.calls[0].through(block.module, block.device)
    finally:
        for hook in hooks:
            hook.remove()
    stages: dict[int, list[Layer]] = {}
    for layer in dict.fromkeys([*order, *block.layers]):
        stages.setdefault(id(block.grams[layer]), []).append(layer)
    return list(stages.values())


def _measure(block: Block, original: nn.Module, layer: Layer, scheme: Scheme) -> tuple[Gram, Tensor] | None:
    """G and D of a layer's input over all windows; None where tokens do not all pass, or pass twice."""
    gram = Gram(layer.columns, block.device)
    drift = torch.zeros_like(gram.mean)
    for call, origin in zip(block.calls, block.origins, strict=True):
        now = _input(block.module, block, layer, call)
        before = _input(original, block, layer, Call(origin, call.rest, call.named))
        tokens = call.states[..., 0].numel()
        if now is None or before is None or not now.shape[0] == before.shape[0] == tokens:
            return None
        now = as_rounded(now, scheme)
        gram.add(now)
        # A running mean, as that of the Gram matrix.
        share = tokens / gram.tokens
        drift.addmm_((before - now).float().t(), now.float(), beta=1 - share, alpha=share / tokens)
    return gram, drift


def _input(module: nn.Module, block: Block, layer: Layer, call: Call) -> Tensor | None:
    """What the layer gets in this call, [tokens, k]."""
    seen: list[Tensor] = []

    def see(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0].reshape(-1, args[0].shape[-1]))
        raise _Reached

    hook = _module(module, block, layer).register_forward_pre_hook(see)
    try:
        call.through(module, block.device)
    except _Reached:
        pass
    finally:
        hook.remove()
    return seen[0] if seen else None


def _module(module: nn.Module, block: Block, layer: Layer) -> nn.Module:
    return module.get_submodule(layer.name.removeprefix(f"{block.name}."))
