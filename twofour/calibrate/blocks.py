"""A transformer run block by block, so that each block can be changed before the next one sees its outputs.

The first block's inputs are caught by running the model up to it. Then, for one block at a time: all
windows pass through it while the inputs of its layers are summed up as Gram matrices; the caller changes
the block; all windows pass through it again, and what comes out is the input of the next. So every layer is
pruned on what the pruned layers before it really give. Only one block has to be on the device; the states
between blocks stay on the CPU. Layers that get the very same input (q, k and v; gate and up) share one Gram
matrix.

Nothing here knows a model by name: the blocks are the longest list of modules that the chosen layers are
in, and whatever else the model passes to a block (masks, positions) is caught with the states and passed
on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calibrate.statistics import Gram
from twofour.errors import InputError
from twofour.progress import OnProgress, silent
from twofour.select import Layer

#: Called for each block with its number and the statistics of each layer's input; changes the weights.
Change = Callable[[int, dict[Layer, Gram]], None]


class _Caught(Exception):
    """Raised to leave the model once its first block has been reached."""


@dataclass
class _Call:
    """One batch on its way through the blocks: the states, and what else a block is called with."""

    states: Tensor
    rest: tuple[Any, ...]
    named: dict[str, Any]


def find_blocks(model: nn.Module, layers: Sequence[Layer]) -> tuple[str, nn.ModuleList]:
    """The list of modules that holds the most of the layers, and its name."""
    best: tuple[int, str, nn.ModuleList | None] = (0, "", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 0:
            inside = sum(layer.name.startswith(f"{name}.") for layer in layers)
            # An outer list holds what an inner one does: the first with the most is the outermost.
            if inside > best[0]:
                best = (inside, name, module)
    if best[2] is None:
        raise InputError(
            "the model has no list of blocks to calibrate one after another.",
            hint="Prune it with --method magnitude.",
        )
    return best[1], best[2]


@torch.no_grad()
def run_blocks(
    model: nn.Module,
    layers: Sequence[Layer],
    windows: Tensor,
    change: Change,
    *,
    device: torch.device | str = "cpu",
    batch: int = 4,
    finished: int = 0,
    on_progress: OnProgress = silent,
) -> None:
    """Pass the windows [samples, length] through the model, changing block after block.

    The first `finished` blocks were changed in an earlier run: they are only passed through.
    """
    name, blocks = find_blocks(model, layers)
    outside = [layer.name for layer in layers if not layer.name.startswith(f"{name}.")]
    if outside:
        raise InputError(
            f"{len(outside)} chosen layers are outside the blocks {name}.*, so their inputs are not seen.",
            layer=outside[0],
            hint="Leave them out with --exclude.",
        )
    calls = _catch(model, blocks[0], windows, batch)
    for number, block in enumerate(blocks):
        prefix = f"{name}.{number}."
        own = [layer for layer in layers if layer.name.startswith(prefix)]
        block.to(device)
        if own and number >= finished:
            grams = _observe(block, own, prefix, calls, device)
            change(number, grams)
        if number + 1 < len(blocks):
            for call in calls:
                call.states = _forward(block, call, device).cpu()
        block.to("cpu")
        on_progress(number + 1, len(blocks), f"block {number}")


def _catch(model: nn.Module, first: nn.Module, windows: Tensor, batch: int) -> list[_Call]:
    """What the first block is called with, batch by batch."""
    calls: list[_Call] = []

    def catch(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if args:
            calls.append(_Call(args[0], args[1:], dict(named)))
        else:
            rest = {key: value for key, value in named.items() if key != "hidden_states"}
            calls.append(_Call(named["hidden_states"], (), rest))
        raise _Caught

    hook = first.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        for tokens in windows.split(batch):
            try:
                model(tokens, use_cache=False)
            except _Caught:
                continue
    finally:
        hook.remove()
    return calls


def _observe(
    block: nn.Module, layers: list[Layer], prefix: str, calls: list[_Call], device: torch.device | str
) -> dict[Layer, Gram]:
    """One pass over all windows: the statistics of every layer's input, shared where the input is."""
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
            _forward(block, call, device)
            if not owner:  # the same tensor, not merely equal ones: known after the first batch
                for layer, x in seen:
                    owner[layer] = next(other for other, its in seen if its is x)
                grams = {layer: Gram(layer.shape[1], device) for layer in dict.fromkeys(owner.values())}
            for layer, x in seen:
                if owner[layer] is layer:
                    grams[layer].add(x)
    finally:
        for hook in hooks:
            hook.remove()
    missing = [layer.name for layer in layers if layer not in owner]
    if missing:
        raise InputError("no calibration token reached this layer.", layer=missing[0], hint="Leave it out.")
    return {layer: grams[owner[layer]] for layer in layers}


def _forward(block: nn.Module, call: _Call, device: torch.device | str) -> Tensor:
    moved = _to((call.states, call.rest, call.named), device)
    out = block(moved[0], *moved[1], **moved[2])
    return out if isinstance(out, Tensor) else out[0]


def _to(thing: Any, device: torch.device | str) -> Any:
    """Tensors inside tuples, lists and dictionaries moved to a device."""
    if isinstance(thing, Tensor):
        return thing.to(device)
    if isinstance(thing, tuple | list):
        return type(thing)(_to(part, device) for part in thing)
    if isinstance(thing, dict):
        return {key: _to(value, device) for key, value in thing.items()}
    return thing
