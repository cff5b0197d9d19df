"""What a block's layers get as inputs, over all windows: one Gram matrix for layers that share their input.

Layers that get the very same input (q, k and v; gate and up) share one. Experts see fewer tokens than passed
the block, and those that saw very few lean on what the others of their list were sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from twofour.calibrate import parallel
from twofour.calibrate.statistics import Gram
from twofour.select import Layer

if TYPE_CHECKING:
    from twofour.calibrate.blocks import Call, Shelf


def observe(
    block: nn.Module,
    layers: list[Layer],
    prefix: str,
    calls: list[Call],
    shelf: Shelf,
    outputs: list[Tensor] | None = None,
) -> dict[Layer, Gram]:
    """One pass over all windows: the statistics of every layer's input, shared where the input is.

    A layer that no token reached (an expert) gets a Gram matrix of zeros: methods then go by the weights.
    What the block gives is added to `outputs`, if there is such a list.
    """
    seen: list[tuple[Layer, Tensor]] = []
    owner: dict[Layer, Layer] = {}
    grams: dict[Layer, Gram] = {}
    hooks = []
    for layer in layers:
        module = block.get_submodule(layer.name.removeprefix(prefix))
        hooks.append(module.register_forward_pre_hook(lambda _, args, own=layer: seen.append((own, args[0]))))
    try:
        for call in calls:
            seen.clear()
            out = call.through(block, shelf.device)
            if outputs is not None:
                outputs.append(shelf.put(out))
            for layer, x in seen:
                if layer not in owner:  # the same tensor, not merely equal ones
                    owner[layer] = next(other for other, its in seen if its is x)
                if owner[layer] is layer:
                    if layer not in grams:
                        grams[layer] = Gram(layer.shape[1], shelf.device)
                    grams[layer].add(x)
        shelf.settle()
    finally:
        for hook in hooks:
            hook.remove()
    for others in parallel.of_all(owner):  # another process may have seen an expert that this one has not
        owner = {**others, **owner}
    for layer in layers:
        own = owner.setdefault(layer, layer)
        if own not in grams:
            grams[own] = Gram(own.shape[1], shelf.device)
    own_grams = {layer: grams[layer] for layer in layers if owner[layer] == layer}
    for gram in own_grams.values():  # in the same order in every process
        gram.share()
    passed = parallel.sum_(torch.tensor(sum(call.states[..., 0].numel() for call in calls)))
    _let_experts_lean(block, prefix, own_grams, int(passed))
    return {layer: grams[owner[layer]] for layer in layers}


def _let_experts_lean(block: nn.Module, prefix: str, grams: dict[Layer, Gram], passed: int) -> None:
    """Experts that were sent few of the tokens lean on what all experts of their list were sent.

    Experts are alike but for their number in a list of modules, and see fewer tokens than passed the block.
    One that saw none is left alone: it is reported, and goes by its weights.
    """
    lists = {name for name, module in block.named_modules() if isinstance(module, nn.ModuleList)}

    def without_numbers(name: str) -> tuple[str, ...]:
        parts = name.removeprefix(prefix).split(".")
        return tuple("*" if ".".join(parts[:i]) in lists else part for i, part in enumerate(parts))

    alike: dict[tuple[tuple[str, ...], int], list[Gram]] = {}
    for layer, gram in grams.items():
        alike.setdefault((without_numbers(layer.name), len(gram.mean)), []).append(gram)
    for (_, columns), experts in alike.items():
        short = [gram for gram in experts if 0 < gram.tokens < min(columns, passed)]
        if short and len(experts) > 1:
            total = sum(gram.tokens for gram in experts)
            pooled = torch.zeros_like(short[0].mean)
            for gram in experts:
                pooled.add_(gram.mean, alpha=gram.tokens / total)
            for gram in short:
                gram.lean_on(pooled)
