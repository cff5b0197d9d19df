"""Measure which kernel is fastest for the products of a model on this GPU, and remember it.

Every candidate is first run once and compared with float64 on a sample of the outputs; one that is not exact
enough does not count, however fast (tuned_weights.py says what is enough). Then all are timed from CUDA
graphs with the weights rotated past the L2, and the best few once more, in turns and with care. The best of
each backend is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from twofour.bench.timing import Timer, graph_timer, in_turns, many_graphs
from twofour.bench.tuned_weights import CodesToTune, ToTune, WeightsToTune
from twofour.errors import TwoFourError
from twofour.kernels import dispatch, tuning
from twofour.progress import OnProgress, silent
from twofour.quantize.schemes import Scheme

#: Replays of each candidate, and the least milliseconds of one: enough to see which are among the best.
FIRST_REPEATS, FIRST_MS = 5, 0.3

#: Candidates that are timed a second time: the best, and the best two of other backends. Several, as who is
#: first on a cool chip need not be the first at its power limit.
FINALISTS, OTHERS = 6, 2

#: Replays of each of them, and the turns that they are shared out to.
REPEATS, ROUNDS = 12, 3

#: What the others must beat. Kept in the table too, for layers whose dense weight may stay in memory.
DENSE = dispatch.Choice("dense")

#: Dense must be so much faster to come first: keeping its weight costs memory.
DENSE_MARGIN = 1.03


@torch.no_grad()
def tune(
    shapes: Iterable[tuple[int, int]],
    buckets: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    on_progress: OnProgress = silent,
    scheme: Scheme | None = None,
) -> list[dict[str, Any]]:
    """Tune weights of these [n, k] for these numbers of tokens, with a scheme: of its codes.

    One row of figures for each that a kernel runs.
    """
    shapes, buckets = list(dict.fromkeys(shapes)), list(dict.fromkeys(buckets))
    kind = WeightsToTune if scheme is None else partial(CodesToTune, scheme=scheme)
    rows: list[dict[str, Any]] = []
    steps, total = itertools.count(), len(shapes) * len(buckets)
    to_tune: list[ToTune] = [kind(n, k, dtype, device) for n, k in shapes]
    on_progress(0, total, "compiling")
    for weights in to_tune:
        weights.compile(buckets)
    for weights in to_tune:
        weights.make()
        with many_graphs():
            for bucket in buckets:
                on_progress(next(steps), total, f"{weights.n}×{weights.k}, {bucket} tokens")
                rows += _tune_one(weights, bucket)
        weights.drop()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    on_progress(total, total, "done")
    dispatch.forget()
    return rows


#: Layers of one parent that `fuse_` is likely to make one product of. Only what is tuned depends on it.
_FUSED_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("query", "key", "value"),
)


def shapes_to_tune(layers: Mapping[str, tuple[int, int]]) -> list[tuple[int, int]]:
    """The [n, k] of a model's layers by name, with those that they have when fused.

    >>> shapes_to_tune({"mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64)})
    [(64, 32), (32, 64), (128, 32)]
    """
    found = list(dict.fromkeys(layers.values()))
    parents = dict.fromkeys(name.rpartition(".")[0] for name in layers)
    for parent, names in itertools.product(parents, _FUSED_TOGETHER):
        shapes = [layers.get(f"{parent}.{name}") for name in names]
        together = [shape for shape in shapes if shape is not None]
        if len(together) == len(names) and len({k for _, k in together}) == 1:
            found.append((sum(n for n, _ in together), together[0][1]))
    return list(dict.fromkeys(found))


def _tune_one(weights: ToTune, bucket: int) -> list[dict[str, Any]]:
    """Its row, none if nothing is right."""
    x = torch.randn(bucket, weights.k, device=weights.device, dtype=weights.dtype)
    product = weights.product(bucket)
    finalists, refused = _first_round(weights, product, x)
    best = _second_round(weights, product, x, finalists)
    dense, ours = best.pop(DENSE.backend), sorted(best.values(), key=lambda entry: entry[0])
    if not ours:
        return []
    kept = ours
    if weights.may_be_dense:
        kept = sorted([*ours, dense], key=lambda e: e[0] * (DENSE_MARGIN if e[1] == DENSE else 1))
    choices = [{**asdict(choice), "ms": round(ms, 5)} for ms, choice in kept]
    tuning.remember(product.key, product.device, choices)
    row = {
        "n": weights.n,
        "k": weights.k,
        "tokens": bucket,
        "key": product.key,
        "scheme": weights.scheme and weights.scheme.name,
        "group": weights.scheme and weights.scheme.group,
        "dense_ms": dense[0],
        "best": {choice.backend: {"ms": ms, **choice.config} for ms, choice in ours},
        "times_dense": dense[0] / ours[0][0],
        "refused": refused,
    }
    return [row]


def _first_round(
    weights: ToTune, product: Any, x: Tensor
) -> tuple[list[dispatch.Choice], list[dict[str, Any]]]:
    """The candidates that are worth a second look, and those that are wrong."""
    is_right = weights.check(x)
    timed: list[tuple[float, dispatch.Choice]] = []
    refused = []
    for choice in weights.candidates(product):
        try:
            run = weights.runner(product, choice)
            if not is_right(choice, run(x, *weights.tensors[0])):
                refused.append(asdict(choice))
                continue
            timer = graph_timer(_calls(run, x, weights), FIRST_MS, warm_ms=0)
            timed.append((median(timer(FIRST_REPEATS)), choice))
        except TwoFourError:
            refused.append(asdict(choice))
    timed.sort(key=lambda entry: entry[0])
    others = [entry for entry in timed[FINALISTS:] if entry[1].backend != timed[0][1].backend]
    return [choice for _, choice in timed[:FINALISTS] + others[:OTHERS]], refused


def _second_round(
    weights: ToTune, product: Any, x: Tensor, finalists: list[dispatch.Choice]
) -> dict[str, tuple[float, dispatch.Choice]]:
    """The fastest of each backend, dense among them, all timed in turns."""
    timers: dict[str, Callable[[], Timer]] = {}
    for number, choice in enumerate(finalists):
        calls = _calls(weights.runner(product, choice), x, weights)
        timers[str(number)] = partial(graph_timer, calls)
    timers["dense"] = partial(graph_timer, [partial(F.linear, x, weight) for weight in weights.dense])
    best: dict[str, tuple[float, dispatch.Choice]] = {}
    results = in_turns(timers, REPEATS, ROUNDS).values()
    for choice, times in zip([*finalists, DENSE], results, strict=True):
        if isinstance(times, Exception):
            raise times  # it ran before
        if choice.backend not in best or times["p50"] < best[choice.backend][0]:
            best[choice.backend] = (times["p50"], choice)
    return best


def _calls(run: Callable[..., Tensor], x: Tensor, weights: ToTune) -> list[Callable[[], Tensor]]:
    return [partial(run, x, *tensors) for tensors in weights.tensors]
