"""Reorder input channels so that weights that matter do not have to share a group of four.

2:4 keeps two of every four neighbours, so which channels are neighbours decides what is lost (Pool & Yu,
NeurIPS 2021). The order of a layer's input channels is free wherever the layers that make those channels can
give them in the new order: then the model computes the same, no gather is ever run, and the mask falls
better. Where that is so is found, and proved, by `twofour.prune.find_folds`.

The search. `scores` [rows, k] say what it costs to lose each weight; wanted is the order of the columns for
which 2:4 keeps the most. Start: columns sorted by their sums and dealt out like cards, so that each group
gets strong and weak ones. Then rounds: the groups are paired at random, and the eight columns of each pair
are split again into two fours in the best of the 35 ways. All pairs of a round are disjoint, so they are
evaluated together, and every change is a gain for sure. Stopping is by rounds, never by the clock: the same
seed gives the same permutation on a slow machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calibrate.statistics import Gram
from twofour.errors import InputError, TwoFourError
from twofour.pattern import keep_best
from twofour.prune.find_folds import find_foldable
from twofour.prune.folds import Constraint, Fold, Kind, apply
from twofour.prune.hessian import damped_cholesky
from twofour.prune.trace import outputs_differ, relative_change, run
from twofour.select import Layer

__all__ = [
    "Constraint",
    "Fold",
    "apply",
    "find_foldable",
    "kept_share",
    "permute_",
    "reorder_",
    "saliency_norms",
    "search_permutation",
]

#: Rounds of the search. Of 3,000 × 1,536 random scores ten rounds gave nine tenths of what fifty did.
ROUNDS = 60

#: Give up after so many rounds in a row that gained less than a hundred-thousandth of the total.
PATIENCE = 10

#: Rows that the search looks at. A residual stream is read by hundreds of layers, and a sample will do.
MOST_ROWS = 4096

#: Scores worked on at a time, times the 56 temporaries of `_best_splits`: to stay in the CPU's cache, or to
#: fill a GPU.
CHUNK = {"cpu": 1 << 15, "cuda": 1 << 23}


def search_permutation(
    scores_by_consumer: Sequence[Tensor],
    constraint: Constraint | None = None,
    *,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Tensor:
    """The order of channels, [k], for which 2:4 keeps the most of the scores: new channel j is old p[j].

    >>> scores = torch.tensor([[9.0, 8.0, 7.0, 6.0, 1.0, 1.0, 1.0, 1.0]])
    >>> order = search_permutation([scores])
    >>> kept_share([scores]), kept_share([scores], order)
    (0.5588..., 0.8823...)

    All consumers [rows, k] read the same channels; they weigh as much as their scores are large. Never worse
    than the order that is there already.
    """
    columns = scores_by_consumer[0].shape[1]
    constraint = constraint or Constraint(columns)
    scores = _sample(scores_by_consumer)
    if not bool(scores.isfinite().all()) or bool((scores < 0).any()):
        raise InputError("scores of a permutation must be finite and not below 0.")
    order = torch.arange(columns)
    block = constraint.block or columns
    if constraint.block and columns % block:
        raise InputError(f"{columns} channels do not fall into blocks of {block}.")
    starts = torch.cat([_deal(scores[:, i : i + block], i) for i in range(0, columns, block)])
    if kept_share([scores], starts) > kept_share([scores], order):
        order = starts
    # A last group of fewer than four is left as dealt: it already got the columns with the most to lose.
    inside = [torch.arange(i, i + block)[: block // 4 * 4].reshape(-1, 4) for i in range(0, columns, block)]
    return _improve(scores, order, torch.stack(inside), rounds, seed)


def kept_share(scores_by_consumer: Sequence[Tensor], order: Tensor | None = None) -> float:
    """The share of all scores that 2:4 keeps, with the channels in this order."""
    kept = total = 0.0
    for scores in scores_by_consumer:
        placed = scores if order is None else scores[:, order.to(scores.device)]
        kept += float(placed.where(keep_best(placed), 0).sum(dtype=torch.float64))
        total += float(scores.sum(dtype=torch.float64))
    return kept / total if total > 0 else 1.0


def saliency_norms(inputs: Gram, damping: float = 0.01, layer: str | None = None) -> Tensor:
    """Per channel 1/√[H⁻¹]_jj, for `permute_` instead of norms: what a weight costs if all others repair it.

    |w| times this, squared, is the saliency of optimal brain surgery: the score to go by if the method to
    come updates the weights it keeps (sparsegpt, admm), as the norm is for one that does not (wanda).
    """
    dead = inputs.mean.diagonal() <= 0
    inverse = torch.cholesky_inverse(damped_cholesky(inputs.mean, damping, layer)[0])
    return inverse.diagonal().rsqrt().masked_fill(dead, 0.0)


def _sample(scores_by_consumer: Sequence[Tensor]) -> Tensor:
    """All rows, or every n-th of each consumer if there are very many."""
    rows = sum(scores.shape[0] for scores in scores_by_consumer)
    step = -(-rows // MOST_ROWS)
    return torch.cat([scores[::step] * min(step, scores.shape[0]) for scores in scores_by_consumer]).float()


def _deal(scores: Tensor, first: int) -> Tensor:
    """Columns sorted by their sums and dealt to and fro into the groups: strong ones meet weak ones."""
    columns = scores.shape[1]
    by_sum = scores.sum(0, dtype=torch.float64).argsort(descending=True, stable=True).cpu()
    short = columns % 4  # such a group loses least, so the strongest are safest there
    rest = by_sum[short:].reshape(4, -1).clone()
    rest[1::2] = rest[1::2].flip(1)
    return first + torch.cat([rest.t().reshape(-1), by_sum[:short]])


def _improve(scores: Tensor, order: Tensor, positions: Tensor, rounds: int, seed: int) -> Tensor:
    """Rounds of random pairs of groups; `positions` [blocks, groups, 4] says which places are groups."""
    random = torch.Generator().manual_seed(seed)
    blocks, groups, _ = positions.shape
    if groups < 2:
        return order
    by_column = scores.t().contiguous()  # rows of it are columns: gathering them copies whole lines
    splits = torch.tensor(_splits())
    total = float(scores.sum(dtype=torch.float64))
    idle = 0
    order = order.clone()
    for _ in range(rounds):
        shuffled = torch.rand(blocks, groups, generator=random).argsort(1)[:, : groups // 2 * 2]
        places = positions.gather(1, shuffled[..., None].expand(-1, -1, 4)).reshape(-1, 8)
        eight = order[places]
        best, gain = _best_splits(by_column, eight)
        order[places] = eight.gather(1, splits[best])
        idle = idle + 1 if gain <= 1e-5 * total else 0
        if idle == PATIENCE:
            break
    return order


def _best_splits(by_column: Tensor, eight: Tensor) -> tuple[Tensor, float]:
    """For each eight columns [pairs, 8]: the number of the split that keeps most, and the gain of them all.

    The two largest of four are a pair: max(a+b, c+d, max(a,b)+max(c,d)). Sums and maxima of the 28 pairs of
    columns are made once, and then serve all 70 fours.
    """
    rows = by_column.shape[1]
    step = max(1, CHUNK.get(by_column.device.type, 1 << 23) // rows)
    best, gained = [], 0.0
    pairs = list(itertools.combinations(range(8), 2))
    for part in eight.split(step):
        columns = by_column[part.t().to(by_column.device)].unbind(0)  # eight of [pairs, rows]
        sums = {(i, j): columns[i] + columns[j] for i, j in pairs}
        peaks = {(i, j): torch.maximum(columns[i], columns[j]) for i, j in pairs}
        kept = []
        for split in _splits():
            fours = (split[:4], split[4:])
            value = [
                torch.maximum(sums[a, b], sums[c, d]).maximum(peaks[a, b] + peaks[c, d])
                for a, b, c, d in fours
            ]
            kept.append((value[0] + value[1]).sum(1))
        scores = torch.stack(kept, 1).double().cpu()  # [pairs, 35]; the first split is the one that is there
        gain = scores - scores[:, :1]
        # Below this it is rounding, and would go round in circles.
        top, which = gain.where(gain > 1e-7 * scores[:, :1], 0.0).max(1)
        best.append(which.where(top > 0, 0))
        gained += float(top.sum())
    return torch.cat(best), gained


@cache
def _splits() -> tuple[tuple[int, ...], ...]:
    """The 35 ways to split eight into two fours; 0 is always in the first, and 0123|4567 comes first."""
    firsts = [(0, *rest) for rest in itertools.combinations(range(1, 8), 3)]
    return tuple(first + tuple(i for i in range(8) if i not in first) for first in firsts)


def permute_(
    model: nn.Module,
    example_inputs: Any,
    statistics: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rounds: int = ROUNDS,
    kinds: Sequence[Kind] = ("chain", "heads", "residual"),
) -> list[dict[str, Any]]:
    """Reorder the channels of a model in place so that 2:4 will keep more of it; it computes the same.

    `statistics` are the norms of each layer's input channels, by the layer's name, as Wanda uses them, or
    their `saliency_norms`; what is not among them counts by magnitude. They, and whatever else was measured
    channel by channel, are in the old order afterwards: measure again. Returned is a note for each fold:
    which layers, and what share of the squared scores 2:4 kept before and keeps now.
    """
    norms = statistics or {}
    folds = [f for f in find_foldable(model, example_inputs, include, exclude) if f.kind in kinds]
    return [note for *_, note in reorder_(model, example_inputs, folds, norms.get, seed=seed, rounds=rounds)]


def reorder_(
    model: nn.Module,
    example_inputs: Any,
    folds: Sequence[Fold],
    norms_of: Callable[[str], Tensor | None],
    *,
    seed: int = 0,
    rounds: int = ROUNDS,
) -> list[tuple[Fold, Tensor, dict[str, Any]]]:
    """Search an order for each fold of a model, or of a block of it, and put it in: the orders, with notes.

    `norms_of` are a consumer's channels as for `permute_`. What the model gives for the inputs is compared
    at the end, and if it moved by more than rounding all is put back.
    """
    before = run(model, example_inputs)
    notes: list[dict[str, Any]] = []
    done: list[tuple[Fold, Tensor]] = []
    for fold in folds:
        scores = [
            _scores(layer, fold, model.get_parameter(f"{layer.name}.weight"), norms_of(layer.name))
            for layer in fold.consumers
        ]
        order = search_permutation(scores, fold.constraint, rounds=rounds, seed=seed)
        apply(fold, order)
        done.append((fold, order))
        notes.append(
            {
                "fold": fold.name,
                "kind": fold.kind,
                "consumers": [layer.name for layer in fold.consumers],
                "producers": list(fold.producers),
                "kept_before": kept_share(scores),
                "kept": kept_share(scores, order),
            }
        )
    after = run(model, example_inputs)
    if outputs_differ(before, after):
        for fold, order in reversed(done):
            apply(fold, order.argsort())
        raise TwoFourError(
            "permuting the channels changed the model's outputs; it was put back as it was.",
            hint="Prune it without permutation, and please report this.",
        )
    change = max(map(relative_change, before, after), default=0.0)
    return [
        (fold, order, note | {"output_change": change})
        for (fold, order), note in zip(done, notes, strict=True)
    ]


def _scores(layer: Layer, fold: Fold, weight: Tensor, norms: Tensor | None) -> Tensor:
    """What the loss of each weight costs, [·, channels]: its squared contribution to the output.

    Squared, because that is the error to second order; each layer's add up to 1, so that all count the same.
    """
    matrix = layer.to_matrix(weight.detach()).float()
    channels = layer.shape[1]
    if norms is not None:
        if norms.numel() not in (channels, layer.columns):
            raise InputError(
                f"{norms.numel()} channel norms were given for a layer of {channels} channels.",
                layer=layer.name,
                hint="Measure the same model that is permuted.",
            )
        norms = norms.to(matrix).reshape(1, 1, -1)
        if norms.numel() == channels:  # of a convolution, then: the same for each of its taps
            norms = nn.functional.pad(norms, (0, -channels % 4 if layer.kind == "conv2d" else 0))
        matrix = (matrix.reshape(layer.rows, -1, norms.numel()) * norms).reshape(matrix.shape)
    if layer.kind == "conv2d":  # groups run along the channels, at each tap
        matrix = matrix.reshape(-1, channels + -channels % 4)[:, :channels]
    squares = matrix.square()
    copies = fold.reads[layer.name].channels.to(matrix.device)  # of heads that share their order
    squares = torch.cat([squares[:, copy] for copy in copies])
    return squares / squares.sum().clamp(min=torch.finfo(squares.dtype).tiny)
