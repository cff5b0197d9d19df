"""The folds of a model: guessed by looking, proved by running.

Nothing here knows a model by name. Each guess of `twofour.prune.fold_candidates` is tried: a random
permutation that the fold allows is put into the model, and only if its outputs stay the same up to rounding
is the fold real. What cannot be proved is not folded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calibrate.examples import evaluating
from twofour.prune.fold_candidates import by_head, chains, residual
from twofour.prune.folds import Fold, apply
from twofour.prune.trace import Trace, outputs_differ
from twofour.select import select

#: Layers of one name and shape (up to the block's number) that may fail before the others are not tried.
ATTEMPTS = 3


def find_foldable(
    model: nn.Module, example_inputs: Any, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> list[Fold]:
    """The folds of a model that hold, for the layers that `select` would prune.

    `example_inputs` is a tensor, a tuple of arguments or a dict of named ones; a few dozen tokens or two
    small images are enough, but they must reach every layer: an expert that no token went to proves nothing.
    """
    wanted = {layer.name for layer in select(model, include, exclude).layers}
    return find_folds(model, example_inputs, wanted, getattr(model, "config", None))


def find_folds(model: nn.Module, example_inputs: Any, wanted: set[str], config: Any) -> list[Fold]:
    """The folds that hold for the layers of these names, of a model or of one block of it.

    `config` is the model's: it may know the numbers of heads where a block's modules do not.
    """
    with evaluating(model):
        trace = Trace(model, example_inputs)
        found: list[Fold] = []
        covered: set[str] = set()
        if (stream := residual(model, trace, wanted)) and _hold(trace, [stream]):
            found.append(stream)
            covered |= set(stream.reads)
        suggestions = []
        for i, event in enumerate(trace.events):
            if event.layer is not None and event.name in wanted and event.name not in covered:
                folds = [*chains(trace, i, wanted), *by_head(model, config, trace, i)]
                covered |= {layer.name for fold in folds for layer in fold.consumers} | {event.name}
                if folds:
                    suggestions.append(folds)
        found += _prove(trace, suggestions)
    return found


def _prove(trace: Trace, suggestions: list[list[Fold]]) -> list[Fold]:
    """Of each list of suggestions, all for the same layer, the first one that holds.

    The blocks of a model are alike: what held in the first is tried in all others at once, and only if that
    fails one by one.
    """
    alike: dict[Any, list[list[Fold]]] = {}
    for folds in suggestions:
        first = folds[0].consumers[0]
        alike.setdefault((_template(first.name), first.shape), []).append(folds)
    found: list[Fold] = []
    for group in alike.values():
        failed = 0
        while group and failed < ATTEMPTS:
            folds = group.pop(0)
            fold = next((fold for fold in folds if _hold(trace, [fold])), None)
            if fold is None:
                failed += 1
                continue
            found.append(fold)
            same = [next((f for f in others if _tag(f) == _tag(fold)), None) for others in group]
            proved = _all_that_hold(trace, [f for f in same if f is not None])
            found += proved
            group = [others for f, others in zip(same, group, strict=True) if f not in proved]
    order = {event.name: i for i, event in enumerate(trace.events)}
    return sorted(found, key=lambda fold: order[fold.consumers[0].name])


def _all_that_hold(trace: Trace, folds: list[Fold]) -> list[Fold]:
    """Together, and if that fails each half for itself."""
    if not folds or _hold(trace, folds):
        return folds
    if len(folds) == 1:
        return []
    middle = len(folds) // 2
    return _all_that_hold(trace, folds[:middle]) + _all_that_hold(trace, folds[middle:])


def _template(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _tag(fold: Fold) -> Any:
    layout = tuple((tuple(site.channels.shape), int(site.channels[-1, 0])) for site in fold.sites)
    return fold.kind, tuple(map(_template, fold.producers)), layout


def _hold(trace: Trace, folds: Sequence[Fold]) -> bool:
    """Whether nothing changes under random permutations of all these folds at once.

    Nothing: neither the model's outputs nor, since one of many layers may move those by little, the outputs
    of the layers that read the channels.
    """
    random = torch.Generator().manual_seed(0)
    permutations = [fold.constraint.random(random) for fold in folds]
    # If reordering the columns alone makes no difference, equal outputs afterwards prove nothing.
    if not all(_matters(trace, *pair) for pair in zip(folds, permutations, strict=True)):
        return False
    # In a chain of chains a reader makes the channels of the next fold: its outputs are in another order.
    made = {name for fold in folds for name in fold.producers}
    readers = [name for fold in folds for name in fold.reads if name not in made]
    for fold, permutation in zip(folds, permutations, strict=True):
        apply(fold, permutation)
    try:
        outputs, of_readers = trace.run_again(readers)
    finally:
        for fold, permutation in zip(folds, permutations, strict=True):
            apply(fold, permutation.argsort())
    return not outputs_differ([*trace.outputs, *map(trace.output_of, readers)], [*outputs, *of_readers])


@torch.no_grad()
def _matters(trace: Trace, fold: Fold, permutation: Tensor) -> bool:
    for name, site in fold.reads.items():
        site.permute(permutation)
        try:
            moved = trace.first[name].module(trace.first[name].input)
        finally:
            site.permute(permutation.argsort())
        if not outputs_differ([trace.output_of(name)], [moved], times=10):
            return False
    return True
