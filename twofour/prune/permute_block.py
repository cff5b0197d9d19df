"""Permutation while a model is streamed: the channels that are made and read inside one block.

Two of the three kinds of folds lie within a block: the inner channels of the MLP (up and gate make them, down
reads them) and those of attention's heads (v makes them, the output layer reads them). So each block can have
its channels reordered in its turn, just before its layers are pruned. The Gram matrices that were summed up
for the old order are reordered with the channels: no further pass over the text. The order of the residual
stream is one for all blocks, and is left to `twofour.prune.permute.permute_`, which has the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from twofour.calibrate import parallel
from twofour.calibrate.blocks import Block
from twofour.calibrate.statistics import Gram
from twofour.errors import InputError
from twofour.pattern import require_finite
from twofour.prune.find_folds import find_folds
from twofour.prune.folds import Fold
from twofour.prune.hessian import require_inputs
from twofour.prune.permute import reorder_, saliency_norms
from twofour.select import Layer, as_layer


@dataclass(frozen=True)
class Reordered:
    """What became of a block: a note for each layer to prune whose columns moved, and all that did move."""

    notes: dict[Layer, dict[str, Any]]
    changed: tuple[str, ...]  # parameters by their full names, those of pruned layers among them


def permute_block_(
    block: Block,
    config: Any,
    *,
    saliencies: bool,
    may_change: Callable[[str], bool] = lambda name: True,
) -> Reordered:
    """Reorder channels inside a dense block in place, and its Gram matrices with them; it computes the same.

    With `saliencies` a channel counts by what is lost when the other weights repair what they can, and
    otherwise by its norm (see `saliency_norms`). `may_change` gets the full names of parameters; a fold that
    would move one that must stay is left out. `config` is the model's.

    Whether a model's blocks can be reordered at all shows in the first one: if nothing folds there it is
    refused, before hours are spent on something else than what was asked for.
    """
    module, prefix = block.module, f"{block.name}."
    to_prune = {layer.name.removeprefix(prefix): layer for layer in block.layers}
    grams = {}
    for name, layer in to_prune.items():  # before anything is compared: NaN would look like a fold that fails
        weight = module.get_parameter(f"{name}.weight").detach()
        require_finite(weight, layer.name)
        grams[name] = require_inputs("permutation", layer.to_matrix(weight), layer.name, block.grams[layer])
    names = {name for name, child in module.named_modules() if isinstance(as_layer(name, child), Layer)}
    found = [
        fold
        for fold in find_folds(module, block.calls[0], names, config)
        if all(may_change(prefix + name) for name in _moved_by(block, fold))
    ]
    if not found and block.number == 0:
        raise InputError(
            "no channels of this block can change their order without changing what it computes.",
            layer=block.name,
            hint="Prune without permutation. It needs an MLP or attention as modules of their own, whose "
            "weights stand in the files under their own names.",
        )
    folds = [
        replace(fold, consumers=own)
        for fold in _found_by_all(found)
        if (own := tuple(layer for layer in fold.consumers if layer.name in to_prune))
    ]

    def norms_of(name: str) -> Tensor:
        if saliencies:
            return saliency_norms(grams[name], layer=prefix + name)
        return grams[name].channel_norms

    notes: dict[Layer, dict[str, Any]] = {}
    moved: dict[str, None] = {}
    for fold, order, note in reorder_(module, block.calls[0], folds, norms_of):
        _reorder_grams(block, fold, order)
        moved |= dict.fromkeys(prefix + name for name in _moved_by(block, fold))
        for layer in fold.consumers:
            notes[to_prune[layer.name]] = {
                "kind": note["kind"],
                "producers": [prefix + name for name in note["producers"]],
                **{key: note[key] for key in ("kept_before", "kept", "output_change")},
            }
    return Reordered(notes, tuple(moved))


def _moved_by(block: Block, fold: Fold) -> list[str]:
    """The block's tensors that the fold moves."""
    names = {child: name for name, child in block.module.named_modules()}
    return [f"{names[site.module]}.{site.tensor}" for site in fold.sites]


def _found_by_all(folds: list[Fold]) -> list[Fold]:
    """Those that every process has proved: each looks at windows of its own, and all must do the same."""
    proved = [set(keys) for keys in parallel.of_all([(fold.name, fold.producers) for fold in folds])]
    return [fold for fold in folds if all((fold.name, fold.producers) in keys for keys in proved)]


def _reorder_grams(block: Block, fold: Fold, order: Tensor) -> None:
    """What was measured of the channels, in their new order; layers that shared a matrix still do."""
    moved: dict[Gram, Gram] = {}
    for layer, gram in block.grams.items():
        site = fold.reads.get(layer.name.removeprefix(f"{block.name}."))
        if site is None:
            continue
        if gram not in moved:
            places = site.places(order).to(gram.mean.device)
            moved[gram] = Gram(0, gram.mean.device)
            moved[gram].mean = gram.mean.index_select(0, places).index_select(1, places)
            moved[gram].tokens = gram.tokens
        block.grams[layer] = moved[gram]
