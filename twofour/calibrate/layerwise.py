"""Any module, layer after layer: for models that are no list of blocks, such as a CNN.

The layers are taken in the order in which they run. For each, the examples pass through the model as far as
that layer while its inputs are summed up as a Gram matrix; the caller changes it; then comes the next,
which sees what the changed layers before it give. Nothing is kept between layers, so the memory is that of
one forward pass, and the time is that of as many half passes as there are layers.

A convolution is a product with the patches of its input: the Gram matrix is theirs, in the order of columns
of `Layer.to_matrix`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour.calibrate.examples import call, evaluating
from twofour.calibrate.statistics import Gram
from twofour.errors import InputError
from twofour.progress import OnProgress, silent
from twofour.select import Layer

#: Called for each layer with the statistics of its inputs; changes its weight.
ChangeLayer = Callable[[Layer, Gram], object]


class _Reached(Exception):
    """Raised to leave the model once a layer has had its inputs."""


@torch.no_grad()
def run_layers(
    model: nn.Module,
    layers: Sequence[Layer],
    data: Sequence[Any],
    change: ChangeLayer,
    on_progress: OnProgress = silent,
) -> None:
    """Pass the examples through the model, changing layer after layer.

    `data` are examples as `twofour.calibrate.examples` has them.
    """
    with evaluating(model):
        order, calls = _order(model, layers, data[0])
        for number, layer in enumerate(order):
            module = model.get_submodule(layer.name)
            gram = Gram(layer.columns, next(module.parameters()).device)
            for example in data:
                _observe(model, layer, module, calls[layer], gram, example)
            change(layer, gram)
            on_progress(number + 1, len(order), layer.name)


def patches(layer: Layer, module: nn.Module, x: Tensor) -> Tensor:
    """A layer's input as rows of what its matrix is multiplied with: [..., columns]."""
    if not isinstance(module, nn.Conv2d):
        return x
    # The padding of a string or of a mode is all in here, and zeros are one mode of several.
    around = module._reversed_padding_repeated_twice
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = x if x.dim() == 4 else x[None]
    if any(around):
        x = F.pad(x, around, mode=mode)
    columns = F.unfold(x, module.kernel_size, dilation=module.dilation, stride=module.stride)
    channels = module.in_channels
    columns = columns.reshape(x.shape[0], channels, -1, columns.shape[-1]).permute(0, 3, 2, 1)
    if channels % 4:
        columns = F.pad(columns, (0, -channels % 4))
    return columns.flatten(2)


@torch.no_grad()
def reestimate_norms_(model: nn.Module, data: Sequence[Any]) -> int:
    """Measure the running means and variances of every BatchNorm anew; how many there were.

    Pruned layers give other means and variances than those that were learned. No weight changes.
    """
    norms = [
        m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    ]
    if not norms:
        return 0
    with evaluating(model):
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all examples instead of a decaying one
            norm.train()
        try:
            for example in data:
                call(model, example)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
                norm.eval()
    return len(norms)


def _order(model: nn.Module, layers: Sequence[Layer], example: Any) -> tuple[list[Layer], dict[Layer, int]]:
    """The layers as they run, and how often each does in one pass."""
    calls: dict[Layer, int] = {}

    def count(layer: Layer) -> None:
        calls[layer] = calls.get(layer, 0) + 1

    hooks = [
        model.get_submodule(layer.name).register_forward_pre_hook(lambda *_, own=layer: count(own))
        for layer in layers
    ]
    try:
        call(model, example)
    finally:
        for hook in hooks:
            hook.remove()
    missing = [layer.name for layer in layers if layer not in calls]
    if missing:
        raise InputError(
            "the examples do not pass through this layer.", layer=missing[0], hint="Leave it out."
        )
    return list(calls), calls


def _observe(model: nn.Module, layer: Layer, module: nn.Module, times: int, gram: Gram, example: Any) -> None:
    left = times

    def see(_: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal left
        if not bool(args[0].isfinite().all()):
            raise InputError(
                "its inputs are NaN or infinite.",
                layer=layer.name,
                hint="Check the examples, or calibrate in bfloat16 or float32.",
            )
        gram.add(patches(layer, module, args[0]))
        left -= 1
        if not left:
            raise _Reached

    hook = module.register_forward_pre_hook(see)
    try:
        call(model, example)
    except _Reached:
        pass
    finally:
        hook.remove()
